"""Tests that observers of reductions get the right values, and that observing changes nothing."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from impl.comm.mesh import Mesh
from impl.comm.wire import Observer, Wire
from impl.policy.policy import Policy
from impl.policy.topology import Topology
from impl.zero import shard
from tests.support.ranks import on_threads
from tests.support.strategies import policies, topologies
from tests.support.training import batch, model


class Means(Observer):
    """Keeps the means that are observed on one rank, by unit."""

    def __init__(self) -> None:
        self.means: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)

    def averaged(self, unit: str, start: int, mean: Tensor) -> None:
        self.means[unit].append((start, mean.clone()))


def _trained(mesh: Mesh, policy: Policy, *, rehearsed: bool) -> tuple[Any, ...]:
    """Run two steps of two micro-batches, each after a rehearsal; return their outcome and the observed means."""
    net, wire, seen = model(), Wire(mesh), Means()
    zero = shard(net, mesh=mesh, policy=policy, wire=wire)
    optimizer = torch.optim.AdamW(zero.param_groups(), lr=1e-2)
    losses = []

    def passes(step: int) -> None:
        for micro in range(2):
            local = micro == 0 and not policy.reduces_each_micro_batch
            with zero.accumulating() if local else contextlib.nullcontext():
                loss = net(batch(2 * step + micro, mesh.rank))
                losses.append(loss.item())
                loss.backward()

    for step in range(2):
        if rehearsed:
            seen = Means()
            with wire.observed(seen), zero.rehearsing():
                passes(step)
            del losses[-2:]
            assert all(master.grad is None for master in zero.masters)
        else:
            zero.forget_gathered()  # frozen units are gathered anew after a rehearsal too
        passes(step)
        means = {unit.geometry.name: unit.master_shard.mean_gradient() for unit in zero.units}
        kept = {name: mean.clone() for name, mean in means.items() if mean is not None}
        optimizer.step()
        optimizer.zero_grad()
    masters = [master.detach().clone() for master in zero.masters]
    return losses, masters, wire.ledger.rows(), zero.memory(), seen, kept, [u.geometry for u in zero.units]


def _both(mesh: Mesh, policy: Policy) -> Sequence[tuple[Any, ...]]:
    return _trained(mesh, policy, rehearsed=False), _trained(mesh, policy, rehearsed=True)


@pytest.mark.long
@settings(deadline=None, max_examples=20)
@given(st.data())
def test_a_rehearsal_leaves_no_trace_and_tells_what_the_step_will_do(data: st.DataObject) -> None:
    """A rehearsal changes no loss, master, byte or memory, and the observer gets the means of the step, each once."""
    topology: Topology = data.draw(topologies(4))
    policy = data.draw(policies(topology))
    results = on_threads(topology, _both, policy)
    for plain, rehearsed in results:
        assert plain[0] == rehearsed[0]
        assert all(map(torch.equal, plain[1], rehearsed[1]))
        assert plain[2] == rehearsed[2]
        assert plain[3] == rehearsed[3]
    for unit in results[0][1][6]:
        if not unit.trainable:
            continue
        tiles = []
        for rank, (_, (*_, seen, kept, _)) in enumerate(results):
            starts = {start for start, _ in seen.means[unit.name]}
            assert len(starts) == 1
            (start,), mean = starts, sum(mean for _, mean in seen.means[unit.name])
            low, _ = unit.bounds(rank)
            assert torch.equal(mean, kept[unit.name][start - low : start - low + mean.numel()])
            tiles.append((start, mean))
        ends = itertools.accumulate(mean.numel() for _, mean in sorted(tiles, key=lambda tile: tile[0]))
        assert [0, *ends] == [*sorted(start for start, _ in tiles), unit.padded]
