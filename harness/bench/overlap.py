"""``zeropp bench overlap``: how much communication overlaps with computation, and one hop with the other.

A step.  *Compute alone* is the same model that every rank trains by itself, on its own batches, sending
nothing: forward, backward and the optimizer's step over the whole model.  It is first timed on all ranks at
once without a link; from its seconds and the bytes that :mod:`impl.plan.traffic` predicts follows the rate at
which computation takes 1.2 times as long as communication in the tighter of forward and backward.  On a link
of that rate it then takes turns with the policy's step, in the same processes.  A step is as long as those of
real training, thousands of tokens a rank: what messages take of the processors that compute does not shrink
with the link's rate, so a step of tenths of a second would measure that instead.

Two hops.  A gradient is reduced in one chunk and in several, and its two hops are timed by themselves: the
same messages, posted and waited for, without encoding.  Inside the nodes it travels by gloo, since shared
memory has next to no first hop; the rate of the link between them makes the second hop the longer one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from harness.bench.engine import LEARNING_RATE, Batch, batches_of
from harness.bench.rounds import Rounds, interleaved, timed
from harness.cluster.rank import Rank
from harness.records.bench_record import Sample
from harness.suites.trial import Model
from harness.workloads.models import build
from impl.codecs.codec import common_grain, parse
from impl.comm.collectives import Reduction, reduce_gradients
from impl.comm.mesh import Mesh
from impl.comm.wire import Tag, Wire
from impl.plan.geometry import chunked
from impl.plan.policy import MemoryLimits, Policy, preset
from impl.plan.topology import Axis, Topology
from impl.plan.traffic import Load, predict
from impl.zero import Zero, shard

MODEL: Final = "gpt-small"
LAYERS: Final = 16
SEQUENCE: Final = 128
SEQUENCES: Final = 96
MEBIBYTES: Final = 128
CHUNKS: Final = 4
TOPOLOGY_OF_STEP: Final = (2, 1)
TOPOLOGY_OF_HOPS: Final = (2, 2)
POLICIES: Final = ("zero3", "zeropp")
CODEC: Final = "int4:256"  # of both hops
MOST_ROUNDS: Final = 200
FEWEST_ROUNDS: Final = 5
PROBES: Final = Rounds(3, 3)  # from whose median a link's rate follows
ROOM: Final = 1.2
"""Seconds of computation over those of communication, where they are closest: what sets the link's rate."""
HOPS_APART: Final = 3.0
"""Seconds of the second hop over those of the first: what sets the link's rate."""
_TAG: Final = Tag("backward", "gradients")


Took = tuple[
    float, float, float
]  # seconds of a step on this rank: forward, backward, all with the optimizer's
Alone = tuple[list[Took], dict[str, tuple[int, int]]]
"""Compute alone by round, without a link, and bytes that this rank will send to other nodes in forward and in
backward, by policy."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured.

    Attributes:
        seconds: about how long all rounds of a policy, or of the hops, take.
        model: a GPT preset's name.
        layers: of it.
        sequences: of each rank in a step.
        mebibytes: of the fp32 gradient that is reduced.
        chunks: of the reduction; its reference has one.
        sequence: tokens of a sequence.
        policy: of the step, a preset's name.
        rate_mbit: of the link between nodes, for the record.
    """

    seconds: float
    model: str = MODEL
    layers: int = LAYERS
    sequences: int = SEQUENCES
    mebibytes: int = MEBIBYTES
    chunks: int = CHUNKS
    sequence: int = SEQUENCE
    policy: str = ""
    rate_mbit: float = 0.0

    @property
    def numel(self) -> int:
        """Number of elements of the gradient."""
        return self.mebibytes << 18


def compute_alone(rank: Rank, setting: Setting) -> Alone:
    """Time the unsharded model without communication; the target of every rank."""
    mesh = Mesh.create(rank.topology)
    sent = {name: _sent(_sharded(_model(setting), name, mesh)) for name in POLICIES}
    batch = batches_of(rank, setting.sequences, setting.sequence)
    (took,) = interleaved(rank, [_alone(setting)], "compute alone", PROBES, batch)
    return took, sent


