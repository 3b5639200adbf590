"""Weights that stay where they arrived: nobody sees others, nobody waits for who lets go late."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from impl.codecs.codec import BF16, FP32, Raw
from impl.comm.all_gather import gather_frames
from impl.comm.exchanges import Distributed, InMemory
from impl.comm.ledger import Tag
from impl.comm.mesh import Mesh
from impl.comm.transfer import Steps, Transfer
from impl.comm.watchdog import WireError
from impl.comm.wire import Wire
from impl.errors import WrittenError
from impl.parameters.gathered import GatheredParameters
from impl.plan.memory import memory
from impl.plan.policy import Policy, preset
from impl.plan.topology import Topology
from impl.transport.zero_copy import INNER_REGIONS, Lease, Passing, SharedRegions, regions_of
from impl.unit.master_shard import MasterShard
from impl.zero import Zero, ZeroError, shard
from tests.support.models import Net, Odd
from tests.support.ranks import on_processes, on_threads
from tests.support.strategies import ROOMY, policies
from tests.support.training import batch, model, train

EXACT = preset("exact", memory=ROOMY)
ROW = 64  # bytes


@given(st.lists(st.booleans(), max_size=40))
def test_homes_are_shared_only_by_units_that_run_far_apart(outer: list[bool]) -> None:
    """A unit that is in use around others has a home of its own; the rest come round in turn."""
    regions = regions_of(outer)
    own = [region for region, around in zip(regions, outer, strict=True) if around]
    inner = [region for region, around in zip(regions, outer, strict=True) if not around]
    assert len({*own}) == len(own)
    assert not {*own} & {*inner}
    for first in range(len(inner)):
        near = inner[first : first + INNER_REGIONS]
        assert len({*near}) == len(near)
    assert sorted({*regions}) == list(range(len({*regions})))


# Stays


def _right(number: int, rows: Tensor) -> bool:
    """Whether each of the (ranks, bytes) rows is what its rank writes in gather ``number``."""
    wanted = torch.arange(len(rows), dtype=torch.uint8)[:, None] + number % 200
    return bool((rows == wanted).all())


def _lives(mesh: Mesh, order: list[int], ends: list[list[int]], lags: list[int]) -> None:
    """Gather at ``order``'s homes; each rank ends its stays at moments of its own."""
    wire = Wire(mesh, transport="shm", timeout=20)
    axis = mesh.topology.local_axis
    regions = wire.regions(axis, [axis.size * ROW + 7 * region for region in range(3)])
    under_way: dict[int, tuple[Any, Lease]] = {}
    lasting: dict[int, tuple[Lease, Tensor]] = {}

    for number, region in enumerate(order):
        lease = Lease(regions, region, ROW)
        exchange = wire.all_gather(axis, ROW, Tag("forward", "weights", str(region)), lease=lease)
        exchange.send.fill_(mesh.rank + number % 200)
        exchange.post()
        under_way[number] = exchange, lease
        for other in [n for n in under_way if n <= number - lags[n]]:
            exchange, lease = under_way.pop(other)
            assert _right(other, exchange.wait())
            exchange.close()
            lasting[other] = lease, lease.rows
        for other in [n for n in lasting if n <= number - ends[mesh.rank][n]]:
            lease, rows = lasting.pop(other)
            assert _right(other, rows)
            lease.end()
        assert all(_right(n, rows) for n, (_, rows) in lasting.items())
    for number, (exchange, lease) in under_way.items():
        assert _right(number, exchange.wait())
        exchange.close()
        lease.leave()
        assert _right(number, lease.rows)
    for lease, _ in lasting.values():
        lease.end()


@settings(max_examples=25)
@given(st.data(), st.integers(2, 3))
def test_ranks_may_end_their_stays_whenever_they_like(data: st.DataObject, ranks: int) -> None:
    """Rows are right while a rank looks at them, whoever has gone on meanwhile; and all ranks go on."""
    order = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=20))
    late = st.lists(st.integers(0, 8), min_size=len(order), max_size=len(order))
    soon = st.lists(st.integers(0, 4), min_size=len(order), max_size=len(order))
    ends, lags = data.draw(st.lists(late, min_size=ranks, max_size=ranks)), data.draw(soon)
    on_threads(Topology(1, ranks), _lives, order, ends, lags)


