"""Compares a trial with a single process and with exact values, at stated steps, not while it is timed.

Before training, in evaluation mode: the sharded model's loss and reduced gradients with a single process's
(:mod:`harness.measure.gradient_bounds`).  Where errors are measured, before the first, a middle and the last
step: all messages with exact values (:mod:`harness.measure.communication_error`), and before the later ones
loss and gradients again, with a single process that has the masters of that step.  After the steps: a grid of
codecs, without messages (:mod:`harness.measure.quantisation_error`).  Training is left as it was.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from harness.cluster.rank import Progress, Rank
from harness.cluster.rank_processes import kind_of
from harness.errors import Refusal
from harness.measure import communication_error, quantisation_error
from harness.measure.communication_error import Place, SumsByPlace
from harness.measure.gradient_bounds import (
    ROUNDING,
    FirstGradient,
    GradientError,
    Layout,
    layouts_of,
    model_layouts,
)
from harness.measure.training_checks import TrainingChecks
from harness.measure.unsharded_loss import (
    as_computed,
    as_gathered,
    by_columns,
    computing_with,
    evaluating,
    mean_loss,
)
from harness.records.trial_record import QuantisationError, Validation
from harness.strategies.strategy import Strategy
from harness.strategies.training_loop import run_passes
from harness.suites.peers import PEERS, family_of
from harness.suites.trial import Trial
from harness.workloads import models
from harness.workloads.rank_batches import Batches, batches_of
from impl.adapters.joined import fsdp2_groups
from impl.adapters.traffic import GroupGeometry
from impl.codecs.codec import Dtype
from impl.codecs.rounding_noise import Clock
from impl.errors import raised
from impl.plan.shard_layout import UnitGeometry
from impl.plan.traffic import Event
from impl.zero import Zero, find_blocks, plan_units

TOLERANCE: Final = 1e-4  # of the loss, or absolute below 1: sums of two processes round differently
same_loss: Final = partial(math.isclose, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


class TrialError(RuntimeError):
    """A trial ran, but a check of its results failed; the message names the numbers.

    ``losses``, by step, and ``validations`` are those of the trial before the first that is not finite.
    """

    def __init__(
        self, message: str, losses: Sequence[float] = (), validations: Sequence[Validation] = ()
    ) -> None:
        super().__init__(message)
        self.losses, self.validations = list(losses), list(validations)


@dataclass(frozen=True, slots=True)
class ComparedLoss:
    """Mean losses of one rank's batches of one step, in evaluation mode."""

    reference: float  # of a single process in fp32
    expected: float  # of one with weights as all-gathered
    trained: float | None = None  # of that in training mode, as the step's own; None where that is random
    step: int = 0  # just before which they were compared
    sharded: float = math.nan  # of the sharded model


@dataclass(slots=True)
class Compared:
    """Comparisons of one rank."""

    losses: list[ComparedLoss] = field(default_factory=list)  # before training, and before later steps
    gradient_errors: list[GradientError] = field(default_factory=list)  # by step and unit
    communicated: list[tuple[Place, list[float]]] = field(default_factory=list)  # sums of errors sent
    errors: list[QuantisationError] = field(default_factory=list)  # of the grid of codecs, over all ranks


