"""``zeropp bench collectives``: times our collectives against gloo's on one fp32 tensor, and counts bytes sent.

In each round all collectives run once, in an order that rotates from round to round.  All of them write into existing
tensors, except our reductions, which allocate the reduced shard.  The time of our all-gather includes decoding the
whole tensor.
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
from impl.policy.policy import Gather, Reduce
from impl.policy.topology import Topology
from impl.quantized_collectives import quantized_all_gather, quantized_reduce_scatter

CODECS: Final = ("fp32", "bf16", "int8:2048", "int4:256")
GATHERS: Final[tuple[Gather, ...]] = ("flat", "hierarchical")
REDUCTIONS: Final[tuple[Reduce, ...]] = ("ring", "one_hop", "two_hop")
TRANSPORTS: Final[tuple[Transport, ...]] = ("shm", "backend")
GRAIN: Final = 1 << 12  # a shard has a multiple of this many elements, so that all codecs' blocks are whole
ROUNDS: Final = (5, 15)  # fewest and most

# torch 2.13 renames these functions and warns about the old names; torch 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


Candidate = tuple[dict[str, str], Wire, Callable[[], object]]
"""One of our collectives: its names (operation, algorithm, codec, transport), its wire, and a function that runs
it once."""


def measure(rank: Rank, *, mebibytes: int, seconds: float) -> list[Sample]:
    """Time our collectives and gloo's on one fp32 tensor of ``mebibytes`` MiB, for about ``seconds`` in all.

    All ranks must call this function.  It returns one sample for each of our collectives.  A sample has this rank's
    seconds and bytes and, as reference, this rank's seconds in gloo's all-gather or reduce-scatter.  ``reference_sent``
    is the number of bytes that gloo sends on all ranks together.
    """
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
    reference_seconds = dict(zip(references, timings, strict=False))  # gloo's come first
    # In a ring each rank sends (world - 1) / world of the tensor.  gloo's reduce-scatter sends twice as much,
    # since it is an all-reduce.
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
    """Return the bytes that this rank sends in one call: ``inter`` to other nodes, and ``intra`` inside its node.

    ``run`` is called twice.  The first call sets up buffers and shared memory, which later timed calls then find ready.
    The bytes of the second call are returned.
    """
    run()
    wire.ledger.booked.clear()
    run()
    return {"inter": wire.ledger.total("inter"), "intra": wire.ledger.total("intra")}


def _candidates(
    mesh: Mesh, wires: list[Wire], whole: Tensor, part: Tensor, out: Tensor
) -> Iterator[Candidate]:
    """Yield our collectives, one for each combination of codec, transport and algorithm that can run on the ranks.

    Args:
        mesh: The ranks.
        wires: For each transport, the object that sends messages through this transport.
        whole: (world * S,) elements to reduce.
        part: (S,) this rank's shard, to gather.
        out: (world * S,) buffer into which gathered elements are written.
    """
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
    """Return whether ``transport`` can carry at least one hop of an algorithm on these nodes and ranks.

    The transport ``backend`` carries every hop.  Shared memory (``shm``) carries only hops inside a node of two or more
    ranks, and no hop of a ring algorithm.
    """
    if transport == "backend":
        return True
    inside = algorithm in ("hierarchical", "two_hop") or (topology.nodes == 1 and algorithm != "ring")
    return inside and topology.ranks_per_node > 1
