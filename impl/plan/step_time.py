"""Predicts the seconds of a training step from its bytes, its computation and a description of the machine.

A :class:`Machine` holds the rates of a cluster, which were measured or published.  Its field ``overlap`` says how the
computation of a step (``compute``) and the sending of its messages (``wire``) overlap:

- ``none``: ``step = compute + wire``
- ``full``: ``step = max(compute, wire)``, a lower bound for every schedule
- ``schedule``: the step of this engine is simulated, unit by unit and hop by hop (:mod:`impl.plan.timeline`)

:func:`step_time` predicts a step for ``none`` and ``full``.  It needs only the totals of a step (:class:`Work`), so it
can be used for systems of which little is known.  The seconds of computation are
``parameters * (fixed + tokens * per_token)``.  The seconds of sending are the bytes that leave one node, divided by the
rate that all adapters of the node together achieve.  For ``schedule``, :func:`step_of` simulates a :class:`Step` of
this engine.

Pure: no torch.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from impl.codecs.codec import Codec
from impl.plan.hops import Hop, gather_hops, in_phase, outer_hops, reduction_hops
from impl.plan.owners import Owners
from impl.plan.prefetch_schedule import Schedule
from impl.plan.timeline import Collective, Load, Pass, TimedHop, in_chunks, pass_time
from impl.plan.traffic import Phase, destinations, uneven
from impl.policy.policy import Policy
from impl.policy.shard_layout import UnitGeometry
from impl.policy.topology import Topology

BACKWARD: Final = 2.0  # floating-point operations of a backward pass, divided by those of a forward pass
# Floating-point operations for each parameter and token: 2 forward, 2 in recomputing the forward pass (activation
# checkpointing), 4 backward.
FLOPS_PER_TOKEN: Final = 8
ALTERNATIVE: Final = (
    "fixed", "per_token", "efficiency", "latency", "inside", "launch", "unit", "element", "message", "sent",
    "optimizer",
)  # fmt: skip
"""The fields of a :class:`Machine` that may differ in another, equally good fit (:attr:`Machine.alternatives`)."""
EQUAL_FITS: Final = 0.01
"""How much larger the error of a fit of a machine's rates may be than the best fit's, to count as equally good.

