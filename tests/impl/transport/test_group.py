"""A rank's group along an axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from impl.policy.topology import Topology
from impl.transport.group import Group


@pytest.mark.parametrize(
    ("backend", "device", "carrier"),
    [
        ("gloo", "cpu", "gloo"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
    ],
)
def test_a_group_of_two_backends_names_the_one_that_carries(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str, carrier: str
) -> None:
    """The device of the tensors decides, so that records say nccl, and gloo's waits have their time limit."""
    monkeypatch.setattr(dist, "get_backend", lambda _: backend)
    handle: Any = object  # torch's group, which is not asked for more
    group = Group(Topology(1, 2).world_axis, (0, 1), 0, same_node=True, handle=handle)
    assert group.backend(device) == carrier
