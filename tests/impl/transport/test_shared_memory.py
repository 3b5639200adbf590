"""Training over shared memory against training over the backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from impl.codecs.codec import FP32
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.plan.policy import Policy
from impl.plan.topology import Topology
from tests.support.models import Odd
from tests.support.ranks import on_threads
from tests.support.strategies import policies
from tests.support.training import model, train


def _trained(mesh: Mesh, net: nn.Module, policy: Policy, transport: Any, width: int) -> Any:
    wire = Wire(mesh, transport=transport)
    losses, state, _ = train(mesh, net, policy, 2, 2, width, wire=wire)
    return losses, state, wire.ledger.rows()


@pytest.mark.long
@settings(max_examples=settings().max_examples // 2)
@given(
    st.data(),
    st.sampled_from([Topology(1, 2), Topology(1, 3), Topology(2, 2)]),
    st.sampled_from([(model(), 16), (model(tied=True), 16), (model(recompute=True), 16), (model(Odd), 7)]),
)
def test_training_is_the_same_to_the_bit_and_the_byte(
    data: st.DataObject, topology: Topology, what: tuple[nn.Module, int]
) -> None:
    """Losses, state and ledger over shared memory are those over the backend."""
    (net, width), policy = what, data.draw(policies(topology))
    if data.draw(st.booleans()):
        policy = replace(policy.without_secondary(), stage=3, weights=FP32)
    backend, shared = (on_threads(topology, _trained, net, policy, way, width) for way in ("backend", "shm"))
    for ours, theirs in zip(shared, backend, strict=True):
        assert ours[0] == theirs[0]
        assert all(torch.equal(value, theirs[1][name]) for name, value in ours[1].items())
        assert ours[2] == theirs[2]
