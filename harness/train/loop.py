"""Training loop of ``zeropp train`` on each rank, and the job that flags and configuration define.

A job is a :class:`harness.suites.trial.Trial` of strategy ``recipe``, so model, data, optimizer and clocks
are those of the suites; it prints a log line per step and writes no record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from harness.cluster.rank import Progress, Rank
from harness.errors import Refusal
from harness.measure.meter import StepClock, forget_peak, peak_device, peak_rss
from harness.records.record import Step
from harness.runs.optimizers import built
from harness.runs.strategies import Strategy, sharded, wire_of
from harness.runs.trial import device_of
from harness.suites.model_sizes import GPTShape, tflops_per_rank
from harness.suites.trial import Cluster, Model, Optimizer, PolicyChanges, Trial
from harness.workloads import models
from harness.workloads.data import Data
from impl.checkpoint import save_load as checkpoint
from impl.checkpoint.save_load import CheckpointError
from impl.comm.wire import Wire
from impl.deepspeed.keys import ZERO
from impl.deepspeed.recipe import Recipe, recipe
from impl.parameters.init import Init
from impl.plan.topology import Topology

MB: Final = 1e6
LR: Final = 3e-4  # where neither flags nor the configuration say one, or that says "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Which checkpoint to load and which to save; None for none.

    Attributes:
        load: a checkpoint, or a folder of them, whose newest is taken.
        save: folder to save checkpoints in.
        every: steps between them; None saves after the last step only.
        keep: number of newest checkpoints to keep; None keeps all.
    """

    load: Path | None = None
    save: Path | None = None
    every: int | None = None
    keep: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Flags of ``zeropp train``; None where a flag leaves it to the configuration.

    Attributes:
        shape: of the model.
        sequence: tokens of a sequence.
        batch: sequences of a rank in a micro-batch.
        recompute: whether blocks are run again in the backward pass.
        precision: ``fp16`` or ``bf16``.
        stage: of ZeRO.
        lr: of the optimizer.
        steps: optimizer steps.
        corpus: see :mod:`harness.workloads.corpus`.
        seed: of weights and batches.
        max_padding: share of a unit's elements that may be padding; None leaves it to the policy.
        topology: nodes x ranks per node.
        device: ``cpu`` or ``cuda``.
        torchrun: whether this process is a rank already.
        threads: of torch in a rank.
        checkpoints: loaded and saved.
    """

    shape: GPTShape
    sequence: int
    batch: int | None
    recompute: bool
    precision: str | None
    stage: int | None
    lr: float | None
    steps: int
    corpus: str
    seed: int
    max_padding: float | None
    topology: Topology
    device: str
    torchrun: bool
    threads: int
    checkpoints: Checkpoints = Checkpoints()


@dataclass(frozen=True, slots=True)
class Job:
    """Argument of every rank of a training run.

    Attributes:
        trial: model, data, optimizer and policy.
        shape: of the model.
        recompute, checkpoints: see :class:`Asked`.
    """

    trial: Trial
    shape: GPTShape
    recompute: bool
    checkpoints: Checkpoints


def configured(config: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """The configuration, completed by the flags.

    Raises:
        Refusal: if a flag contradicts it.
    """
    table = {name: dict(value) if isinstance(value, Mapping) else value for name, value in config.items()}
    adam = table.get("optimizer")
    params = adam.get("params") if isinstance(adam, dict) else None
    if isinstance(adam, dict) and isinstance(params, Mapping | None):
        adam["params"] = params = dict(params or {})
        said, lr = params.get("lr"), asked.lr
        if lr is not None and said not in (None, "auto", lr):
            raise Refusal(f"--lr {lr}, but the configuration's optimizer.params.lr = {json.dumps(said)}")
        if lr is not None or said == "auto":
            params["lr"] = LR if lr is None else lr
        if not params:
            del adam["params"]
    for flag, section, key, value in (
        ("--zero-stage", ZERO, "stage", asked.stage),
        (f"--{asked.precision}", asked.precision, "enabled", None if asked.precision is None else True),
        ("--batch-size", None, "train_micro_batch_size_per_gpu", asked.batch),
    ):
        if value is None:
            continue
        place = table if section is None else table.setdefault(section, {})
        if not isinstance(place, dict):
            raise Refusal(f"{flag}, but the configuration's {section} = {json.dumps(place)}")
        said = place.get(key)
        if said not in (None, "auto", value):
            raise Refusal(f"{flag} {json.dumps(value)}, but the configuration's {key} = {json.dumps(said)}")
        place[key] = value
    return table


def job_of(config: Mapping[str, Any], asked: Asked) -> tuple[Job, Recipe]:
    """Build the job from configuration and flags.

    Raises:
        Refusal: if they contradict one another.
        DeepSpeedError: for a configuration that is not supported.
    """
    table = configured(config, asked)
    changes = PolicyChanges(max_padding=asked.max_padding)
    found = recipe(table, topology=asked.topology)
    found = replace(found, policy=changes.applied(found.policy))
    shape = asked.shape
    adam = found.optimizer
    arguments: dict[str, float | bool | list[float]] = {"lr": LR if asked.lr is None else asked.lr}
    if adam is not None:
        arguments = {
            "lr": adam.lr, "betas": list(adam.betas), "eps": adam.eps, "weight_decay": adam.weight_decay,
        }  # fmt: skip
    trial = Trial(
        strategy="recipe",
        deepspeed_config=json.dumps(table),
        policy=changes,
        cluster=Cluster(
            nodes=asked.topology.nodes,
            ranks_per_node=asked.topology.ranks_per_node,
            link="real" if asked.torchrun else "none",
            device="cuda" if asked.device == "cuda" else "cpu",
            transport="nccl" if asked.device == "cuda" else "shm",
            launcher="torchrun" if asked.torchrun else "local",
        ),
        model=Model(
            name="gpt-small",
            arguments={
                "layers": shape.layers, "width": shape.width, "heads": shape.heads, "vocab": shape.vocab,
                "tied": shape.tied,
            },
        ),
        corpus=asked.corpus,
        sequence=asked.sequence,
        tokens_per_rank=(found.micro_batch or 1) * asked.sequence,
        accumulation=found.accumulation,
        optimizer=Optimizer(name="AdamW" if adam is None else adam.type, arguments=arguments),
        clip=found.clip,
        steps=asked.steps,
        warmup=0,
        seed=asked.seed,
        threads=asked.threads,
    )  # fmt: skip
    return Job(trial, shape, asked.recompute, asked.checkpoints), found


def train(rank: Rank, job: Job) -> list[Step]:
    """Train on this rank; rank 0 reports one line per step.

    Returns:
        Times of its steps.

    Raises:
        Refusal, PolicyError, GeometryError, ZeroError, CorpusError: it cannot be run as asked.
    """
    return _Training(rank, job).run()


class _Training:
    """State of a training run on one rank."""

    def __init__(self, rank: Rank, job: Job) -> None:
        trial = job.trial
        self.rank, self.job, self.trial = rank, job, trial
        self.device = device_of(trial, rank)
        self.data = Data(trial, rank.rank, self.device)
        policy = trial.resolved_policy()
        assert policy is not None  # noqa: S101  # a recipe is one
        wire = wire_of(trial, rank, self.device)
        # Cut block by block: no rank ever holds the whole model, unless its stage does.
        with (
            Init(mesh=wire.mesh, policy=policy, blocks=models.Block, wire=wire, seed=trial.seed),
            self.device,
        ):
            model = models.GPT(job.shape, trial.sequence, recompute=job.recompute)
        self.strategy: Strategy = sharded(trial, model, wire, policy)
        self.optimizer = built(trial.optimizer, self.strategy.parameters())
        self.clock = StepClock(self.strategy.exposed_seconds, self.device)
        self.stepped = True  # the last step, rather than skipped for an overflow

    def run(self) -> list[Step]:
        """Run all steps, reporting a line for each."""
        begin = self._resumed()
        forget_peak(self.device)
        for index in range(begin, self.trial.steps):
            loss, scale = self._step(index), _scale(self.strategy)
            mean = _mean(self.strategy, loss, self.device)
            peak = peak_device(self.device) or peak_rss()
            text = line(self.job, self.clock.steps[-1], mean, scale, peak)
            if not self.stepped:
                text += " | overflow: nothing was updated"
            self.rank.report(Progress("steps", index + 1, self.trial.steps, text))
            self._save(index + 1)
        self.strategy.close()
        return self.clock.steps

    def _resumed(self) -> int:
        """Load the checkpoint, if any; returns the number of steps already done.

        Raises:
            Refusal: for a checkpoint that cannot be loaded, of other data, or with no step left.
        """
        folder = self.job.checkpoints.load
        if folder is None:
            return 0
        assert self.strategy.zero is not None  # noqa: S101  # a recipe is a policy
        asked = [_options(group) for group in self.optimizer.param_groups]
        try:
            loaded = checkpoint.load(folder, self.strategy.zero, [self.optimizer])
        except CheckpointError as error:
            raise Refusal(str(error)) from None
        saved = [_options(group) for group in self.optimizer.param_groups]
        for group, options in zip(self.optimizer.param_groups, asked, strict=True):
            group.update(options)
        other = dict.fromkeys(
            f"{name} = {here}, not the checkpoint's {there}"
            for options, before in zip(asked, saved, strict=True)
            for name in options
            if (here := json.dumps(options[name])) != (there := json.dumps(before.get(name)))
        )
        held = loaded.extra if isinstance(loaded.extra, dict) else {}
        for name, here in self._run().items():
            if held.get(name) != here:
                raise Refusal(f"{folder}: is of a run with {name} {held.get(name)}, not {here}")
        done = int(held.get("steps", 0))
        if done >= self.trial.steps:
            raise Refusal(f"{folder}: has {done} steps behind it, --steps {self.trial.steps} leaves none")
        said = [
            f"{folder}: goes on after step {done}",
            *(f"not taken over: {why}" for why in loaded.dropped),
            *(f"as asked: {why}" for why in other),
        ]
        self.rank.report(Progress("resume", done, self.trial.steps, "\n".join(said)))
        return done

    def _save(self, done: int) -> None:
        """Save a checkpoint after ``done`` steps, if one is due.

        Raises:
            Refusal: if it cannot be written; earlier ones stay.
        """
        asked = self.job.checkpoints
        last = done == self.trial.steps
        if asked.save is None or not (last or (asked.every and done % asked.every == 0)):
            return
        assert self.strategy.zero is not None  # noqa: S101  # a recipe is a policy
        extra = self._run() | {"steps": done}
        try:
            saving = checkpoint.save(
                asked.save, self.strategy.zero, [self.optimizer], extra=extra, keep=asked.keep
            )
        except CheckpointError as error:
            raise Refusal(str(error)) from None
        self.rank.report(Progress("save", done, self.trial.steps, f"saved {saving.path}"))

    def _run(self) -> dict[str, Any]:
        """Identity of the run, which must be equal on resume: batches are drawn from it."""
        trial = self.trial
        return {"seed": trial.seed, "corpus": self.data.sha256, "sequence": trial.sequence}

    def _step(self, index: int) -> float:
        """One optimizer step; this rank's mean loss."""
        clock, strategy, accumulation = self.clock, self.strategy, self.trial.accumulation
        clock.begin()
        losses: list[Tensor] = []
        for number, micro in enumerate(self.data.step(index)):
            strategy.begin(last=number == accumulation - 1)
            for batch in micro:
                with clock.part("forward"):
                    loss = strategy.model(*batch)
                with clock.part("backward"):
                    strategy.backward(loss / accumulation)
                losses.append(loss.detach())
            with clock.part("backward"):
                strategy.finish_backward()
        with clock.part("optimizer"):
            norm, self.stepped = strategy.step(self.optimizer, self.trial.clip)
            self.optimizer.zero_grad()
        mean = math.fsum(float(loss) for loss in losses) / len(losses)
        clock.end(index=index, warmup=False, loss=mean, norm=norm)
        return mean


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an optimizer's parameter group, without the parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def _mean(strategy: Strategy, loss: float, device: torch.device) -> float:
    """Mean loss over all ranks, through the wire: 8 bytes per rank."""
    assert strategy.zero is not None  # noqa: S101  # a recipe is a policy
    wire: Wire = strategy.zero.wire
    losses = wire.all_gather_small(torch.tensor([loss], dtype=torch.float64, device=device))
    return float(losses.mean())


