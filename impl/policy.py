"""What is sent, held and computed: one frozen value, so that an ablation is data.

Pure: no torch.  ZeRO-3, qwZ, hpZ, qgZ and ZeRO++ are values of :class:`Policy`
(paper 2306.10209, sections 3.1 to 3.3); the engine never asks for their names.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Final, Literal, get_args

from impl.codec import BF16, FP32, ITEM_BYTES, Codec, Dtype, IntCodec, Raw, common_grain
from impl.topology import Axis, Topology

Gather = Literal["flat", "hierarchical"]
Reduce = Literal["ring", "one_hop", "two_hop"]

MOST_CHUNKS: Final = 8  # each holds a slot of the shared memory between its two hops


class PolicyError(ValueError):
    """A policy, alone or with a topology, cannot be carried out; the message names why."""


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a word that is none of the allowed ones."""
    if value not in allowed:
        raise PolicyError(f"{name} = {value!r}: expected one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """How much may be gathered, in elements of the unsharded model.

    Attributes:
        prefetch: elements of coming units that may be gathered ahead of the one in use.
        max_padding: share of a unit that may be padding; more is refused, naming the unit.
    """

    prefetch: int = 50_000_000
    max_padding: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Error feedback of gradient codecs: what an encoding leaves over is added to the next step's.

    ``error = decay * error + (1 - decay) * (h - decoded)`` after encoding ``h = gradient + error``
    (:class:`impl.reference.Carried`).  Classic feedback has decay 0; LoCo (2407.04480) keeps a moving
    average, which DeepSpeed sets to 0.8, and forgets it every 1024 steps.

    Attributes:
        decay: share of the old error that stays, in [0, 1).
        reset: optimizer steps after which the error is forgotten; 0 for never.
        hops: ``last`` keeps the error of the last hop alone: between nodes, where sums are already
            sharded inside the node, ``padded / ranks_per_node`` elements a rank; ``all`` also that of the
            first hop, as many as the unsharded gradient has.
        state: type of the kept error.

    Raises:
        PolicyError: for a decay outside [0, 1) or a negative reset.
    """

    decay: float = 0.0
    reset: int = 0
    hops: Literal["last", "all"] = "last"
    state: Dtype = "fp32"

    def __post_init__(self) -> None:
        _one_of("hops", self.hops, ("last", "all"))
        _one_of("state", self.state, tuple(ITEM_BYTES))
        if not 0.0 <= self.decay < 1.0 or self.reset < 0:
            raise PolicyError(
                f"feedback: decay = {self.decay} and reset = {self.reset}; a decay is in [0, 1), a reset "
                "a number of steps or 0 for never"
            )

    def __str__(self) -> str:
        head = "loco" if self.decay else "classic"
        base = FEEDBACKS[head]
        parts = [head]
        if self.decay != base.decay:
            parts.append(f"decay{self.decay!r}")
        if self.reset != base.reset:
            parts.append(f"reset{self.reset}")
        if self.hops != base.hops:
            parts.append(self.hops)
        if self.state != base.state:
            parts.append(self.state)
        return ":".join(parts)


FEEDBACKS: Final = {"classic": Feedback(), "loco": Feedback(decay=0.8, reset=1024, hops="all")}


def parse_feedback(text: str) -> Feedback | None:
    """Read the text form of feedback, which prints back: ``classic``, ``loco:decay0.9:reset512:bf16``.

    Returns:
        None for ``none``.

    Raises:
        PolicyError: naming the text and what is allowed.
    """
    head, *options = text.strip().split(":")
    if head == "none" and not options:
        return None
    allowed = (
        "expected none, classic or loco, then :decay<d>, :reset<steps>, :last or :all, :fp32, :bf16 or :fp16"
    )
    if head not in FEEDBACKS:
        raise PolicyError(f"feedback {text!r}: {allowed}")
    found: dict[str, object] = {}
    for option in options:
        given: dict[str, object]
        if option in ("last", "all"):
            given = {"hops": option}
        elif option in ITEM_BYTES:
            given = {"state": option}
        elif re.fullmatch(r"reset[0-9]+", option):
            given = {"reset": int(option[5:])}
        elif re.fullmatch(r"decay[0-9]*\.?[0-9]+(e-?[0-9]+)?", option):
            given = {"decay": float(option[5:])}
        else:
            raise PolicyError(f"feedback {text!r}: unknown option {option!r}; {allowed}")
        if given.keys() & found.keys():
            raise PolicyError(f"feedback {text!r}: {option!r} says a thing twice; {allowed}")
        found |= given
    return replace(FEEDBACKS[head], **found)  # type: ignore[arg-type]  # checked by Feedback itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One point of the ablation space of ZeRO stage 3.

    Attributes:
        weights: codec of every weight gather (qwZ: an integer codec).
        gradients: codec of hop 1 (inside a node) and of hop 2 (between nodes) (qgZ).
        gather: ``hierarchical`` sends a shard once across each link between nodes; ``flat`` is
            one library all-gather over the world.
        reduce: ``two_hop`` (inside nodes, then between them), ``one_hop`` (one all-to-all over
            the world) or ``ring`` (blind to nodes, partial sums on the wire, encoded again at every one
            of its ``world - 1`` steps: the paper's counter-example for quantised gradients).
        chunks: pieces of a unit whose two hops overlap: one travels between nodes while the next
            travels inside them.
        secondary: ranks that share one secondary copy of the weights (hpZ): 0 for none,
            ``"node"`` for the ranks of a node.
        feedback: of the gradient codecs; None for none.
        compute: type of gathered weights and of local gradients.
        memory: limits on what is gathered.
        align: elements, beside the codecs' own blocks, on which parameters start; a suite sets
            it so that all its policies share one geometry.

    Raises:
        PolicyError: for combinations that no topology could run.
    """

    weights: Codec = BF16
    gradients: tuple[Codec, Codec] = (BF16, BF16)
    gather: Gather = "hierarchical"
    reduce: Reduce = "two_hop"
    chunks: int = 1
    secondary: int | Literal["node"] = 0
    feedback: Feedback | None = None
    compute: Dtype = "fp32"
    memory: MemoryLimits = MemoryLimits()
    align: int = 1

    def __post_init__(self) -> None:
        _one_of("gather", self.gather, get_args(Gather))
        _one_of("reduce", self.reduce, get_args(Reduce))
        _one_of("compute", self.compute, tuple(ITEM_BYTES))
        if self.gather == "flat" and self.secondary != 0:
            raise PolicyError(
                f"hpZ (secondary={self.secondary}) keeps what the first hop of a hierarchical "
                "gather brought; a flat gather has no such hop"
            )
        if self.reduce != "two_hop" and self.gradients[0] != self.gradients[1]:
            raise PolicyError(
                f"reduce={self.reduce!r} has one hop, but two gradient codecs are named: "
                f"{self.gradients[0]} and {self.gradients[1]}"
            )
        if not 1 <= self.chunks <= MOST_CHUNKS:
            raise PolicyError(f"chunks = {self.chunks}: expected 1 to {MOST_CHUNKS}")
        if self.chunks > 1 and self.reduce != "two_hop":
            raise PolicyError(
                f"chunks = {self.chunks} overlap two hops, and reduce={self.reduce!r} has one; use two_hop"
            )
        if self.chunks > 1 and any(_one_block(codec) for codec in self.gradients):
            raise PolicyError(
                f"chunks = {self.chunks} cut a shard that {' and '.join(map(str, self.gradients))} give "
                "one scale as a whole; use a block of elements"
            )
        if self.feedback is not None and self.reduce == "ring":
            raise PolicyError(
                "feedback needs the error of the same values at every step; the partial sums of a ring are "
                "others' too: use one_hop or two_hop"
            )
        if self.align < 1 or self.memory.prefetch < 0 or self.memory.max_padding < 0:
            raise PolicyError("align is at least 1; prefetch and max_padding are not negative")

    @property
    def grain(self) -> int:
        """Elements on which parameters and shards start."""
        return math.lcm(self.align, common_grain(self.weights, *self.gradients))

    def secondary_ranks(self, topology: Topology) -> int:
        """Ranks that share one secondary copy on ``topology``; 0 for none."""
        return topology.ranks_per_node if self.secondary == "node" else self.secondary

    def check(self, topology: Topology) -> None:
        """Refuse a topology that this policy cannot run on.

        Raises:
            PolicyError: naming both.
        """
        try:
            topology.check_secondary(self.secondary_ranks(topology))
        except ValueError as error:
            raise PolicyError(str(error)) from None

    def gather_axes(self, topology: Topology) -> tuple[tuple[Axis, ...], int]:
        """Hops of a weight gather, and how many of them the secondary spares."""
        if self.gather == "flat":
            return (topology.world_axis,), 0
        return topology.gather_axes(self.secondary_ranks(topology))

    def feedback_hops(self, topology: Topology) -> tuple[bool, ...]:
        """For each hop of a reduction, first hop first, whether its error is kept."""
        hops = len(self.reduce_axes(topology))
        if self.feedback is None:
            return (False,) * hops
        return tuple(self.feedback.hops == "all" or hop == hops - 1 for hop in range(hops))

    def reduce_axes(self, topology: Topology) -> tuple[tuple[Axis, Codec], ...]:
        """Hops of a gradient reduction with the codec of each, first hop first.

        A hop among one rank sends nothing: it is none, and its codec is not used.
        """
        hops = [(topology.world_axis, self.gradients[0])]
        if self.reduce == "two_hop":
            hops = [(topology.local_axis, self.gradients[0]), (topology.node_axis, self.gradients[1])]
        return tuple((axis, codec) for axis, codec in hops if axis.size > 1)


def _one_block(codec: Codec) -> bool:
    return not isinstance(codec, Raw) and codec.block == "shard"


_INT8 = IntCodec(8, 2048)
_INT4 = (IntCodec(4, 256), IntCodec(4, 256))

PRESETS: Final[dict[str, Policy]] = {
    "exact": Policy(weights=FP32, gradients=(FP32, FP32)),
    "zero3": Policy(),
    "qwz": Policy(weights=_INT8),
    "hpz": Policy(secondary="node"),
    "qgz": Policy(gradients=_INT4),
    "qwz+hpz": Policy(weights=_INT8, secondary="node"),
    "qwz+qgz": Policy(weights=_INT8, gradients=_INT4),
    "hpz+qgz": Policy(secondary="node", gradients=_INT4),
    "zeropp": Policy(weights=_INT8, secondary="node", gradients=_INT4),
}
"""Policies by name: the baseline in 16 bits, each technique, every pair, and all three."""


def preset(name: str, **changes: object) -> Policy:
    """A preset with some fields replaced.

    Raises:
        PolicyError: for an unknown name or field.
    """
    if name not in PRESETS:
        raise PolicyError(f"unknown policy {name!r}: expected one of {', '.join(PRESETS)}")
    known = {field.name for field in fields(Policy)}
    for key in changes:
        if key not in known:
            raise PolicyError(f"unknown policy field {key!r}: expected one of {', '.join(sorted(known))}")
    return replace(PRESETS[name], **changes)  # type: ignore[arg-type]  # checked by Policy itself
