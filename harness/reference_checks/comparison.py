"""Compares a sharded model with a single process, and the model's messages with exact values, on one rank.

The package's docstring (:mod:`harness.reference_checks`) lists the comparisons, and explains the terms masters, unit,
rehearsal and drawn step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from harness.cluster.rank import Progress, Rank
from harness.measure import communication_error, quantisation_error
from harness.measure.communication_error import Place, SumsByPlace
from harness.measure.gradient_bounds import (
    FirstGradient,
    GradientError,
)
from harness.measure.unsharded_loss import (
    evaluating,
    mean_loss,
)
from harness.records.trial_record import LosslessSize, QuantisationError, Validation
from harness.reference_checks.single_process import (
    ComparedLoss,
    SingleProcess,
    checked_step,
    model_of_masters,
)
from harness.strategies.strategy import Strategy
from harness.strategies.training_loop import run_passes
from harness.suites.trial import Trial
from harness.witness.check_costs import counted
from harness.witness.training_checks import TrainingChecks
from harness.workloads.dataset import draw
from harness.workloads.rank_batches import Batches, FirstSequences, batches_of
from impl.codecs.rounding_noise import Clock
from impl.plan.traffic import Event
from impl.policy.shard_layout import UnitGeometry
from impl.unit.unit import Unit
from impl.zero import Zero


class TrialError(RuntimeError):
    """Raised when a trial ran, but a check of its results failed; the message names the numbers that differ.

    Attributes:
        losses: The trial's losses by step, before the first loss that is not finite.
        validations: The trial's validations (losses on the validation split), before the first loss that is not finite.
    """

    def __init__(
        self, message: str, losses: Sequence[float] = (), validations: Sequence[Validation] = ()
    ) -> None:
        super().__init__(message)
        self.losses, self.validations = list(losses), list(validations)


@dataclass(slots=True)
class Compared:
    """Results of the comparisons that :class:`Comparison` makes on one rank."""

    losses: list[ComparedLoss] = field(default_factory=list)  # before training, then before later steps
    gradient_errors: list[GradientError] = field(default_factory=list)  # by step and unit
    # Sums of the errors of messages, each with its place: the step, purpose, unit and hop of the messages.
    communicated: list[tuple[Place, list[float]]] = field(default_factory=list)
    errors: list[QuantisationError] = field(default_factory=list)  # of a grid of codecs, over all ranks
    lossless: list[LosslessSize] = field(default_factory=list)  # sizes with lossless codecs, over all ranks
    # Like ``communicated``, for one unit's messages before the drawn step.  These errors are checked, but not recorded.
    drawn: list[tuple[Place, list[float]]] = field(default_factory=list)
    wrong: str | None = (
        None  # the first fault that this rank found itself, in gathered weights or in messages
    )
    seconds: float = 0.0  # of all comparisons before later steps
    costs: dict[str, float] = field(default_factory=dict)  # CPU seconds by check


class Comparison:
    """Compares one rank's losses and gradients with a single process's, and the rank's messages with exact values.

    The results are noted in the attribute ``compared`` (:class:`Compared`).  All ranks must call each of the methods.
    """

    def __init__(self, trial: Trial, model: nn.Module, data: Batches, rank: Rank) -> None:
        self.trial, self.data, self.rank = trial, data, rank
        self.compared = Compared()
        self.single = SingleProcess(trial, data, rank.topology)
        # Further repeats would only measure the same errors again.
        self.measures = trial.measure_quantisation and trial.repeat == 0
        measured = communication_error.measured_steps(trial.warmup + trial.steps)
        self.steps = sorted(measured) if self.measures else []
        drawn = checked_step(trial)
        self.drawn = None if drawn in self.steps else drawn
        policy = trial.resolved_policy()
        own = policy is not None and (policy.own_reduce is not None or policy.own_gather is not None)
        # A user's model may compute at random in training, and a user's method may give other values when it is called
        # again.  In these trials, a rehearsal in evaluation mode is compared.  In all others, the drawn step itself is.
        self._rehearses = own or ":" in trial.model.name
        self._awaited: tuple[ComparedLoss, FirstGradient] | None = None  # what the drawn step should compute
        self.events: list[Event] = []  # passes before training, for ``impl.plan.traffic``
        # What the sharded model should compute before training; None if the drawn step takes this comparison's place.
        self._first: tuple[ComparedLoss, FirstGradient | None] | None = None
        if self._rehearses or compares_first(trial, self.drawn):
            with counted(self.compared.costs, "before training"):
                self._first = self.single.compute(model)

    def before_training(self, strategy: Strategy) -> None:
        """Compare the sharded model's loss and reduced gradients with those of a single process.

        The results are noted in ``compared``.  Nothing is done in a trial that compares only a later step
        (:func:`compares_first`).
        """
        if self._first is not None:
            with counted(self.compared.costs, "before training"):
                self._compare_before_training(strategy, *self._first)

    def _compare_before_training(
        self, strategy: Strategy, expected: ComparedLoss, gradient: FirstGradient | None
    ) -> None:
        if strategy.zero is not None and strategy.zero.policy.own_gather is not None:
            with _rehearsal(strategy):  # the single process computes with the weights that the class gathers
                model, gathered = model_of_masters(self.trial, strategy.zero)
                assert gathered is not None  # noqa: S101  # a user's class gathers
                self.compared.wrong = communication_error.beyond_bound(strategy.zero, gathered[0])
                expected, gradient = self.single.compute(model, gathered=gathered)
        if gradient is None:
            loss = mean_loss(strategy.model, batches_of(self.data))
            strategy.weights_changed()  # the first step must gather weights anew, and not use those of this check
        else:
            with evaluating(strategy.model):
                passes = run_passes(self.trial, strategy, self.data, 0)
            self.compared.gradient_errors += _gradient_errors(gradient, strategy)
            loss = passes.mean
            strategy.forget_gradients()
            self.events = [*passes.events, "changed"]
        self.compared.losses.append(replace(expected, sharded=loss))

    def before_step(self, index: int, strategy: Strategy, checks: TrainingChecks) -> None:
        """Rehearse step ``index``, and note in ``compared`` how the messages of its passes differ from exact values.

        A rehearsal runs the forward and backward passes of the step before the step itself, and changes nothing that
        training depends on.  If our engine trains and the step is not step 0, the loss and the gradients of these
        passes are also compared with those of a single process (:meth:`_compare_later_step`).

        Args:
            index: Number of the step.
            strategy: The trial's strategy, which runs the passes.
            checks: The rank's checks of training.  They keep the gradients of the rehearsal, to compare them later with
                the gradients of the step itself.
        """
        self.rank.report(Progress("measuring errors", self.steps.index(index) + 1, len(self.steps)))
        policy, errors = self.trial.resolved_policy(), SumsByPlace()
        differ = policy is not None and communication_error.outcomes_differ(policy.policy_at(index))
        for repeated in (1, communication_error.REPEATED) if differ and index == self.steps[-1] else (1,):
            with _rehearsal(strategy) as observed:
                if repeated == 1 and strategy.zero is not None:
                    errors |= communication_error.weight_errors(index, strategy.zero)
                for _ in range(repeated):
                    run_passes(self.trial, strategy, self.data, index)
            errors |= communication_error.gradient_errors(
                index, observed, repeated=repeated, group=self._group()
            )
        self.compared.communicated += [(place, sums.tolist()) for place, sums in errors.items()]
        if index and strategy.zero is not None:
            self._compare_later_step(index, strategy, strategy.zero, checks)

    def before_drawn_step(
        self, index: int, strategy: Strategy, zero: Zero, count: Callable[[], NDArray[np.int64]]
    ) -> None:
        """Check a unit's gathered weights before step ``index``, and prepare to compare the step with a single process.

        Step ``index`` is the drawn step: the trial's seed and repeat number have chosen it for this check.  They also
        choose the unit, a set of parameters that are gathered and reduced together.  First, the unit's gathered weights
        are compared with its masters (the engine's fp32 weights).  Faults are noted in ``compared``.  The second part
        depends on the trial:

        - If the policy sends differences of weights or has a bit budget, there is no comparison with a single process.
        - If the model, the reduction or the gather is the user's own, this method makes the comparison itself: it runs
          the passes of the step in advance (a rehearsal), and compares their loss and gradients with those of a single
          process.  To save time, each batch is cut to its first sequence.
        - In all other trials, a single process computes the loss and gradients that the step should give.  When the
          step has run its passes, :meth:`compare_drawn_step` compares the gradients.

        Args:
            index: Number of the step.
            strategy: The strategy.
            zero: The strategy's engine.
            count: A function that returns what this node has sent so far, as an array.  Element 0 has the bytes of the
                node's network interface, or 0 if they are not known.  All ranks must call this function at once.
        """
        self.rank.report(Progress("checking a drawn step"))
        units = [unit for unit in zero.units if unit.geometry.trainable] or zero.units
        key = f"{self.trial.seed}/{self.trial.repeat}/checked unit"
        drawn = units[draw(key, len(units))]
        unit = drawn.geometry.name
        with _rehearsal(strategy, unit) as observed:
            costs = self.compared.costs
            with counted(costs, "drawn step: weights"):
                errors = communication_error.weight_errors(index, zero, unit)
                gathered = next(sums for place, sums in errors.items() if place.purpose == "weights")
                wrong = communication_error.too_exact(index, zero, unit, gathered)
            with counted(costs, "drawn step: copies across nodes"):
                wrong = wrong or _copied_between_nodes(zero, unit, count)
            if zero.current_policy.differences is None and zero.policy.budget is None:
                if self._rehearses:
                    with counted(costs, "drawn step: rehearsal"):
                        self._compare_passes(index, strategy, zero, FirstSequences(self.data), drawn.geometry)
                else:
                    self._await_step(index, zero, drawn)
            errors |= {
                Place(index, "gradients", name, hop.number, hop.axis, str(hop.codec)): sums
                for (name, hop), sums in observed.hops.items()
            }
        self.compared.drawn += [(place, sums.tolist()) for place, sums in errors.items()]
        self.compared.wrong = self.compared.wrong or wrong or observed.unlike

    def _await_step(self, index: int, zero: Zero, unit: Unit) -> None:
        """Compute the loss and mean gradients that step ``index`` should give, for :meth:`compare_drawn_step`.

        An unsharded model computes the loss and the gradients.  Then the engine reduces this rank's gradient of
        ``unit`` once, while the caller's observer (:class:`~harness.measure.communication_error.ReductionObserver`)
        checks the messages of this reduction.  The messages of the step itself are not observed, because this would
        take time in a timed step.

        Args:
            index: Number of the step.
            zero: The engine.
            unit: The set of parameters, gathered and reduced together, that is checked before the step.
        """
        with counted(self.compared.costs, "drawn step: single process"):
            model, _ = model_of_masters(self.trial, zero)
            clock = Clock(self.trial.seed, zero.clock.step)
            expected, gradient = self.single.compute(model, index, clock, unit=unit.geometry)
        assert gradient is not None and gradient.latest is not None  # noqa: S101, PT018  # the unit has a gradient
        with counted(self.compared.costs, "drawn step: messages"):
            unit.reduction.average(gradient.latest)
        self._awaited = replace(expected, sharded=None), gradient

    def compare_drawn_step(self, index: int, strategy: Strategy, zero: Zero) -> None:
        """Compare the reduced gradients of the drawn step with those that a single process has computed for it.

        The drawn step is the one step that :meth:`before_drawn_step` has prepared.  Call this method in every step,
        after the backward passes and before the optimizer's step; in all other steps it does nothing.  The largest
        difference of each unit is noted in ``compared``, except with error feedback, which puts errors of earlier steps
        into the gradients.  The method sends no message.  The step's loss is compared later, by
        :mod:`harness.runs.merge_ranks`.
        """
        if self._awaited is None or index != self.drawn:
            return
        (expected, gradient), self._awaited = self._awaited, None
        self.compared.losses.append(expected)
        # Errors that were carried from earlier steps are in the reduced gradient, and not in the single process's.
        if zero.current_policy.feedback is None:
            with counted(self.compared.costs, "drawn step: gradient"):
                self.compared.gradient_errors += _gradient_errors(gradient, strategy)

    def forget_step(self, index: int) -> None:
        """Remove the gradient errors of step ``index`` from ``compared``.

        Call this if a gradient of the step is not finite (an overflow): the step is then skipped, and its gradients
        cannot be compared.
        """
        errors = self.compared.gradient_errors
        self.compared.gradient_errors = [error for error in errors if error.step != index]

    def _compare_later_step(self, index: int, strategy: Strategy, zero: Zero, checks: TrainingChecks) -> None:
        """Rehearse step ``index``, and compare its loss and reduced gradients with those of a single process.

        A rehearsal runs the step's passes in advance, and changes nothing that training depends on.  The single process
        has the same masters (fp32 weights) as the engine, and encodes these weights once with the policy's codecs.  It
        cannot reproduce what the engine keeps from earlier steps.  Nothing is therefore compared if the policy sends
        differences of weights or has a bit budget.  Gradients are not compared if the policy has error feedback, or if
        a user's own reduction keeps values from earlier steps.

        If the step itself should give the same gradients as the rehearsal, ``checks`` keeps the rehearsal's gradients,
        to compare them later with those of the step.
        """
        if zero.current_policy.differences is not None or zero.policy.budget is not None:
            return
        with _rehearsal(strategy):
            expected = self._compare_passes(index, strategy, zero, self.data)
            if expected.trained is not None and zero.current_policy.feedback is None:
                checks.note_rehearsal(index)

    def _compare_passes(
        self, index: int, strategy: Strategy, zero: Zero, data: Batches, unit: UnitGeometry | None = None
    ) -> ComparedLoss:
        """Run the passes of step ``index``, and compare their loss and gradients with those of a single process.

        Call this inside :func:`_rehearsal`, which afterwards restores everything that training depends on.

        Args:
            index: Number of the step.
            strategy: The strategy.
            zero: The strategy's engine, from which the single process gets its weights.
            data: The batches to use.  In the drawn step (the one step that seed and repeat choose for a check), these
                are only a part of the trial's batches.
            unit: The unit (set of parameters that are reduced together) that is checked in the drawn step; None in
                other steps.

        Returns:
            The losses of the single process.  Their field ``trained`` is the loss that the training step itself should
            have, over the trial's whole batches; it is None if this loss is not known
            (:meth:`.SingleProcess._trained`).
        """
        model, gathered = model_of_masters(self.trial, zero)
        clock = Clock(self.trial.seed, zero.clock.step)
        expected, gradient = self.single.compute(model, index, clock, data, unit, gathered=gathered)
        with evaluating(strategy.model):
            passes = run_passes(self.trial, strategy, data, index)
        # Errors that were carried from earlier steps are in the reduced gradient, and not in the single process's.
        carries = zero.current_policy.feedback is not None or any(
            unit.reduction.remembers for unit in zero.units
        )
        if gradient is not None and not carries:
            self.compared.gradient_errors += _gradient_errors(gradient, strategy)
        self.compared.losses.append(replace(expected, sharded=passes.mean))
        return expected

    def after_steps(self, strategy: Strategy) -> None:
        """Measure the errors of a grid of codecs on the trained weights and gradients, and note them in ``compared``.

        The gradients are computed by the passes of one further step, whose optimizer step is left out.  Nothing is done
        without our engine, if the suite measures no errors, or in repeats after the first.
        """
        if strategy.zero is None or not self.measures:
            return
        self.rank.report(Progress("trying codecs"))
        run_passes(self.trial, strategy, self.data, self.trial.warmup + self.trial.steps)
        self.compared.errors = quantisation_error.measure(strategy.zero)
        self.compared.lossless = quantisation_error.measure_lossless(strategy.zero)

    def _group(self) -> slice:
        """Return the numbers of the ranks over which this rank's gradients are averaged, as a slice.

        With local steps, these are the ranks of this rank's state group, which trains apart from other groups.
        Otherwise they are all ranks.
        """
        policy, topology, rank = self.trial.resolved_policy(), self.rank.topology, self.rank.rank
        ranks = topology.world if policy is None else policy.averaged_ranks(topology)
        return slice(rank - rank % ranks, rank - rank % ranks + ranks)


def compares_first(trial: Trial, drawn: int | None) -> bool:
    """Return whether a trial's loss and gradients are compared with a single process's before training begins.

    Most trials make this comparison only during training, in one step that is chosen at random from seed and repeat
    (the *drawn* step).  The result is True in each of these cases:

    - The trial is the first repeat.
    - No step is drawn.
    - Another engine trains the model (a peer, such as DDP), or our policy runs inside FSDP2 or DDP.
    - The policy of the drawn step has differences, error feedback, a bit budget or a loss scale.  With these, the loss
      or the gradients of the drawn step are not always compared.
    - The trial has no warm-up steps.  The comparison then makes the first passes of the process, which are slow and
      would otherwise be timed.

    A trial with a user's own model, reduction or gather makes the comparison even if the result is False.

    Args:
        trial: The trial.
        drawn: Index of the drawn step; None if no step is drawn.
    """
    policy = trial.resolved_policy()
    if policy is None or trial.host is not None or drawn is None or trial.repeat == 0 or trial.warmup == 0:
        return True
    there = policy.policy_at(drawn)
    # After an overflow, the drawn step has no gradients to be compared.
    return (
        there.differences is not None
        or there.feedback is not None
        or policy.budget is not None
        or policy.loss_scale is not None
    )


@contextlib.contextmanager
def _rehearsal(
    strategy: Strategy, unit: str | None = None
) -> Iterator[communication_error.ReductionObserver]:
    """Context for passes that send the same messages as a training step, but have no effect on later training.

    When the context ends, gradients and gathered weights are dropped.  Buffers, random states and what the engine keeps
    for later messages, such as the errors of error feedback, are restored.

    Yields:
        An observer of the gradient reductions in the context.  It observes the unit (set of parameters that are reduced
        together) that is named ``unit``, or all units if ``unit`` is None.
    """
    assert strategy.wire is not None  # noqa: S101  # callers compare only trials with a wire
    observed, device = communication_error.ReductionObserver(unit), next(strategy.model.parameters()).device
    random = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with strategy.wire.observed(observed), strategy.rehearsing(), random:
        yield observed


def _copied_between_nodes(zero: Zero, name: str, count: Callable[[], NDArray[np.int64]]) -> str | None:
    """Check that hpZ's gather of a unit for backward sends no weights between nodes; return a sentence if it does.

    With hpZ inside nodes, each node keeps a copy of the weights, so that a gather for the backward pass needs no other
    node.  This function gathers the weights of one unit (a set of parameters that are gathered together) once as in
    forward and once as in backward.  It reads the bytes from the node's network interface, independently of the
    engine's own counts.  The backward gather may send at most half as much as the forward gather, or 4096 bytes if this
    is more.  All ranks must call this function together.

    Args:
        zero: The engine.
        name: Name of the unit.
        count: A function that returns what this node has sent so far, as an array.  Element 0 is the bytes of the
            node's network interface, or 0 if these bytes are not known.

    Returns:
        A sentence with the bytes that were sent.  None if the backward gather sent no weights between nodes, if the
        policy has no hpZ inside nodes, or if the node has no network interface of its own, so that its bytes are not
        known.
    """
    topology = zero.wire.mesh.topology
    if (
        topology.nodes == 1
        or not 0 < zero.current_policy.secondary_ranks(topology) <= topology.ranks_per_node
    ):
        return None
    (unit,) = (unit for unit in zero.units if unit.geometry.name == name)
    counts = [count()]
    # Measure what a barrier alone sends, since a gather has barriers too.
    unit.wire.meet("the count of a backward gather")
    counts.append(count())
    for phase in ("forward", "backward"):
        unit.all_gather(phase)
        unit.reshard()
        counts.append(count())
    nothing, first, again = (int((after - before)[0]) for before, after in itertools.pairwise(counts))
    # A backward gather between nodes sends at least half as much as the forward gather; barriers send far less.
    if again - nothing <= max((first - nothing) / 2, 4096):
        return None
    return (
        f"a backward gather of unit {name!r} sent {again - nothing} bytes between nodes, although hpZ keeps a copy in "
        "each node"
    )


def _gradient_errors(gradient: FirstGradient, strategy: Strategy) -> list[GradientError]:
    """Compare this rank's reduced gradients with ``gradient``, the gradient that a single process computed.

    Returns:
        The error of each unit's gradient, where a unit is a set of parameters that are reduced together.  Units of
        which nothing could be compared are left out.
    """
    scale = strategy.loss_scale
    errors = (gradient.compare(layout, *strategy.mean_gradient(layout), scale) for layout in gradient.layouts)
    return [error for error in errors if error is not None]