def _scale(strategy: Strategy) -> float | None:
    """The loss scale, where there is one."""
    assert strategy.zero is not None  # noqa: S101  # a recipe is a policy
    return strategy.zero.scaler.scale if strategy.zero.policy.loss_scale is not None else None


def line(job: Job, step: Step, loss: float, scale: float | None, peak: int) -> str:
    """Log line of one step, in the form of the ZeRO++ tutorial's log.

    Args:
        job: for batch and model sizes.
        step: its times.
        loss: mean over all ranks.
        scale: of the loss, if there is one.
        peak: largest bytes of a rank so far: allocated on its GPU, or resident.
    """
    trial = job.trial
    ranks = trial.topology().world
    sequences = trial.tokens_per_rank // trial.sequence * trial.accumulation * ranks
    rate = tflops_per_rank(
        job.shape, sequences=sequences, length=trial.sequence, recompute=job.recompute, seconds=step.total,
        ranks=ranks,
    )  # fmt: skip
    parts = ", ".join(
        f"{name} {getattr(step, name) * 1e3:.1f}" for name in ("forward", "backward", "optimizer")
    )
    said = [
        f"step {step.index + 1}/{trial.steps}",
        f"loss {loss:.6f}",
        f"{step.total * 1e3:.1f} ms ({parts})",
        f"{sequences / step.total:.3f} samples/s",
        f"{rate:.4g} TFLOP/s per rank",
        f"{peak / MB:.2f} MB at most",
    ]
    if scale is not None:
        said.append(f"loss scale {scale:g}")
    if step.gradient_norm is not None:
        said.append(f"gradient norm {step.gradient_norm:.4g}")
    return " | ".join(said)