def _passes(
    mesh: Mesh, order: list[int], ends: list[list[int]], lags: list[int], dropped: frozenset[int]
) -> None:
    """As :func:`_lives`, where rows come from other nodes; gathers that are ``dropped`` are not finished."""
    wire, topology = Wire(mesh, transport="shm", timeout=30), mesh.topology
    axes = topology.node_axis, topology.local_axis
    regions = wire.regions(topology.local_axis, [topology.world * ROW + 7 * region for region in range(3)])
    under_way: dict[int, tuple[Transfer, Lease]] = {}
    lasting: dict[int, tuple[Lease, Tensor]] = {}

    def gathering(number: int, lease: Lease) -> Steps[None]:
        def write(frame: Tensor) -> None:
            frame.fill_(mesh.rank + number % 200)

        tag = Tag("forward", "weights", str(order[number]))
        exchange = yield from gather_frames(wire, axes, write, ROW, tag, destination=lease)
        exchange.close()

    def finish(number: int) -> None:
        if number in under_way:
            under_way[number][0].wait()

    for number, region in enumerate(order):
        through = slice(mesh.rank % topology.ranks_per_node, topology.world, topology.ranks_per_node)
        lease = Lease(regions, region, ROW, Passing(topology.world, through, partial(finish, number)))
        transfer = Transfer(gathering(number, lease), "gather")
        if number not in dropped:
            under_way[number] = transfer, lease
        for other in [n for n in under_way if n <= number - lags[n]]:
            under_way[other][0].wait()
            _, lease = under_way.pop(other)
            assert _right(other, lease.rows)
            lasting[other] = lease, lease.rows
        for other in [n for n in lasting if n <= number - ends[mesh.rank][n]]:
            lease, rows = lasting.pop(other)
            assert _right(other, rows)
            lease.end()
        assert all(_right(n, rows) for n, (_, rows) in lasting.items())
    for number, (transfer, lease) in under_way.items():
        transfer.wait()
        lease.leave()
        assert _right(number, lease.rows)
    for lease, _ in lasting.values():
        lease.end()


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (3, 2)])
def test_rows_from_other_nodes_arrive_in_their_region(nodes: int, ranks: int) -> None:
    """Over gloo each rank fills rows of its node's region; late ranks, waits and drops mix nothing up."""
    draw = random.Random(nodes)
    order = [draw.randrange(3) for _ in range(200)]
    ends = [[draw.randrange(9) for _ in order] for _ in range(nodes * ranks)]
    lags = [draw.randrange(5) for _ in order]
    dropped = frozenset(draw.sample(range(200), 20))
    on_processes(Topology(nodes, ranks), _passes, order, ends, lags, dropped)


def test_regions_need_shared_memory() -> None:
    """Where ranks share none, regions are refused, naming the axis."""

    def body(mesh: Mesh) -> None:
        with pytest.raises(WireError, match="axis node share no memory"):
            Wire(mesh, transport="shm").regions(mesh.topology.node_axis, [64])

    on_threads(Topology(2, 1), body)


def _parted(mesh: Mesh) -> str:
    wire = Wire(mesh, transport="shm", timeout=60)
    axis = mesh.topology.local_axis
    regions = wire.regions(axis, [2 * ROW, 2 * ROW])
    lease = Lease(regions, mesh.rank, ROW)
    exchange = wire.all_gather(axis, ROW, Tag("forward", "weights", f"blocks.{mesh.rank}"), lease=lease)
    exchange.post()
    with pytest.raises(WireError) as caught:
        exchange.wait()
    return str(caught.value)


def test_ranks_that_gather_different_units_are_told_at_once() -> None:
    """Though their units live at different homes, the first exchange that differs is an error."""
    for said in on_threads(Topology(1, 2), _parted):
        assert "found that the ranks' exchanges differ" in said


# Training


@contextlib.contextmanager
def _nothing_decoded() -> Iterator[None]:
    with mock.patch("impl.unit.weight_gather.ops.decode", side_effect=AssertionError("decoded")):
        yield


