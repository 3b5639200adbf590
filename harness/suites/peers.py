"""Describes the peers as data: DDP, FSDP2 and DeepSpeed, as shipped or tuned, and a single process.

A peer is another engine than ours, for comparison.  It trains and sends its messages as its library does, without our
collectives.  :mod:`harness.strategies` builds a peer from its description here.  This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Family = Literal["single", "ddp", "fsdp2", "deepspeed"]
Compute = Literal["fp32", "bf16"]
Group = Literal["all", "node"]
ReduceDtype = Literal["compute", "fp32"]

DEEPSPEED: Final = "deepspeed"
BUCKET_MB: Final = 25.0  # DDP's default size of a bucket of gradients
READ_BY: Final[dict[str, tuple[Family, ...]]] = {
    "reduce_dtype": ("fsdp2",), "group": ("fsdp2",), "bucket_mb": ("ddp",),
}  # fmt: skip
"""Settings of a peer that only these families read; all families read the other settings."""
AHEAD: Final = 2  # blocks that FSDP2 prefetches; with 1, fewer all-gathers overlap with computing


@dataclass(frozen=True, slots=True)
class Peer:
    """The settings of one peer: DDP, FSDP2, DeepSpeed or a single process.

    Everything that is not set here is as the peer's library ships it.
    """

    family: Family
    says: str  # what the peer does, in a few words, for tables and documentation
    tuned: bool = False  # DDP: gradients are views of its buckets, and the graph is static
    compressed: bool = False  # DDP: buckets are reduced in bf16 (its ``bf16_compress_hook``)
    prefetch: bool = False  # FSDP2: all-gathers begin `AHEAD` blocks early, and are asynchronous (`async_op`)
    kept: bool = False  # FSDP2: all weights stay gathered until backward, not only the root's weights
    hpz: bool = False  # DeepSpeed: each node keeps a second copy of the weights
    # DeepSpeed: keys of the section ``zero_optimization``, unless the trial's ``deepspeed_config`` sets them.
    zero: Mapping[str, int | bool] = field(default_factory=dict)

    def wire(self, compute: Compute, reduce_dtype: ReduceDtype = "compute") -> str:
        """Return the type in which the peer sends weights and gradients: ``fp32``, ``bf16``, or ``bf16 and fp32``.

        DDP sends gradients in fp32 even if it computes in bf16, since autocast leaves gradients in fp32.  A DDP that
        compresses its gradients sends bf16.

        Args:
            compute: The type in which the peer computes (``peer.compute``).
            reduce_dtype: The type in which FSDP2 reduces gradients (``peer.reduce_dtype``).
        """
        if self.family == "ddp":
            return "bf16" if self.compressed else "fp32"
        if reduce_dtype == "fp32" and compute == "bf16":
            return "bf16 and fp32"
        return compute


PEERS: Final = {
    "single": Peer("single", "one process that averages over the batches of all ranks: the reference"),
    "ddp": Peer("ddp", "DDP as shipped"),
    "ddp-tuned": Peer("ddp", "DDP with `gradient_as_bucket_view` and `static_graph`", tuned=True),
    "ddp-bf16": Peer(
        "ddp",
        "`ddp-tuned` whose gradients are sent in bf16 (`bf16_compress_hook`)",
        tuned=True,
        compressed=True,
    ),
    "fsdp2": Peer("fsdp2", "FSDP2 as shipped: the root stays gathered until backward, blocks do not"),
    "fsdp2-prefetch": Peer(
        "fsdp2", "FSDP2 with asynchronous all-gathers, explicitly prefetched two blocks ahead", prefetch=True
    ),
    "fsdp2-kept": Peer("fsdp2", "FSDP2 with all weights gathered until backward", kept=True),
    "fsdp2-kept-prefetch": Peer(
        "fsdp2", "`fsdp2-kept` with the all-gathers of `fsdp2-prefetch`", prefetch=True, kept=True
    ),
    DEEPSPEED: Peer("deepspeed", "DeepSpeed by `deepspeed_config`; without one, its ZeRO-3 as shipped"),
    "deepspeed-hpz": Peer(
        "deepspeed", "`deepspeed` with a copy in each node (`zero_hpz_partition_size`)", hpz=True
    ),
    "deepspeed-kept": Peer(
        "deepspeed",
        "`deepspeed` whose weights all stay gathered (`stage3_param_persistence_threshold`)",
        zero={"stage3_param_persistence_threshold": 1_000_000_000},
    ),
    "deepspeed-serial": Peer("deepspeed", "`deepspeed` without `overlap_comm`", zero={"overlap_comm": False}),
    "deepspeed-stage2": Peer("deepspeed", "DeepSpeed's ZeRO-2 as shipped", zero={"stage": 2}),
    "deepspeed-stage2-overlap": Peer(
        "deepspeed",
        "`deepspeed-stage2` with `overlap_comm` and buckets of 1 M elements (`reduce_bucket_size`)",
        zero={"stage": 2, "overlap_comm": True, "reduce_bucket_size": 1_000_000},
    ),
    "deepspeed-stage1": Peer("deepspeed", "DeepSpeed's ZeRO-1 as shipped", zero={"stage": 1}),
}

_STAGE_3: Final = {"stage": 3}
QUANTISERS: Final = (
    "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",
)  # fmt: skip


def family_of(strategy: str) -> Family | None:
    """Return the library with which a strategy trains, such as ``ddp``.  Returns None if the strategy is no peer."""
    return PEERS[strategy].family if strategy in PEERS else None


def configuration(peer: Peer, ranks_per_node: int, table: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a peer such as ``deepspeed-hpz``, without batch sizes and data types.

    Args:
        peer: The peer, which trains with DeepSpeed.
        ranks_per_node: Number of ranks of a node; the size of hpZ's groups if the peer has hpZ.
        table: The DeepSpeed configuration that a suite gives, to which the peer's settings are added.  If both set a
            key, the value of ``table`` is used.  With None, the configuration has only the peer's settings, and stage 3
            if the peer sets no stage.
    """
    own = dict(peer.zero) | ({"zero_hpz_partition_size": ranks_per_node} if peer.hpz else {})
    if table is None:
        return {"zero_optimization": _STAGE_3 | own}
    return table | {"zero_optimization": own | _zero(table)} if own else table


def _zero(table: dict[str, Any]) -> dict[str, Any]:
    section = table.get("zero_optimization")
    return section if isinstance(section, dict) else {}


def quantising_keys(table: dict[str, Any]) -> list[str]:
    """Return the keys with which a DeepSpeed configuration switches on quantisation.

    DeepSpeed's kernels for quantisation need a GPU.
    """
    return [name for name in QUANTISERS if _zero(table).get(name)]


def zero_stage(table: dict[str, Any]) -> int:
    """Return the ZeRO stage that a DeepSpeed configuration sets.  Returns 0, the default, if it sets no stage."""
    stage = _zero(table).get("stage", 0)
    return stage if isinstance(stage, int) else 0
