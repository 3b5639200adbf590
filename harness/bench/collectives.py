"""``zeropp bench collectives``: seconds and bytes of our collectives beside gloo's own.

Every rank holds a shard of an fp32 tensor for an all-gather, and a whole gradient for a
reduce-scatter.  In each round gloo's own collective of that tensor is timed first, then each of ours,
after a barrier each; a round's seconds are the slowest rank's.  All write into existing tensors, but for
the reduced shard, which our reductions make.  An all-gather's work ends when the whole tensor is decoded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from harness.cluster.rank import Progress, Rank
from harness.records.bench_record import CollectiveSample
from impl.codecs.codec import parse
from impl.comm.mesh import Mesh
from impl.comm.quantized import quantized_all_gather, quantized_reduce_scatter
from impl.comm.wire import Transport, Wire
from impl.plan.policy import Gather, Policy, Reduce
from impl.plan.topology import Axis, Topology

OPERATIONS: Final = ("all_gather", "reduce_scatter")
CODECS: Final = ("fp32", "bf16", "int8:2048", "int4:256")
GATHERS: Final[tuple[Gather, ...]] = ("flat", "hierarchical")
REDUCTIONS: Final[tuple[Reduce, ...]] = ("ring", "one_hop", "two_hop")
TRANSPORTS: Final[tuple[Transport, ...]] = ("shm", "backend")
GRAIN: Final = 1 << 12  # elements of a shard: whole blocks of all codecs above
MOST_ROUNDS: Final = 15
FEWEST_ROUNDS: Final = 5

# torch 2.13 renames them and warns about the old names; 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured.

    Attributes:
        mebibytes: sizes of the whole tensor.
        rate_mbit: of the link between nodes, for the record; None is unshaped.
        seconds: about how long all rounds of one size take.
    """

    mebibytes: tuple[int, ...]
    rate_mbit: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Contender:
    """One of our collectives.

    Attributes:
        operation: of :data:`OPERATIONS`.
        algorithm: of the policy.
        codecs: one a hop that sends.
        transport: what carries messages inside a node: ``shm`` only where a hop lies inside one.
        run: one call.
        wire: its ledger.
    """

    operation: Literal["all_gather", "reduce_scatter"]
    algorithm: str
    codecs: tuple[str, ...]
    transport: str
    run: Callable[[], object]
    wire: Wire


def measure(rank: Rank, setting: Setting) -> list[CollectiveSample]:
    """Time everything; the target of every rank.  ``seconds`` and bytes are this rank's alone."""
    mesh = Mesh.create(rank.topology)
    wires = {transport: Wire(mesh, transport=transport) for transport in TRANSPORTS}
    found = []
    for size in setting.mebibytes:
        found += _of_size(rank, mesh, wires, size, setting)
        for wire in wires.values():
            wire.close()
    return found


def together(ranks: list[list[CollectiveSample]]) -> list[CollectiveSample]:
    """All ranks' samples as one: of every round the slowest rank's seconds, and everybody's bytes."""
    return [
        samples[0].model_copy(
            update={
                "seconds": [max(each) for each in zip(*(s.seconds for s in samples), strict=True)],
                "reference_seconds": [
                    max(each) for each in zip(*(s.reference_seconds for s in samples), strict=True)
                ],
                "sent_inter": sum(s.sent_inter for s in samples),
                "sent_intra": sum(s.sent_intra for s in samples),
            }
        )
        for samples in zip(*ranks, strict=True)
    ]


