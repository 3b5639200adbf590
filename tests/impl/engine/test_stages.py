"""Stages and groups are places to keep things: what is learned is the same, what is held and sent differs."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from impl.codecs.codec import IntCodec, parse
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.plan.memory import ADAM_BYTES
from impl.plan.memory import memory as formula_of
from impl.plan.reduction_queue import Reducing
from impl.policy.policy import Feedback, MemoryLimits, Offload, Policy, Stage
from impl.policy.presets import preset
from impl.policy.spans import Span
from impl.policy.topology import Topology
from impl.zero import ZeroError, shard
from tests.support.history import history_of
from tests.support.models import Odd
from tests.support.params import nightly
from tests.support.ranks import each_rank, on_processes, on_threads
from tests.support.strategies import EXACT, ROOMY
from tests.support.training import batch, booked, close, mean_losses, model, sgd, single, train

STAGES: list[Stage] = [0, 1, 2, 3]
NET = model(depth=4)
ALL = Offload(optimizer=1, weights=1)
INT4 = (parse("int4:32"),) * 2


def follows(topology: Topology, policy: Policy, micro_batches: int = 2, **options: Any) -> None:
    results, net = on_threads(topology, train, model(**options), policy, 3, micro_batches), model(**options)
    assert mean_losses(results) == pytest.approx(single(net, topology.world, 3, micro_batches), rel=1e-5)
    for result in results:
        assert close(result[1], net.state_dict(), 1e-4)


@pytest.mark.parametrize(
    ("topology", "group"),
    [
        *((Topology(2, 2), 0), (Topology(3, 2), 0)),
        *((Topology(2, 2), "node"), (Topology(2, 3), 3), (Topology(1, 6), 2)),
        *nightly((Topology(1, 4), 0), (Topology(4, 1), 0)),
        *nightly((Topology(2, 2), 1), (Topology(2, 4), 2), (Topology(4, 2), 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("stage", STAGES)
def test_all_stages_learn_what_one_process_learns(stage: Stage, topology: Topology, group: Any) -> None:
    """Unquantised, losses and weights are a single process's within 1e-5, also with groups of any size."""
    if group and stage == 0:
        pytest.skip("nothing is sharded so")
    follows(topology, replace(EXACT, group=group, stage=stage))


@pytest.mark.parametrize(
    ("secondary", "accumulation", "options"),
    [
        *((secondary, 3, {}) for secondary in (0, 1, 2)),
        *((0, 1, options) for options in ({"tied": True}, {"recompute": True}, {"depth": 1})),
    ],
    ids=str,
)
def test_exact_is_exact(secondary: int, accumulation: int, options: dict[str, Any]) -> None:
    """Accumulation, hpZ of any group size, tied weights, recomputed and single blocks train the same."""
    follows(Topology(2, 2), replace(EXACT, secondary=secondary), accumulation, **options)


@pytest.mark.parametrize("stage", STAGES)
def test_odd_models_train_at_every_stage(stage: Stage) -> None:
    """Scalar, empty, tiny, frozen, unused and twice-used parameters train as in one process."""
    results = on_threads(Topology(3, 2), train, model(Odd), replace(EXACT, stage=stage), 3, 2, 7)
    net = model(Odd)
    assert mean_losses(results) == pytest.approx(single(net, 6, 3, 2, 7), rel=1e-5)
    assert results[0][1].keys() == net.state_dict().keys()
    assert torch.equal(results[0][1]["frozen"], net.frozen)


