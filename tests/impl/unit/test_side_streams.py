"""Tests that hops and decoding on side streams of a GPU use memory in order."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from impl.codecs.codec import parse
from impl.comm.exchanges import Buffers, Distributed
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.plan.memory import memory
from impl.plan.prefetch_schedule import MOST_AHEAD, small_units
from impl.plan.step_time import Machine, Step, passes_of
from impl.plan.timeline import Pass
from impl.plan.traffic import Link
from impl.policy.policy import Policy
from impl.policy.presets import preset
from impl.policy.shard_layout import UnitGeometry
from impl.policy.spans import Span
from impl.policy.topology import Topology
from impl.transport.side_stream import Arrival
from impl.unit.unit import Unit
from impl.zero import shard
from tests.support import stream_order
from tests.support.models import Net
from tests.support.params import nightly
from tests.support.ranks import on_threads
from tests.support.strategies import ROOMY
from tests.support.stream_order import Detector, RaceError, on_streams
from tests.support.training import batch, model

MACHINE = Machine(
    name="m", source="s", fixed=1e-9, per_token=1e-11, efficiency=1, fewest=1, most=1e9, overlap="schedule"
)
SMALL = {"weights": parse("int8:32"), "gradients": (parse("int4:32"),) * 2}
POLICIES = {
    "zero3": preset("zero3", memory=ROOMY),
    "zero2": preset("zero2", memory=ROOMY),
    "flat": preset("zero3-flat", memory=ROOMY),
    "ring": preset("zero3", memory=ROOMY, reduce="ring"),
    "zeropp": preset("zeropp", memory=ROOMY, **SMALL),
    "chunks": preset("zeropp", memory=ROOMY, **SMALL, chunks=2),
    "bf16 copy": preset("zeropp", memory=ROOMY, **SMALL, secondary_format="bf16"),
    "differences": preset("sdp4bit", memory=ROOMY, differences=parse("int4:32:stochastic")),
    "feedback": preset("loco", memory=ROOMY),
    "mics": preset("mics", memory=ROOMY),
}


def trained(mesh: Mesh, policy: Policy, detected: bool) -> dict[str, Tensor]:
    """Return the weights after steps with accumulation, an evaluation, and a write by hand."""
    with Detector() if detected else contextlib.nullcontext():
        net = model()
        zero = shard(net, mesh=mesh, policy=policy)
        optimizer = torch.optim.AdamW(zero.param_groups(), lr=1e-2)
        for number in range(4):
            net(batch(2 * number, mesh.rank)).backward()
            net(batch(2 * number + 1, mesh.rank)).backward()
            zero.step(optimizer, max_norm=1.0)
            optimizer.zero_grad()
            if number == 1:
                with torch.no_grad():
                    net(batch(99, mesh.rank))
                    for unit in zero.units:
                        unit.master_shard.master.mul_(1.5)
                zero.weights_changed()
        return zero.full_state_dict()


CASES = [(name, nodes) for name in POLICIES for nodes in (1, 2)]
IN_LINE = (("zeropp", 2), ("ring", 1))


@pytest.mark.parametrize(
    ("name", "nodes"),
    [pytest.param(*case, marks=() if case in IN_LINE else pytest.mark.long) for case in CASES],
)
def test_streams_change_nothing_and_race_nowhere(
    name: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights after training have the same bits, and any two accesses to the same memory are in order."""
    topology, policy = Topology(nodes, 2), POLICIES[name]
    wanted = on_threads(topology, trained, policy, False, backend="nccl_rules", seconds=20)
    on_streams(monkeypatch)
    states = on_threads(topology, trained, policy, True, backend="nccl_rules", seconds=20)
    for state, expected in zip(states, wanted, strict=True):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], expected[key]) for key in state)