def rates_for_steps(ranks: Sequence[Alone]) -> dict[str, float]:
    """Mbit/s of the link by policy, from what :func:`compute_alone` found on all ranks, one a node."""
    rounds = list(zip(*(took for took, _ in ranks), strict=True))
    forward, backward = (
        statistics.median(max(took[part] for took in each) for each in rounds) for part in (0, 1)
    )
    return {
        name: max(rate_for_step(sent[name], (forward, backward)) for _, sent in ranks) for name in POLICIES
    }


def rate_for_step(sent: tuple[int, int], computed: tuple[float, float]) -> float:
    """Mbit/s, to three digits, at which computation takes :data:`ROOM` times as long as communication.

    Args:
        sent: bytes of a node to others in forward and in backward, in one step.
        computed: seconds of the same two of compute alone.

    Returns:
        The rate of the tighter of the two: in the other, computation takes longer still.
    """
    rates = (ROOM * 8e-6 * nbytes / seconds for nbytes, seconds in zip(sent, computed, strict=True))
    return float(f"{max(rates):.3g}")


def step(rank: Rank, setting: Setting) -> list[Sample]:
    """Time a policy's step and compute alone in turns; the target of every rank."""
    mesh = Mesh.create(rank.topology)
    model = _model(setting)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    zero = _sharded(model, setting.policy, mesh)
    contenders = [_alone(setting), _trained(model, zero.param_groups(), zero.finish_backward)]
    rounds = Rounds(FEWEST_ROUNDS, MOST_ROUNDS, setting.seconds)
    batch = batches_of(rank, setting.sequences, setting.sequence)
    alone, took = interleaved(rank, contenders, setting.policy, rounds, batch)
    forward, backward = _sent(zero)
    sample = Sample(
        kind="step",
        names={
            "policy": setting.policy, "nodes": mesh.topology.nodes,
            "ranks_per_node": mesh.topology.ranks_per_node, "rate_mbit": setting.rate_mbit,
            "model": setting.model, "layers": setting.layers, "sequence": setting.sequence,
            "sequences": setting.sequences,
        },
        sizes={"parameters": parameters, "sent_forward": forward, "sent_backward": backward},
        seconds=[whole for _, _, whole in took],
        reference_seconds=[whole for _, _, whole in alone],
        parts={"forward": [each[0] for each in alone], "backward": [each[1] for each in alone]},
    )  # fmt: skip
    return [sample]


def first_hop(rank: Rank, setting: Setting) -> list[float]:
    """Time the first hop alone, without a link; the target of every rank."""
    hop, _ = _hops(_wire(Mesh.create(rank.topology)), setting)
    (took,) = interleaved(rank, [timed(hop)], "first hop", PROBES, lambda _: None)
    return took


def rate_for_hops(ranks: Sequence[Sequence[float]], setting: Setting) -> float:
    """Mbit/s of the link, to three digits, at which the second hop takes :data:`HOPS_APART` times as long as
    :func:`first_hop` found the first to take on the slowest rank.
    """
    slowest = statistics.median(max(each) for each in zip(*ranks, strict=True))
    topology = Topology(*TOPOLOGY_OF_HOPS)
    _, second = _rows(topology, setting)
    sent = topology.ranks_per_node * (topology.nodes - 1) * second  # by a node, to others
    return float(f"{8e-6 * sent / (HOPS_APART * slowest):.3g}")


