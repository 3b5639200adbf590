"""``zeropp bench engine``: training steps of our engine beside those of its peers, interleaved.

All contenders live in the same processes: each has its own copy of the same model, sees the same batches of
real text, and steps the same AdamW.  In each round each trains a few steps in its turn, after a barrier; the
turns rotate from round to round.  A round's seconds are the slowest rank's.  Nothing is clipped, all is fp32
but for what ``zeropp`` quantises, and weights are released after use unless a name says ``kept``.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.bench import deepspeed_peer
from harness.cluster.rank import Progress, Rank
from harness.records.bench_record import EngineSample
from harness.records.engine_goals import ALONE
from harness.suites.trial import Model
from harness.workloads import corpus
from harness.workloads.models import build
from impl.comm.mesh import Mesh
from impl.comm.wire import Transport, Wire
from impl.plan.policy import preset
from impl.zero import find_blocks, shard

STEPS: Final = 3  # of each contender in a round
MOST_ROUNDS: Final = 40
FEWEST_ROUNDS: Final = 5
LEARNING_RATE: Final = 1e-3
DEEPSPEED: Final = ("deepspeed", "deepspeed-kept")

OURS: Final[dict[str, tuple[str, Transport]]] = {
    "exact": ("exact", "shm"),
    "exact-backend": ("exact", "backend"),
    "zeropp": ("zeropp", "shm"),
}
"""Preset and transport by the name of the run."""

NAMES: Final = (ALONE, "ddp", "fsdp2", "fsdp2-kept", *DEEPSPEED, *OURS)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured.

    Attributes:
        names: of :data:`NAMES`; the first is :data:`~harness.records.engine_goals.ALONE`.
        rate_mbit: of the link between nodes, for the record; None is unshaped.
        seconds: about how long all rounds take.
        model: a preset's name.
        sequence: tokens of a sequence.
        sequences: of each rank in a step.
    """

    names: tuple[str, ...]
    rate_mbit: float | None
    seconds: float
    model: str
    sequence: int
    sequences: int


@dataclass(slots=True)
class Contender:
    """One that trains.

    Attributes:
        name: of :data:`NAMES`.
        step: one training step on (sequences, T) tokens and targets; () the loss before it.
        told: how it was set up.
        losses: this rank's, so far.
        seconds: this rank's, by round.
        cpu_seconds: likewise, of all threads of its process.
    """

    name: str
    step: Callable[[Tensor, Tensor], Tensor]
    told: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


def measure(rank: Rank, setting: Setting) -> list[EngineSample]:
    """Train everything; the target of every rank.  Seconds and losses are this rank's alone."""
    # torch 2.13 renames two collectives that FSDP2 and DeepSpeed still call by their old names.
    warnings.filterwarnings("ignore", category=FutureWarning)
    mesh = Mesh.create(rank.topology)
    text = corpus.load(corpus.STDLIB)
    contenders = [_contender(name, mesh, setting) for name in setting.names]

    def batch(step: int) -> tuple[Tensor, Tensor]:
        windows = torch.from_numpy(
            text.batch(
                seed=0,
                step=step,
                micro_batch=0,
                rank=rank.rank,
                sequences=setting.sequences,
                length=setting.sequence,
            )
        )
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    rounds = MOST_ROUNDS
    begin = time.perf_counter()
    index = -1  # of which nothing is kept but losses: buffers are made, orders are learnt
    while index < rounds:
        rank.report(Progress("warm-up" if index < 0 else "rounds", max(index, 0), rounds))
        batches = [batch((index + 1) * STEPS + number) for number in range(STEPS)]
        for place in range(len(contenders)):
            each = contenders[(place + index) % len(contenders)]
            took, computed = _round(each, batches)
            if index >= 0:
                each.seconds.append(took)
                each.cpu_seconds.append(computed)
        if index == 0:
            rounds = _agreed(setting.seconds, time.perf_counter() - begin)
        begin = time.perf_counter() if index < 0 else begin
        index += 1
    return [_sample(each, contenders[0], mesh, setting) for each in contenders]


