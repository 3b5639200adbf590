"""Predicts the seconds of a training step from its bytes, its computation and a machine.

Pure: no torch.  A :class:`Machine` says what a cluster achieves, as measured or as published, and how the
system overlaps: ``none`` (``step = compute + wire``), ``full`` (``max(compute, wire)``, which no schedule
surpasses), or ``schedule``, that of this engine, unit by unit and hop by hop (:mod:`impl.plan.timeline`).

The first two need only sums (:class:`Work`), so that systems that little is known about are modelled, too:
``parameters * (fixed + tokens * per_token)`` seconds of computation a rank, and the bytes that leave one node
over what its adapters carry together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final, Literal

from impl.codecs.codec import Codec
from impl.plan.policy import Policy
from impl.plan.prefetch_schedule import Schedule
from impl.plan.shard_layout import UnitGeometry, chunked
from impl.plan.timeline import Collective, Hop, Load, Pass, in_chunks, pass_time
from impl.plan.topology import Axis, Topology
from impl.plan.traffic import destinations, gather_hops, reduction_hops

BACKWARD: Final = 2.0  # operations of a backward pass over those of a forward pass
FLOPS_PER_TOKEN: Final = 8  # for each parameter: forward 2, again for activation checkpointing 2, backward 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """Seconds of one processor for each element."""

    encode: float
    decode: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What one cluster achieves in training.

    Seconds are of one processor (a core, or a GPU), and longer where more ranks than processors share a host.

    Raises ValueError: naming a field that is negative, not finite, or out of its range.
    """

    name: str
    source: str
    fixed: float  # seconds of a step for each parameter of the model, whatever the batch
    per_token: float  # further seconds for each parameter and each token of a rank
    efficiency: float  # share of an adapter's nominal rate that messages achieve, above 0 and at most 1
    fewest: float  # tokens of a rank between which ``fixed`` and ``per_token`` were measured
    most: float
    smallest: float = 0.0  # parameters of the measured models; 0 for any
    largest: float = 0.0
    overlap: Literal["none", "full", "schedule"] = "none"  # how the system hides messages
    latency: float = 0.0  # seconds from the end of sending a message to its arrival
    inside: float = 0.0  # bytes a second that a rank sends inside its node; 0 for any number
    launch: float = 0.0  # further seconds for each unit of the model
    unit: float = 0.0  # the engine's seconds for each unit in each half of a pass
    element: float = 0.0  # for each element of a unit in each half of a pass
    message: float = 0.0  # for each message that a rank sends
    sent: float = 0.0  # further seconds for each byte to another node
    optimizer: float = 0.0  # seconds for each element that a rank's optimizer steps
    processors: int = 0  # of a host; 0 for one for each rank
    emulated: bool = False  # all nodes are one host, whose processors they share
    spread: float = 0.0  # relative standard deviation of a step around its prediction
    date: str = ""  # when and on what it was calibrated; empty for one that was published
    host: str = ""
    # What its numbers are: measured by ``zeropp calibrate``, fitted to published steps, or taken from data
    # sheets; by default a calibration where there is a host.
    nature: Literal["", "calibration", "published steps", "data sheet"] = ""
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)  # by their text, such as ``int4:128``

    def __post_init__(self) -> None:
        numbers = {f.name: getattr(self, f.name) for f in fields(self)}
        for text, cost in self.codecs.items():
            numbers |= {f"codecs.{text}.encode": cost.encode, f"codecs.{text}.decode": cost.decode}
        for name, value in numbers.items():
            if isinstance(value, float | int) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"machine {self.name}: {name} is {value}, not a finite number from 0 on")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"machine {self.name}: efficiency is {self.efficiency}, not in (0, 1]")
        if self.fixed + self.per_token == 0:
            raise ValueError(f"machine {self.name}: fixed and per_token are 0, so nothing takes time")

    def compute(self, parameters: float, tokens: float, units: int = 0) -> float:
        """Seconds of one processor for the passes over ``tokens`` of a model."""
        return units * self.launch + parameters * (self.fixed + tokens * self.per_token)

    def knows(self, parameters: float, tokens: float) -> bool:
        """Whether a model and a batch are within the measured range."""
        sizes = self.largest == 0 or self.smallest <= parameters <= self.largest
        return sizes and self.fewest <= tokens <= self.most

    def basis(self, *, known: bool) -> str:
        """What a predicted step rests on, in words; ``known`` ones are within the machine's range."""
        match self.nature or ("calibration" if self.host else ""):
            case "calibration":
                return "calibrated" if known else "transferred"
            case "published steps":
                return "fitted" if known else "transferred"
            case "data sheet":
                return "data sheet" if known else "data sheet, out of range"
        return "not calibrated"

    def times(self, codec: Codec) -> bool:
        """Whether a codec of this type and these bits was measured; true for machines without codecs."""
        family = str(codec).split(":")[0]
        return not self.codecs or any(text.split(":")[0] == family for text in self.codecs)

    def stretch(self, nodes: int, ranks_per_node: int) -> float:
        """The factor of a rank's seconds because others share its host's processors."""
        ranks = nodes * ranks_per_node if self.emulated else ranks_per_node
        return max(1.0, ranks / self.processors) if self.processors else 1.0

    def cost(self, codec: Codec) -> CodecCost:
        """The cost of a codec, or of the measured codec most like it: first by type, then by options."""
        if not self.codecs:
            return CodecCost(encode=0.0, decode=0.0)
        return self.codecs[max(sorted(self.codecs), key=lambda text: _likeness(text, str(codec)))]