def test_hops_are_posted_when_a_gather_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hops of the unit ahead are posted before the unit before it computes, in the same order on all ranks."""
    on_streams(monkeypatch)
    log: dict[str, list[str]] = {}
    post = Distributed.post

    def noted(self: Any) -> None:
        log.setdefault(str(self._watchdog._rank), []).append(" ".join(map(str, self._route.operation)))
        post(self)

    monkeypatch.setattr(Distributed, "post", noted)

    def forward(mesh: Mesh) -> list[str]:
        with Detector():
            net = model()
            shard(net, mesh=mesh, policy=POLICIES["zeropp"])
            lines = log.setdefault(str(mesh.rank), [])
            lines.clear()
            seen: list[int] = []
            for module in net.modules():
                if type(module).__name__ == "Block":
                    module.register_forward_pre_hook(lambda *_: seen.append(len(lines)))
            net(batch(0, mesh.rank))
            return [*lines[: seen[0]], f"{seen}"]

    first, *others = on_threads(Topology(2, 2), forward, backend="nccl_rules", seconds=20)
    assert all(other == first for other in others)
    hops = [line.split()[1] for line in first[:-1]]
    assert hops.count("local") == hops.count("node") > 1


def without(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Remove one of the waits."""

    def join(stream: str) -> Callable[[Wire, Arrival], None]:
        kept = Wire.join

        def joined(self: Wire, arrival: Arrival) -> None:
            event: Any = arrival.event
            if event.stream != getattr(self, stream)._stream.number:
                kept(self, arrival)

        return joined

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        if name in ("gathers", "reductions"):
            monkeypatch.setattr(Wire, "join", join(name))
        elif name == "buffers":

            def give_back(self: Buffers, *buffers: Tensor) -> None:
                for buffer in buffers:
                    self._free[buffer.numel()].append((buffer, Arrival()))

            monkeypatch.setattr(Buffers, "give_back", give_back)
        else:
            monkeypatch.setattr(stream_order.Stream, "wait_stream", lambda *_: None)

    return patch


