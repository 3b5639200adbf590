"""``zeropp bench overlap``: measures how much communication overlaps computation, and how much two hops overlap.

There are two experiments:

- Training steps under a policy alternate with steps of the same model that send nothing.  The steps that send nothing
  are called *compute alone*.  Their seconds decide the rate of the link: forward and backward each compute at least
  :data:`ROOM` times as long as they send.  All communication could therefore overlap with computation.
- A gradient is reduced in two hops, the first inside nodes and the second between nodes.  This reduction is timed
  twice: with the gradient in one chunk, and in several chunks.  With several chunks, the hops of different chunks may
  overlap.  The messages of each hop are also timed alone.  The hop inside nodes uses gloo, because through shared
  memory it would take almost no time, and nothing would be left to overlap.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from harness.bench.rounds import interleaved, timed
from harness.cluster.rank import Rank
from harness.records.bench_record import Sample
from harness.suites.trial import Model
from harness.workloads.models import build
from impl.codecs.codec import parse
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.plan.traffic import Tag, passes, predict
from impl.policy.presets import preset
from impl.policy.topology import Axis, Topology
from impl.quantized_collectives import quantized_reduce_scatter
from impl.zero import Zero, shard

TOPOLOGY_OF_STEP: Final = (2, 1)  # nodes, and ranks of each node, for the experiment with steps
TOPOLOGY_OF_HOPS: Final = (2, 2)  # nodes, and ranks of each node, for the experiment with hops
MODEL: Final = "gpt-small"
SEQUENCE: Final = 128
POLICIES: Final = ("zero3", "zeropp")
CODEC: Final = "int4:256"  # codec of the messages of both hops
CHUNKS: Final = 4
ROUNDS: Final = (5, 200)  # fewest and most rounds of an experiment
PROBES: Final = (3, 3)  # fewest and most rounds from whose median the rate of a link is chosen
# The link's rate for steps is set such that forward and backward each compute at least this many times as long as they
# send.
ROOM: Final = 1.2
# The link's rate for hops is set such that the second hop takes this many times as long as the first.
HOPS_APART: Final = 3.0
_TAG: Final = Tag("backward", "gradients")

Times = tuple[float, float, float]
"""Seconds of a step on this rank: forward, backward, and the whole step with the optimizer."""
Alone = tuple[list[Times], dict[str, list[int]]]
"""The result of :func:`compute_alone` on a rank, in two parts.