The error is the root mean square of the logarithms of measured over predicted seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """Seconds that one processor takes to encode and to decode one element."""

    encode: float
    decode: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The rates at which one cluster computes and sends, from which the time of a training step is predicted.

    Fields in seconds hold for one processor (a core or a GPU) that serves only one rank.  If more ranks than processors
    share a host, predictions multiply all these seconds, except ``latency``, by :meth:`stretch`.

    Raises ValueError: if a field is negative, not finite, or out of its range; or if an entry of ``alternatives``
    changes a field that is not in :data:`ALTERNATIVE`.  The message names the field.
    """

    name: str
    source: str  # where the numbers come from
    # Seconds of a forward and a backward pass for each parameter of the model, whatever the number of tokens.
    fixed: float
    per_token: float  # seconds for each parameter and each token of a rank, in addition to ``fixed``
    efficiency: float  # share of an adapter's nominal rate that messages achieve, above 0 and at most 1
    fewest: float  # fewest tokens of a rank with which ``fixed`` and ``per_token`` were measured
    most: float  # most tokens of a rank with which ``fixed`` and ``per_token`` were measured
    smallest: float = 0.0  # parameters of the smallest model measured
    largest: float = 0.0  # parameters of the largest model measured; 0: models of any size are in range
    overlap: Literal["none", "full", "schedule"] = "none"  # how messages overlap computation
    latency: float = 0.0  # seconds from the end of sending a message to its arrival
    inside: float = 0.0  # bytes a second that a rank sends inside its node; 0: no limit
    launch: float = 0.0  # seconds of a forward and a backward pass for each unit, in addition to ``fixed``
    unit: float = 0.0  # seconds of the engine for each unit, once in forward and once more in backward
    element: float = 0.0  # seconds of the engine for each element, once in forward and once more in backward
    message: float = 0.0  # seconds of the processor for each message that a rank sends
    sent: float = 0.0  # seconds of the processor for each byte sent to another node
    optimizer: float = 0.0  # seconds for each element that a rank's optimizer steps
    processors: int = 0  # number of processors of a host; 0: one for each rank
    emulated: bool = False  # whether all nodes are on one host, whose processors they share
    spread: float = 0.0  # relative standard deviation of measured steps around the prediction
    date: str = ""  # day of the calibration; empty for published numbers
    host: str = ""  # machine of the calibration; empty for published numbers
    # Whether the numbers were measured by ``zeropp calibrate``, fitted to published steps, or taken from data
    # sheets.  Empty: a calibration if there is a host, else unknown.
    nature: Literal["", "calibration", "published steps", "data sheet"] = ""
    # The cost of each measured codec, by the codec's name, such as ``int4:128``.
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)
    # Other fits of the rates that explain the measurements as well as the fields above.  Each maps the names of the
    # fields that differ (some of :data:`ALTERNATIVE`) to their values.
    alternatives: Sequence[Mapping[str, float]] = ()

    def __post_init__(self) -> None:
        numbers = {f.name: getattr(self, f.name) for f in fields(self)}
        for text, cost in self.codecs.items():
            numbers |= {f"codecs.{text}.encode": cost.encode, f"codecs.{text}.decode": cost.decode}
        for name, value in numbers.items():
            if isinstance(value, float | int) and not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"machine {self.name}: {name} is {value}, expected a finite number of 0 or more"
                )
        if not 0 < self.efficiency <= 1:
            raise ValueError(
                f"machine {self.name}: efficiency is {self.efficiency}, expected 0 < efficiency <= 1"
            )
        if self.fixed + self.per_token == 0:
            raise ValueError(
                f"machine {self.name}: fixed and per_token are both 0, so no step would take time: set one of them"
            )
        for number, changes in enumerate(self.alternatives, 1):
            for name in changes:
                if name not in ALTERNATIVE:
                    raise ValueError(
                        f"machine {self.name}: alternative {number} changes {name!r}, but may change only "
                        f"{', '.join(ALTERNATIVE)}: remove {name}"
                    )
            self._changed({"name": f"{self.name}, alternative {number}", **changes})  # checks the values

    @property
    def fits(self) -> tuple[Machine, ...]:
        """Copies of this machine, one for each set of rates that explains the measurements equally well.

        The first copy has this machine's own rates, and the other copies have the rates of ``alternatives``.  The field
        ``alternatives`` of every copy is empty.
        """
        return self._changed({}), *(self._changed(changes) for changes in self.alternatives)

    def _changed(self, changes: Mapping[str, Any]) -> Machine:
        """Returns a copy of this machine with the values of ``changes`` (name of field: value), and no alternatives."""
        return replace(self, alternatives=(), **changes)

    def compute(self, parameters: float, tokens: float, units: int = 0) -> float:
        """Returns the seconds of one forward and one backward pass over ``tokens`` tokens on one rank.

        The result is for a rank that has one processor to itself.  ``parameters`` and ``units`` are the numbers of the
        model's parameters and units.
        """
        return units * self.launch + parameters * (self.fixed + tokens * self.per_token)

    def knows(self, parameters: float, tokens: float) -> bool:
        """Returns whether a model and a batch are within the range of sizes that was measured on this machine.

        ``parameters`` is the number of parameters of the whole model, and ``tokens`` the number of tokens of a rank.
        The result is True if both numbers lie between the smallest and the largest that were measured.  If the field
        ``largest`` is 0, any number of parameters is in range.
        """
        sizes = self.largest == 0 or self.smallest <= parameters <= self.largest
        return sizes and self.fewest <= tokens <= self.most

    def basis(self, *, known: bool) -> str:
        """Returns in words what a prediction for this machine is based on.

        ``known`` says whether the predicted step is within the measured range (:attr:`StepTime.calibrated`).  The
        result also depends on where the machine's numbers come from (``nature``):

        ===============  ==============  ========================
        ``nature``       known           not known
        ===============  ==============  ========================
        calibration      calibrated      transferred
        published steps  fitted          transferred
        data sheet       data sheet      data sheet, out of range
        unknown          not calibrated  not calibrated
        ===============  ==============  ========================

        An empty ``nature`` counts as a calibration if there is a ``host``, and otherwise as unknown.
        """
        match self.nature or ("calibration" if self.host else ""):
            case "calibration":
                return "calibrated" if known else "transferred"
            case "published steps":
                return "fitted" if known else "transferred"
            case "data sheet":
                return "data sheet" if known else "data sheet, out of range"
        return "not calibrated"

    def times(self, codec: Codec) -> bool:
        """Returns whether a codec with the same type and bits as ``codec`` was timed on this machine.

        The block size and options of the two codecs may differ: if ``int4:128:clip`` was timed, the result for
        ``int4:64`` is True.  The result is also True if no codec at all was timed, since predictions then assume that
        coding takes no time.
        """
        family = str(codec).split(":")[0]
        return not self.codecs or any(text.split(":")[0] == family for text in self.codecs)

    def stretch(self, nodes: int, ranks_per_node: int) -> float:
        """Returns the factor by which a rank's seconds grow because ranks share the processors of a host.

        The factor is the number of ranks of a host divided by the number of its processors, but at least 1.
        """
        ranks = nodes * ranks_per_node if self.emulated else ranks_per_node
        return max(1.0, ranks / self.processors) if self.processors else 1.0

    def cost(self, codec: Codec) -> CodecCost:
        """Returns the seconds that ``codec`` takes to encode and to decode an element.

        If ``codec`` was not measured, the result is the cost of the measured codec that is most similar to ``codec``
        (:func:`_likeness`).  Both seconds are 0 if the machine has no costs of codecs.
        """
        if not self.codecs:
            return CodecCost(encode=0.0, decode=0.0)
        own = str(codec)
        if own in self.codecs:
            return self.codecs[own]
        return self.codecs[max(sorted(self.codecs), key=lambda text: _likeness(text, own))]


def _likeness(text: str, other: str) -> tuple[bool, bool, int]:
    """Returns a tuple that is larger, the more similar the codecs called ``text`` and ``other`` are.

    The tuple is (whether type and bits agree, whether the type agrees, minus the number of options that only one of the
    codecs has).  A block size does not count as an option.  For ``int4:128:clip`` and ``int4:64``: (True, True, -1).
    """
    (head, *options), (other_head, *other_options) = text.split(":"), other.split(":")
    same_type = re.sub(r"[0-9].*", "", head) == re.sub(r"[0-9].*", "", other_head)
    differing = {option for option in {*options} ^ {*other_options} if not option.isdigit()}
    return head == other_head, same_type, -len(differing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The total computation and traffic of one step, not divided into units and messages."""

    parameters: float  # parameters of the model, without padding
    tokens: float  # tokens of one rank in a step
    egress_bytes: float  # bytes that one node sends to all others in a step
    rate: float  # nominal bytes a second of all adapters of one node together; infinite on one node
    # Time in which the stages of a pipeline wait for one another, divided by the time of computation.
    idle: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The prediction of one step, in seconds."""

    compute: float  # computation of the model and the optimizer
    wire: float  # time in which a node's adapter sends messages to other nodes, also while ranks compute
    seconds: float  # the whole step
    # Whether the step is within the range that was measured on the machine.  :func:`step_of` compares the model, the
    # batch and the codecs with this range, and :func:`step_time` only the batch.
    calibrated: bool
    # Time in which the rank waits for messages.  NaN in a prediction of :func:`step_time`.
    exposed: float = math.nan
    spread: float = 0.0  # relative standard deviation of measured steps around the prediction

    @property
    def critical(self) -> str:
        """What limits the step: ``link`` or ``processor``.

        The result is ``link`` if a node's adapter sends for longer than the processor is busy.
        """
        busy = self.compute if math.isnan(self.exposed) else self.seconds - self.exposed
        return "link" if self.wire > busy else "processor"


def step_time(machine: Machine, work: Work) -> StepTime:
    """Predicts the seconds of a step from its total computation and its total traffic.

    If ``machine.overlap`` is ``none``, a step takes the time of computing plus the time of sending.  With any other
    ``overlap``, a step takes the longer of the two times.
    """
    compute = machine.compute(work.parameters, work.tokens) * (1 + work.idle)
    wire = work.egress_bytes / (work.rate * machine.efficiency)
    return StepTime(
        compute=compute,
        wire=wire,
        seconds=compute + wire if machine.overlap == "none" else max(compute, wire),
        calibrated=machine.fewest <= work.tokens <= machine.most,
        spread=machine.spread,
    )


def least_seconds(work: Work, peak_flops: float) -> float:
    """Returns a lower bound of the seconds of a step that recomputes activations (activation checkpointing).

    The bound is the larger of two times: the time to send all bytes at the adapters' nominal rate, and the time to
    compute at ``peak_flops``, the highest number of floating-point operations a second that one rank can reach.  A step
    without activation checkpointing computes less (:data:`FLOPS_PER_TOKEN`), and may be shorter than the bound.
    """
    return max(work.egress_bytes / work.rate, flops(work) / peak_flops)


def flops(work: Work) -> float:
    """Returns the number of floating-point operations of one rank in a step, with activation checkpointing."""
    return FLOPS_PER_TOKEN * work.parameters * work.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The description of one step of this engine, which :func:`step_of` simulates."""

    policy: Policy
    topology: Topology
    units: Sequence[UnitGeometry]  # the model's units, in model order, laid out for the topology's ranks
    parameters: float  # parameters of the model, without padding
    tokens: float  # tokens of a rank in a micro-batch
    micro_batches: int = 1  # micro-batches in a step
    # For a policy with a schedule: the optimizer steps [first, end), counted from 0, whose mean is predicted.
    steps: tuple[int, int] = (0, 1)
    recompute: bool = False  # whether backward runs the forward pass again (activation checkpointing)
    rate: float = math.inf  # nominal bytes a second of all adapters of the slowest node; infinite: no limit
    owners: Owners | None = None  # if Muon steps the matrices: the owners, the ranks that orthogonalise them
    # The units that are gathered ahead in pairs (:func:`impl.plan.prefetch_schedule.small_units`); empty unless a GPU's
    # stream waits for messages, as with NCCL.
    small: frozenset[int] = frozenset()
    # For each unit, the measured seconds of its computation in a micro-batch, as (forward, backward).  If empty, the
    # seconds are predicted from the machine's rates.
    computing: Sequence[tuple[float, float]] = ()


