"""Runs one rank of ``zeropp train``: builds the sharded model, resumes, trains, logs and saves checkpoints.

Model, data, optimizer and clocks are the same as in trials of suites.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from harness.cluster.rank import Progress, Rank
from harness.errors import Refusal
from harness.measure.peak_memory import forget_peak, peak_device, peak_rss
from harness.records.trial_record import Step
from harness.runs.rank_trial import device_of
from harness.strategies.strategy import shard_model, wire_of
from harness.strategies.training_loop import TrainingLoop
from harness.suites.model_sizes import step_flops
from harness.suites.trial import Trial
from harness.workloads import models
from harness.workloads.preset_parameters import shape_of
from harness.workloads.rank_batches import RankBatches
from impl.checkpoint import save_load as checkpoint
from impl.checkpoint.commit import resolve
from impl.checkpoint.manifest import read_manifest
from impl.checkpoint.save_load import CheckpointError
from impl.engine.masters import LossScaleError
from impl.errors import ZeroError
from impl.parameters.init import Init

MB: Final = 1e6
# The flags that determine the batches of a run, by the name under which a checkpoint has their values.
_FLAGS: Final = {"seed": "--seed", "corpus": "--corpus", "sequence": "--seq-length"}


@dataclass(frozen=True, slots=True)
class Job:
    """A training run: the trial, and where checkpoints are loaded and saved.  Every rank gets the same job."""

    trial: Trial  # model, data, optimizer and policy
    # Checkpoint to continue from, or a folder whose newest checkpoint is used.  None starts a new run.
    load: Path | None
    save: Path | None  # folder to save checkpoints in; None saves no checkpoint
    every: int | None  # steps between checkpoints; None saves after the last step only
    keep: int | None  # number of newest checkpoints to keep; None keeps all


def train(rank: Rank, job: Job) -> list[Step]:
    """Train on this rank, and return the losses and times of the steps on this rank.

    The rank reports a line for each step; the command prints the lines of rank 0.

    Raises:
        Refusal: if the checkpoint does not fit, if gradients overflow even at the smallest loss scale, or if the engine
            refuses the model.
    """
    try:
        return _Training(rank, job).run()
    except (CheckpointError, LossScaleError, ZeroError) as error:
        raise Refusal(str(error)) from None


class _Training:
    """State of a training run on one rank."""

    def __init__(self, rank: Rank, job: Job) -> None:
        trial = job.trial
        self.rank, self.job, self.trial = rank, job, trial
        self.device = device_of(trial, rank)
        self.data = RankBatches(trial, rank.rank, self.device)
        policy = trial.resolved_policy()
        assert policy is not None  # noqa: S101  # strategy "recipe" always has a policy
        wire = wire_of(trial, rank, self.device)
        # The model is sharded block by block while it is built, so that no rank ever holds all of it, except at
        # stages that keep whole weights.
        with (
            Init(mesh=wire.mesh, policy=policy, blocks=models.Block, wire=wire, seed=trial.seed),
            self.device,
        ):
            model = models.build(trial.model, trial.sequence)
        if trial.activation_checkpointing:
            models.checkpoint_activations(model)
        self.strategy = shard_model(trial, model, wire, policy)
        self.zero = self.strategy.zero
        self.loop = TrainingLoop(trial, self.strategy, self.data, self.device)

    def run(self) -> list[Step]:
        """Run all steps, report a line for each, and return the losses and times of all steps on this rank."""
        begin = self._resumed()
        forget_peak(self.device)
        for index in range(begin, self.trial.steps):
            stepped, step = self.loop.step(index), self.loop.clock.steps[-1]
            loss = torch.tensor([step.loss], dtype=torch.float64, device=self.device)
            mean = float(self.zero.wire.all_gather_small(loss).mean())  # over all ranks; 8 bytes from each
            scale = None if self.zero.policy.loss_scale is None else self.zero.scaler.scale
            peak = peak_device(self.device) or peak_rss()
            text = line(self.trial, step, mean, scale, peak)
            if not stepped.done:
                text += " | overflow: step skipped"
            self.rank.report(Progress("steps", index + 1, self.trial.steps, text))
            self._save(index + 1)
        self.strategy.close()
        return self.loop.clock.steps

    def _resumed(self) -> int:
        """Load the job's checkpoint, and return the number of steps that the saved run had done.

        Returns 0 if the job has no checkpoint.  Options of the optimizer, such as the learning rate, come from this
        run's flags and configuration, not from the checkpoint.

        Raises:
            CheckpointError: If the checkpoint cannot be read, or is of another run.
            Refusal: If the saved run had done as many steps as this run has in all, or more, so that none is left.
        """
        folder = self.job.load
        if folder is None:
            return 0
        path, _ = checkpoint.together(self.zero.wire, lambda: (self._checked(folder), None))
        groups = self.loop.optimizer.param_groups
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        loaded = checkpoint.load(path, self.zero, [self.loop.optimizer])
        changes: dict[str, None] = {}  # a set in order
        for group, options in zip(self.loop.optimizer.param_groups, settings, strict=True):
            for name, value in options.items():
                if (new := json.dumps(value)) != (old := json.dumps(group.get(name))):
                    changes[f"{name} = {new}, not the checkpoint's {old}"] = None
            group.update(options)
        done = int(loaded.extra["steps"])
        if done >= self.trial.steps:
            raise Refusal(
                f"{folder}: the checkpoint was saved after step {done}, so --steps {self.trial.steps} leaves no step "
                "to run; raise --steps"
            )
        lines = [
            f"{folder}: continues after step {done}",
            *(f"not restored: {reason}" for reason in loaded.dropped),
            *(f"changed for this run: {change}" for change in changes),
        ]
        self.rank.report(Progress("resume", done, self.trial.steps, "\n".join(lines)))
        return done

    def _checked(self, folder: Path) -> Path:
        """Check that the checkpoint to load fits this run's batches, model and optimizer, and return its path.

        The checkpoint is ``folder`` itself, or the newest checkpoint in ``folder``.  When the checkpoint is loaded
        afterwards, model and optimizer are checked again.  This method checks them before, because its error messages
        name the flags to change.

        Raises:
            CheckpointError: If the checkpoint cannot be read, was not saved by ``zeropp train``, or is of another run.
        """
        path, run = resolve(folder), self._run()
        manifest = read_manifest(path)
        saved = manifest.extra if isinstance(manifest.extra, dict) else {}
        if not {*run, "steps"} <= saved.keys():
            raise CheckpointError(
                f"{path}: was not saved by zeropp train, so the batches of its run are not known: give --load a "
                "checkpoint that zeropp train has saved"
            )
        for name, flag in _FLAGS.items():
            if saved[name] != run[name]:
                old, new = (
                    f"(SHA-256 {str(value)[:12]})" if name == "corpus" else value
                    for value in (saved[name], run[name])
                )
                raise CheckpointError(
                    f"{path}: comes from a run with {flag} {old}, and this run has {flag} {new}: give the same {flag}, "
                    "or load another checkpoint"
                )
        try:
            checkpoint.check_model(self.zero, manifest)
        except CheckpointError as error:
            raise CheckpointError(
                f"{path}: {error} (--preset, --num-layers, --hidden-size and --vocab-size choose this run's model)"
            ) from None
        kinds, kind = [entry["kind"] for entry in manifest.optimizers], type(self.loop.optimizer).__name__
        if kinds != [kind]:
            saved_kinds = " and ".join(kinds) or "no optimizer"
            raise CheckpointError(
                f"{path}: has the state of {saved_kinds}, and this run's optimizer is {kind}: "
                "set optimizer.type and optimizer.params.adam_w_mode in the --deepspeed_config as in the saved run"
            )
        return path

    def _save(self, done: int) -> None:
        """Save a checkpoint if one is due after ``done`` steps, and report its path.

        If the job has a folder to save in, a checkpoint is due after the last step and after every ``job.every`` steps.
        """
        job = self.job
        last = done == self.trial.steps
        if job.save is None or not (last or (job.every and done % job.every == 0)):
            return
        extra = self._run() | {"steps": done}
        path = checkpoint.save(job.save, self.zero, [self.loop.optimizer], extra=extra, keep=job.keep)
        self.rank.report(Progress("save", done, self.trial.steps, f"saved {path}"))

    def _run(self) -> dict[str, Any]:
        """Return the settings that determine the batches of this run; they are saved in each checkpoint.

        A run that loads the checkpoint must have the same settings.  The keys are ``seed``, ``corpus`` (SHA-256 of the
        corpus) and ``sequence`` (tokens of a sequence).
        """
        trial = self.trial
        return {"seed": trial.seed, "corpus": self.data.sha256, "sequence": trial.sequence}


def line(trial: Trial, step: Step, loss: float, scale: float | None, peak: int) -> str:
    """Return the log line of one step, in the form of the ZeRO++ tutorial.

    Args:
        trial: The trial.
        step: The times of the step on this rank.
        loss: Mean loss over all ranks.
        scale: Loss scale; None without one.
        peak: Peak memory in bytes: of the process if ranks compute on the CPU, otherwise of the GPU.
    """
    ranks = trial.topology().world
    sequences = trial.tokens_per_rank // trial.sequence * trial.accumulation * ranks
    shape, recompute = shape_of(trial.model), trial.activation_checkpointing
    flops = step_flops(shape, sequences=sequences, length=trial.sequence, recompute=recompute)
    parts = ", ".join(
        f"{name} {getattr(step, name) * 1e3:.1f}" for name in ("forward", "backward", "optimizer")
    )
    columns = [
        f"step {step.index + 1}/{trial.steps}",
        f"loss {loss:.6f}",
        f"{step.total * 1e3:.1f} ms ({parts})",
        f"{sequences / step.total:.3f} samples/s",
        f"{flops / step.total / ranks / 1e12:.4g} TFLOP/s per rank",
        f"{'process' if trial.cluster.device == 'cpu' else 'GPU'} peak {peak / MB:.2f} MB",
    ]
    if scale is not None:
        columns.append(f"loss scale {scale:g}")
    if step.gradient_norm is not None:
        columns.append(f"gradient norm {step.gradient_norm:.4g}")
    return " | ".join(columns)