@pytest.mark.parametrize("micro_batches", [2, *nightly(1)])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("offload", [Offload(), ALL], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"group": 2}, {"reduce_every": "step"}, {"frozen": parse("int8:32")}, {"compute": "bf16"}),
        *({"secondary": "node"}, {"secondary": "node", "weights": parse("int8:32")}),
        {"secondary": "node", "weights": parse("int8:32"), "secondary_format": "bf16"},
        *({"offload": Offload(weights=1)}, {"offload": Offload(optimizer=0.5)}),
        {"feedback": Feedback(state="bf16"), "gradients": INT4},
        {"feedback": Feedback(hops="all"), "gradients": INT4},
    ],
    ids=str,
)
def test_memory_is_the_formulas_at_every_stage(
    stage: Stage, offload: Offload, changes: dict[str, Any], micro_batches: int
) -> None:
    """Most bytes of device and host are the formula's, by part; with all offloaded the device has staging."""
    if (stage == 0 and "group" in changes) or (stage < 3 and "secondary" in changes):
        pytest.skip("nothing is sharded so")
    net, topology = model(depth=4), Topology(2, 2)
    for block in net.blocks:
        block.up.bias.requires_grad_(requires_grad=False)
    memory = replace(ROOMY, prefetch=0)
    policy = replace(EXACT, **{"stage": stage, "memory": memory, "offload": offload, **changes})
    zero = on_threads(topology, train, net, policy, 2, micro_batches)[0][2]
    units = [unit.geometry for unit in zero.units]
    formula, measured = formula_of(policy, topology, units, micro_batches=micro_batches), zero.memory()
    assert measured.keys() <= formula.keys()
    for part in formula.keys() - {"optimizer", "host_optimizer"}:  # torch's own
        assert measured.get(part, 0) == formula[part], part
    if policy.offload == ALL:
        assert [formula[part] for part in ("masters", "gradients", "optimizer", "frames")] == [0] * 4
        assert formula["staging"] == 2 * 4 * max(unit.shard for unit in units if unit.trainable)
        assert formula["host_optimizer"] == ADAM_BYTES * sum(master.numel() for master in zero.masters)


AHEAD = {
    "exact": EXACT,
    "flat": replace(EXACT, gather="flat"),
    "mics": replace(EXACT, group="node"),
    "hpz": replace(EXACT, secondary="node"),
    "zero3": preset("zero3", memory=ROOMY),
    "zero3 in bf16": preset("zero3", compute="bf16", memory=ROOMY),
    "zeropp": preset("zeropp", memory=ROOMY, weights=parse("int8:32"), gradients=INT4),
    "stage 2": replace(EXACT, stage=2),
    "offload": replace(EXACT, offload=ALL),
    "spans": replace(EXACT, schedule=(Span(until=1, gather="flat"), Span())),
}
ALONE = {"max_reuse": 0}  # no block stays gathered for backward
LIMITS: list[dict[str, int]] = [
    *({"prefetch": prefetch, **ALONE} for prefetch in (0, 1, 1500)),
    *({"max_reuse": reuse} for reuse in (1, 3000, 10**9)),
    *({"max_live": 5000}, {"persist_below": 30}),
]


def _gathered_ahead(mesh: Mesh) -> list[tuple[str, int, int, int]]:
    """Return for each case the bytes of gathered weights: measured, predicted, and those with one block at a time."""
    found = []
    policies = [(name, ALONE) for name in AHEAD]
    limits = [(name, each) for name in ("exact", "zeropp") for each in LIMITS]
    frozen = [("exact, frozen", each) for each in LIMITS]
    wires: dict[str, Wire] = {"gloo": Wire(mesh), "shm": Wire(mesh, transport="shm")}
    for transport, (case, each) in [
        *itertools.product(wires, policies),
        *itertools.product(["gloo"], [*limits, *frozen]),
    ]:
        name, *parts = case.split(", ")
        policy, net = replace(AHEAD[name], memory=replace(ROOMY, **each)), model(depth=7)
        for block in net.blocks if parts else ():
            block.up.bias.requires_grad_(requires_grad=False)
        wire = wires[transport]
        zero = train(mesh, net, policy, 2, wire=wire)[2]
        units = [unit.geometry for unit in zero.units]
        predicted = formula_of(policy, mesh.topology, units, in_place=wire.lets_go)["gathered"]
        one = formula_of(policy, mesh.topology, units)["gathered"]
        found.append((f"{case}, {each}, {transport}", zero.memory()["gathered"], predicted, one))
    return found


@pytest.mark.parametrize(
    ("topology", "ahead"),
    [
        (Topology(1, 2), {"exact", "flat", "mics", "zero3 in bf16", "offload", "spans"}),
        (Topology(2, 2), {"flat", "mics", "spans"}),
    ],
    ids=["1x2", "2x2"],
)
def test_weights_gathered_ahead_are_in_the_formula(topology: Topology, ahead: set[str]) -> None:
    """Over gloo and shared memory, a rank's most gathered weights are the formula's under every policy and limit.

    Over gloo, they are those of several blocks in policies whose messages arrive in the memory of the weights.

    gloo's thread may hold a message's memory for some milliseconds after the wait for the message has ended.  A unit
    that is resharded within this time keeps its weights until it is resharded again.  So the least of at most three
    runs is compared.
    """
    least = on_processes(topology, _gathered_ahead)
    for _ in range(2):
        if all(held <= predicted for found in least for _, held, predicted, _ in found):
            break
        again = on_processes(topology, _gathered_ahead)
        least = [
            [min(pair) for pair in zip(found, others, strict=True)]
            for found, others in zip(least, again, strict=True)
        ]
    for found in least:
        assert {case: held for case, held, _, _ in found} == {case: held for case, _, held, _ in found}
        several = {case for case, held, _, one in found if held > one}
        assert {name for name in AHEAD if f"{name}, {ALONE}, gloo" in several} == ahead