def _engine(mesh: Mesh, net: nn.Module, policy: Policy = EXACT, transport: Any = "shm") -> Zero:
    return shard(net, mesh=mesh, policy=policy, wire=Wire(mesh, transport=transport, timeout=30))


def _round(zero: Zero, loss: Tensor) -> None:
    loss.backward()
    zero.finish_backward()
    _update(zero)


def _update(zero: Zero) -> None:
    with torch.no_grad():
        for unit in zero.units:
            for _, master in unit.master_shard.masters:
                assert master.grad is not None
                master.sub_(master.grad, alpha=0.1)
                master.grad = None
    zero.weights_changed()


def _trained(mesh: Mesh, net: nn.Module, policy: Policy, transport: Any, width: int) -> Any:
    wire = Wire(mesh, transport=transport)
    losses, state, _ = train(mesh, net, policy, 2, 2, width, wire=wire)
    return losses, state, wire.ledger.rows()


@settings(max_examples=25)
@given(st.data(), st.integers(2, 4), st.sampled_from(["net", "tied", "recompute", "odd"]))
def test_training_is_the_same_to_the_bit_and_the_byte(data: st.DataObject, ranks: int, kind: str) -> None:
    """Weights that stay where they arrived train as copies do: losses, state and ledger are equal."""
    topology = Topology(1, ranks)
    policy = data.draw(policies(topology))
    if data.draw(st.booleans()):
        policy = replace(policy, stage=3, weights=FP32, secondary=0, secondary_format="frames")
    net = model(Odd) if kind == "odd" else model(Net, tied=kind == "tied", recompute=kind == "recompute")
    width = 7 if kind == "odd" else 16
    copied, stayed = (on_threads(topology, _trained, net, policy, way, width) for way in ("backend", "shm"))
    for ours, theirs in zip(stayed, copied, strict=True):
        assert ours[0] == theirs[0]
        assert all(torch.equal(value, theirs[1][name]) for name, value in ours[1].items())
        assert ours[2] == theirs[2]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("changes", [{}, {"weights": BF16, "compute": "bf16"}], ids=["fp32", "bf16"])
def test_nothing_is_decoded_and_nobody_leaves(ranks: int, changes: dict[str, Any]) -> None:
    """In a plain loop, training, evaluating and generating, gathers copy nothing: not even to let go."""

    def body(mesh: Mesh) -> None:
        net = copy.deepcopy(base)
        zero = _engine(mesh, net, replace(EXACT, **changes))
        for step in range(2):
            _round(zero, net(batch(step, mesh.rank)))
            with torch.inference_mode():
                net(batch(step, mesh.rank))
            with torch.no_grad():
                net(batch(step, mesh.rank))

    base = model(Net, depth=2 * INNER_REGIONS)
    with _nothing_decoded(), mock.patch.object(SharedRegions, "part", side_effect=AssertionError("left")):
        on_threads(Topology(1, ranks), body)


@pytest.mark.parametrize(("depth", "again"), [(3, 0), (INNER_REGIONS + 3, 2)])
def test_backward_finds_what_forward_wrote(depth: int, again: int) -> None:
    """A rank writes its rows in each forward pass; in backward those that another took the place of.

    The last block, which stays for backward, shares its home with none.
    """

    def body(mesh: Mesh) -> list[int]:
        net = copy.deepcopy(base)
        zero = _engine(mesh, net)
        counts = []
        for step in range(3):
            before = written[mesh.rank]
            _round(zero, net(batch(step, mesh.rank)))
            counts.append(written[mesh.rank] - before)
        return counts

    base, written = model(Net, depth=depth), [0, 0]
    write = MasterShard.write_frame

    def counting(master_shard: MasterShard, frame: Tensor) -> None:
        written[master_shard._mesh.rank] += 1
        write(master_shard, frame)

    with mock.patch.object(MasterShard, "write_frame", counting):
        for counts in on_threads(Topology(1, 2), body):
            assert counts == 3 * [1 + depth + again]


