"""Predicts how long a traced step would take under a policy.

There are two kinds of policies:

- A policy of :data:`REWRITES` keeps the schedule of the traced program.  ``same`` changes no messages, ``bf16`` and
  ``fp16`` change the type in which they are sent, and ``kept`` leaves out the gathers that the backward pass repeats.
- A preset of :mod:`impl.policy.presets` replaces the traced program by our own engine.  The step is simulated with our
  engine's schedule and messages (:mod:`impl.plan.step_time`), and with the traced computation of each part of the
  model, such as an FSDP module.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from harness.errors import Refusal, suggestion
from harness.whatif.joint import Joined, JointStep, Run, Traced
from impl.codecs.codec import ITEM_BYTES, Raw
from impl.plan.prefetch_schedule import small_units
from impl.plan.step_time import Machine, Step, passes_of
from impl.plan.timeline import Pass
from impl.policy.policy import Policy, PolicyError
from impl.policy.presets import PRESETS
from impl.policy.shard_layout import ROOT, UnitGeometry
from impl.policy.topology import Topology

SAME: Final = "same"
REWRITES: Final = {
    SAME: "the program as it was traced",
    "bf16": "all weights and gradients are sent in bf16",
    "fp16": "all weights and gradients are sent in fp16",
    "kept": "weights stay gathered from forward to backward",
}
DTYPES: Final = {"fp32": "Float", "bf16": "BFloat16", "fp16": "Half"}  # NCCL's names of our types
Overheads = Literal["scale", "constant"]
"""Two hypotheses on the overhead of a collective under another policy or rate.

``scale``: the overhead grows in proportion to the collective's time on the link (its bytes over the rate).
``constant``: the overhead is the same as traced."""


@dataclass(frozen=True, slots=True)
class Target:
    """The policy, the link's rate and the topology for which a step is predicted."""

    policy: str  # a key of :data:`REWRITES` or a preset
    rate: float  # bytes a second of a node's link
    topology: Topology
    # Gives the seconds of codecs, and the number of processors that ranks share.  None if no machine file was given.
    machine: Machine | None = None
    slower: float = 1.0  # factor by which computation takes longer than traced


@dataclass(frozen=True, slots=True)
class Predicted:
    """A predicted step, in seconds."""

    seconds: float  # duration of the step
    exposed: float  # seconds of waiting for messages, on the rank that waits longest
    link: float  # seconds in which the link between nodes is busy


def check(policy: str, traced: Traced) -> None:
    """Raise a Refusal if a policy is unknown, or if it cannot be predicted for the traced program.

    ``kept`` and the presets of our engine need a program without gradient accumulation.  ``kept`` also needs a program
    that gathers weights again in its backward pass.  Presets have further conditions, which :func:`of_our_engine`
    checks.
    """
    if policy not in REWRITES and policy not in PRESETS:
        known = [*REWRITES, *PRESETS]
        raise Refusal(f"--policy {policy!r}: expected one of {', '.join(known)}{suggestion(policy, known)}")
    if policy == SAME or policy in ITEM_BYTES:
        return
    for step in traced.steps:
        for rank in step.ranks.values():
            if rank.marks.passes > 1:
                raise Refusal(
                    f"--policy {policy}: a traced step has {rank.marks.passes} forward passes, but this policy needs "
                    "steps with one: trace the program without gradient accumulation, or choose same, bf16 or fp16"
                )
    if policy == "kept" and not any(_again(step.collectives) for step in traced.steps):
        raise Refusal(
            "--policy kept: the traced program gathers no weights again in its backward pass, so this policy would "
            "change nothing: choose another policy"
        )


def rewritten(step: JointStep, traced: Traced, target: Target, overheads: Overheads) -> list[Run]:
    """Return how each collective of a traced step would run under the target's policy, link rate and topology.

    The policy is one of :data:`REWRITES`, which keep the traced schedule and change only the messages.  The result has
    one :class:`~harness.whatif.joint.Run` for each collective, in the order of ``step.collectives``.
    :func:`harness.whatif.joint.replay` takes this list as its argument ``runs``.

    ``overheads`` says how the overhead of a collective changes under the target (:data:`Overheads`).
    """
    left_out = _again(step.collectives) if target.policy == "kept" else set()
    resized = target.topology != traced.topology
    return [
        Run(0.0, {}, joined.between)
        if number in left_out
        else _run(joined, traced, target, overheads, resized=resized)
        for number, joined in enumerate(step.collectives)
    ]