def together(ranks: Sequence[Sequence[EngineSample]]) -> list[EngineSample]:
    """All ranks' samples as one: of every round the slowest rank's seconds and all ranks' CPU
    seconds, of every step the mean loss.
    """
    return [
        samples[0].model_copy(
            update={
                "seconds": [max(each) for each in zip(*(s.seconds for s in samples), strict=True)],
                "reference_seconds": [
                    max(each) for each in zip(*(s.reference_seconds for s in samples), strict=True)
                ],
                "cpu_seconds": [
                    math.fsum(each) for each in zip(*(s.cpu_seconds for s in samples), strict=True)
                ],
                "losses": [
                    math.fsum(each) / len(samples) for each in zip(*(s.losses for s in samples), strict=True)
                ],
            }
        )
        for samples in zip(*ranks, strict=True)
    ]


def _round(contender: Contender, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Train on each batch; seconds on this rank, begun together, and CPU seconds of its process."""
    dist.barrier()
    begin, computed = time.perf_counter(), time.process_time()
    losses = [contender.step(tokens, targets) for tokens, targets in batches]
    took = time.perf_counter() - begin, time.process_time() - computed
    contender.losses += [float(loss) for loss in losses]
    return took


def _agreed(budget: float, one: float) -> int:
    """Rounds that fit the budget, the same on all ranks."""
    rounds = torch.tensor(min(MOST_ROUNDS, max(FEWEST_ROUNDS, int(budget / one))))
    dist.broadcast(rounds, src=0)
    return int(rounds)


def _sample(contender: Contender, alone: Contender, mesh: Mesh, setting: Setting) -> EngineSample:
    name = contender.name
    policy, transport = OURS.get(name, (name, "backend"))
    equal = {ALONE: 1, "zeropp": 0}  # steps: the one learns from its own batches alone, the other quantises
    return EngineSample(
        contender=policy,
        transport="none" if name == ALONE else transport,
        nodes=mesh.topology.nodes,
        ranks_per_node=mesh.topology.ranks_per_node,
        rate_mbit=setting.rate_mbit,
        model=setting.model,
        parameters=sum(parameter.numel() for parameter in _model(setting).parameters()),
        sequence=setting.sequence,
        sequences=setting.sequences,
        steps=STEPS,
        losses=contender.losses,
        equal_steps=equal.get(name, len(contender.losses)),
        cpu_seconds=contender.cpu_seconds,
        told=contender.told,
        seconds=contender.seconds,
        reference_seconds=alone.seconds,
    )


def _model(setting: Setting) -> nn.Module:
    """The same on every rank and for every contender."""
    torch.manual_seed(0)
    return build(Model(name=setting.model), setting.sequence)


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def _contender(name: str, mesh: Mesh, setting: Setting) -> Contender:
    """Build it; all ranks must call it."""
    model = _model(setting)
    if name in DEEPSPEED:
        kept = name == "deepspeed-kept"
        engine = deepspeed_peer.engine(model, _optimizer, sequences=setting.sequences, kept=kept)
        told = deepspeed_peer.config(sequences=setting.sequences, kept=kept)
        return Contender(name, lambda *batch: deepspeed_peer.step(engine, *batch), told)
    if name in OURS:
        return _ours(name, model, mesh)
    if name == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif name in ("fsdp2", "fsdp2-kept"):
        _shard_by_fsdp2(model, reshard=name == "fsdp2")
    return Contender(name, _trained(model, _optimizer(model.parameters())), {"optimizer": "fused AdamW"})


def _ours(name: str, model: nn.Module, mesh: Mesh) -> Contender:
    policy, transport = OURS[name]
    zero = shard(model, mesh=mesh, policy=preset(policy), wire=Wire(mesh, transport=transport))
    step = _trained(model, _optimizer(zero.param_groups()), zero.finish_backward)
    return Contender(name, step, {"optimizer": "fused AdamW", "preset": policy})


def _shard_by_fsdp2(model: nn.Module, *, reshard: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in find_blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def _trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, finish: Callable[[], None] = lambda: None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Steps of a model that torch's own loop trains."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        finish()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