def step_of(machine: Machine, step: Step) -> StepTime:
    """Predicts the seconds of a step of this engine by simulating the step, unit by unit.

    The simulation follows one rank, and gives each exchange the time of the rank that sends most.  If
    ``step.computing`` is empty, the computation of the model is divided among units in proportion to their elements.
    The simulated step follows another optimizer step, which has changed the weights.  Therefore its first forward pass
    gathers the weights from all ranks, not from hpZ's copy.

    If the policy's settings change while training (a schedule), the result is the mean over the optimizer steps
    ``step.steps``.

    If the policy has local steps (DiLoCo), the ranks form groups.  Each group has a copy of all states, trains on its
    own, and averages the weights of each unit with the other groups once in ``local_steps`` steps.  The result is then
    the mean over these ``local_steps`` steps.
    """
    if step.policy.schedule:
        return _mean_of_phases(machine, step)
    policy, units, passes = step.policy, step.units, passes_of(machine, step)
    outer = _Outer.of(machine, step)
    stretch = machine.stretch(step.topology.nodes, step.topology.ranks_per_node)
    optimizer = machine.optimizer * stretch * sum(unit.shard for unit in units if unit.trainable)
    matrices = OwnersTime() if step.owners is None else owners_time(machine, step, step.owners)
    return StepTime(
        compute=sum(_computing(machine, step)) * step.micro_batches + optimizer + matrices.compute,
        wire=sum(run.adapter for run in passes) + matrices.adapter + outer.adapter,
        seconds=sum(float(run.seconds) for run in passes) + optimizer + matrices.seconds + outer.seconds,
        calibrated=machine.knows(step.parameters, step.tokens) and all(map(machine.times, policy.codecs)),
        exposed=sum(float(run.exposed) for run in passes)
        + (matrices.seconds - matrices.compute)
        + outer.exposed,
        spread=machine.spread,
    )


