"""What other engines send through our collectives, from the policy and their layout alone.

Pure: no torch.  Two hosts: FSDP2 gathers weights and scatters gradients one parameter group at a time,
each parameter cut along its first dimension; DDP reduces gradients, which are laid out as a policy of
stage 0 lays them out.  The ledger of :mod:`impl.adapters.fsdp2_ddp` must equal these predictions to the
byte, by the counting rule of :mod:`impl.plan.traffic`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from impl.codecs.codec import FP32, common_grain
from impl.plan.geometry import ParameterSpec, UnitGeometry, chunked
from impl.plan.policy import PRESETS, MemoryLimits, Offload, Policy, PolicyError
from impl.plan.topology import Axis, Topology
from impl.plan.traffic import NORM_BYTES, Event, LedgerKey, Phase, Purpose, Sent, destinations

Host = Literal["fsdp2", "ddp"]

BASES: Final[dict[Host, Policy]] = {"fsdp2": Policy(), "ddp": Policy(stage=0, weights=FP32)}
"""Policies that a host carries out; only the fields in :data:`_OPEN` may differ."""

HOSTED: Final[dict[str, tuple[Host, Policy]]] = {
    "fsdp2+exact": ("fsdp2", PRESETS["exact"]),
    "fsdp2+bf16": ("fsdp2", BASES["fsdp2"]),
    "fsdp2+qwz": ("fsdp2", PRESETS["qwz"]),
    "fsdp2+qgz": ("fsdp2", PRESETS["qgz"]),
    "fsdp2+qwz+qgz": ("fsdp2", PRESETS["qwz+qgz"]),
    "ddp+exact": ("ddp", replace(BASES["ddp"], gradients=(FP32, FP32))),
    "ddp+bf16": ("ddp", BASES["ddp"]),
    "ddp+qgz": ("ddp", replace(BASES["ddp"], gradients=PRESETS["qgz"].gradients)),
}
"""Policies inside a host, by the name of the strategy."""

_LAYOUT: Final = ("align", "memory.max_padding")  # of units; FSDP2 lays its groups out by itself
_OPEN: Final[dict[Host, tuple[str, ...]]] = {
    "fsdp2": ("weights", "gradients", "gather", "reduce", "chunks", *_LAYOUT),
    "ddp": ("gradients", "reduce", "chunks", *_LAYOUT),
}
_WHY: Final = {
    "weights": "it keeps whole weights and gathers none",
    "secondary": "it gathers anew in backward and keeps nothing for hpZ",
    "feedback": "it tells no steps, and has no place for carried errors",
}


def carries(host: Host, name: str) -> bool:
    """Whether ``host`` lets a suite's ``policy.<name>`` be set with our collectives."""
    return any(name == field.rpartition(".")[2] for field in _OPEN[host])


def check_host(host: Host, policy: Policy) -> None:
    """Refuse a policy that ``host`` cannot carry out with our collectives.

    Raises:
        PolicyError: naming the first field, its value and what is expected.
    """
    base = dict(_values(BASES[host]))
    for name, value in _values(policy):
        if name not in _OPEN[host] and value != base[name]:
            why = _WHY.get(name, "that is its own to decide")
            raise PolicyError(
                f"{name} = {value} inside {host}: {why}; expected {base[name]}, or a strategy of our engine"
            )
    for codec in (policy.weights, *policy.gradients):
        if codec.stochastic:
            raise PolicyError(
                f"{codec} inside {host}: it tells no steps, by which stochastic rounding is keyed; expected "
                "a codec that rounds to nearest"
            )


