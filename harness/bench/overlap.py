"""``zeropp bench overlap``: what of communication hides behind computation, and of one hop behind the other.

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

Each contender has one turn in a round, after a barrier; the turns rotate.  A round's seconds are the slowest
rank's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.cluster.rank import Progress, Rank
from harness.records import overlap_goals
from harness.records.bench_record import OverlapHops, OverlapStep
from harness.suites.trial import Model
from harness.workloads import corpus
from harness.workloads.models import build
from impl.codecs.codec import Codec, common_grain, parse
from impl.comm.collectives import Reduction, reduce_gradients
from impl.comm.mesh import Mesh
from impl.comm.wire import Tag, Wire
from impl.plan.geometry import chunked
from impl.plan.policy import MemoryLimits, Policy, preset
from impl.plan.topology import Axis, Topology
from impl.plan.traffic import Load, predict
from impl.zero import Zero, shard

T = TypeVar("T")

TOPOLOGY_OF_STEP: Final = (2, 1)
TOPOLOGY_OF_HOPS: Final = (2, 2)
POLICIES: Final = ("zero3", "zeropp")
CODECS: Final = ("int4:256", "int4:256")
MOST_ROUNDS: Final = 200
FEWEST_ROUNDS: Final = 5
WARM_UPS: Final = 1
PROBES: Final = 3  # rounds from whose median a link's rate follows
LEARNING_RATE: Final = 1e-3
_TAG: Final = Tag("backward", "gradients")


@dataclass(frozen=True, slots=True)
class StepSetting:
    """Of a step.

    Attributes:
        model: a GPT preset's name.
        layers: of it.
        sequence: tokens of a sequence.
        sequences: of each rank in a step.
        seconds: about how long all rounds take.
        policy: a preset's name; empty for compute alone.
        rate_mbit: of the link between nodes, for the record.
    """

    model: str
    layers: int
    sequence: int
    sequences: int
    seconds: float
    policy: str = ""
    rate_mbit: float = 0.0


@dataclass(frozen=True, slots=True)
class HopsSetting:
    """Of two hops.

    Attributes:
        mebibytes: of the fp32 gradient.
        chunks: of the contender; the reference has one.
        seconds: about how long all rounds take.
        rate_mbit: of the link between nodes, for the record.
    """

    mebibytes: int
    chunks: int
    seconds: float
    rate_mbit: float = 0.0

    @property
    def numel(self) -> int:
        """Elements of the gradient."""
        return self.mebibytes << 18


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of one step on this rank; ``whole`` includes the optimizer's."""

    forward: float
    backward: float
    whole: float


@dataclass(frozen=True, slots=True)
class Alone:
    """Compute alone on this rank, without a link.

    Attributes:
        took: by round.
        sent: bytes that this rank will send to other nodes in forward and in backward, by policy.
    """

    took: list[Took]
    sent: dict[str, tuple[int, int]]


def compute_alone(rank: Rank, setting: StepSetting) -> Alone:
    """Time the model by itself; the target of every rank."""
    mesh = Mesh.create(rank.topology)
    sent = {name: _sent(_sharded(_model(setting), name, mesh)) for name in POLICIES}
    (took,) = _interleaved(rank, [_alone(rank, setting)], "compute alone", rounds=PROBES)
    return Alone(took, sent)


def rates_for_steps(ranks: Sequence[Alone]) -> dict[str, float]:
    """Mbit/s of the link by policy, from what :func:`compute_alone` found on all ranks, one a node."""
    forward, backward = (
        statistics.median(max(getattr(took, part) for took in each) for each in _rounds_of(ranks))
        for part in ("forward", "backward")
    )
    return {
        name: max(overlap_goals.rate_for_step(each.sent[name], (forward, backward)) for each in ranks)
        for name in POLICIES
    }


def _rounds_of(ranks: Sequence[Alone]) -> list[tuple[Took, ...]]:
    return list(zip(*(each.took for each in ranks), strict=True))