@dataclass(frozen=True, slots=True)
class _Outer:
    """The seconds that outer steps add to one optimizer step on average; 0 without local steps.

    With local steps, groups of ranks train by themselves.  Once in ``policy.local_steps`` optimizer steps, they average
    the weights of each unit.  This exchange is the unit's outer step.  The seconds of the outer steps of all units are
    divided by ``policy.local_steps``.  The prediction assumes that units are exchanged one after the other, while the
    ranks neither compute nor send other messages.
    """

    adapter: float = 0.0  # time in which a node's adapter sends
    exposed: float = 0.0  # time in which the rank waits for messages
    seconds: float = 0.0  # time in all, with encoding and decoding

    @classmethod
    def of(cls, machine: Machine, step: Step) -> _Outer:
        """Returns the seconds that outer steps add, on average, to the optimizer step that ``step`` describes."""
        if (every := step.policy.local_steps) is None:
            return cls()
        seconds = _Seconds(machine, step.topology, step.rate)
        made = [seconds.outer(step.policy.for_unit(unit), unit) for unit in step.units if unit.trainable]
        hops = [hop for collective in made for hop in collective.hops]
        adapter = sum(hop.adapter for hop in hops)
        exposed = adapter + sum(hop.inside + hop.latency for hop in hops)
        coding = sum(hop.before for hop in hops) + sum(collective.after for collective in made)
        return cls(adapter / every, exposed / every, (exposed + coding) / every)