def test_what_changed_since_forward_is_written_anew() -> None:
    """A row is written if its name is another, in any case if asked, and after a write that failed."""

    def body(mesh: Mesh) -> list[bool]:
        regions = Wire(mesh, transport="shm").regions(mesh.topology.local_axis, [2 * ROW])
        calls = []

        def fails() -> None:
            raise ValueError("no memory")

        lease = Lease(regions, 0, ROW)
        lease.begin()
        for row, anew in (("a", False), ("a", False), ("a", True), ("b", False), ("a", False)):
            calls.append(False)
            lease.write(row, lambda: calls.__setitem__(-1, True), anew=anew)
        with pytest.raises(ValueError, match="no memory"):
            lease.write("c", fails, anew=False)
        calls.append(False)
        lease.write("a", lambda: calls.__setitem__(-1, True), anew=False)
        lease.end()
        return calls

    for calls in on_threads(Topology(1, 2), body):
        assert calls == [True, False, True, True, True, True]


def _mapped(mesh: Mesh) -> tuple[list[bool], list[float]]:
    """Whether each parameter lies in the arena's file during a pass; losses."""
    net = model()
    zero = _engine(mesh, net)
    there = []

    def look(module: nn.Module, _: Any) -> None:
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "zeropp-arena" in line]
        bounds = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps]
        addresses = [parameter.data_ptr() for parameter in module.parameters(recurse=False)]
        there.extend(any(low <= address < high for low, high in bounds) for address in addresses)

    for module in net.modules():
        module.register_forward_pre_hook(look)
    losses = []
    for step in range(3):
        loss = net(batch(step, mesh.rank))
        losses.append(loss.item())
        _round(zero, loss)
    return there, losses


@pytest.mark.parametrize("nodes", [1, 2])
def test_parameters_lie_in_the_memory_of_the_node(nodes: int) -> None:
    """On processes, each parameter is a view of shared memory while its module runs; losses are a copy's.

    Also where gloo brings most of it from another node.
    """
    base = model()

    def copied(mesh: Mesh) -> list[float]:
        net = copy.deepcopy(base)
        zero = _engine(mesh, net, transport="backend")
        losses = []
        for step in range(3):
            loss = net(batch(step, mesh.rank))
            losses.append(loss.item())
            _round(zero, loss)
        return losses

    results = on_processes(Topology(nodes, 2), _mapped)
    assert all(there and all(there) for there, _ in results)
    assert [losses for _, losses in results] == on_threads(Topology(nodes, 2), copied)


@pytest.mark.parametrize("kind", ["net", "odd", "recompute"])
@pytest.mark.parametrize("weights", [FP32, BF16], ids=str)
def test_training_over_two_hops_is_the_same_to_the_bit_and_the_byte(kind: str, weights: Raw) -> None:
    """Weights that two hops bring to their home train as copies do: losses, state and ledger are equal."""
    net = model(Odd) if kind == "odd" else model(Net, recompute=kind == "recompute")
    compute: Any = "bf16" if weights == BF16 else "fp32"
    policy, width = replace(EXACT, weights=weights, compute=compute), 7 if kind == "odd" else 16
    stayed = on_processes(Topology(2, 2), _trained, net, policy, "shm", width)
    copied = on_processes(Topology(2, 2), _trained, net, policy, "backend", width)
    for ours, theirs in zip(stayed, copied, strict=True):
        assert ours[0] == theirs[0]
        assert all(torch.equal(value, theirs[1][name]) for name, value in ours[1].items())
        assert ours[2] == theirs[2]


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": 2},
        {"weights": BF16},
        {"secondary": "node"},
        {"memory": replace(ROOMY, persist_below=10**9)},
    ],
    ids=str,
)
def test_what_cannot_stay_is_copied(changes: dict[str, Any]) -> None:
    """Units that stay gathered until they change, codecs that must be decoded, and hpZ have no homes."""

    def body(mesh: Mesh) -> set[str]:
        zero = _engine(mesh, copy.deepcopy(base), replace(EXACT, **changes))
        return {unit.geometry.block for unit in zero.units if unit.flat.leases}

    base = model()
    for lives in on_threads(Topology(1, 2), body):
        assert not lives


