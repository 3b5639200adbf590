"""Messages that go through host memory train to the same bits, with the same ledger."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.plan.policy import preset
from impl.plan.topology import Topology
from impl.zero import shard
from tests.golden import record
from tests.support.ranks import each_rank, on_processes, on_threads
from tests.support.training import model

SHAPES = (Topology(1, 4), Topology(2, 2), Topology(2, 3), Topology(4, 1))


def _all_policies(mesh: Mesh, transport: str, names: tuple[str, ...]) -> dict[str, Any]:
    torch.set_num_threads(1)
    policies = record.policies()
    return {
        name: record.run(mesh, transport, policies[name], ragged=False, steps=1) for name in names or policies
    }


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("topology", "transport", "backend"),
    [
        (Topology(2, 2), "staged", "threaded"),
        *((topology, "backend", "nccl_rules") for topology in SHAPES),
    ],
    ids=str,
)
def test_every_policy_trains_as_over_the_backend(topology: Topology, transport: str, backend: str) -> None:
    """Every preset and algorithm, through host memory or by NCCL's rules: ledgers and losses of all ranks are
    the same to the bit.
    """
    found = on_threads(topology, _all_policies, transport, (), backend=backend)
    assert found == on_threads(topology, _all_policies, "backend", ())


def test_over_gloo_too() -> None:
    """Between processes, point to point."""
    names = ("zero3-flat", "zeropp", "ring", "two_hop in 4 chunks", "loco", "offloaded")
    found, wanted = (
        on_processes(Topology(2, 2), _all_policies, transport, names) for transport in ("staged", "backend")
    )
    assert found == wanted


@each_rank(2, 2, processes=True)
def test_the_record_says_so(mesh: Mesh) -> None:
    """Whatever carried a message, it went through host memory."""
    wire = Wire(mesh, transport="staged")
    shard(model(), mesh=mesh, policy=preset("exact", memory=record.policies()["exact"].memory), wire=wire)
    wire.check_order()
    assert all(words.endswith("through host memory") for words in wire.describe().values())
