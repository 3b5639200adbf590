"""Predicts what FSDP2 and DDP send through our collectives, from the policy and their layout alone.

Pure: no torch.  Two hosts: FSDP2 gathers weights and scatters gradients one parameter group at a time, each
parameter cut along its first dimension; DDP reduces gradients, laid out as a policy of stage 0 does.  The
adapters' ledgers must equal these predictions to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal

from impl.codecs.codec import FP32, common_grain
from impl.plan.policy import PRESETS, MemoryLimits, Offload, Policy, PolicyError
from impl.plan.shard_layout import ROOT, ParameterSpec, UnitGeometry
from impl.plan.topology import Topology
from impl.plan.traffic import NORM_BYTES, Book, Event, LedgerKey, Phase, Sent, Tag, predict

Host = Literal["fsdp2", "ddp"]

BASES: Final[dict[Host, Policy]] = {"fsdp2": Policy(), "ddp": Policy(stage=0, weights=FP32)}
"""The policy of each host; only the fields in :data:`_OPEN` may differ."""

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
    """Refuse a policy that ``host`` cannot carry out, naming the first such field and the value expected."""
    base = dict(_values(BASES[host]))
    for name, value in _values(policy):
        if name not in _OPEN[host] and value != base[name]:
            why = _WHY.get(name, "that is its own to decide")
            raise PolicyError(
                f"{name} = {value} inside {host}: {why}; expected {base[name]}, or a strategy of our engine"
            )
    for codec in (policy.weights, *policy.gradients):
        if codec.stochastic:
            raise PolicyError(f"{codec} inside {host}: it tells no steps; expected rounding to nearest")


def _values(policy: Policy) -> Iterator[tuple[str, Any]]:
    """(name, value) of every field, those of memory limits and offload by themselves."""
    for field in fields(policy):
        value = getattr(policy, field.name)
        if isinstance(value, MemoryLimits | Offload):
            yield from ((f"{field.name}.{limit.name}", getattr(value, limit.name)) for limit in fields(value))
        else:
            yield field.name, value


class HostError(RuntimeError):
    """Our collectives cannot do what a host asks for; the message names the numbers."""


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """A group of FSDP2: the parameters of one module, gathered and scattered in one message.

    Every parameter is cut along its first dimension into ``world`` parts of equal size, the last ones padded
    or empty; a rank's message is its parts side by side, so a codec's block may straddle parameters.
    """

    name: str  # of the module; ``root`` for the model itself
    parameters: tuple[ParameterSpec, ...]  # in FSDP2's order
    trained: tuple[bool, ...]  # of each, whether it has a gradient
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
        """Elements of a gathered group, padding included."""
        return self.world * self.shard

    @property
    def piece(self) -> int:
        """Elements of the mean gradient that one rank receives."""
        pairs = zip(self.parameters, self.trained, strict=True)
        return sum(self.part(parameter) for parameter, trained in pairs if trained)


def predict_hosted(
    host: Host,
    policy: Policy,
    topology: Topology,
    units: Sequence[UnitGeometry | GroupGeometry],
    *,
    rank: int,
    events: Iterable[Event],
) -> dict[LedgerKey, Sent]:
    """Everything that ``rank`` sends inside ``host``, by a policy that it carries out (:func:`check_host`).

    FSDP2 by default gathers every group in each pass, but keeps the root from forward until the backward
    pass ends or the weights change, and reduces every group in each backward pass.  DDP reduces in the last
    micro-batch of a step only, and its norms send nothing.

    ``units`` are FSDP2's groups, cut into ``topology.world`` parts, or DDP's units, laid out for ``policy``.
    """
    if host == "ddp":
        ddp_units = [unit for unit in units if isinstance(unit, UnitGeometry)]
        unaligned = replace(policy, align=1, order_every=0)  # chunks on the codecs' own grain, and no checks
        return predict(unaligned, topology, ddp_units, rank, ["backward"] * _reduced_steps(events)).sent
    book = Book(topology, rank)
    axes, _ = policy.gather_axes(topology)
    ring, root_gathered = policy.gather == "flat", False
    for event in events:
        if event == "norm":
            book.control(NORM_BYTES)
        if event in ("changed", "forgotten"):
            root_gathered = False
        if event not in ("forward", "evaluate", "backward", "accumulate"):
            continue
        phase: Phase = "backward" if event == "accumulate" else event
        for group in units:
            if group.shard and not (root_gathered and group.name == ROOT):
                frame = policy.weights.frame_bytes(group.shard)
                book.gather(Tag(phase, "weights", group.name), axes, frame, ring=ring)
            if phase == "backward" and group.piece:
                book.reduction(policy, group.name, group.piece, common_grain(*policy.gradients))
        root_gathered = phase != "backward"
    return book.sent


def _reduced_steps(events: Iterable[Event]) -> int:
    """Steps after at least one backward pass."""
    steps, waiting = 0, False
    for event in events:
        steps += waiting and event == "step"
        waiting = event in ("backward", "accumulate") or (waiting and event != "step")
    return steps