def test_memory_is_counted_as_what_a_rank_sees() -> None:
    """The meter counts each gathered unit on each rank while its parameters are views of it."""

    def body(mesh: Mesh) -> tuple[int, int, int]:
        net = copy.deepcopy(base)
        zero = _engine(mesh, net)
        _round(zero, net(batch(0, mesh.rank)))
        formula = memory(EXACT, mesh.topology, [unit.geometry for unit in zero.units])
        return zero.memory()["gathered"], formula["gathered"], zero._meter.now["gathered"]

    base = model(Net, depth=4)
    for most, foreseen, now in on_threads(Topology(1, 2), body):
        assert most == foreseen
        assert now == 0


class _Keeps(nn.Module):
    """A linear layer that shows its weight to whoever asks for it, on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.seen: Tensor | None = None
        self.asked = False

    def forward(self, x: Tensor) -> Tensor:
        if self.asked:
            self.seen = self.weight.detach().t()
        return torch.tanh(x @ self.weight)


def test_ranks_that_let_go_at_different_moments_neither_wait_nor_mix() -> None:
    """One rank looks at weights for ever, another never, over more blocks than homes: values stay right."""
    base = _keeping()
    copied = on_threads(Topology(1, 4), _letting_go, base, "backend")
    assert on_threads(Topology(1, 4), _letting_go, base, "shm") == copied


def test_ranks_on_two_nodes_let_go_at_different_moments() -> None:
    """Likewise where homes are filled from another node."""
    base = _keeping()
    copied = on_threads(Topology(2, 2), _letting_go, base, "backend")
    assert on_processes(Topology(2, 2), _letting_go, base, "shm") == copied


def _keeping() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(_Keeps() for _ in range(2 * INNER_REGIONS + 3)))


def _letting_go(mesh: Mesh, base: nn.Sequential, transport: Any) -> list[float]:
    net = copy.deepcopy(base)
    zero = _engine(mesh, net, transport=transport)
    losses, kept = [], []
    for step in range(3):
        for number, block in enumerate(net):
            assert isinstance(block, _Keeps)
            block.asked = number % 3 == mesh.rank % 4
        before = {name: value.clone() for name, value in zero.full_state_dict().items()}
        loss = net(batch(step, mesh.rank, 8)).square().mean()
        for number, block in enumerate(net):
            assert isinstance(block, _Keeps)
            if block.asked:
                assert block.seen is not None
                kept.append((block.seen, before[f"{number}.weight"]))
        losses.append(loss.item())
        _round(zero, loss)
        if transport == "shm":  # elsewhere a view shows the weights of later passes
            assert all(torch.equal(seen.t(), value) for seen, value in kept)
    return losses


def test_a_copy_lives_no_longer_than_whoever_looks_at_it() -> None:
    """Blocks that shared a home with weights that somebody keeps are views of that copy no more."""
    torch.manual_seed(0)
    base = nn.Sequential(*(_Keeps() for _ in range(2 * INNER_REGIONS)))

    def body(mesh: Mesh) -> None:
        net = copy.deepcopy(base)
        zero = _engine(mesh, net, transport="shm")
        _round(zero, net(batch(0, mesh.rank, 8)).square().mean())  # all are views of their homes
        first = net[0]
        assert isinstance(first, _Keeps)
        first.asked = True
        with torch.no_grad():
            first(batch(1, mesh.rank, 8))  # alone: the others are not gathered again
        assert first.seen is not None
        held = torch.empty(8, 8).detach().t()  # a view as the one that is kept, of memory of its own
        assert _views(first.seen) == _views(held)

    def _views(tensor: Tensor) -> int:
        return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))

    on_threads(Topology(1, 2), body)


def test_a_kept_view_outlives_a_look_at_other_weights_of_its_home() -> None:
    """Who keeps a view of a block's weights is noticed, though another block's are seen whole meanwhile."""
    torch.manual_seed(0)
    base = nn.Sequential(*(_Keeps() for _ in range(INNER_REGIONS + 1)))

    def body(mesh: Mesh) -> None:
        net = copy.deepcopy(base)
        zero = _engine(mesh, net)
        _round(zero, net(batch(0, mesh.rank, 8)).square().mean())  # all are views of their homes
        last, unit = net[-1], zero.units[-1]
        assert isinstance(last, _Keeps)
        unit.bring("forward")
        kept = last.weight.detach()
        before = kept.clone()
        with GatheredParameters(net[0].weight):  # at the same home
            pass
        unit.release()
        _update_to(zero, 7.0)
        with torch.no_grad():
            net(batch(1, mesh.rank, 8))
        assert torch.equal(kept, before)

    on_threads(Topology(1, 2), body)


def _update_to(zero: Zero, value: float) -> None:
    with torch.no_grad():
        for unit in zero.units:
            for _, master in unit.master_shard.masters:
                master.fill_(value)
    zero.weights_changed()


@pytest.mark.parametrize("transport", ["shm", "backend"])
@pytest.mark.parametrize("waits", [2, 4])
def test_a_gather_that_was_interrupted_is_not_there(waits: int, transport: Any) -> None:
    """What KeyboardInterrupt left of a gather is never computed with: the next pass gathers it again."""
    base, left = model(Net, depth=3), threading.local()
    kind: Any = InMemory if transport == "shm" else Distributed
    wait = kind.wait

    def interrupted(exchange: Any) -> Tensor:
        left.waits = getattr(left, "waits", 0) - 1
        if left.waits == 0:
            raise KeyboardInterrupt
        return cast("Tensor", wait(exchange))

    def body(mesh: Mesh) -> float:
        net = copy.deepcopy(base)
        zero = _engine(mesh, net, transport=transport)
        left.waits = waits
        with pytest.raises(KeyboardInterrupt):
            net(batch(0, mesh.rank))
        zero.drop_gradients()
        loss: float = net(batch(0, mesh.rank)).item()
        return loss

    with mock.patch.object(kind, "wait", interrupted):
        losses = on_threads(Topology(1, 2), body)
    assert losses == pytest.approx([base(batch(0, rank)).item() for rank in range(2)])


class _Walks(nn.Module):
    """Blocks, of which a pass may leave some out."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Keeps() for _ in range(blocks))
        self.left_out: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number not in self.left_out:
                x = block(x)
        return x