@pytest.mark.parametrize(
    ("name", "ranks"), [("gathers", 2), ("reductions", 2), ("buffers", 2), ("what came before", 1)]
)
def test_every_wait_is_needed(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait for a gather, a reduction, a buffer's last user or earlier work, two accesses race."""
    on_streams(monkeypatch)
    without(name)(monkeypatch)
    with pytest.raises(RaceError, match="in no order"):
        on_threads(Topology(1, ranks), trained, POLICIES["zeropp"], True, backend="nccl_rules", seconds=5)


def held(mesh: Mesh, policy: Policy, micro_batches: int) -> dict[str, tuple[int, int]]:
    """Return the bytes of messages and of gathered weights that a rank holds in training, and the predicted ones."""
    with Detector():
        net = model()
        zero = shard(net, mesh=mesh, policy=policy)
        optimizer = torch.optim.AdamW(zero.param_groups(), lr=1e-2)
        for number in range(4):
            for micro in range(micro_batches):
                net(batch(2 * number + micro, mesh.rank)).backward()
            zero.step(optimizer, max_norm=1.0)
            optimizer.zero_grad()
        units = [unit.geometry for unit in zero.units]
        formula = memory(policy, mesh.topology, units, micro_batches=micro_batches, streams=True)
        return {part: (zero.memory()[part], formula[part]) for part in ("messages", "gathered")}


@pytest.mark.parametrize(
    ("name", "micro_batches"), [*((name, 2) for name in POLICIES), ("bf16 copy", 1), ("spans", 1)]
)
@pytest.mark.parametrize(
    "topology", [Topology(2, 2), *nightly(Topology(1, 2), Topology(1, 1), Topology(2, 1))], ids=str
)
def test_messages_hold_what_the_formula_predicts(
    name: str, micro_batches: int, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages and gathered weights on a GPU are as large as predicted, for every kind of gather and reduction."""
    on_streams(monkeypatch)
    spans = preset("zeropp", memory=ROOMY, schedule=(Span(until=2, **SMALL), Span(**SMALL)))
    policy = spans if name == "spans" else POLICIES[name]
    if policy.differences is not None:
        policy = replace(policy, refresh=2)  # else weights themselves are sent once, and need no spare buffer
    for parts in on_threads(topology, held, policy, micro_batches, backend="nccl_rules", seconds=20):
        for part, (measured, formula) in parts.items():
            assert measured == formula > 0, part


def test_a_step_asks_little_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather or reduction takes one event, at its end; a unit's gradients take one copy."""
    on_streams(monkeypatch)
    events, copies = defaultdict[int, int](int), defaultdict[int, int](int)
    record, copy = stream_order.Event.record, torch._foreach_copy_

    def recorded(self: stream_order.Event, stream: stream_order.Stream | None = None) -> None:
        events[threading.get_ident()] += 1
        record(self, stream)

    def copied(*tensors: Any) -> None:
        copies[threading.get_ident()] += 1
        copy(*tensors)

    monkeypatch.setattr(stream_order.Event, "record", recorded)
    monkeypatch.setattr(torch, "_foreach_copy_", copied)

    def counted(mesh: Mesh) -> tuple[int, int, int]:
        with Detector():
            net = model()
            zero = shard(net, mesh=mesh, policy=POLICIES["zeropp"])
            optimizer, rank = torch.optim.AdamW(zero.param_groups(), lr=1e-2), threading.get_ident()
            for number in range(3):
                events[rank] = copies[rank] = 0
                net(batch(number, mesh.rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return len(zero.units), events[rank], copies[rank]

    for units, recordings, launches in on_threads(Topology(2, 2), counted, backend="nccl_rules", seconds=20):
        assert 0 < recordings <= 3 * units  # two gathers and a reduction
        assert 0 < launches < units  # outer units copy each gradient when it arrives


@pytest.mark.parametrize("pair_below", [0, 4_000_000])
def test_one_call_gathers_two_small_units(pair_below: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call posts a hop of two blocks, and the ledger has its bytes; with pair_below=0 a call posts one hop."""
    on_streams(monkeypatch)
    together = list[list[str]]()
    post_joined = Distributed.post_joined

    def noted(several: Any) -> None:
        together.append([str(each._route.operation[-2]) for each in several])
        post_joined(several)

    monkeypatch.setattr(Distributed, "post_joined", staticmethod(noted))
    policy = replace(POLICIES["zeropp"], memory=replace(ROOMY, pair_below=pair_below))

    def forward(mesh: Mesh) -> tuple[list[str], int]:
        with Detector():
            net = model()
            zero = shard(net, mesh=mesh, policy=policy)
            net(batch(0, mesh.rank))
            blocks = [unit.geometry.name for unit in zero.units if not unit.geometry.outer]
            booked = sum(zero.wire.ledger.total(link) for link in get_args(Link))
            return blocks, zero.wire.carried - booked

    ranks = on_threads(Topology(2, 2), forward, backend="nccl_rules", seconds=20)
    for blocks, missing in ranks:
        assert missing == 0
        pairs = [list(pair) for pair in zip(blocks[1::2], blocks[2::2], strict=False)] if pair_below else []
        assert sorted(together) == sorted(pairs * 2 * len(ranks))


def gathered(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, list[tuple[str, ...]]], dict[int, int]]:
    """Record for each rank the gathers that start, a pair as one, and the most that are under way at one time."""
    started, most = defaultdict[int, list[tuple[str, ...]]](list), defaultdict[int, int](int)

    def note(*units: Unit) -> None:
        rank = units[0].wire.mesh.rank
        started[rank].append((*(unit.geometry.name for unit in units),))
        most[rank] = max(most[rank], len(units[0]._passes.gathering))

    start_gather, start_pair = Unit.start_gather, Unit.start_pair

    def alone(self: Unit, phase: Any) -> None:
        starts = not self.in_use
        start_gather(self, phase)
        if starts:
            note(self)

    def paired(self: Unit, other: Unit, phase: Any) -> None:
        start_pair(self, other, phase)
        note(self, other)

    monkeypatch.setattr(Unit, "start_gather", alone)
    monkeypatch.setattr(Unit, "start_pair", paired)
    return started, most


@pytest.mark.parametrize("frozen", [(), ("up",)])
@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("prefetch", [0, 1500, 4000, 10**6])
def test_pairs_are_gathered_in_the_order_of_the_prediction(
    prefetch: int, depth: int, frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine and the simulation of its step start the same gathers and pairs of gathers, in the same order.

    The formula of memory has the weights that the engine gathers ahead.

    With frozen weights, each block has two units.
    """
    on_streams(monkeypatch)
    started, most = gathered(monkeypatch)
    policy = preset("zero3", memory=replace(ROOMY, prefetch=prefetch))

    def passed(mesh: Mesh) -> tuple[list[UnitGeometry], frozenset[int], int]:
        with Detector():
            net = model(depth=depth)
            for name, parameter in net.named_parameters():
                parameter.requires_grad_(not any(part in name for part in frozen))
            zero = shard(net, mesh=mesh, policy=policy)
            net(batch(0, mesh.rank)).backward()
            units = [unit.geometry for unit in zero.units]
            return units, zero.units[0]._passes.schedule.small, zero.memory()["gathered"]

    topology = Topology(1, 2)
    (units, small, weights), *_ = on_threads(topology, passed, backend="nccl_rules", seconds=20)
    simulated = list[tuple[str, ...]]()
    start, start_pair = Pass.start, Pass._start_pair

    def alone(self: Pass, unit: int, purpose: Any, collective: Any) -> Any:
        if purpose == "weights":
            simulated.append((units[unit].name,))
        return start(self, unit, purpose, collective)

    def paired(self: Pass, pair: Any) -> None:
        simulated.append((*(units[unit].name for unit in pair),))
        start_pair(self, pair)

    monkeypatch.setattr(Pass, "start", alone)
    monkeypatch.setattr(Pass, "_start_pair", paired)
    assert small == small_units(policy, topology, units)
    assert weights == memory(policy, topology, units, streams=True)["gathered"]
    step = Step(policy=policy, topology=topology, units=units, parameters=1e4, tokens=4, small=small)
    passes_of(MACHINE, step)
    assert any(len(pair) == 2 for pair in simulated) == (prefetch > 0 and depth * (1 + len(frozen)) > 2)
    for rank in range(topology.world):
        assert started[rank] == simulated
        assert most[rank] <= MOST_AHEAD + 1


class Skipping(Net):
    """A net that runs only its blocks 0 and 9."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to a loss."""
        for module in (self.embed, self.blocks[0], self.blocks[9], self.head):
            x = module(x)
        return x.square().mean()


def test_a_pair_is_not_gathered_ahead_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks 1 and 2 are gathered ahead and skipped; with block 9, block 10 and both of the next pair they would be six
    gathers under way, one more than the limit, so that the pair is not started.
    """
    on_streams(monkeypatch)
    started, most = gathered(monkeypatch)

    def forward(mesh: Mesh) -> None:
        with Detector(), torch.no_grad():
            net = model(Skipping, depth=16)
            size = sum(parameter.numel() for parameter in net.blocks[0].parameters())
            limits = replace(ROOMY, prefetch=2 * size + size // 2)
            shard(net, mesh=mesh, policy=preset("zero3", memory=limits))
            net(batch(0, mesh.rank))

    on_threads(Topology(1, 2), forward, backend="nccl_rules", seconds=20)
    for rank in range(2):
        assert ("blocks.1", "blocks.2") in started[rank]
        assert ("blocks.11", "blocks.12") not in started[rank]
        assert started[rank][-1] == ("blocks.10",)
        assert most[rank] == MOST_AHEAD