def _of_size(
    rank: Rank, mesh: Mesh, wires: dict[Transport, Wire], mebibytes: int, setting: Setting
) -> list[CollectiveSample]:
    world = mesh.topology.world
    shard = max(GRAIN, (mebibytes << 20) // 4 // world // GRAIN * GRAIN)
    generator = torch.Generator().manual_seed(mesh.rank)
    whole = torch.randn(world * shard, generator=generator)
    mine, out, reduced_shard = whole[:shard].clone(), torch.empty_like(whole), torch.empty(shard)
    references: dict[str, Callable[[], object]] = {
        "all_gather": lambda: _all_gather(out, mine),
        "reduce_scatter": lambda: _reduce_scatter(reduced_shard, whole),
    }
    contenders = _contenders(mesh, wires, whole, mine, out)
    bytes_of = [_warm_up(each) for each in contenders]
    for reference in references.values():
        _seconds(reference)
    seconds: list[list[float]] = [[] for _ in contenders]
    reference_seconds: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}
    rounds = MOST_ROUNDS
    begin = time.perf_counter()
    index = 0
    while index < rounds:
        rank.report(Progress(f"{mebibytes} MiB", index, rounds))
        for operation in OPERATIONS:
            reference_seconds[operation].append(_seconds(references[operation]))
            for each, values in zip(contenders, seconds, strict=True):
                if each.operation == operation:
                    values.append(_seconds(each.run))
        index += 1
        if index == 1:
            rounds = _agreed(setting.seconds, time.perf_counter() - begin)
    return [
        CollectiveSample(
            operation=each.operation,
            algorithm=each.algorithm,
            codecs=each.codecs,
            transport=each.transport,
            nodes=mesh.topology.nodes,
            ranks_per_node=mesh.topology.ranks_per_node,
            rate_mbit=setting.rate_mbit,
            numel=whole.numel(),
            sent_inter=inter,
            sent_intra=intra,
            reference_sent=_gloo_bytes(each.operation, world, whole.nbytes),
            seconds=values,
            reference_seconds=reference_seconds[each.operation],
        )
        for each, values, (inter, intra) in zip(contenders, seconds, bytes_of, strict=True)
    ]


def _agreed(budget: float, one: float) -> int:
    """Rounds that fit the budget, the same on all ranks."""
    rounds = torch.tensor(min(MOST_ROUNDS, max(FEWEST_ROUNDS, int(budget / one))))
    dist.broadcast(rounds, src=0)
    return int(rounds)


def _seconds(run: Callable[[], object]) -> float:
    """Of one call on this rank, begun together."""
    dist.barrier()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _warm_up(contender: Contender) -> tuple[int, int]:
    """Call it once, buffers and arenas are made; bytes that this rank sent between and inside nodes."""
    ledger = contender.wire.ledger
    contender.run()
    ledger.clear()
    contender.run()
    return ledger.total("inter"), ledger.total("intra")


def _gloo_bytes(operation: str, world: int, nbytes: int) -> int:
    """What all ranks send: gloo gathers in a ring, and reduces and scatters by a whole all-reduce's ring.

    Each of ``world`` ranks sends ``(world - 1) / world`` of the tensor; an all-reduce does it twice.
    """
    return (world - 1) * nbytes * (2 if operation == "reduce_scatter" else 1)


def _contenders(
    mesh: Mesh, wires: dict[Transport, Wire], whole: Tensor, mine: Tensor, out: Tensor
) -> list[Contender]:
    found = []
    for text in CODECS:
        codec = parse(text)
        for transport, wire in wires.items():
            for gather in GATHERS:
                policy = Policy(weights=codec, gather=gather)
                axes, _ = policy.gather_axes(mesh.topology)
                if transport == "shm" and not any_inside(mesh.topology, axes):
                    continue
                run = _gather(mesh, wire, policy, mine, out)
                found.append(Contender("all_gather", gather, (text,), transport, run, wire))
            for reduce in REDUCTIONS:
                policy = Policy(gradients=(codec, codec), reduce=reduce)
                hops = policy.reduce_axes(mesh.topology)
                inside = any_inside(mesh.topology, [axis for axis, _ in hops])
                if transport == "shm" and (reduce == "ring" or not inside):
                    continue  # a step of the ring is the backend's everywhere
                texts = tuple(str(codec) for _, codec in hops)
                call = _reduce(mesh, wire, policy, whole)
                found.append(Contender("reduce_scatter", reduce, texts, transport, call, wire))
    return found


def any_inside(topology: Topology, axes: Iterable[Axis]) -> bool:
    """Whether a hop that sends lies inside a node: no other is carried by shared memory."""
    return any(
        axis.size > 1 and len({topology.node_of(rank) for rank in axis.group(0)}) == 1 for axis in axes
    )


def _gather(mesh: Mesh, wire: Wire, policy: Policy, mine: Tensor, out: Tensor) -> Callable[[], object]:
    codec, whole = policy.weights, out.view(mesh.topology.world, -1)
    return lambda: quantized_all_gather(mine, codec, mesh, gather=policy.gather, wire=wire, out=whole)


def _reduce(mesh: Mesh, wire: Wire, policy: Policy, whole: Tensor) -> Callable[[], object]:
    codecs = policy.gradients
    return lambda: quantized_reduce_scatter(whole, codecs, mesh, reduce=policy.reduce, wire=wire)