def _values(policy: Policy) -> Iterator[tuple[str, Any]]:
    """(name, value) of every field, those of memory limits and offload by themselves."""
    for one in fields(policy):
        value = getattr(policy, one.name)
        if isinstance(value, MemoryLimits | Offload):
            yield from ((f"{one.name}.{limit.name}", getattr(value, limit.name)) for limit in fields(value))
        else:
            yield one.name, value


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """What FSDP2 gathers and scatters in one message: the parameters of one module that it shards.

    Every parameter is cut along its first dimension into ``world`` parts of equal size, the last ones
    padded or empty; a rank's message is its parts side by side.  So a block of a codec may straddle
    parameters.

    Attributes:
        name: of the module; ``root`` for the model itself.
        parameters: in FSDP2's order.
        trained: of each, whether it has a gradient.
        world: ranks that share them.
    """

    name: str
    parameters: tuple[ParameterSpec, ...]
    trained: tuple[bool, ...]
    world: int

    def part(self, parameter: ParameterSpec) -> int:
        """Elements of one rank's part of a parameter, padding included."""
        rows, *rest = parameter.shape
        return -(-rows // self.world) * math.prod(rest)

    @property
    def numel(self) -> int:
        """Elements of the parameters, without padding."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def shard(self) -> int:
        """Elements of one rank's message in a gather."""
        return sum(map(self.part, self.parameters))

    @property
    def padded(self) -> int:
        """Elements that a gather brings."""
        return self.world * self.shard

    @property
    def piece(self) -> int:
        """Elements of the mean gradient with which one rank ends a reduction."""
        pairs = zip(self.parameters, self.trained, strict=True)
        return sum(self.part(parameter) for parameter, trained in pairs if trained)


@dataclass(slots=True)
class _Book:
    """Adds up one rank's messages."""

    topology: Topology
    rank: int
    rows: dict[LedgerKey, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def exchange(
        self, phase: Phase, purpose: Purpose, unit: str, axis: Axis, nbytes: int, *, ring: bool = False
    ) -> None:
        for link, count in destinations(self.topology, axis, self.rank, ring=ring).items():
            row = self.rows[LedgerKey(phase, purpose, unit, axis.name, link)]
            row[0] += count * nbytes
            row[1] += count

    def reduction(self, policy: Policy, unit: str, piece: int) -> None:
        slices = self.topology.world
        for axis, codec in policy.reduce_axes(self.topology):
            slices //= axis.size
            for start, end in chunks_of(policy, piece):
                nbytes = slices * codec.frame_bytes(end - start)
                self.exchange("backward", "gradients", unit, axis, nbytes, ring=policy.reduce == "ring")

    def sent(self) -> dict[LedgerKey, Sent]:
        return {key: Sent(*row) for key, row in self.rows.items()}


def chunks_of(policy: Policy, piece: int) -> tuple[tuple[int, int], ...]:
    """(start, end) of the chunks of a piece of any length whose hops overlap; block by block."""
    return chunked(piece, policy.chunks, common_grain(*policy.gradients))


def predict_fsdp2(
    policy: Policy, topology: Topology, groups: Sequence[GroupGeometry], rank: int, events: Iterable[Event]
) -> dict[LedgerKey, Sent]:
    """Everything that ``rank`` sends under FSDP2 that reshards each group after forward.

    Every group is gathered in each pass, and reduced in each backward pass, of which FSDP2 makes no
    difference between micro-batches.

    Args:
        policy: what is sent.
        topology: where ranks stand.
        groups: cut into ``topology.world`` parts.
        rank: the sender.
        events: passes, norms and steps.

    Raises:
        PolicyError: if FSDP2 cannot carry the policy out.
    """
    check_host("fsdp2", policy)
    book = _Book(topology, rank)
    axes, _ = policy.gather_axes(topology)
    for event in events:
        if event == "norm":
            book.exchange("step", "control", "", topology.world_axis, NORM_BYTES)
        if event not in ("forward", "evaluate", "backward", "accumulate"):
            continue
        phase: Phase = "backward" if event == "accumulate" else event
        for group in groups:
            held = policy.weights.frame_bytes(group.shard)
            for axis in axes if group.shard else ():
                book.exchange(phase, "weights", group.name, axis, held, ring=policy.gather == "flat")
                held *= axis.size
            if phase == "backward" and group.piece:
                book.reduction(policy, group.name, group.piece)
    return book.sent()


def predict_ddp(
    policy: Policy, topology: Topology, units: Sequence[UnitGeometry], rank: int, events: Iterable[Event]
) -> dict[LedgerKey, Sent]:
    """Everything that ``rank`` sends under DDP, which reduces in the last micro-batch of a step alone.

    The mean of each unit travels back in the codec in which it last came; norms cost nothing, since every
    rank has all gradients.

    Args:
        policy: what is sent; of stage 0.
        topology: where ranks stand.
        units: laid out for ``policy``.
        rank: the sender.
        events: passes, norms and steps.

    Raises:
        PolicyError: if DDP cannot carry the policy out.
    """
    check_host("ddp", policy)
    book = _Book(topology, rank)
    axes, codec = policy.replica_axes(topology)
    trained = [unit for unit in units if unit.trainable]
    for _ in range(_reduced_steps(events)):
        for unit in trained:
            book.reduction(policy, unit.name, unit.piece)
            held = codec.frame_bytes(unit.piece)
            for axis in axes:
                book.exchange("backward", "gradients", unit.name, axis, held)
                held *= axis.size
    return book.sent()


def predict_hosted(
    host: Host,
    policy: Policy,
    topology: Topology,
    units: Sequence[UnitGeometry | GroupGeometry],
    *,
    rank: int,
    events: Iterable[Event],
) -> dict[LedgerKey, Sent]:
    """Everything that ``rank`` sends inside ``host``: :func:`predict_fsdp2` or :func:`predict_ddp`.

    Args:
        host: inside which.
        policy: what is sent.
        topology: where ranks stand.
        units: FSDP2's groups, or DDP's units.
        rank: the sender.
        events: passes, norms and steps.

    Raises:
        PolicyError: if the host cannot carry the policy out.
    """
    if host == "fsdp2":
        groups = [unit for unit in units if isinstance(unit, GroupGeometry)]
        return predict_fsdp2(policy, topology, groups, rank, events)
    own = [unit for unit in units if isinstance(unit, UnitGeometry)]
    return predict_ddp(policy, topology, own, rank, events)


def _reduced_steps(events: Iterable[Event]) -> int:
    """Steps before which there was a backward pass."""
    steps, waiting = 0, False
    for event in events:
        if event in ("backward", "accumulate"):
            waiting = True
        elif event == "step":
            steps, waiting = steps + waiting, False
    return steps