def _run(joined: Joined, traced: Traced, target: Target, overheads: Overheads, *, resized: bool) -> Run:
    seen, between = joined.seen, joined.between
    if resized:
        if len(seen.group) != traced.topology.world:
            raise Refusal(
                f"--nodes, --ranks-per-node: a traced collective has {len(seen.group)} of {traced.topology.world} "
                "ranks, and only a program whose collectives have all ranks can be moved to another topology: leave "
                "out both options"
            )
        seen, between = replace(seen, group=tuple(range(target.topology.world))), True
    sent, coding = seen, (0.0, 0.0)
    if target.policy in ITEM_BYTES and seen.item > ITEM_BYTES[target.policy] and seen.elements > 1:
        sent = replace(seen, item=ITEM_BYTES[target.policy], dtype=DTYPES[target.policy])
        coding = _casting(target, seen.elements, len(seen.group), whole=seen.kind != "all_gather")
    if not between:
        share = sent.item / seen.item
        return Run(joined.link * share, joined.overhead, between=False, coding=coding, sent=sent)
    link = sent.wire_bytes() / target.rate
    stretch = link / joined.link if overheads == "scale" and joined.link else 1.0
    return Run(
        link,
        {rank: seconds * stretch for rank, seconds in joined.overhead.items()},
        between=True,
        coding=coding,
        sent=sent,
    )


def _casting(target: Target, elements: int, ranks: int, *, whole: bool) -> tuple[float, float]:
    """Return how long a rank takes to cast to 16 bits before a collective, and back after it, in seconds.

    Args:
        target: The target.  Its machine gives the speed of casts; without a machine both results are 0.
        elements: Number of elements of all ranks' parts together.  A rank casts all of them after the collective.
        ranks: Number of ranks of the collective.
        whole: Whether a rank casts all elements before the collective too.  If False, it casts only its own part then,
            ``elements / ranks``.
    """
    if target.machine is None:
        return 0.0, 0.0
    cost, stretch = target.machine.cost(Raw("bf16" if target.policy == "bf16" else "fp16")), _stretch(target)
    before = elements if whole else elements / ranks
    return before * cost.encode * stretch, elements * cost.decode * stretch


def _stretch(target: Target) -> float:
    if target.machine is None:
        return 1.0
    return target.machine.stretch(target.topology.nodes, target.topology.ranks_per_node)


