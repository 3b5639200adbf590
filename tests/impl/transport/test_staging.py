"""Tests that the transport, shared memory or host memory, changes neither results nor the ledger."""

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
from impl.policy.policy import Policy
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import shard
from tests.golden import record
from tests.support.models import Odd
from tests.support.ranks import each_rank, on_processes, on_threads
from tests.support.strategies import policies
from tests.support.training import model, train

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
    """Through host memory, or under NCCL's rules, losses and ledgers of all ranks are the same to the bit."""
    runs = on_threads(topology, _all_policies, transport, (), backend=backend)
    assert runs == on_threads(topology, _all_policies, "backend", ())


def test_over_gloo_too() -> None:
    """The same holds between processes that send point to point."""
    names = ("zero3-flat", "zeropp", "ring", "two_hop in 4 chunks", "loco", "offloaded")
    staged, backend = (
        on_processes(Topology(2, 2), _all_policies, transport, names) for transport in ("staged", "backend")
    )
    assert staged == backend


@each_rank(2, 2, processes=True)
def test_the_record_says_so(mesh: Mesh) -> None:
    """The record says that messages went through host memory."""
    wire = Wire(mesh, transport="staged")
    shard(model(), mesh=mesh, policy=preset("exact", memory=record.policies()["exact"].memory), wire=wire)
    wire.check_order()
    assert all(carriers.endswith("through host memory") for carriers in wire.describe().values())


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
    data: st.DataObject, topology: Topology, case: tuple[nn.Module, int]
) -> None:
    """Losses, state and ledger over shared memory are those over the backend."""
    (net, width), policy = case, data.draw(policies(topology))
    if data.draw(st.booleans()):
        policy = replace(policy.without_secondary(), stage=3, weights=FP32)
    rest = _trained, net, policy
    backend, shared = (
        on_threads(topology, *rest, way, width, backend="threaded") for way in ("backend", "shm")
    )
    for (losses, state, ledger), expected in zip(shared, backend, strict=True):
        assert (losses, ledger) == (expected[0], expected[2])
        assert all(torch.equal(value, expected[1][name]) for name, value in state.items())