def step(rank: Rank, setting: StepSetting) -> OverlapStep:
    """Time a policy's step and compute alone in turns; the target of every rank."""
    mesh = Mesh.create(rank.topology)
    model = _model(setting)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    zero = _sharded(model, setting.policy, mesh)
    own = _trained(model, zero.param_groups(), zero.finish_backward, rank, setting)
    contenders = [_alone(rank, setting), own]
    alone, took = _interleaved(rank, contenders, setting.policy, seconds=setting.seconds)
    forward, backward = _sent(zero)
    return OverlapStep(
        policy=setting.policy,
        nodes=mesh.topology.nodes,
        ranks_per_node=mesh.topology.ranks_per_node,
        rate_mbit=setting.rate_mbit,
        model=setting.model,
        layers=setting.layers,
        parameters=parameters,
        sequence=setting.sequence,
        sequences=setting.sequences,
        sent_forward=forward,
        sent_backward=backward,
        forward_seconds=[each.forward for each in alone],
        backward_seconds=[each.backward for each in alone],
        seconds=[each.whole for each in took],
        reference_seconds=[each.whole for each in alone],
    )


def first_hop(rank: Rank, setting: HopsSetting) -> list[float]:
    """Time the first hop by itself, without a link; the target of every rank."""
    mesh = Mesh.create(rank.topology)
    hop, _ = _hops(Wire(mesh), setting)
    (took,) = _interleaved(rank, [_timed(hop)], "first hop", rounds=PROBES)
    return took


def rate_for_hops(ranks: Sequence[Sequence[float]], setting: HopsSetting) -> float:
    """Mbit/s of the link, from what :func:`first_hop` found on all ranks."""
    slowest = [max(each) for each in zip(*ranks, strict=True)]
    topology = Topology(*TOPOLOGY_OF_HOPS)
    _, second = _rows(topology, setting)
    sent = topology.ranks_per_node * (topology.nodes - 1) * second
    return overlap_goals.rate_for_hops(sent, statistics.median(slowest))


