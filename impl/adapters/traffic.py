"""Predicts how many bytes FSDP2 and DDP send through this project's collectives, without sending anything.

The bytes follow from the policy, the topology and the sizes of the parameters.  FSDP2 gathers weights and reduces
gradients one parameter group at a time, with each parameter cut along its first dimension.  DDP reduces gradients,
which are laid out as for a policy of stage 0 (nothing is sharded).  Tests check that these predictions equal the bytes
that the adapters count while they run.  This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from impl.codecs.codec import FP32, OwnCodec, common_grain
from impl.plan.hops import gather_hops, reduction_hops
from impl.plan.traffic import NORM_BYTES, Book, Event, LedgerKey, Phase, Sent, Tag, predict
from impl.policy.policy import SETTINGS, Policy, PolicyError
from impl.policy.presets import PRESETS
from impl.policy.shard_layout import ROOT, ParameterSpec, UnitGeometry
from impl.policy.topology import Topology

Host = Literal["fsdp2", "ddp"]

BASES: Final[dict[Host, Policy]] = {"fsdp2": Policy(), "ddp": Policy(stage=0, weights=FP32)}
"""For FSDP2 and DDP, the policy that describes what they do by themselves.

A policy that runs inside one of them may differ from this policy only in the fields in :data:`_OPEN`.
"""

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
"""The named strategies that run inside FSDP2 or DDP: for each name, ``fsdp2`` or ``ddp``, and the policy."""

# Fields that lay out DDP's units.  They change nothing inside FSDP2, which lays out its groups by itself.
_LAYOUT: Final = ("align", "memory.max_padding")
_OPEN: Final[dict[Host, tuple[str, ...]]] = {
    "fsdp2": ("weights", "gradients", "gather", "reduce", "chunks", *_LAYOUT),
    "ddp": ("gradients", "reduce", "chunks", *_LAYOUT),
}
_WHY: Final = {
    "weights": "DDP keeps whole weights and gathers none",
    "compute": "the host decides this itself, FSDP2 by its MixedPrecisionPolicy",
    "secondary": "FSDP2 gathers anew in backward and keeps no secondary copy",
    "feedback": "FSDP2 and DDP do not tell collectives when a step ends, which error feedback needs",
    "schedule": "FSDP2 and DDP do not tell collectives when a step ends",
}


def carries(host: Host, name: str) -> bool:
    """Returns whether a policy that runs inside ``host`` (FSDP2 or DDP) may set the field ``name``.

    All other fields must keep the values that they have in ``BASES[host]``.

    ``name`` is the last part of the field's path: ``max_padding`` for ``memory.max_padding``.
    """
    return any(name == field.rpartition(".")[2] for field in _OPEN[host])


def check_host(host: Host, policy: Policy) -> None:
    """Raise PolicyError if ``host`` (FSDP2 or DDP) cannot carry out ``policy``.

    The message names a field or a codec, the reason, and what is expected instead.
    """
    for each in SETTINGS:
        name, value, expected = each.path, each.of(policy), each.of(BASES[host])
        if name not in _OPEN[host] and value != expected:
            why = _WHY.get(name, "the host decides this itself")
            value, expected = (policy.schedule_in_words, "none") if name == "schedule" else (value, expected)
            raise PolicyError(
                f"{name} = {value} inside {host}: {why}; expected {expected}; other values need this project's engine "
                "(zeropp.shard)"
            )
    for name, own, known in (
        ("reduce", policy.own_reduce, "ring, one_hop, two_hop"),
        ("gather", policy.own_gather, "flat, hierarchical"),
    ):
        if own is not None:
            raise PolicyError(
                f"{name} = {own} inside {host}: a method of your own needs the units of this project's engine; "
                f"expected one of {known}, or use this project's engine (zeropp.shard)"
            )
    for codec in (policy.weights, *policy.gradients):
        if (not isinstance(codec, OwnCodec) or codec.readable) and codec.stochastic:
            raise PolicyError(
                f"{codec} inside {host}: stochastic rounding needs the number of the step, which {host} "
                "does not tell collectives; expected a codec that rounds to nearest"
            )


class HostError(RuntimeError):
    """An adapter cannot be created, or cannot do what FSDP2 or DDP asks of it; the message names a way out."""


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """The sizes of one parameter group of FSDP2, whose weights or gradients a rank sends in one message.

    Every parameter is cut along its first dimension into ``world`` parts, one for each rank.  The last parts may have
    fewer rows, or none, and are padded to the size of the first part.  A rank's message consists of its parts of all
    parameters, one after the other, so a codec's block may span parameters.
    """

    name: str  # name of the module; ``root`` for the model itself
    parameters: tuple[ParameterSpec, ...]  # in FSDP2's order
    trained: tuple[bool, ...]  # for each parameter, whether it has a gradient
    world: int  # number of ranks

    def part(self, parameter: ParameterSpec) -> int:
        """Returns the number of elements in one rank's part of a parameter, padding included."""
        rows, *rest = parameter.shape
        return -(-rows // self.world) * math.prod(rest)

    @property
    def numel(self) -> int:
        """Number of elements of the parameters, without padding."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def shard(self) -> int:
        """Number of elements that one rank sends in a gather, padding included."""
        return sum(map(self.part, self.parameters))

    @property
    def padded(self) -> int:
        """Number of elements of the gathered group, padding included."""
        return self.world * self.shard

    @property
    def piece(self) -> int:
        """Number of elements of the mean gradients that one rank receives in a reduction, padding included."""
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
    kept: Collection[str] = (ROOT,),
) -> dict[LedgerKey, Sent]:
    """Predicts the bytes and messages that ``rank`` sends inside FSDP2 or DDP, by phase, purpose, unit, hop and link.

    Inside FSDP2, a rank sends messages in these cases:

    - Each pass (forward, backward, evaluation) gathers the weights of every parameter group that is not gathered yet.
      The gathered weights of groups that are not in ``kept`` are freed in each pass.  The groups in ``kept`` stay
      gathered after a forward or evaluation pass, until the first of these events: a backward pass ends; weights are
      written outside an optimizer step (``changed``); or gathered weights are dropped although they have not changed
      (``forgotten``).
    - A backward pass also reduces the gradients of every group that has trained parameters.
    - For a gradient norm, a rank sends one small message to each other rank.

    Inside DDP, the gradients of every unit are reduced once in each optimizer step, in its last micro-batch.  No
    weights are gathered, and a norm sends nothing.

    Args:
        host: ``fsdp2`` or ``ddp``.
        policy: a policy that passes :func:`check_host`.
        topology: the nodes and the ranks of a node.
        units: FSDP2's groups, cut into ``topology.world`` parts, or DDP's units, laid out for ``policy``.
        rank: the rank whose messages are predicted.
        events: the passes and steps in their order, such as ``["forward", "backward", "norm", "step"]``.
        kept: names of the groups that FSDP2 keeps gathered from forward to backward; not used inside DDP.  With FSDP2's
            default settings, this is the group of the root module only.
    """
    if host == "ddp":
        ddp_units = [unit for unit in units if isinstance(unit, UnitGeometry)]
        # Chunks start on the codecs' own grain, and the order of collectives is not checked.
        unaligned = replace(policy, align=1, order_every=0)
        return predict(unaligned, topology, ddp_units, rank, ["backward"] * _reduced_steps(events)).sent
    book = Book(topology, rank)
    gathered = False  # whether the kept groups are gathered
    for event in events:
        if event == "norm":
            book.control(NORM_BYTES)
        if event in ("changed", "forgotten"):
            gathered = False
        if event not in ("forward", "evaluate", "backward", "accumulate"):
            continue
        phase: Phase = "backward" if event == "accumulate" else event
        for group in units:
            if group.shard and not (gathered and group.name in kept):
                book.send(Tag(phase, "weights", group.name), gather_hops(policy, topology, group.shard))
            if phase == "backward" and group.piece:
                hops = reduction_hops(policy, topology, group.piece, common_grain(*policy.gradients))
                book.send(Tag("backward", "gradients", group.name), hops)
        gathered = phase != "backward"
    return book.sent


def _reduced_steps(events: Iterable[Event]) -> int:
    """Returns the number of optimizer steps in ``events`` that have at least one backward pass."""
    steps, waiting = 0, False
    for event in events:
        steps += waiting and event == "step"
        waiting = event in ("backward", "accumulate") or (waiting and event != "step")
    return steps