class Comparison:
    """A trial's comparisons on one rank with the unsharded model; all ranks must call each method."""

    def __init__(self, trial: Trial, model: nn.Module, data: Batches, rank: Rank) -> None:
        self.trial, self.data, self.rank = trial, data, rank
        self.expected, self.gradient = self._single_process(model)
        total = trial.warmup + trial.steps
        # Further repeats would measure the same errors again.
        self.measures = trial.measure_quantisation and trial.repeat == 0
        self.steps = sorted(communication_error.measured_steps(total)) if self.measures else []
        self.compared = Compared()
        self.events: list[Event] = []  # passes before training, as ``impl.plan.traffic`` has them

    def before_training(self, strategy: Strategy) -> None:
        """Compare the sharded model's loss and reduced gradients with a single process's."""
        if self.gradient is None:
            loss = mean_loss(strategy.model, batches_of(self.data))
            strategy.weights_changed()  # weights gathered by the check must not serve the first step
        else:
            with evaluating(strategy.model):
                passes = run_passes(self.trial, strategy, self.data, 0)
            self.compared.gradient_errors += _gradient_errors(self.gradient, strategy)
            loss = passes.mean
            strategy.forget_gradients()
            self.events = [*passes.events, "changed"]
        self.compared.losses.append(replace(self.expected, sharded=loss))

    def before_step(self, index: int, strategy: Strategy, checks: TrainingChecks) -> None:
        """Send the messages of step ``index`` in advance, and compare them with exact values."""
        self.rank.report(Progress("measuring errors", self.steps.index(index) + 1, len(self.steps)))
        policy, errors = self.trial.resolved_policy(), SumsByPlace()
        differ = policy is not None and communication_error.outcomes_differ(policy)
        for repeated in (1, communication_error.REPEATED) if differ and index == self.steps[-1] else (1,):
            with _rehearsal(strategy) as observed:
                if repeated == 1 and strategy.zero is not None:
                    errors |= communication_error.weight_errors(index, strategy.zero)
                for _ in range(repeated):
                    run_passes(self.trial, strategy, self.data, index)
            errors |= communication_error.gradient_errors(index, observed, repeated=repeated)
        self.compared.communicated += [(place, sums.tolist()) for place, sums in errors.items()]
        if index and strategy.zero is not None:
            self._compare_later_step(index, strategy, strategy.zero, checks)

    def _compare_later_step(self, index: int, strategy: Strategy, zero: Zero, checks: TrainingChecks) -> None:
        """Compare loss and reduced gradients of step ``index`` with one process that has the masters.

        Weights that are sums of differences, and gradients that carry errors over, are left out: they are not
        one encoding of a single process's. So are trials whose budget chooses other codecs than their policy.
        """
        if zero.policy.differences is not None or zero.policy.budget is not None:
            return
        with _rehearsal(strategy):
            with next(strategy.model.parameters()).device:
                model = models.of_trial(self.trial)
            model.load_state_dict(zero.full_state_dict())
            clock = Clock(self.trial.seed, zero.clock.step)
            expected, gradient = self._single_process(model, index, clock)
            with evaluating(strategy.model):
                passes = run_passes(self.trial, strategy, self.data, index)
            if expected.trained is not None and zero.policy.feedback is None:
                checks.note_rehearsal(index)
            if gradient is not None and zero.policy.feedback is None:
                self.compared.gradient_errors += _gradient_errors(gradient, strategy)
        self.compared.losses.append(replace(expected, sharded=passes.mean))

    def after_steps(self, strategy: Strategy) -> None:
        """Try a grid of codecs on this rank's weights, and on gradients of one more backward pass."""
        if strategy.zero is None or not self.measures:
            return
        self.rank.report(Progress("trying codecs"))
        run_passes(self.trial, strategy, self.data, self.trial.warmup + self.trial.steps)
        self.compared.errors = quantisation_error.measure(strategy.zero)

    def _single_process(
        self, model: nn.Module, step: int = 0, clock: Clock | None = None
    ) -> tuple[ComparedLoss, FirstGradient | None]:
        """Losses of the unsharded model on this rank's batches of ``step``, and all ranks' mean gradient, or
        None if a trial decodes or a peer keeps its gradients to itself; all ranks must call it.

        ``clock`` determines the random rounding of weights; by default the first step's.
        """
        trial, topology, policy = self.trial, self.rank.topology, self.trial.resolved_policy()
        try:
            reference = mean_loss(model, batches_of(self.data, step))
        except Exception as error:  # by a user's own model, unless memory is lacking
            if ":" not in trial.model.name or kind_of(error) != "crashed":
                raise
            raise Refusal(f"model {trial.model.name!r}: raised {raised(error)}") from error
        layouts: Sequence[Layout] | None = None  # DeepSpeed keeps its reduced gradients to itself
        family, columns = trial.host or family_of(trial.strategy), dict[str, Tensor]()
        with contextlib.ExitStack() as gathered:
            units: Sequence[UnitGeometry | GroupGeometry] = ()
            if family == "fsdp2":
                units = fsdp2_groups(model, find_blocks(model), topology)
            elif policy is not None:
                units = plan_units(model, topology, policy)
            elif family == "ddp":
                layouts = model_layouts(model)
            if units:
                layouts = layouts_of(units, policy, topology)
            if policy is not None and family != "ddp":  # DDP has whole weights on every rank
                columns = by_columns(model, policy, units)
                gathered.enter_context(as_gathered(model, policy, units, clock or Clock(trial.seed)))
            computed = as_computed(trial, model)
            if trial.workload == "generate" or layouts is None:
                loss = mean_loss(computed, batches_of(self.data, step))
                return ComparedLoss(reference, loss, None, step), None
            loss, gradient = self._gradient(computed, layouts, step, columns)
            trained: float | None = None  # of later steps, where training mode has the same loss
            if step:
                with torch.no_grad():
                    computed.train()
                    losses = [float(computed(*batch)) for batch in batches_of(self.data, step)]
                trained = loss if same_loss(math.fsum(losses) / len(losses), loss) else None
        return ComparedLoss(reference, loss, trained, step), gradient

    def _gradient(
        self, model: nn.Module, layouts: Sequence[Layout], step: int, columns: Mapping[str, Tensor]
    ) -> tuple[float, FirstGradient]:
        """This rank's mean loss of a step's batches, and all ranks' mean gradient; backward passes compute
        with the values of ``columns``, if any, in place of the model's.
        """
        trial, policy = self.trial, None if self.trial.host is not None else self.trial.resolved_policy()
        compute, scale = (_type_of(trial), None) if policy is None else (policy.compute, policy.loss_scale)
        rounding = ROUNDING[compute]
        if policy is not None and policy.secondary_format != "frames":  # backward has a rounded copy
            rounding = max(rounding, ROUNDING[policy.secondary_format])
        first = FirstGradient(layouts, trial.seed, trial.accumulation, rounding, step)
        times = 1.0 if scale is None else scale.initial
        parameters = dict(model.named_parameters())
        losses: list[float] = []
        with evaluating(model):
            for micro in self.data.step(step):
                for batch in micro:
                    loss = model(*batch)
                    losses.append(float(loss.detach()))
                    with computing_with(model, columns):
                        (loss * times).backward()
                first.add({name: parameter.grad for name, parameter in parameters.items()}, times)
                for parameter in parameters.values():
                    parameter.grad = None
        first.average()
        return math.fsum(losses) / len(losses), first


@contextlib.contextmanager
def _rehearsal(strategy: Strategy) -> Iterator[communication_error.ReductionObserver]:
    """Passes in the body send what a step would, and leave no trace; yields observations of the wire."""
    assert strategy.wire is not None  # noqa: S101  # else no step is compared
    observed, device = communication_error.ReductionObserver(), next(strategy.model.parameters()).device
    random = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with strategy.wire.observed(observed), strategy.rehearsing(), random:
        yield observed


def _gradient_errors(gradient: FirstGradient, strategy: Strategy) -> list[GradientError]:
    """How far each unit's reduced gradient is from a single process's."""
    scale = strategy.loss_scale
    errors = (gradient.compare(layout, *strategy.mean_gradient(layout), scale) for layout in gradient.layouts)
    return [error for error in errors if error is not None]


def _type_of(trial: Trial) -> Dtype:
    """The coarser of the types in which a peer computes and sends; fp32 for hosts, whose codecs round."""
    if trial.strategy not in PEERS:
        return "fp32"
    compute = trial.peer.compute
    return "bf16" if "bf16" in (compute, PEERS[trial.strategy].wire(compute)) else "fp32"