def _likeness(text: str, other: str) -> tuple[bool, bool, int]:
    """Whether two codecs' texts agree in type and bits, and in type; minus the options of only one."""
    (head, *options), (other_head, *other_options) = text.split(":"), other.split(":")
    same_type = re.sub(r"[0-9].*", "", head) == re.sub(r"[0-9].*", "", other_head)
    differing = {option for option in {*options} ^ {*other_options} if not option.isdigit()}
    return head == other_head, same_type, -len(differing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one step computes and sends."""

    parameters: float  # of the model, without padding
    tokens: float  # of one rank in a step
    egress_bytes: float  # that one node sends to all others in a step
    rate: float  # bytes a second that all adapters of one node carry nominally; infinite where nodes are one


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A predicted step, in seconds."""

    compute: float  # of the model's passes and the optimizer
    wire: float  # of the messages between nodes, hidden or not
    seconds: float  # of the step
    calibrated: bool  # whether such models, batches and codecs are within the machine's range
    exposed: float = math.nan  # in which the rank waits for messages, where the schedule is known
    spread: float = 0.0  # relative standard deviation of such steps

    @property
    def critical(self) -> str:
        """The resource that is busy longest."""
        busy = self.compute if math.isnan(self.exposed) else self.seconds - self.exposed
        return "link" if self.wire > busy else "processor"


def step_time(machine: Machine, work: Work) -> StepTime:
    """Returns the predicted step of a system, from sums alone."""
    compute = machine.compute(work.parameters, work.tokens)
    wire = work.egress_bytes / (work.rate * machine.efficiency)
    return StepTime(
        compute=compute,
        wire=wire,
        seconds=compute + wire if machine.overlap == "none" else max(compute, wire),
        calibrated=machine.fewest <= work.tokens <= machine.most,
        spread=machine.spread,
    )


def least_seconds(work: Work, peak_flops: float) -> float:
    """Returns a lower bound of any step: the wire at its nominal rate, or operations at ``peak_flops``."""
    return max(work.egress_bytes / work.rate, flops(work) / peak_flops)


def flops(work: Work) -> float:
    """Returns the floating-point operations of a rank in a step, with activation checkpointing."""
    return FLOPS_PER_TOKEN * work.parameters * work.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of this engine."""

    policy: Policy
    topology: Topology
    units: Sequence[UnitGeometry]  # of the model, in model order, laid out for the topology's world
    parameters: float  # of the model, without padding
    tokens: float  # of a rank in a micro-batch
    micro_batches: int = 1  # in a step
    recompute: bool = False  # whether backward runs the forward pass again (activation checkpointing)
    rate: float = math.inf  # bytes a second of the slowest node's adapters; infinite without a limit


def step_of(machine: Machine, step: Step) -> StepTime:
    """Returns the predicted step of this engine, unit by unit, of the rank that sends most.

    Computation is divided by elements; the first pass finds no copy of the weights kept.
    """
    policy, units, passes = step.policy, step.units, passes_of(machine, step)
    stretch = machine.stretch(step.topology.nodes, step.topology.ranks_per_node)
    optimizer = machine.optimizer * stretch * sum(unit.shard for unit in units if unit.trainable)
    return StepTime(
        compute=sum(_computing(machine, step)) * step.micro_batches + optimizer,
        wire=sum(run.adapter for run in passes),
        seconds=sum(float(run.seconds) for run in passes) + optimizer,
        calibrated=machine.knows(step.parameters, step.tokens) and all(map(machine.times, policy.codecs)),
        exposed=sum(float(run.exposed) for run in passes),
        spread=machine.spread,
    )


def passes_of(machine: Machine, step: Step) -> list[Pass]:
    """The simulated passes of a step's micro-batches."""
    policy, units = step.policy, step.units
    seconds, (forward, backward) = _Seconds(machine, step.topology, step.rate), _computing(machine, step)
    elements, schedule, passes = sum(unit.padded for unit in units), Schedule.for_units(policy, units), []
    for index in range(step.micro_batches):
        loads = []
        for unit in units:
            rules, share = policy.for_unit(unit), unit.padded / elements
            regather = seconds.gather(rules, unit, again=True) if rules.stage == 3 else Collective()
            load = Load(
                forward=forward * share,
                backward=backward * share,
                gather=seconds.gather(rules, unit, again=False) if index == 0 else regather,
                regather=regather,
                reduce=seconds.reduction(rules, unit) if unit.trainable else Collective(),
                engine=seconds.stretch * (machine.unit + machine.element * unit.padded),
            )
            loads.append(load)
        reduces = index == step.micro_batches - 1 or policy.reduces_each_micro_batch
        passes.append(pass_time(schedule, loads, bucket=policy.memory.reduce_bucket, reduces=reduces))
    return passes


def _computing(machine: Machine, step: Step) -> tuple[float, float]:
    """Seconds of a rank's forward and backward pass over one micro-batch, without the engine."""
    stretch = machine.stretch(step.topology.nodes, step.topology.ranks_per_node)
    forward = machine.compute(step.parameters, step.tokens, len(step.units)) * stretch / (1 + BACKWARD)
    return forward, forward * (BACKWARD + step.recompute)


class _Seconds:
    """Turns hops into seconds of one machine."""

    def __init__(self, machine: Machine, topology: Topology, rate: float) -> None:
        self._machine, self._topology, self._rate = machine, topology, rate
        self.stretch = machine.stretch(topology.nodes, topology.ranks_per_node)

    def gather(self, policy: Policy, unit: UnitGeometry, *, again: bool) -> Collective:
        """The gather of a unit's weights; ``again`` from hpZ's copy, if there is one."""
        copied = policy.gather_axes(self._topology)[1]  # hops before hpZ's copy
        again = again and copied > 0
        # of every step but the first, which sends weights, not differences
        codec = policy.copy_codec if again else policy.differences or policy.weights
        before = 0.0 if again else policy.planes * self._coding(codec, unit.shard, "encode")
        hops, ring = list[Hop](), policy.gather == "flat"
        spared = copied if policy.differences and not again else None
        sends = gather_hops(policy, self._topology, unit, codec, again=again)
        for index, (axis, sent, elements, size) in enumerate(sends):
            if sent != codec or index == spared:  # differences are added to the copy, whatever its type
                before, codec = self._coding(codec, elements, "decode"), sent
            if axis.size > 1:
                hops.append(self._hop(axis, size, ring=ring, before=before))
                before = 0.0
            elif not (again or hops) and index + 1 == copied:  # hpZ on one node keeps its copy in the wait
                hops.append(Hop(adapter=0.0, before=before, sends=False))
                before = 0.0
        return Collective(hops=tuple(hops), after=self._coding(codec, unit.padded, "decode"))

    def reduction(self, policy: Policy, unit: UnitGeometry) -> Collective:
        """The reduction of a unit's gradient, and the gather of its mean between groups."""
        if policy.reduce == "ring":
            hops, after = self._ring(policy, unit)
        else:
            hops, after = self._chunked_hops(policy, unit)
        axes, codec = policy.replica_axes(self._topology)
        size = codec.frame_bytes(unit.piece)
        for axis in axes:
            hops.append(self._hop(axis, size, before=after))
            after, size = 0.0, size * axis.size
        crosses = [*(axis for axis, _ in policy.reduce_axes(self._topology)), *axes][-1:]
        return Collective(hops=tuple(hops), after=after, crosses=any(map(self._topology.crosses, crosses)))

    def _chunked_hops(self, policy: Policy, unit: UnitGeometry) -> tuple[list[Hop], float]:
        """Hops in the order of posting, and the seconds to decode what the last one brings."""
        lengths = [end - start for start, end in chunked(unit.piece, policy.chunks, policy.grain)]
        by_hop, summed = list[list[Hop]](), 0.0  # seconds to decode the hop before
        for axis, codec, slices, sizes in reduction_hops(policy, self._topology, unit.piece, policy.grain):
            elements = slices * axis.size * unit.piece
            before = summed + self._coding(codec, elements, "encode")
            chunks = zip(lengths, sizes, strict=True)
            by_hop.append([
                self._hop(axis, size, before=before * length / unit.piece) for length, size in chunks
            ])  # fmt: skip
            summed = self._coding(codec, elements, "decode")
        return list(in_chunks(by_hop)), summed

    def _ring(self, policy: Policy, unit: UnitGeometry) -> tuple[list[Hop], float]:
        """The steps of a ring, each of which decodes the partial sum that the one before brought."""
        ring = reduction_hops(policy, self._topology, unit.piece, policy.grain)
        hops, after = list[Hop](), 0.0
        for axis, codec, _, sizes in ring:
            encode, decode = (self._coding(codec, unit.piece, way) for way in ("encode", "decode"))
            steps = [encode] + [decode + encode] * (axis.size - 2)
            hops += [self._hop(axis, sum(sizes), ring=True, step=True, before=before) for before in steps]
            after = decode
        return hops, after

    def _hop(self, axis: Axis, size: int, *, before: float, ring: bool = False, step: bool = False) -> Hop:
        """One message of ``size`` bytes to every other rank along ``axis``.

        In a ``ring`` all go to the next rank; one ``step`` of it sends one of them.
        """
        machine, ranks = self._machine, range(self._topology.ranks_per_node)  # of node 0; all send the same
        counts = [destinations(self._topology, axis, rank, ring=ring) for rank in ranks]
        if step:
            counts = [{link: count // (axis.size - 1) for link, count in by.items()} for by in counts]
        between = [size * count.get("inter", 0) for count in counts]
        inside = max(size * count.get("intra", 0) for count in counts)
        posting = max(sum(count.values()) for count in counts) * machine.message + max(between) * machine.sent
        return Hop(
            adapter=sum(between) / (self._rate * machine.efficiency),
            inside=inside / machine.inside if machine.inside else 0.0,
            latency=machine.latency,
            before=before + posting * self.stretch,
        )

    def _coding(self, codec: Codec, elements: int, way: Literal["encode", "decode"]) -> float:
        return elements * self.stretch * float(getattr(self._machine.cost(codec), way))
