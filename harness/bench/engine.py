"""``zeropp bench engine``: times training steps of our engine beside those of its peers, interleaved.

All contenders live in the same processes: each has its own copy of the same model, sees the same batches of
real text, and steps the same AdamW.  In each round each trains a few steps in its turn, after a barrier; the
turns rotate from round to round.  A round's seconds are the slowest rank's.  Nothing is clipped, all is fp32
but for what ``zeropp`` quantises.  Weights are released after use, but for the root and the last block of
ours; where a name says ``kept``, none is.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.bench import deepspeed_peer
from harness.bench.rounds import Rounds, interleaved
from harness.cluster.rank import Rank
from harness.records.bench_record import CPU, Sample
from harness.suites.trial import Model
from harness.workloads import corpus
from harness.workloads.models import build
from impl.comm.mesh import Mesh
from impl.comm.wire import Transport, Wire
from impl.plan.policy import preset
from impl.zero import find_blocks, shard

MODEL: Final = "gpt-small"
SEQUENCE: Final = 128
SEQUENCES: Final = 4
STEPS: Final = 3  # of each contender in a round
MOST_ROUNDS: Final = 40
FEWEST_ROUNDS: Final = 5
LEARNING_RATE: Final = 1e-3
LOSS_TOLERANCE: Final = 1e-3
"""Largest relative difference of two contenders' losses in a step: what the order of fp32 sums makes of
AdamW's steps, far below what a lost or doubled gradient does (docs/reference/metrics.md)."""

ALONE: Final = "alone"  # computes, and sends nothing
DEEPSPEED: Final = ("deepspeed", "deepspeed-kept")
OURS: Final[dict[str, tuple[str, Transport]]] = {
    "exact": ("exact", "shm"),
    "exact-backend": ("exact", "backend"),
    "zeropp": ("zeropp", "shm"),
}
"""Preset and transport by the name of the run."""

NAMES: Final = (ALONE, "ddp", "fsdp2", "fsdp2-kept", *DEEPSPEED, *OURS)

Batch = tuple[Tensor, Tensor]  # tokens and targets, each (sequences, T)


@dataclass(frozen=True, slots=True)
class Setting:
    """Options of the benchmark.

    Attributes:
        names: of :data:`NAMES`; the first is :data:`ALONE`.
        rate_mbit: of the link between nodes, for the record; None is unshaped.
        seconds: approximate time of all rounds.
        model: a preset's name.
        sequence: tokens of a sequence.
        sequences: of each rank in a step.
    """

    names: tuple[str, ...]
    rate_mbit: float | None
    seconds: float
    model: str = MODEL
    sequence: int = SEQUENCE
    sequences: int = SEQUENCES