def _again(collectives: Sequence[Joined]) -> set[int]:
    """Return the indices in ``collectives`` of those all-gathers that gather weights for a second time.

    ``collectives`` are those of one step.  An all-gather of the backward pass gathers weights for a second time if an
    earlier all-gather of the step has the same unit and number of elements.
    """
    seen, again = set[tuple[str, int]](), set[int]()
    for number, joined in enumerate(collectives):
        key = joined.seen.unit, joined.seen.elements
        if joined.seen.kind == "all_gather":
            if joined.seen.phase == "backward" and key in seen:
                again.add(number)
            seen.add(key)
    return again


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of the traced model whose weights are gathered, or whose gradients are reduced, by one collective."""

    name: str
    elements: int  # number of elements of the unit's parameters
    forward: float  # seconds in which the slowest rank computes the unit's forward pass in a step
    backward: float  # seconds in which the slowest rank computes the unit's backward pass in a step


def units_of(step: JointStep) -> list[Unit]:
    """Return the units of the traced model, in the order in which the forward pass uses them.

    A unit is a module that FSDP gathers, the weights of one gather of DeepSpeed, or a bucket of DDP.

    Raises:
        Refusal: If the step has no such units.
    """
    collectives = [joined.seen for joined in step.collectives]
    gathers = [seen for seen in collectives if seen.kind == "all_gather" and seen.phase == "forward"]
    if gathers and not any(seen.unit for seen in gathers):
        return _unnamed(step, [seen.elements for seen in gathers])
    if gathers:
        sizes = dict[str, int]()
        for seen in gathers:
            sizes[seen.unit] = sizes.get(seen.unit, 0) + seen.elements
        # The root's parameters are gathered once, first, and are in use until the end of backward.
        again = {collectives[number].unit for number in _again(step.collectives)}
        root = next((name for name in sizes if name not in again), None) if again else None
        return [
            Unit(ROOT, elements, *_seconds(step, {name, ""}))
            if name == root
            else Unit(name, elements, *_seconds(step, {name}))
            for name, elements in sizes.items()
        ]
    buckets = [seen for seen in collectives if seen.kind == "all_reduce" and seen.phase == "backward"]
    largest = max((seen.elements for seen in buckets), default=0)
    buckets = [seen for seen in buckets if seen.elements > max(1, largest // 10_000)]  # not norms and flags
    if not buckets or not any(rank.marks.in_ddp for rank in step.ranks.values()):
        raise Refusal(
            "a policy of our engine needs the traced model's units, and the traces show neither modules that FSDP "
            "gathers, nor gathers of DeepSpeed, nor buckets of DDP: choose --policy same, bf16 or fp16"
        )
    return _buckets(step, [seen.elements for seen in buckets], [seen.issued[0] for seen in buckets])


def _unnamed(step: JointStep, elements: Sequence[int]) -> list[Unit]:
    """Return a unit for each gather of DeepSpeed.

    ``elements`` has the number of elements of each gather.  The seconds of the whole model are divided among the units
    in proportion to their elements, since the trace does not say which unit computes.
    """
    (forward, backward), whole = _seconds(step, {""}), sum(elements)
    return [
        Unit(f"gather {place}", size, forward * size / whole, backward * size / whole)
        for place, size in enumerate(elements)
    ]


def _seconds(step: JointStep, names: set[str]) -> tuple[float, float]:
    """Return the seconds that the slowest rank computes in FSDP modules, in the forward and in the backward pass.

    ``names`` are the names of the modules; the root module is ``""``.  The slowest rank of the forward pass may be
    another rank than the slowest rank of the backward pass.
    """
    forward, backward = dict[int, float](), dict[int, float]()
    for number, rank in step.ranks.items():
        for moment, seconds in rank.computed:
            if rank.marks.computing(moment) in names:
                part = forward if moment < rank.marks.backward else backward
                part[number] = part.get(number, 0.0) + seconds
    return max(forward.values(), default=0.0), max(backward.values(), default=0.0)


def _buckets(step: JointStep, elements: Sequence[int], issued: Sequence[float]) -> list[Unit]:
    """Return one unit for each DDP bucket (the gradients of one all-reduce), in the order of the forward pass.

    All seconds are those of one rank, the rank that computes longest.  Its forward seconds are divided among the units
    in proportion to their elements.  Its backward seconds are divided at the moments at which it issues an all-reduce:

    - The first bucket gets the computation from the beginning of the backward pass to the issue of its all-reduce.
    - Each later bucket gets the computation from the issue of the previous all-reduce to the issue of its own.
    - The bucket that is issued last also gets the computation after its issue.

    Args:
        step: The traced step.
        elements: Number of elements of each bucket, in the order of issue.
        issued: When the rank with the lowest number issued the all-reduce of each bucket, in seconds.
    """
    number, rank = max(step.ranks.items(), key=lambda item: sum(seconds for _, seconds in item[1].computed))
    marks, whole = rank.marks, sum(elements)
    forward = sum(seconds for moment, seconds in rank.computed if moment < marks.backward)
    backward, own = [0.0] * len(elements), _issued(step, number, issued)
    for moment, seconds in rank.computed:
        if moment >= marks.backward:
            place = next((place for place, end in enumerate(own) if moment < end), len(own) - 1)
            backward[place] += seconds
    units = [
        Unit(f"bucket {place}", size, forward * size / whole, seconds)
        for place, (size, seconds) in enumerate(zip(elements, backward, strict=True))
    ]
    return units[::-1]  # the last bucket holds the parameters that run first


def _issued(step: JointStep, rank: int, issued: Sequence[float]) -> list[float]:
    """Return when ``rank`` issued the all-reduce of each DDP bucket, in seconds.

    ``issued`` says when the rank with the lowest number issued these all-reduces.  The function looks up their indices
    in that rank's list of collectives.  All ranks issue the same collectives in the same order, so the all-reduces have
    the same indices in the list of ``rank``.
    """
    first = step.ranks[min(step.ranks)].collectives
    places = [place for place, seen in enumerate(first) if seen.issued[0] in set(issued)]
    return [step.ranks[rank].collectives[place].issued[0] for place in places]


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulated step of our engine under a preset.  All ranks do the same at the same time."""

    passes: Sequence[Pass]
    units: Sequence[Unit]
    optimizer: float  # seconds of the optimizer's step, after the passes

    @property
    def predicted(self) -> Predicted:
        """The step's duration, its exposed communication, and the time in which the link is busy, in seconds."""
        return Predicted(
            seconds=sum(float(run.seconds) for run in self.passes) + self.optimizer,
            exposed=sum(float(run.exposed) for run in self.passes),
            link=sum(run.adapter for run in self.passes),
        )