def _interrupted_at_its_home(mesh: Mesh, base: nn.Module) -> tuple[int, float]:
    """Interrupts of a gather that another unit of its home finished; the loss of the pass after."""
    net, interrupts = copy.deepcopy(base), []
    assert isinstance(net, _Walks)
    zero = _engine(mesh, net, replace(EXACT, memory=replace(ROOMY, prefetch=10**9)))
    with torch.no_grad():
        net(batch(0, mesh.rank, 8))
    wait, vacate = Distributed.wait, SharedRegions.vacate

    def interrupted(exchange: Any) -> Tensor:
        interrupts.append(exchange)
        raise KeyboardInterrupt

    def vacating(regions: SharedRegions, region: int) -> None:
        with mock.patch.object(Distributed, "wait", wait if interrupts else interrupted):
            vacate(regions, region)

    net.left_out = (1,)  # gathered ahead; the block that comes to its home finds it under way
    with (
        mock.patch.object(SharedRegions, "vacate", vacating),
        pytest.raises(KeyboardInterrupt),
        torch.no_grad(),
    ):
        net(batch(0, mesh.rank, 8))
    zero.drop_gradients()
    net.left_out = ()
    with torch.no_grad():
        return len(interrupts), net(batch(0, mesh.rank, 8)).square().mean().item()


def test_a_gather_that_was_interrupted_at_its_home_is_not_there() -> None:
    """KeyboardInterrupt while another unit waits for its home leaves nothing behind."""
    torch.manual_seed(0)
    base = _Walks(INNER_REGIONS + 3)  # the last has a home of its own
    results = on_processes(Topology(2, 2), _interrupted_at_its_home, base)
    assert [count for count, _ in results] == 4 * [1]
    wanted = [base(batch(0, rank, 8)).square().mean().item() for rank in range(4)]
    assert [loss for _, loss in results] == pytest.approx(wanted)


