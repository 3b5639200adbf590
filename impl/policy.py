"""What is sent, held and computed: one frozen value, so that an ablation is data.

Pure: no torch.  ZeRO-3, qwZ, hpZ, qgZ and ZeRO++ are values of :class:`Policy`
(paper 2306.10209, sections 3.1 to 3.3); the engine never asks for their names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Final, Literal

from impl.codec import BF16, FP32, Codec, Dtype, IntCodec, Raw, common_grain
from impl.topology import Axis, Topology

Gather = Literal["flat", "hierarchical"]
Reduce = Literal["flat", "one_hop", "two_hop"]


class PolicyError(ValueError):
    """A policy, alone or with a topology, cannot be carried out; the message names why."""


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
class Policy:
    """One point of the ablation space of ZeRO stage 3.

    Attributes:
        weights: codec of every weight gather (qwZ: an integer codec).
        gradients: codec of hop 1 (inside a node) and of hop 2 (between nodes) (qgZ).
        gather: ``hierarchical`` sends a shard once across each link between nodes; ``flat`` is
            one library all-gather over the world.
        reduce: ``two_hop`` (inside nodes, then between them), ``one_hop`` (one all-to-all over
            the world) or ``flat`` (one ring over all ranks, partial sums on the wire; raw codecs only).
        secondary: ranks that share one secondary copy of the weights (hpZ): 0 for none,
            ``"node"`` for the ranks of a node.
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
    secondary: int | Literal["node"] = 0
    compute: Dtype = "fp32"
    memory: MemoryLimits = MemoryLimits()
    align: int = 1

    def __post_init__(self) -> None:
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
        if self.reduce == "flat" and not isinstance(self.gradients[0], Raw):
            raise PolicyError(
                f"reduce='flat' sends partial sums around a ring and cannot carry {self.gradients[0]}; "
                "use one_hop or two_hop"
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

    def reduce_axes(self, topology: Topology) -> tuple[tuple[Axis, Codec], ...]:
        """Hops of a gradient reduction with the codec of each, first hop first."""
        if self.reduce == "two_hop":
            return (
                (topology.local_axis, self.gradients[0]),
                (topology.node_axis, self.gradients[1]),
            )
        return ((topology.world_axis, self.gradients[0]),)


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