def _mean_of_phases(machine: Machine, step: Step) -> StepTime:
    """Predicts the mean times of the optimizer steps ``step.steps``, if the policy's settings change while training."""
    numbers = step.policy.phase_counts(*step.steps)
    phases, total = step.policy.phases, sum(numbers.values())
    parts = [
        (step_of(machine, replace(step, policy=phases[number])), count / total)
        for number, count in numbers.items()
    ]

    def mean(name: str) -> float:
        return sum(float(getattr(part, name)) * share for part, share in parts)

    return StepTime(
        compute=mean("compute"),
        wire=mean("wire"),
        seconds=mean("seconds"),
        calibrated=all(part.calibrated for part, _ in parts),
        exposed=mean("exposed"),
        spread=machine.spread,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnersTime:
    """The seconds that Muon adds to one step: it orthogonalises matrices, and sends momentum and updates."""

    compute: float = 0.0  # Newton-Schulz at the owner with the most floating-point operations
    adapter: float = 0.0  # sending by the adapter of the node that sends most
    seconds: float = 0.0  # all of Muon's work together; computation and exchanges do not overlap


def owners_time(machine: Machine, step: Step, owners: Owners) -> OwnersTime:
    """Predicts the seconds that Muon adds to a step, for orthogonalising matrices and for exchanges with their owners.

    The owner of a matrix is the rank that orthogonalises the matrix by Newton-Schulz iterations.  These are assumed to
    reach the same number of floating-point operations a second as the model's passes.  There are two exchanges:
    momentum is sent to the owners, and updates are sent back.  The time of each exchange is the sum of three times:

    - sending: the latency of a message, plus ``max(between, inside)``.  ``between`` is the time in which the busiest
      node sends its bytes to other nodes.  ``inside`` is the time in which the busiest rank sends its bytes to ranks of
      the same node.
    - posting the messages.
    - encoding and decoding, on the rank that holds most elements of matrices.
    """
    topology, stretch = step.topology, machine.stretch(step.topology.nodes, step.topology.ranks_per_node)
    compute = max(owners.loads) * machine.per_token / (2 * (1 + BACKWARD)) * stretch
    adapter, seconds = 0.0, compute
    exchanges = ((owners.to_owners, owners.momentum), (owners.from_owners, owners.update))
    held = max((sum(part.numel for part in parts) for parts in owners.parts), default=0)
    for sizes, codec in exchanges:
        between, inside, messages = Counter[int](), 0, 0
        for rank in range(topology.world):
            sent = uneven(topology, owners.axis, rank, sizes[owners.axis.digit(rank)])
            between[topology.node_of(rank)] += sent["inter"].bytes if "inter" in sent else 0
            inside = max(inside, sent["intra"].bytes if "intra" in sent else 0)
            messages = max(messages, sum(each.messages for each in sent.values()))
        sending = max(between.values()) / (step.rate * machine.efficiency)
        within = inside / machine.inside if machine.inside else 0.0
        posting = messages * machine.message + max(between.values()) * machine.sent
        cost = machine.cost(codec)
        coding = held * (cost.encode + cost.decode)
        adapter += sending
        seconds += max(sending, within) + stretch * (posting + coding)
        seconds += machine.latency if messages else 0.0
    return OwnersTime(compute=compute, adapter=adapter, seconds=seconds)


def passes_of(machine: Machine, step: Step) -> list[Pass]:
    """Simulates a forward and a backward pass for each micro-batch of a step, and returns these passes in order."""
    policy, units = step.policy, step.units
    seconds, (forward, backward) = _Seconds(machine, step.topology, step.rate), _computing(machine, step)
    elements, passes = sum(unit.padded for unit in units), list[Pass]()
    schedule = Schedule.for_units(policy, units, step.small)
    for index in range(step.micro_batches):
        loads = []
        for place, unit in enumerate(units):
            rules, share = policy.for_unit(unit), unit.padded / elements
            measured = step.computing[place] if step.computing else (forward * share, backward * share)
            # Forward's and backward's; below stage 3 weights stay gathered.
            gathers = [Collective(), Collective()]
            if rules.stage == 3 or index == 0:
                gathers[0] = seconds.gather(rules, unit, "forward", again=index > 0)
            if rules.stage == 3:
                gathers[1] = seconds.gather(rules, unit, "backward", again=True)
            load = Load(
                forward=measured[0],
                backward=measured[1],
                gather=gathers[0],
                regather=gathers[1],
                reduce=seconds.reduction(rules, unit) if unit.trainable else Collective(),
                engine=seconds.stretch * (machine.unit + machine.element * unit.padded),
            )
            loads.append(load)
        reduces = index == step.micro_batches - 1 or policy.reduces_each_micro_batch
        passes.append(pass_time(schedule, loads, bucket=policy.memory.reduce_bucket, reduces=reduces))
    return passes


def _computing(machine: Machine, step: Step) -> tuple[float, float]:
    """Returns (seconds of forward, seconds of backward) of the model's computation in one micro-batch on one rank.

    With ``step.recompute``, backward includes the time of recomputing the forward pass.
    """
    stretch = machine.stretch(step.topology.nodes, step.topology.ranks_per_node)
    forward = machine.compute(step.parameters, step.tokens, len(step.units)) * stretch / (1 + BACKWARD)
    return forward, forward * (BACKWARD + step.recompute)


class _Seconds:
    """Predicts the seconds of the hops of gathers and reductions (:mod:`impl.plan.hops`) on one machine."""

    def __init__(self, machine: Machine, topology: Topology, rate: float) -> None:
        self._machine, self._topology, self._rate = machine, topology, rate
        self.stretch = machine.stretch(topology.nodes, topology.ranks_per_node)

    def gather(self, policy: Policy, unit: UnitGeometry, phase: Phase, *, again: bool) -> Collective:
        """Returns the gather of a unit's weights for a pass of this ``phase``, as exchanges with their times.

        ``again`` says that the unit was gathered earlier in the step.  If the policy has hpZ, the weights then come
        from hpZ's copy.
        """
        # A policy with differences sends whole weights only in the first step; any other step is modelled.
        sends = in_phase(policy, phase, "copy" if again else "differences")
        hops = gather_hops(policy, self._topology, unit.shard, sends)
        if not hops:  # a user's own gather
            return Collective()
        previous, timed, before = hops[0], list[TimedHop](), 0.0
        if previous.source != "copy":
            before = len(previous.planes) * self._coding(previous.codec, unit.shard, "encode")
        for hop in hops:
            # Differences are decoded even if the copy has their codec, since they are added to the copy.
            if hop.codec != previous.codec or (hop.source == "copy" and previous.keeps == "sum"):
                before = self._coding(previous.codec, hop.elements, "decode")
            # A rank's exchange with itself takes time only where hpZ's copy is made.
            if hop.axis.size > 1 or hop.keeps != "nothing":
                timed.append(self._timed(hop, hop.nbytes, before))
                before = 0.0
            previous = hop
        return Collective(hops=tuple(timed), after=self._coding(previous.codec, unit.padded, "decode"))

    def reduction(self, policy: Policy, unit: UnitGeometry) -> Collective:
        """Returns the reduction of a unit's gradient, as exchanges with their times.

        If several groups of ranks each hold a copy of all shards, the exchanges between the groups are included.
        """
        return self._reduced(reduction_hops(policy, self._topology, unit.piece, policy.grain))

    def outer(self, policy: Policy, unit: UnitGeometry) -> Collective:
        """Returns the outer step of a unit, in which groups of ranks average its weights, as exchanges with times."""
        return self._reduced(outer_hops(policy, self._topology, unit.piece, policy.grain))

    def _reduced(self, hops: Sequence[Hop]) -> Collective:
        """Returns the reduction that consists of ``hops``, as exchanges with their times.

        The first of the ``hops`` compute a mean.  The remaining hops, if there are any, gather this mean from other
        ranks.
        """
        # ``after``: seconds in which the rank decodes what the hop before has brought.
        chunked, timed, after = list[list[TimedHop]](), list[TimedHop](), 0.0
        for hop in hops:
            if hop.kind == "all_gather":
                timed.append(self._timed(hop, hop.nbytes, after))
                after = 0.0
                continue
            elements = hop.numel if hop.kind == "shift" else hop.axis.size * hop.elements
            encode, decode = (self._coding(hop.codec, elements, way) for way in ("encode", "decode"))
            if hop.kind == "shift":  # each step of the ring first decodes the partial sum of the step before
                steps = [encode] + [decode + encode] * (hop.axis.size - 2)
                timed += [self._timed(hop, hop.nbytes, before) for before in steps]
            else:
                chunks = zip(hop.chunks, hop.sizes, strict=True)
                before = after + encode
                chunked.append([
                    self._timed(hop, size, before * (end - start) / hop.numel) for (start, end), size in chunks
                ])  # fmt: skip
            after = decode
        crosses = bool(hops) and hops[-1].crosses
        return Collective(hops=(*in_chunks(chunked), *timed), after=after, crosses=crosses)

    def _timed(self, hop: Hop, size: int, before: float) -> TimedHop:
        """Returns one exchange of ``hop`` with its times in seconds.

        In the exchange, a rank sends one message of ``size`` bytes to every other rank of the axis.  If the hop is a
        ring, the rank sends as many messages, but all of them to the next rank.  If the hop's kind is ``shift``, the
        exchange is one step of a ring reduction, in which the rank sends a single message.  ``before`` are the seconds
        that the rank spends on decoding and encoding before the exchange.
        """
        if hop.axis.size == 1:
            return TimedHop(adapter=0.0, before=before, sends=False)
        # The ranks of node 0 stand for those of every node, which send the same.
        machine, ranks = self._machine, range(self._topology.ranks_per_node)
        counts = [destinations(self._topology, hop.axis, rank, ring=hop.ring) for rank in ranks]
        if hop.kind == "shift":
            counts = [{link: count // (hop.axis.size - 1) for link, count in by.items()} for by in counts]
        between = [size * count.get("inter", 0) for count in counts]
        inside = max(size * count.get("intra", 0) for count in counts)
        call = max(sum(count.values()) for count in counts) * machine.message
        posting = call + max(between) * machine.sent
        return TimedHop(
            adapter=sum(between) / (self._rate * machine.efficiency),
            inside=inside / machine.inside if machine.inside else 0.0,
            latency=machine.latency,
            before=before + posting * self.stretch,
            call=call * self.stretch,
            hop=hop,
            nbytes=size,
        )

    def _coding(self, codec: Codec, elements: int, way: Literal["encode", "decode"]) -> float:
        return elements * self.stretch * float(getattr(self._machine.cost(codec), way))
