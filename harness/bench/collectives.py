"""``zeropp bench collectives``: our collectives' times and bytes beside gloo's, on one fp32 tensor.

All take turns in each round and write into existing tensors, except that our reductions allocate the reduced
shard; an all-gather ends when the whole tensor is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from harness.bench.rounds import interleaved, timed
from harness.cluster.rank import Rank
from harness.records.bench_record import Sample
from impl.comm.mesh import Mesh
from impl.comm.wire import Transport, Wire
from impl.plan.policy import Gather, Reduce
from impl.plan.topology import Topology
from impl.quantized_collectives import quantized_all_gather, quantized_reduce_scatter

CODECS: Final = ("fp32", "bf16", "int8:2048", "int4:256")
GATHERS: Final[tuple[Gather, ...]] = ("flat", "hierarchical")
REDUCTIONS: Final[tuple[Reduce, ...]] = ("ring", "one_hop", "two_hop")
TRANSPORTS: Final[tuple[Transport, ...]] = ("shm", "backend")
GRAIN: Final = 1 << 12  # elements of a shard: whole blocks of all codecs above
ROUNDS: Final = (5, 15)

# torch 2.13 renames them and warns about the old names; 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


Candidate = tuple[dict[str, str], Wire, Callable[[], object]]
"""One of our collectives: operation, algorithm, codec and transport; its wire; one call."""


def measure(rank: Rank, *, mebibytes: int, seconds: float) -> list[Sample]:
    """Time all on one tensor; the target of every rank.  Seconds and bytes are of this rank alone."""
    mesh = Mesh.create(rank.topology)
    wires = [Wire(mesh, transport=transport) for transport in TRANSPORTS]
    world = mesh.topology.world
    shard = max(GRAIN, (mebibytes << 20) // 4 // world // GRAIN * GRAIN)
    whole = torch.randn(world * shard, generator=torch.Generator().manual_seed(mesh.rank))
    part, out, reduced_shard = whole[:shard].clone(), torch.empty_like(whole), torch.empty(shard)
    references: dict[str, Callable[[], object]] = {
        "all_gather": partial(_all_gather, out, part),
        "reduce_scatter": partial(_reduce_scatter, reduced_shard, whole),
    }
    candidates = list(_candidates(mesh, wires, whole, part, out))
    sent = [_sent(wire, run) for _, wire, run in candidates]
    turns = [timed(run) for run in (*references.values(), *(run for *_, run in candidates))]
    timings = interleaved(rank, turns, f"{mebibytes} MiB", ROUNDS, seconds=seconds)
    reference_seconds = dict(zip(references, timings, strict=False))  # which come first
    # Each rank sends (world - 1) / world of the tensor in a ring, twice in gloo's reduce-scatter, which is
    # an all-reduce.
    gloo_bytes = {"all_gather": (world - 1) * whole.nbytes, "reduce_scatter": 2 * (world - 1) * whole.nbytes}
    return [
        Sample(
            kind="collective",
            names=names | {"numel": whole.numel()},
            sizes={"reference_sent": gloo_bytes[names["operation"]]},
            seconds=rounds,
            reference_seconds=reference_seconds[names["operation"]],
            sent=nbytes,
        )
        for (names, *_), rounds, nbytes in zip(candidates, timings[len(references) :], sent, strict=True)
    ]


def _sent(wire: Wire, run: Callable[[], object]) -> dict[str, int]:
    """Bytes that this rank sends in one call, by link: in the second, since the first allocates arenas."""
    run()
    wire.ledger.booked.clear()
    run()
    return {"inter": wire.ledger.total("inter"), "intra": wire.ledger.total("intra")}


def _candidates(
    mesh: Mesh, wires: list[Wire], whole: Tensor, part: Tensor, out: Tensor
) -> Iterator[Candidate]:
    topology, rows = mesh.topology, out.view(mesh.topology.world, -1)
    for codec, wire in product(CODECS, wires):
        names = {"codec": codec, "transport": wire.transport}
        for gather in (name for name in GATHERS if _carries(wire.transport, name, topology)):
            run = partial(quantized_all_gather, part, codec, mesh, gather=gather, wire=wire, out=rows)
            yield names | {"operation": "all_gather", "algorithm": gather}, wire, run
        for reduce in (name for name in REDUCTIONS if _carries(wire.transport, name, topology)):
            run = partial(quantized_reduce_scatter, whole, codec, mesh, reduce=reduce, wire=wire)
            yield names | {"operation": "reduce_scatter", "algorithm": reduce}, wire, run


def _carries(transport: Transport, algorithm: Gather | Reduce, topology: Topology) -> bool:
    """Whether a transport carries a hop: shared memory those inside a node, except a ring's."""
    if transport == "backend":
        return True
    inside = algorithm in ("hierarchical", "two_hop") or (topology.nodes == 1 and algorithm != "ring")
    return inside and topology.ranks_per_node > 1
