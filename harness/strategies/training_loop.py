"""Runs the training loop of one rank, for trials of suites and for ``zeropp train``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harness.measure.step_clock import StepClock
from harness.measure.unsharded_loss import evaluating
from harness.strategies.optimizers import set_rates
from harness.strategies.strategy import Strategy
from harness.suites.trial import Trial
from harness.witness.check_costs import counted
from harness.witness.training_checks import TrainingChecks
from harness.workloads.generation import decode
from harness.workloads.preset_parameters import shape_of
from harness.workloads.rank_batches import Batches, ExperienceBatch, RankBatches, batches_of
from harness.workloads.reinforcement import Experience, group_advantages, sampler, targets_of
from impl.engine.masters import Stepped
from impl.plan.traffic import Event


@dataclass(slots=True)
class Passes:
    """Collects the results of the forward and backward passes of one step."""

    losses: list[Tensor] = field(default_factory=list)  # one scalar for each of this rank's batches
    batches: list[tuple[Tensor, Any]] = field(default_factory=list)  # inputs and targets that the model read
    # The passes by name, such as ``forward``, in order; ``impl.plan.traffic`` predicts their messages.
    events: list[Event] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Mean loss over all batches."""
        return math.fsum(float(loss) for loss in self.losses) / len(self.losses)


def run_passes(
    trial: Trial, strategy: Strategy, data: Batches, index: int, clock: StepClock | None = None
) -> Passes:
    """Run the forward and backward passes of step ``index``, without the optimizer; all ranks must call this.

    Args:
        trial: The trial.
        strategy: The trial's strategy, which reduces the gradients.
        data: Gives the batches of each step.
        index: Number of the step; the first warm-up step is 0.
        clock: Adds up the seconds of the forward and backward passes.  With None nothing is timed.
    """
    passes, clock = Passes(), clock or StepClock()
    for number, micro in enumerate(data.step(index)):
        last = number == trial.accumulation - 1
        strategy.begin(last=last)
        for batch in micro:
            with clock.part("forward"):
                loss = strategy.model(*batch)
            with clock.part("backward"):
                strategy.backward(loss / (trial.accumulation * len(micro)))
            passes.losses.append(loss.detach())
            passes.batches.append(batch)
        reduced = last or strategy.reduces_each_micro_batch
        passes.events += ["forward", "backward" if reduced else "accumulate"]
    return passes


class TrainingLoop:
    """Runs the training steps of a trial on one rank.  The strategy must not have trained yet."""

    def __init__(self, trial: Trial, strategy: Strategy, data: RankBatches, device: torch.device) -> None:
        """Build the trial's optimizer.

        Args:
            trial: The trial.
            strategy: The trial's strategy, which has not trained yet.
            data: This rank's batches of each step.
            device: The device that computes, whose work the loop's clock times.

        Raises:
            Refusal: if the optimizer cannot be built.
        """
        self.trial, self.strategy, self.data = trial, strategy, data
        self.optimizer, self.schedule = strategy.make_optimizer(trial.optimizer), trial.schedule()
        self.clock = StepClock(
            strategy.mark_exposed, device
        )  # holds the times and losses of the steps so far
        self.events: list[Event] = []  # all passes and steps so far
        self.checks: TrainingChecks | None = None  # called at every step, if set
        # A function that makes the batch of a step (workload rlhf).  If it is None, `data` gives the batch.
        self.collect: Callable[[int, StepClock], ExperienceBatch] | None = None

    def step(self, index: int, *, warmup: bool = False) -> Stepped:
        """Run the passes of step ``index`` and take one optimizer step; all ranks must call this.

        Args:
            index: Number of the step.
            warmup: Whether the step is recorded as a warm-up step, which counts in no timing.

        Returns:
            The global norm of the gradient before clipping (None if it was not computed), and whether the optimizer
            stepped.
        """
        clock, strategy = self.clock, self.strategy
        clock.begin()
        experience = None if self.collect is None else self.collect(index, clock)
        passes = run_passes(self.trial, strategy, experience or self.data, index, clock)
        if self.checks is not None:
            with clock.paused():
                self.checks.note_reduced(index, passes.mean, strategy.loss_scale)
        with clock.part("optimizer"):
            set_rates(self.optimizer, self.schedule, index)
            stepped = strategy.step(self.optimizer, self.trial.clip)
        if self.checks is not None:
            with clock.paused():
                self.checks.replay(index, done=stepped.done)
        with clock.part("optimizer"):
            self.optimizer.zero_grad()
        self.events += passes.events
        self.events += ["norm"] if stepped.norm is not None else []
        self.events += ["step"] if stepped.done else []
        clock.end(index=index, warmup=warmup, loss=passes.mean, norm=stepped.norm)
        if self.checks is not None:
            drawn = passes.batches if experience is None else experience.drawn
            with clock.witness.lap("check"), counted(self.checks.checked.costs, "batches"):
                self.checks.note_batches(index, drawn, passes.batches)
        return stepped

    @property
    def seconds(self) -> float:
        """Total seconds of all steps so far."""
        return math.fsum(step.total for step in self.clock.steps)


def collect(
    trial: Trial,
    data: RankBatches,
    actor: nn.Module,
    judges: nn.Module,
    *,
    rank: int,
    index: int,
    clock: StepClock,
) -> ExperienceBatch:
    """Make the batch on which one rank trains in one step of workload ``rlhf``.

    The prompts are the beginnings of the first sequences that ``data`` gives.  The actor continues each prompt
    ``trial.rlhf.group`` times, with one forward pass for each token.  The judges then score whole sequences in one
    forward pass.  If the models are sharded, all ranks must call this.

    Args:
        trial: The trial.
        data: Gives the sequences whose beginnings are the prompts.
        actor: The model that is trained.
        judges: The frozen models (:class:`~harness.workloads.reinforcement.Judges`).
        rank: Number of this rank.  Seed, step and rank determine which tokens are sampled.
        index: Number of the step.
        clock: Adds up the seconds of decoding as part ``generate``, and the seconds of the judges as part ``score``.
    """
    generate, group = trial.generate, trial.rlhf.group
    drawn = [*batches_of(data, index)]
    read, _ = drawn[0]  # (B, sequence)
    prompts = read[: len(read) // group, : generate.prompt].repeat_interleave(group, 0)  # (B, prompt)
    layers, choose = shape_of(trial.model).layers, sampler(trial.seed, index, rank)
    with clock.part("generate"), evaluating(actor):
        written = torch.stack([*decode(actor, prompts, generate.tokens, layers, choose)], 1)
    sequences = torch.cat([prompts, written], 1)  # (B, sequence)
    targets = targets_of(sequences, generate.prompt)  # (B, sequence - 1)
    with clock.part("score"), torch.no_grad():
        reference, rewards = judges(sequences, targets)
    experience = Experience(targets, group_advantages(rewards, group), reference, trial.rlhf.kl)
    return ExperienceBatch((sequences[:, :-1], experience), drawn)