@each_rank(1, 2)
def test_gradients_that_were_not_reduced_are_refused_by_the_step(mesh: Mesh) -> None:
    """A step after accumulating alone names what is missing; accumulating names the setting it needs."""
    history = history_of(mesh, NET, replace(EXACT, stage=1), ["accumulate"])
    with pytest.raises(ZeroError, match="run the last micro-batch outside"):
        history.optimizer.step()
    with pytest.raises(ZeroError, match="reduce_every to 'step'"):
        shard(model(), mesh=mesh, policy=EXACT).accumulate(on=True)


@each_rank(1, 2)
def test_an_inner_context_of_accumulating_does_not_end_the_outer_one(mesh: Mesh) -> None:
    """After an inner context, or an error in it, passes inside the outer context still reduce nothing."""
    zero = shard(net := model(), mesh=mesh, policy=replace(EXACT, stage=1))
    with zero.accumulating():
        with contextlib.suppress(ValueError), zero.accumulating():
            net(batch(0, mesh.rank)).backward()
            raise ValueError("boom")
        net(batch(1, mesh.rank)).backward()
        assert all(master.grad is None for master in zero.masters)
    net(batch(2, mesh.rank)).backward()
    assert all(master.grad is not None for master in zero.masters)


@pytest.mark.parametrize("how", ["to none", "to zero", "rehearsing"])
@each_rank(1, 2)
def test_zero_grad_of_the_model_drops_local_gradients(mesh: Mesh, how: str) -> None:
    """The next reduction has nothing of passes before ``model.zero_grad()``, or of a rehearsal that accumulated."""

    def gradients(*, dropped: bool) -> list[Tensor]:
        zero = shard(net := model(), mesh=mesh, policy=replace(EXACT, stage=1))
        if dropped:
            with zero.rehearsing() if how == "rehearsing" else contextlib.nullcontext(), zero.accumulating():
                net(batch(0, mesh.rank)).backward()
            if how != "rehearsing":
                net.zero_grad(set_to_none=how == "to none")
        net(batch(1, mesh.rank)).backward()
        return [master.grad.clone() for master in zero.masters if master.grad is not None]

    assert all(map(torch.equal, gradients(dropped=False), gradients(dropped=True)))


@pytest.mark.parametrize("max_live", [0, 2500, *nightly(5000, 10**9)])
@pytest.mark.parametrize("max_reuse", [0, 1, 3000, *nightly(10**9)])
def test_no_more_is_gathered_than_allowed(max_live: int, max_reuse: int) -> None:
    """With any prefetch, the gathered elements stay within max_live, or what is in use if that is more."""
    limits = replace(ROOMY, max_live=max_live, max_reuse=max_reuse, prefetch=10**9)
    zero = on_threads(Topology(1, 2), train, model(depth=5), replace(EXACT, memory=limits), 2)[0][2]
    sizes = [(unit.geometry.outer, unit.geometry.padded) for unit in zero.units]
    outer = sum(size for is_outer, size in sizes if is_outer)
    block = max(size for is_outer, size in sizes if not is_outer)
    assert zero.memory()["gathered"] // 4 <= max(max_live, outer + block)


@pytest.mark.parametrize(("max_reuse", "kept"), [(0, 0), (1, 1), (3000, 2), (10**9, 5)])
def test_blocks_within_the_reuse_distance_are_gathered_once(max_reuse: int, kept: int) -> None:
    """Above 0 the root and the last blocks within it are gathered in forward alone; by default one block."""
    assert preset("zeropp").memory == MemoryLimits()
    assert MemoryLimits().max_reuse == 1
    policy = replace(EXACT, memory=replace(ROOMY, max_reuse=max_reuse))
    zero = on_threads(Topology(1, 2), train, model(depth=5), policy, 1)[0][2]
    rows = zero.wire.ledger.rows()
    again = {key.unit for key in rows if (key.phase, key.purpose) == ("backward", "weights")}
    assert {f"blocks.{i}" for i in range(5 - kept)} <= again
    assert not again & {f"blocks.{i}" for i in range(5 - kept, 5)}
    assert ("root" in again) == (max_reuse == 0)