def of_our_engine(step: JointStep, traced: Traced, target: Target, overheads: Overheads) -> Simulated:
    """Simulate a step in which our engine trains the traced model under a preset.

    ``overheads`` says how the overhead of a collective changes under the target (:data:`Overheads`).

    Raises:
        Refusal: if the traces do not show the model's units, or if the preset does not fit the topology.
    """
    policy, topology, stretch = PRESETS[target.policy], target.topology, target.slower
    try:
        policy.check(topology)
    except PolicyError as error:
        raise Refusal(f"--policy {target.policy}: {error}") from None
    units = units_of(step)
    overhead = 0.0
    if overheads == "constant":
        known = [
            max(0.0, *joined.overhead.values())
            for joined in step.collectives
            if joined.between and not joined.shared
        ]
        overhead = statistics.median(known) if known else 0.0
    machine = target.machine or Machine(
        name="traced", source="traces", fixed=1.0, per_token=0.0, efficiency=1.0, fewest=0.0, most=1.0,
        overlap="schedule",
    )  # fmt: skip
    # If the rate is what the traced collectives achieved, it already includes the link's efficiency.
    efficiency = machine.efficiency if traced.rate_given else 1.0
    machine = replace(machine, efficiency=efficiency, latency=machine.latency + overhead)
    optimizer = max(rank.optimizer for rank in step.ranks.values()) * _optimizer_share(
        step, policy, traced, topology
    )
    laid_out = [_geometry(unit, policy, topology) for unit in units]
    on_gpu = any(task.stream is not None for rank in step.ranks.values() for task in rank.tasks)
    passes = passes_of(
        machine,
        Step(
            policy=policy,
            topology=topology,
            units=laid_out,
            parameters=sum(unit.elements for unit in units),
            tokens=1,
            rate=target.rate,
            computing=[(unit.forward * stretch, unit.backward * stretch) for unit in units],
            small=small_units(policy, topology, laid_out) if on_gpu else frozenset(),
        ),
    )
    return Simulated(passes, units, optimizer * stretch)


def _geometry(unit: Unit, policy: Policy, topology: Topology) -> UnitGeometry:
    grain = policy.grain * topology.world
    padded = -(-unit.elements // grain) * grain
    group = policy.group_ranks(topology)
    return UnitGeometry(unit.name, (), padded, topology.world, group=0 if group == topology.world else group)


def _optimizer_share(step: JointStep, policy: Policy, traced: Traced, topology: Topology) -> float:
    """Return how many elements a rank's optimizer updates under ``policy``, relative to the traced run.

    The result is a ratio; 0.5 means half as many elements.  In the traced run, a rank is assumed to update one shard
    (the model divided by the number of ranks) if the step has reduce-scatters, and otherwise the whole model.
    """
    sharded = any(joined.seen.kind == "reduce_scatter" for joined in step.collectives)
    ours = policy.group_ranks(topology) if policy.stage else 1
    return (traced.topology.world if sharded else 1) / ours


def codec_note(target: Target, policy: Mapping[str, Policy] = PRESETS) -> str:
    """Return a note for the user on where a prediction's seconds of encoding and decoding come from.

    The note is empty if the target's policy is ``same`` or ``kept``, which encode nothing.  ``policy`` maps the names
    of our engine's presets to their policies.
    """
    if target.policy in (SAME, "kept"):
        return ""
    machine = target.machine
    if machine is None or not machine.codecs:
        return "codecs are counted as taking no time: give --machine, which zeropp calibrate writes"
    if machine.nature == "data sheet":
        return f"codec seconds are predicted for {machine.name}, and were not measured"
    known = target.policy not in policy or all(map(machine.times, policy[target.policy].codecs))
    return f"codec seconds of {machine.name}" + ("" if known else ", partly those of similar codecs")