def hops(rank: Rank, setting: HopsSetting) -> OverlapHops:
    """Time both hops by themselves, and whole reductions in one chunk and in several, in turns; the target
    of every rank.
    """
    mesh = Mesh.create(rank.topology)
    wire = Wire(mesh)
    gradient = torch.randn(setting.numel, generator=torch.Generator().manual_seed(mesh.rank))  # (world * S,)
    mean = torch.empty(setting.numel // mesh.topology.world)  # (S,)

    def reduction(chunks: int) -> Callable[[], None]:
        how = _reduction(wire, chunks, mean)

        def run() -> None:
            for _ in reduce_gradients(how, gradient):
                pass

        return run

    contenders = [*_hops(wire, setting), reduction(1), reduction(setting.chunks)]
    first, second, whole, cut = _interleaved(
        rank, [_timed(each) for each in contenders], "hops", seconds=setting.seconds
    )
    rows = _rows(mesh.topology, setting)
    return OverlapHops(
        nodes=mesh.topology.nodes,
        ranks_per_node=mesh.topology.ranks_per_node,
        rate_mbit=setting.rate_mbit,
        numel=setting.numel,
        codecs=CODECS,
        chunks=setting.chunks,
        first_sent=rows[0],
        second_sent=rows[1],
        first_seconds=first,
        second_seconds=second,
        seconds=cut,
        reference_seconds=whole,
    )


Sample = TypeVar("Sample", OverlapStep, OverlapHops)


def together(ranks: Sequence[Sample]) -> Sample:
    """All ranks' samples as one: of every round the slowest rank's seconds."""
    names = [name for name in type(ranks[0]).model_fields if name.endswith("seconds")]
    slowest = {
        name: [max(each) for each in zip(*(getattr(sample, name) for sample in ranks), strict=True)]
        for name in names
    }
    return ranks[0].model_copy(update=slowest)


def _interleaved(
    rank: Rank,
    contenders: Sequence[Callable[[int], T]],
    stage: str,
    *,
    rounds: int = MOST_ROUNDS,
    seconds: float | None = None,
) -> list[list[T]]:
    """What each contender returned in every round; the first rounds, in which buffers are made, are left out.

    Args:
        rank: whose turn it is.
        contenders: called with the round, all ranks at once.
        stage: what progress calls it.
        rounds: how many at most.
        seconds: that they may take, about; None for all of them.
    """
    found: list[list[T]] = [[] for _ in contenders]
    begin, index = 0.0, -WARM_UPS
    while index < rounds:
        rank.report(Progress(stage, max(index, 0), rounds))
        if index == 0:
            begin = time.perf_counter()
        for place in range(len(contenders)):
            turn = (place + index) % len(contenders)
            dist.barrier()
            value = contenders[turn](index + WARM_UPS)
            if index >= 0:
                found[turn].append(value)
        if index == 0 and seconds is not None:
            rounds = _agreed(seconds, time.perf_counter() - begin)
        index += 1
    return found


def _agreed(budget: float, one: float) -> int:
    """Rounds that fit the budget, the same on all ranks."""
    rounds = torch.tensor(min(MOST_ROUNDS, max(FEWEST_ROUNDS, int(budget / one))))
    dist.broadcast(rounds, src=0)
    return int(rounds)


def _timed(run: Callable[[], object]) -> Callable[[int], float]:
    def seconds(_: int) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    return seconds


def _model(setting: StepSetting) -> nn.Module:
    """The same on every rank and for every contender."""
    torch.manual_seed(0)
    return build(Model(name=setting.model, arguments={"layers": setting.layers}), setting.sequence)


def _sharded(model: nn.Module, policy: str, mesh: Mesh) -> Zero:
    # The last block's weights stay for its backward pass, which comes next: no schedule lets them go.
    limits = MemoryLimits(max_reuse=1)
    return shard(model, mesh=mesh, policy=preset(policy, memory=limits), wire=Wire(mesh, transport="shm"))


def _sent(zero: Zero) -> tuple[int, int]:
    """Bytes that this rank sends to other nodes in forward and in backward of a step, as predicted."""
    mesh = zero.wire.mesh
    sent = predict(zero.policy, mesh.topology, [unit.geometry for unit in zero.units], mesh.rank, Load())
    forward, backward = (
        sum(of.bytes for key, of in sent.items() if key.phase == phase and key.link == "inter")
        for phase in ("forward", "backward")
    )
    return forward, backward


def _alone(rank: Rank, setting: StepSetting) -> Callable[[int], Took]:
    model = _model(setting)
    return _trained(model, model.parameters(), lambda: None, rank, setting)


def _trained(
    model: nn.Module, parameters: Any, finish: Callable[[], None], rank: Rank, setting: StepSetting
) -> Callable[[int], Took]:
    """Steps on this rank's batches, by torch's own loop."""
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    text = corpus.load(corpus.STDLIB)

    def one(index: int) -> Took:
        drawn = text.batch(
            seed=0,
            step=index,
            micro_batch=0,
            rank=rank.rank,
            sequences=setting.sequences,
            length=setting.sequence,
        )
        windows = torch.from_numpy(drawn)
        tokens, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        begin = time.perf_counter()
        loss = model(tokens, targets)
        forward = time.perf_counter()
        loss.backward()
        finish()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        return Took(forward - begin, backward - forward, time.perf_counter() - begin)

    return one


def _rows(topology: Topology, setting: HopsSetting) -> tuple[int, int]:
    """Bytes that a rank sends to each other rank of its group in the first hop, and in the second."""
    piece = setting.numel // topology.world
    first, second = _codecs()
    return topology.nodes * first.frame_bytes(piece), second.frame_bytes(piece)


def _codecs() -> tuple[Codec, Codec]:
    first, second = (parse(text) for text in CODECS)
    return first, second


def _reduction(wire: Wire, chunks: int, mean: Tensor) -> Reduction:
    """By two hops into ``mean`` (S,) fp32."""
    codecs = _codecs()
    return Reduction(
        wire=wire,
        hops=Policy(gradients=codecs).reduce_axes(wire.mesh.topology),
        tag=_TAG,
        chunks=chunked(mean.numel(), chunks, common_grain(*codecs)),
        out=mean,
    )


def _hops(wire: Wire, setting: HopsSetting) -> tuple[Callable[[], None], Callable[[], None]]:
    """The messages of each hop by themselves: posted and waited for."""
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