class _Half(nn.Module):
    """Of two weights, one that some ranks do not use: their unit is released when the pass is finished."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2))
        self.uses = True

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight)
        return y * (x @ self.other) if self.uses else y


def test_a_parameter_that_one_rank_does_not_use_delays_no_other() -> None:
    """Its unit stays gathered there until the pass is finished; the next passes are right on all ranks."""
    torch.manual_seed(0)
    base = nn.Sequential(_Half(), *(_Keeps() for _ in range(2 * INNER_REGIONS)))

    def body(mesh: Mesh, transport: Any) -> list[float]:
        net = copy.deepcopy(base)
        net[0].uses = mesh.rank == 0
        zero = _engine(mesh, net, transport=transport)
        losses = []
        for step in range(3):
            loss = net(batch(step, mesh.rank, 8)).square().mean()
            losses.append(loss.item())
            loss.backward()
            assert zero.units[0].gathered == (mesh.rank != 0)
            zero.finish_backward()
            zero.scale_gradients(0.5)
            for unit in zero.units:
                for _, master in unit.master_shard.masters:
                    assert master.grad is not None
                    master.data.sub_(master.grad)
                    master.grad = None
            zero.weights_changed()
        return losses

    assert on_threads(Topology(1, 2), body, "shm") == on_threads(Topology(1, 2), body, "backend")


class _Clamps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return x @ self.weight


class _Renormalises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.argmax(-1))


class _ClampsAround(nn.Module):
    """The root's weight, in use around a block."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return self.blocks[0](x @ self.weight)  # type: ignore[no-any-return]


class _Replaces(nn.Module):
    """As layers do that limit their weight's norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight.detach().clone())
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        return x @ self.weight


@pytest.mark.parametrize("transport", ["backend", "shm"])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("kind", [_Clamps, _Renormalises, _Replaces, _ClampsAround])
def test_a_pass_in_which_weights_were_written_has_ended(
    kind: type[nn.Module], alone: bool, transport: Any
) -> None:
    """The error leaves nothing gathered, and autograd saving as before; also of a block that runs alone."""

    def body(mesh: Mesh) -> None:
        written = kind()
        net = written if kind is _ClampsAround else nn.Sequential(written, nn.Linear(8, 8))
        zero = _engine(mesh, net, transport=transport)
        with pytest.raises(ZeroError, match="was written in place or through"):
            (written if alone else net)(batch(0, mesh.rank, 8))
        assert not any(unit.gathered for unit in zero.units)
        assert not zero.hooks.actions.saved.active
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None

    on_threads(Topology(1, 2), body)


class _ClampsAll(nn.Module):
    """Blocks, and what writes all their weights once they have run, as an average of weights does."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            for block in self.blocks:
                block.weight.mul_(0.5)
        return x


@pytest.mark.parametrize("transport", ["backend", "shm"])
@pytest.mark.parametrize(
    ("blocks", "named"),
    [
        (1, "parameter 'blocks.0.weight' was written"),
        (3, "parameters ('blocks.[012].weight'(, )?){3} were written"),
        (6, "parameters ('blocks.[0-5].weight'(, )?){4} and 2 more were written"),
    ],
)
def test_all_weights_that_were_written_are_named(blocks: int, named: str, transport: Any) -> None:
    """Where several units are refused at once one error has all their names, up to four, and the count."""

    def body(mesh: Mesh) -> None:
        kept = replace(EXACT, memory=replace(EXACT.memory, max_reuse=10**9, max_live=10**9))
        net = _ClampsAll(blocks)
        zero = _engine(mesh, net, kept, transport=transport)
        with pytest.raises(ZeroError, match=named) as caught:
            _round(zero, net(batch(0, mesh.rank, 8)).sum())
        assert isinstance(caught.value, WrittenError)
        assert sorted(caught.value.names) == [f"blocks.{index}.weight" for index in range(blocks)]

    on_threads(Topology(1, 2), body)


