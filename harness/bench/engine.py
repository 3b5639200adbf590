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
from torch import Tensor, nn

from harness.bench import peers
from harness.bench.rounds import interleaved
from harness.cluster.rank import Rank
from harness.records.bench_record import CPU, Sample
from harness.runs.strategies import peer
from harness.suites.trial import Model
from harness.workloads import corpus
from harness.workloads.models import build
from impl.comm.mesh import Mesh
from impl.comm.wire import Transport, Wire
from impl.plan.policy import preset
from impl.zero import shard

SEQUENCE: Final = 128
SEQUENCES: Final = 4
STEPS: Final = 3  # of each contender in a round
ROUNDS: Final = (5, 40)
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


@dataclass(slots=True)
class Contender:
    """One contender: a strategy with its own copy of the model."""

    name: str  # of :data:`NAMES`
    step: Callable[[Tensor, Tensor], Tensor]  # one training step; () the loss before it
    told: dict[str, Any]  # how it was set up
    losses: list[float] = field(default_factory=list)  # this rank's, so far

    def round(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """Train on each batch; seconds on this rank, and CPU seconds of its process."""
        begin, computed = time.perf_counter(), time.process_time()
        losses = [self.step(*batch) for batch in batches]
        took = time.perf_counter() - begin, time.process_time() - computed
        self.losses += [float(loss) for loss in losses]
        return took


def measure(rank: Rank, *, names: Sequence[str], model: str, seconds: float) -> list[Sample]:
    """Train everything for about ``seconds``; the target of every rank.  Seconds and losses are this rank's
    alone; ``names`` are of :data:`NAMES`, the first is :data:`ALONE`, and ``model`` is a preset.
    """
    # torch 2.13 renames two collectives that FSDP2 and DeepSpeed still call by their old names.
    warnings.filterwarnings("ignore", category=FutureWarning)
    mesh = Mesh.create(rank.topology)
    contenders = [_contender(name, mesh, model) for name in names]
    batch = batches_of(rank, SEQUENCES)
    took = interleaved(
        rank,
        [each.round for each in contenders],
        "rounds",
        ROUNDS,
        lambda index: [batch(index * STEPS + number) for number in range(STEPS)],
        seconds=seconds,
    )
    by_round = [[whole for whole, _ in rounds] for rounds in took]
    tokens = mesh.topology.world * SEQUENCES * SEQUENCE * STEPS
    parameters = sum(parameter.numel() for parameter in model_of(model).parameters())
    # The one learns from its own batches alone, the other quantises.
    equal = {ALONE: 1, "zeropp": 0}
    samples = []
    for each, mine, rounds in zip(contenders, by_round, took, strict=True):
        policy, transport = OURS.get(each.name, (each.name, "none" if each.name == ALONE else "backend"))
        samples.append(
            Sample(
                kind="training",
                names={
                    "contender": policy, "transport": transport, "model": model,
                    "sequence": SEQUENCE, "sequences": SEQUENCES,
                },
                sizes={"parameters": parameters, "tokens": tokens, "steps": STEPS},
                seconds=mine,
                reference_seconds=by_round[0],
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
        here = (other for other in samples if other.place == sample.place)
        first = next((other for other in here if other.equal_steps == len(other.losses)), sample)
        pairs = zip(sample.losses[: sample.equal_steps], first.losses, strict=False)
        for step, (loss, expected) in enumerate(pairs):
            if not abs(loss - expected) <= LOSS_TOLERANCE * abs(expected):  # NaN is not equal either
                nodes, ranks, _ = sample.place
                one, other = (f"{x.names['contender']} over {x.names['transport']}" for x in (sample, first))
                return (
                    f"{one} has loss {loss:.6g} in step {step} on {nodes}x{ranks} ranks, {other} "
                    f"{expected:.6g}: more than {LOSS_TOLERANCE:g} apart, so they do not train the same"
                )
    return None


def batches_of(rank: Rank, sequences: int) -> Callable[[int], Batch]:
    """Batches of text by step, for this rank, of ``sequences`` sequences."""
    text = corpus.Text(corpus.load(corpus.STDLIB), SEQUENCE)

    def batch(step: int) -> Batch:
        read, answer = text.batch(seed=0, step=step, micro_batch=0, rank=rank.rank, sequences=sequences)
        return torch.tensor(read), torch.tensor(answer)

    return batch


def model_of(name: str, **arguments: int) -> nn.Module:
    """Build a preset's model, equal on every rank and for every contender."""
    torch.manual_seed(0)
    return build(Model(name=name, arguments=arguments), SEQUENCE)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of every contender."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def _contender(name: str, mesh: Mesh, preset_name: str) -> Contender:
    """Build a contender; all ranks must call it."""
    model, told = model_of(preset_name), {"optimizer": "fused AdamW"}
    if name in DEEPSPEED:
        kept = name == "deepspeed-kept"
        return Contender(name, *peers.deepspeed(model, optimizer_of, sequences=SEQUENCES, kept=kept))
    if name in OURS:
        policy, transport = OURS[name]
        zero = shard(model, mesh=mesh, policy=preset(policy), wire=Wire(mesh, transport=transport))
        step = _trained(model, optimizer_of(zero.param_groups()), zero.finish_backward)
        return Contender(name, step, told | {"preset": policy})
    if name != ALONE:
        model = peer(name.removesuffix("-kept"), model, mesh.device, kept=name.endswith("-kept")).model
    return Contender(name, _trained(model, optimizer_of(model.parameters())), told)


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