def hops(rank: Rank, setting: Setting) -> list[Sample]:
    """Time both hops by themselves, and whole reductions in one chunk and in several, in turns; the target
    of every rank.
    """
    mesh = Mesh.create(rank.topology)
    wire = _wire(mesh)
    gradient = torch.randn(setting.numel, generator=torch.Generator().manual_seed(mesh.rank))  # (world * S,)
    runs = [*_hops(wire, setting), *(_reduction(wire, chunks, gradient) for chunks in (1, setting.chunks))]
    rounds = Rounds(FEWEST_ROUNDS, MOST_ROUNDS, setting.seconds)
    contenders = [timed(run) for run in runs]
    first, second, whole, cut = interleaved(rank, contenders, "hops", rounds, lambda _: None)
    rows = _rows(mesh.topology, setting)
    sample = Sample(
        kind="hops",
        names={
            "chunks": setting.chunks, "codec": CODEC, "numel": setting.numel, "nodes": mesh.topology.nodes,
            "ranks_per_node": mesh.topology.ranks_per_node, "rate_mbit": setting.rate_mbit,
        },
        sizes={"first_sent": rows[0], "second_sent": rows[1]},
        seconds=cut,
        reference_seconds=whole,
        parts={"first": first, "second": second},
    )  # fmt: skip
    return [sample]


def _model(setting: Setting) -> nn.Module:
    """Build the model, equal on every rank and for every contender."""
    torch.manual_seed(0)
    return build(Model(name=setting.model, arguments={"layers": setting.layers}), setting.sequence)


def _sharded(model: nn.Module, policy: str, mesh: Mesh) -> Zero:
    # The last block's weights stay for its backward pass, which comes next: no schedule lets them go.
    limits = MemoryLimits(max_reuse=1)
    return shard(model, mesh=mesh, policy=preset(policy, memory=limits), wire=_wire(mesh))


def _wire(mesh: Mesh) -> Wire:
    return Wire(mesh, transport="backend")


def _sent(zero: Zero) -> tuple[int, int]:
    """Predicted bytes that this rank sends to other nodes in forward and in backward of a step."""
    mesh = zero.wire.mesh
    sent = predict(zero.policy, mesh.topology, [unit.geometry for unit in zero.units], mesh.rank, Load()).sent
    forward, backward = (
        sum(of.bytes for key, of in sent.items() if key.phase == phase and key.link == "inter")
        for phase in ("forward", "backward")
    )
    return forward, backward


def _alone(setting: Setting) -> Callable[[Batch], Took]:
    model = _model(setting)
    return _trained(model, model.parameters(), lambda: None)


def _trained(model: nn.Module, parameters: Any, finish: Callable[[], None]) -> Callable[[Batch], Took]:
    """A step of a plain torch training loop."""
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)

    def one(batch: Batch) -> Took:
        begin = time.perf_counter()
        loss = model(*batch)
        forward = time.perf_counter()
        loss.backward()
        finish()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        return forward - begin, backward - forward, time.perf_counter() - begin

    return one


def _rows(topology: Topology, setting: Setting) -> tuple[int, int]:
    """Bytes that a rank sends to each other rank of its group in the first hop, and in the second."""
    frame = parse(CODEC).frame_bytes(setting.numel // topology.world)
    return topology.nodes * frame, frame


def _reduction(wire: Wire, chunks: int, gradient: torch.Tensor) -> Callable[[], None]:
    """A two-hop reduction of ``gradient`` (world * S,) fp32, its shards in chunks."""
    codec = parse(CODEC)
    mean = torch.empty(gradient.numel() // wire.mesh.topology.world)  # (S,)
    how = Reduction(
        wire=wire,
        hops=Policy(gradients=(codec, codec)).reduce_axes(wire.mesh.topology),
        tag=_TAG,
        chunks=chunked(mean.numel(), chunks, common_grain(codec, codec)),
        out=mean,
    )

    def run() -> None:
        for _ in reduce_gradients(how, gradient):
            pass

    return run


def _hops(wire: Wire, setting: Setting) -> tuple[Callable[[], None], Callable[[], None]]:
    """The messages of each hop alone: posted and waited for, without encoding."""
    topology = wire.mesh.topology

    def hop(axis: Axis, row: int) -> Callable[[], None]:
        def run() -> None:
            exchange = wire.all_to_all(axis, row, _TAG)
            exchange.post()
            exchange.wait()
            exchange.close()

        return run

    first, second = _rows(topology, setting)
    return hop(topology.local_axis, first), hop(topology.node_axis, second)