@pytest.mark.parametrize("alike", [False, True])
def test_an_error_names_nothing_of_an_earlier_one(alike: bool) -> None:
    """Weights that another pass wrote, of this model or another, are not named while theirs is handled."""

    class Writes(nn.Sequential):
        written = "0"

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            with torch.no_grad():
                self[int(self.written)].weight.mul_(0.5)
            return x

    def body(mesh: Mesh) -> None:
        nets = [nn.Sequential(Writes(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)) for _ in range(2)]
        for net in nets:
            _engine(mesh, net, transport="backend")
        first, second = nets[0], nets[0 if alike else 1]
        with pytest.raises(WrittenError) as caught:
            first(batch(0, mesh.rank, 8))
        assert caught.value.names == ("0.0.weight",)
        cast("Writes", second[0]).written = "1"
        try:
            raise caught.value
        except WrittenError:
            with pytest.raises(WrittenError) as other:
                second(batch(0, mesh.rank, 8))
        assert other.value.names == ("0.1.weight",)

    on_threads(Topology(1, 1), body)


@pytest.mark.parametrize("transport", ["backend", "shm"])
def test_values_given_through_data_are_refused_and_do_not_stay(transport: Any) -> None:
    """A weight that is given another memory in a pass is told of; the next pass has the masters' values."""

    def body(mesh: Mesh) -> None:
        written = _Replaces()
        zero = _engine(mesh, nn.Sequential(written, nn.Linear(8, 8)), transport=transport)
        for step in range(2):
            with pytest.raises(ZeroError, match=r"parameter '0\.weight' was written"):
                zero.model(batch(step, mesh.rank, 8))
        values = zero.full_state_dict()["0.weight"]
        assert all(torch.equal(seen, values) for seen in written.seen)

    on_threads(Topology(1, 2), body)


@pytest.mark.parametrize("transport", ["backend", "shm"])
def test_reading_a_weight_between_passes_is_no_write(transport: Any) -> None:
    """Where units stay for their backward pass, seeing one parameter whole before it writes none of them."""
    policy = replace(EXACT, memory=replace(ROOMY, max_reuse=10**9))
    base = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def body(mesh: Mesh) -> None:
        net = copy.deepcopy(base)
        zero = _engine(mesh, net, policy, transport)
        loss = net(batch(0, mesh.rank, 8)).square().mean()
        assert all(unit.gathered for unit in zero.units)
        with GatheredParameters(net.get_parameter("0.weight")):
            pass
        _round(zero, loss)

    on_threads(Topology(1, 2), body)


@pytest.mark.parametrize("transport", ["backend", "shm"])
def test_a_backward_pass_in_which_weights_were_written_has_ended(transport: Any) -> None:
    """finish_backward() tells of a write, and is done: the next passes train as without it."""
    torch.manual_seed(0)
    base = nn.Sequential(_Half(), nn.Linear(8, 8))

    def body(mesh: Mesh, writes: bool) -> list[float]:
        net, losses = copy.deepcopy(base), []
        net[0].uses = False
        zero = _engine(mesh, net, transport=transport)
        for step in range(3):
            loss = net(batch(step, mesh.rank, 8)).square().mean()
            losses.append(loss.item())
            if writes and step == 1:
                loss.backward()
                with torch.no_grad():  # gathered still, as it got no gradient
                    net.get_parameter("0.other").mul_(2)
                with pytest.raises(ZeroError, match=r"parameter '0\.other' was written"):
                    zero.finish_backward()
                assert not any(unit.gathered for unit in zero.units)
                _update(zero)
            else:
                _round(zero, loss)
        return losses

    assert on_threads(Topology(1, 2), body, True) == on_threads(Topology(1, 2), body, False)


@pytest.mark.parametrize("transport", ["backend", "shm"])
@pytest.mark.parametrize("kind", [_Clamps, _Renormalises])
def test_writing_weights_during_a_pass_is_refused(kind: type[nn.Module], transport: Any) -> None:
    """A write that no master would see, and in shared memory others would, is an error that names it."""

    def body(mesh: Mesh) -> None:
        net = nn.Sequential(kind(), nn.Linear(8, 8))
        zero = _engine(mesh, net, transport=transport)
        with pytest.raises(
            ZeroError, match=r"parameter '0\.\S+' was written in place or .* GatheredParameters"
        ):
            net(batch(0, mesh.rank, 8))
        assert not any(unit.gathered for unit in zero.units)

    on_threads(Topology(1, 2), body)