@dataclass(slots=True)
class Contender:
    """One contender: a strategy with its own copy of the model.

    Attributes:
        name: of :data:`NAMES`.
        step: one training step; () the loss before it.
        told: how it was set up, as labels.
        losses: this rank's, so far.
    """

    name: str
    step: Callable[[Tensor, Tensor], Tensor]
    told: dict[str, Any]
    losses: list[float] = field(default_factory=list)

    def round(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """Train on each batch; seconds on this rank, and CPU seconds of its process."""
        begin, computed = time.perf_counter(), time.process_time()
        losses = [self.step(*batch) for batch in batches]
        took = time.perf_counter() - begin, time.process_time() - computed
        self.losses += [float(loss) for loss in losses]
        return took


def measure(rank: Rank, setting: Setting) -> list[Sample]:
    """Train everything; the target of every rank.  Seconds and losses are this rank's alone."""
    # torch 2.13 renames two collectives that FSDP2 and DeepSpeed still call by their old names.
    warnings.filterwarnings("ignore", category=FutureWarning)
    mesh = Mesh.create(rank.topology)
    contenders = [_contender(name, mesh, setting) for name in setting.names]
    batch = batches_of(rank, setting.sequences, setting.sequence)
    took = interleaved(
        rank,
        [each.round for each in contenders],
        "rounds",
        Rounds(FEWEST_ROUNDS, MOST_ROUNDS, setting.seconds),
        lambda index: [batch(index * STEPS + number) for number in range(STEPS)],
    )
    seconds = [[whole for whole, _ in rounds] for rounds in took]
    tokens = mesh.topology.world * setting.sequences * setting.sequence * STEPS
    parameters = sum(parameter.numel() for parameter in _model(setting).parameters())
    # The one learns from its own batches alone, the other quantises.
    equal = {ALONE: 1, "zeropp": 0}
    samples = []
    for each, mine, rounds in zip(contenders, seconds, took, strict=True):
        policy, transport = OURS.get(each.name, (each.name, "none" if each.name == ALONE else "backend"))
        samples.append(
            Sample(
                kind="training",
                names={
                    "contender": policy,
                    "transport": transport,
                    "nodes": mesh.topology.nodes,
                    "ranks_per_node": mesh.topology.ranks_per_node,
                    "rate_mbit": setting.rate_mbit,
                    "model": setting.model,
                    "sequence": setting.sequence,
                    "sequences": setting.sequences,
                },
                sizes={"parameters": parameters, "tokens": tokens, "steps": STEPS},
                seconds=mine,
                reference_seconds=seconds[0],
                parts={CPU: [computed for _, computed in rounds]},
                losses=each.losses,
                equal_steps=equal.get(each.name, len(each.losses)),
                told=each.told,
            )
        )  # fmt: skip
    return samples


def unequal(samples: Sequence[Sample]) -> str | None:
    """A message on contenders whose losses differ from those of the first exact contender; None if none do.

    Each is compared in the steps that it says must be equal
    (:attr:`~harness.records.bench_record.Sample.equal_steps`).
    """
    for sample in samples:
        peers = (other for other in samples if other.place == sample.place)
        first = next((other for other in peers if other.equal_steps == len(other.losses)), sample)
        pairs = zip(sample.losses[: sample.equal_steps], first.losses, strict=False)
        for step, (loss, expected) in enumerate(pairs):
            if not abs(loss - expected) <= LOSS_TOLERANCE * abs(expected):  # NaN is not equal either
                return (
                    f"{_told(sample)} has loss {loss:.6g} in step {step} on {sample.names['nodes']}x"
                    f"{sample.names['ranks_per_node']} ranks, {_told(first)} {expected:.6g}: more than "
                    f"{LOSS_TOLERANCE:g} apart, so they do not train the same"
                )
    return None


def _told(sample: Sample) -> str:
    return f"{sample.names['contender']} over {sample.names['transport']}"


def batches_of(rank: Rank, sequences: int, length: int) -> Callable[[int], Batch]:
    """Batches of text by step, for this rank, of ``sequences`` sequences."""
    text = corpus.Text(corpus.load(corpus.STDLIB), length)

    def batch(step: int) -> Batch:
        read, answer = text.batch(seed=0, step=step, micro_batch=0, rank=rank.rank, sequences=sequences)
        return torch.tensor(read), torch.tensor(answer)

    return batch


def _model(setting: Setting) -> nn.Module:
    """Build the model, equal on every rank and for every contender."""
    torch.manual_seed(0)
    return build(Model(name=setting.model), setting.sequence)


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def _contender(name: str, mesh: Mesh, setting: Setting) -> Contender:
    """Build a contender; all ranks must call it."""
    model = _model(setting)
    if name in DEEPSPEED:
        kept = name == "deepspeed-kept"
        engine = deepspeed_peer.engine(model, _optimizer, sequences=setting.sequences, kept=kept)
        told = deepspeed_peer.config(sequences=setting.sequences, kept=kept)
        return Contender(name, lambda *batch: deepspeed_peer.step(engine, *batch), told)
    if name in OURS:
        policy, transport = OURS[name]
        zero = shard(model, mesh=mesh, policy=preset(policy), wire=Wire(mesh, transport=transport))
        step = _trained(model, _optimizer(zero.param_groups()), zero.finish_backward)
        return Contender(name, step, {"optimizer": "fused AdamW", "preset": policy})
    if name == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif name in ("fsdp2", "fsdp2-kept"):
        _shard_by_fsdp2(model, reshard=name == "fsdp2")
    return Contender(name, _trained(model, _optimizer(model.parameters())), {"optimizer": "fused AdamW"})


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
    """A step of a model in a plain torch training loop."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        finish()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
