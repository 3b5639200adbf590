"""Tests the example of docs/design/engine.md: a kind of hop is added in two files, and all readers follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from impl import ops
from impl.codecs.codec import BF16
from impl.comm.mesh import Mesh
from impl.plan import hops, messages, step_time, traffic
from impl.plan.hops import Hop, Sends
from impl.plan.step_time import Machine, Step
from impl.policy.policy import Policy
from impl.policy.presets import preset
from impl.policy.shard_layout import UnitGeometry
from impl.policy.topology import Topology
from impl.unit import weight_gather
from impl.unit.weight_gather import WeightGather
from impl.zero import shard
from tests.support.ranks import on_threads
from tests.support.strategies import ROOMY
from tests.support.training import batch, model

RECODED: Any = "recoded"  # the new source: what the hop before has brought, decoded and encoded again
QWZ, TOPOLOGY = preset("qwz", memory=replace(ROOMY, max_reuse=0), order_every=0), Topology(2, 2)
MACHINE = Machine(
    name="m", source="s", fixed=1e-9, per_token=1e-11, efficiency=1, fewest=1, most=1e9, overlap="schedule",
    inside=1.0,
)  # fmt: skip
plain_hops, plain_write = hops.gather_hops, WeightGather._write


def recoded_hops(policy: Policy, topology: Topology, shard: int, sends: Sends = "weights") -> tuple[Hop, ...]:
    """Return a gather that crosses nodes in the policy's codec and goes on inside them in bf16, without a copy."""
    first, *inside = plain_hops(policy, topology, shard, sends)
    return first, *(replace(hop, codec=BF16, source=RECODED) for hop in inside)


def write(gather: WeightGather, hop: Hop, message: Tensor, received: Tensor | None = None) -> None:
    """Write the message of a hop, also of the new kind."""
    if hop.source != RECODED or received is None:
        plain_write(gather, hop, message, received)
        return
    values = torch.empty(len(received), hop.numel)
    ops.decode(QWZ.weights, received, values)
    ops.encode(hop.codec, values, message.view(len(received), -1))


def passed(mesh: Mesh) -> tuple[float, dict[Any, Any], list[UnitGeometry]]:
    """Return a loss, the rank's ledger after forward and backward, and the units; all ranks have the same data."""
    net = model()
    zero = shard(net, mesh=mesh, policy=QWZ)
    loss = net(batch(0, 0))
    loss.backward()
    sent = {key: row for key, row in zero.wire.ledger.rows().items() if key.phase != "step"}
    return loss.item(), sent, [unit.geometry for unit in zero.units]


def test_a_kind_of_hop_that_is_added_is_sent_counted_sized_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hops in bf16 inside nodes, which qwZ sends in int8, give the same weights, and predictions follow."""
    (loss, _, units), *_ = on_threads(TOPOLOGY, passed)
    step = Step(policy=QWZ, topology=TOPOLOGY, units=units, parameters=1e4, tokens=4)

    def predictions(rank: int) -> tuple[dict[Any, Any], int, float]:
        sent = traffic.predict(QWZ, TOPOLOGY, units, rank, ["forward", "backward"]).sent
        return sent, messages.message_bytes(QWZ, TOPOLOGY, units), step_time.step_of(MACHINE, step).seconds

    before = predictions(0)
    for reader in (traffic, messages, step_time, weight_gather):
        monkeypatch.setattr(reader, "gather_hops", recoded_hops)
    monkeypatch.setattr(WeightGather, "_write", write)
    for rank, (same, sent, _) in enumerate(on_threads(TOPOLOGY, passed)):
        assert same == pytest.approx(loss, rel=0.02)
        assert sent == predictions(rank)[0]
    sent, held, seconds = predictions(0)
    assert sum(row.bytes for row in sent.values()) > sum(row.bytes for row in before[0].values())
    assert held != before[1]
    assert seconds > before[2]
