"""Peers: how other engines train, as shipped and tuned, as data.  No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

Family = Literal["single", "ddp", "fsdp2", "deepspeed"]
Compute = Literal["fp32", "bf16"]

DEEPSPEED: Final = "deepspeed"
AHEAD: Final = 2  # blocks whose all-gathers are begun ahead: FSDP2 overlaps more from two on


@dataclass(frozen=True, slots=True)
class Peer:
    """How one peer is set up, otherwise as the library ships it."""

    family: Family
    says: str  # what it does, in a few words, for tables and documentation
    tuned: bool = False  # of DDP, gradients are views of its buckets, and the graph is static
    compressed: bool = False  # of DDP, buckets are reduced in bf16 (its ``bf16_compress_hook``)
    prefetch: bool = False  # of FSDP2, asynchronous all-gathers begin `AHEAD` blocks ahead, without streams
    kept: bool = False  # of FSDP2, all weights stay gathered until backward, not only the root's
    hpz: bool = False  # of DeepSpeed, each node keeps a second copy of the weights

    def wire(self, compute: Compute) -> Compute:
        """The type of most bytes that it sends; DDP's autocast gives gradients in fp32."""
        if self.family == "ddp":
            return "bf16" if self.compressed else "fp32"
        return compute


PEERS: Final = {
    "single": Peer("single", "one process that averages over the batches of all ranks: the reference"),
    "ddp": Peer("ddp", "DDP as shipped"),
    "ddp-tuned": Peer("ddp", "DDP with `gradient_as_bucket_view` and `static_graph`", tuned=True),
    "ddp-bf16": Peer(
        "ddp",
        "`ddp-tuned` whose gradients travel in bf16 (`bf16_compress_hook`)",
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
}

_SHIPPED: Final = {"zero_optimization": {"stage": 3}}
QUANTISERS: Final = (
    "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",
)  # fmt: skip


def family_of(strategy: str) -> Family | None:
    """The family of a strategy that is a peer; None for policies."""
    return PEERS[strategy].family if strategy in PEERS else None


def configuration(peer: Peer, ranks_per_node: int, table: dict[str, Any] | None = None) -> dict[str, Any]:
    """DeepSpeed's configuration, without batches and types: ``table``, else ZeRO-3 as shipped."""
    table = _SHIPPED if table is None else table
    hpz = {"zero_hpz_partition_size": ranks_per_node}
    return table | {"zero_optimization": hpz | _zero(table)} if peer.hpz else table


def _zero(table: dict[str, Any]) -> dict[str, Any]:
    section = table.get("zero_optimization")
    return section if isinstance(section, dict) else {}


def quantising_keys(table: dict[str, Any]) -> list[str]:
    """The keys of a DeepSpeed configuration that switch on quantising kernels, which need a GPU."""
    return [name for name in QUANTISERS if _zero(table).get(name)]


def zero_stage(table: dict[str, Any]) -> int:
    """The stage that a DeepSpeed configuration asks for; DeepSpeed's default is 0."""
    stage = _zero(table).get("stage", 0)
    return stage if isinstance(stage, int) else 0