The first part has, for each round, the times of a step that sends nothing.  The second part has, for each policy, the
bytes that the rank would send to other nodes in a step, as [in forward, in backward]."""


def compute_alone(rank: Rank, *, layers: int, sequences: int) -> Alone:
    """Measure how long steps of the unsharded model compute, and predict the bytes that each policy sends.

    The steps send no messages, and are timed in several rounds.  All ranks must call this function.  It returns the
    seconds that this rank took in each round, and the bytes by policy (:data:`Alone`).
    """
    mesh = Mesh.create(rank.topology)
    sent = {name: _sent(_sharded(_model(layers), name, mesh)) for name in POLICIES}
    (rounds,) = interleaved(rank, [_trainer(rank, sequences, _model(layers))], "compute alone", PROBES)
    return rounds, sent


def rates_for_steps(ranks: Sequence[Alone]) -> dict[str, float]:
    """Return, for each policy, the rate in Mbit/s of the link over which the policy's steps are timed.

    ``ranks`` has the results of :func:`compute_alone` on all ranks.  The rates are chosen by :func:`rate_for_step`.
    """
    turns = list(zip(*(rounds for rounds, _ in ranks), strict=True))  # by round, then by rank
    slowest = [[max(seconds[part] for seconds in turn) for turn in turns] for part in (0, 1)]
    computed = [*map(statistics.median, slowest)]  # forward, backward
    return {name: max(rate_for_step(sent[name], computed) for _, sent in ranks) for name in POLICIES}


def rate_for_step(sent: Sequence[int], computed: Sequence[float]) -> float:
    """Return the lowest link rate, in Mbit/s, at which communication could be hidden behind computation.

    At this rate, forward and backward each compute at least :data:`ROOM` times as long as they send.

    Args:
        sent: Bytes that a rank sends between nodes in forward and in backward.
        computed: Seconds of forward and backward without communication.
    """
    rates = (ROOM * 8e-6 * nbytes / seconds for nbytes, seconds in zip(sent, computed, strict=True))
    return float(f"{max(rates):.3g}")


def step(rank: Rank, *, policy: str, layers: int, sequences: int, seconds: float) -> list[Sample]:
    """Time steps of a policy and steps of compute alone, in turns, for about ``seconds`` in all.

    Compute alone is the same model without sharding, whose steps send nothing.  All ranks must call this function.  It
    returns one sample of this rank: the seconds of the policy's steps, with the steps of compute alone as reference,
    and the seconds of forward and of backward in compute alone as ``parts``.
    """
    model = _model(layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    zero = _sharded(model, policy, Mesh.create(rank.topology))
    candidates = [_trainer(rank, sequences, _model(layers)), _trainer(rank, sequences, model, zero)]
    alone, sharded = interleaved(rank, candidates, policy, ROUNDS, seconds=seconds)
    forward, backward = _sent(zero)
    parts = dict(zip(("forward", "backward", "whole"), map(list, zip(*alone, strict=True)), strict=True))
    sample = Sample(
        kind="step",
        names={
            "policy": policy, "model": MODEL, "layers": layers, "sequence": SEQUENCE, "sequences": sequences,
        },
        sizes={"parameters": parameters, "sent_forward": forward, "sent_backward": backward},
        seconds=[whole for *_, whole in sharded],
        reference_seconds=parts.pop("whole"),
        parts=parts,
    )  # fmt: skip
    return [sample]


def first_hop(rank: Rank, *, mebibytes: int) -> list[float]:
    """Time only the first hop of a two-hop reduction, and return this rank's seconds of each round.

    All ranks must call this function.  The first hop stays inside nodes, and needs no link between nodes.
    ``mebibytes`` is the size of the reduced fp32 gradient in MiB.
    """
    hop, _ = _hops(Wire(Mesh.create(rank.topology), transport="backend"), mebibytes)
    (rounds,) = interleaved(rank, [timed(hop)], "first hop", PROBES)
    return rounds


def rate_for_hops(ranks: Sequence[Sequence[float]], mebibytes: int) -> float:
    """Return the rate, in Mbit/s, at which the second hop takes :data:`HOPS_APART` times as long as the first hop.

    The hops are the two exchanges of messages in a reduction: the first stays inside nodes, and the second crosses the
    link between nodes.  ``ranks`` has the results of :func:`first_hop` on all ranks, and ``mebibytes`` is the size of
    the reduced fp32 gradient in MiB.
    """
    slowest = statistics.median(map(max, zip(*ranks, strict=True)))
    topology = Topology(*TOPOLOGY_OF_HOPS)
    _, second = _rows(topology, mebibytes)
    sent = topology.ranks_per_node * (topology.nodes - 1) * second  # bytes that a node sends to the others
    return float(f"{8e-6 * sent / (HOPS_APART * slowest):.3g}")


def hops(rank: Rank, *, mebibytes: int, seconds: float) -> list[Sample]:
    """Time a two-hop reduction in several chunks and in one chunk, and the messages of each of its hops alone.

    Both reductions and both hops are timed in turns, for about ``seconds`` in all.  All ranks must call this function.
    It returns one sample of this rank: the seconds of the reduction in several chunks, with the reduction in one chunk
    as reference, and the seconds of each hop as ``parts``.  ``mebibytes`` is the size of the reduced fp32 gradient in
    MiB.
    """
    mesh = Mesh.create(rank.topology)
    wire = Wire(mesh, transport="backend")
    generator = torch.Generator().manual_seed(mesh.rank)
    gradient = torch.randn(mebibytes << 18, generator=generator)  # (world * S,)
    whole = partial(quantized_reduce_scatter, gradient, CODEC, mesh, wire=wire)
    candidates = [*map(timed, _hops(wire, mebibytes)), timed(whole), timed(partial(whole, chunks=CHUNKS))]
    first, second, in_one, cut = interleaved(rank, candidates, "hops", ROUNDS, seconds=seconds)
    first_sent, second_sent = _rows(mesh.topology, mebibytes)
    sample = Sample(
        kind="hops",
        names={"chunks": CHUNKS, "codec": CODEC, "numel": gradient.numel()},
        sizes={"first_sent": first_sent, "second_sent": second_sent},
        seconds=cut,
        reference_seconds=in_one,
        parts={"first": first, "second": second},
    )
    return [sample]


def _model(layers: int) -> nn.Module:
    """Return a new model with this number of layers, whose weights are the same on every rank."""
    torch.manual_seed(0)
    return build(Model(name=MODEL, arguments={"layers": layers}), SEQUENCE)


def _sharded(model: nn.Module, policy: str, mesh: Mesh) -> Zero:
    return shard(model, mesh=mesh, policy=preset(policy), wire=Wire(mesh, transport="backend"))


def _sent(zero: Zero) -> list[int]:
    """Return the predicted bytes that this rank sends to other nodes in a step: [in forward, in backward]."""
    mesh, units = zero.wire.mesh, [unit.geometry for unit in zero.units]
    traffic = predict(zero.policy, mesh.topology, units, mesh.rank, passes(zero.policy)).sent
    return [
        sum(sent.bytes for key, sent in traffic.items() if (key.phase, key.link) == (phase, "inter"))
        for phase in ("forward", "backward")
    ]


def _trainer(rank: Rank, sequences: int, model: nn.Module, zero: Zero | None = None) -> Callable[[], Times]:
    """Return a function that trains the model for one step on random bytes, and returns the step's times.

    ``zero`` is the engine that shards the model.  If None, the model is not sharded, and nothing is sent.
    """
    generator = torch.Generator().manual_seed(rank.rank)
    text = torch.randint(256, (sequences, SEQUENCE + 1), generator=generator)
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    parameters: Any = model.parameters() if zero is None else zero.param_groups()
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    def train() -> Times:
        begin = time.perf_counter()
        loss = model(tokens, targets)
        forward = time.perf_counter()
        loss.backward()
        if zero is not None:
            zero.finish_backward()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        return forward - begin, backward - forward, time.perf_counter() - begin

    return train


def _rows(topology: Topology, mebibytes: int) -> tuple[int, int]:
    """Return (first, second): the bytes of one message in the first and in the second hop of a two-hop reduction.

    In each hop, a rank sends one message to each other rank of a group: first to the ranks of its node, then to the
    ranks with the same place on other nodes.  ``mebibytes`` is the size of the reduced fp32 gradient in MiB.
    """
    frame = parse(CODEC).frame_bytes((mebibytes << 18) // topology.world)
    return topology.nodes * frame, frame


def _hops(wire: Wire, mebibytes: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions, one for each hop of a two-hop reduction, that send the hop's messages and wait for them.

    The messages have the size of encoded gradients, but nothing is encoded.  ``mebibytes`` is the size of the fp32
    gradient in MiB.
    """
    topology = wire.mesh.topology

    def hop(axis: Axis, row: int) -> None:
        exchange = wire.all_to_all(axis, row, _TAG)
        exchange.post()
        exchange.wait()
        exchange.close()

    first, second = _rows(topology, mebibytes)
    return partial(hop, topology.local_axis, first), partial(hop, topology.node_axis, second)