@each_rank(1, 2)
def test_nothing_stays_where_no_backward_pass_follows(mesh: Mesh) -> None:
    """After an evaluation and after a forward pass that failed all units are sharded."""
    net = model(depth=2)
    zero = shard(net, mesh=mesh, policy=EXACT)
    with torch.no_grad():
        net(batch(0, mesh.rank))
    assert not any(unit.gathered for unit in zero.units)
    with pytest.raises(RuntimeError):
        net(torch.zeros(3, 5))
    assert not any(unit.gathered for unit in zero.units)


def _under_way(mesh: Mesh, bucket: int) -> tuple[int, int]:
    """Most elements of gradients under way at once, and the elements of the largest unit."""
    policy = replace(EXACT, memory=replace(ROOMY, reduce_bucket=bucket))
    zero, seen = shard(model(depth=4), mesh=mesh, policy=policy), [0]
    reductions = zero.hooks.reductions
    start = reductions._start

    def watched(reduction: Reducing) -> None:
        start(reduction)
        seen.append(reductions.elements_under_way)

    reductions._start = watched  # type: ignore[method-assign]
    zero.model(batch(0, mesh.rank)).backward()
    return max(seen), max(unit.geometry.padded for unit in zero.units)


def test_gradients_under_way_stay_within_the_bucket() -> None:
    """A reduction waits for earlier ones as long as both would exceed reduce_bucket."""
    (free, block), (held, _) = (on_threads(Topology(2, 2), _under_way, size)[0] for size in (10**9, 1500))
    assert free > block
    assert held <= max(1500, block)


def test_small_parameters_are_gathered_once_a_step_and_never_quantised() -> None:
    """Below persist_below parameters stay gathered: one gather a step, in the type computed in."""
    policy = preset("qwz", weights=IntCodec(8, 32), memory=replace(ROOMY, persist_below=50))
    zero = on_threads(Topology(1, 2), train, model(depth=3), policy, 2, 3)[0][2]
    small = next(unit.geometry for unit in zero.units if unit.geometry.persistent)
    assert {slot.spec.numel for slot in small.slots} == {16, 40}
    sent = booked(zero, purpose="persistent")
    assert sent == booked(zero, purpose="persistent", phase="forward") == 2 * 4 * small.shard  # steps, fp32


class _Chooses(nn.Module):
    """Of its blocks it calls one, and another on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor, choice: int) -> Tensor:
        return torch.tanh(self.blocks[choice % 6](self.embed(x))).square().mean()


def _choice(net: nn.Module, step: int, rank: int) -> Tensor:
    return net(batch(step, rank), 3 * rank + step)


def _chosen(mesh: Mesh, policy: Policy) -> tuple[list[float], dict[str, Tensor]]:
    wire, optimize = Wire(mesh, timeout=20.0), partial(sgd, lr=0.5)
    losses, state, _ = train(mesh, model(_Chooses), policy, 4, optimize=optimize, loss_of=_choice, wire=wire)
    wire.check_order()
    return losses, state


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize(
    ("topology", "changes"),
    [
        *((Topology(1, 2), {"stage": stage}) for stage in (0, 1, 2)),
        (Topology(2, 2), {"stage": 2, "group": 2}),
        (Topology(1, 4), {"stage": 1, "gather": "flat", "reduce": "ring"}),
    ],
    ids=str,
)
def test_ranks_may_call_different_blocks_below_stage_3(
    topology: Topology, changes: dict[str, Any], processes: bool
) -> None:
    """Ranks use different blocks of six: all gather and reduce in one order, and learn as one process."""
    run, net = on_processes if processes else on_threads, model(_Chooses)
    results = run(topology, _chosen, replace(EXACT, **changes))
    wanted = single(net, topology.world, 4, optimize=partial(sgd, lr=0.5), loss_of=_choice)
    assert mean_losses(results) == pytest.approx(wanted, rel=1e-5)
    assert close(results[0][1], dict(net.state_dict()), 1e-4)
