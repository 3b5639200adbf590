"""Compares a trial with a single process and with exact values, outside of the time that is measured.

Four terms are used here.  The *masters* are the engine's fp32 weights.  A *unit* is a set of parameters that are
gathered and reduced together.  A *rehearsal* runs the passes of a step before the step itself, to compare its messages,
and changes nothing that training depends on.  The *drawn step* is one step in the second half of the trial, chosen at
random by the trial's seed and repeat.

A trial makes these comparisons:

- Before training, loss and reduced gradients of the sharded model, in evaluation mode, are compared with those of a
  single process (:mod:`harness.measure.gradient_bounds`).  Some repeats leave this out (:func:`compares_first`).
- If the suite measures errors, the first, a middle and the last step are rehearsed, and all messages of the rehearsals
  are compared with exact values (:mod:`harness.measure.communication_error`).  If our engine trains, loss and gradients
  of the middle and the last step are also compared with those of a single process that has the same masters.
- If our engine trains, one unit is checked before the drawn step; seed and repeat choose the unit.  Its gathered
  weights, and hpZ's copy of them, are compared with its masters.  Its gradient is reduced once, and the messages of
  this reduction are compared with what the reference codecs encode.
- After the backward passes of the drawn step, the step's loss and the gradients of all units are compared with those of
  a single process.  If Muon is the optimizer, its step of one whole matrix is recomputed afterwards, and compared.
- If the suite measures errors, a grid of codecs is tried on the trained weights and gradients after the last step.
  Nothing is sent for this (:mod:`harness.measure.quantisation_error`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import _muon as torch_muon

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
from harness.measure.unsharded_loss import (
    as_computed,
    as_gathered,
    by_columns,
    computing_with,
    evaluating,
    mean_loss,
    packed,
    quantise,
)
from harness.records.trial_record import LosslessSize, QuantisationError, Validation
from harness.strategies.optimizers import group_of, muon_arguments, set_rates
from harness.strategies.strategy import Strategy
from harness.strategies.training_loop import run_passes
from harness.suites.peers import PEERS, family_of
from harness.suites.trial import Trial
from harness.witness.check_costs import counted
from harness.witness.matrix_witness import MatrixWitness
from harness.witness.training_checks import TrainingChecks
from harness.workloads import models
from harness.workloads.dataset import draw
from harness.workloads.rank_batches import Batches, FirstSequences, batches_of
from impl.adapters.joined import fsdp2_groups
from impl.adapters.traffic import GroupGeometry
from impl.codecs import reference
from impl.codecs.codec import Codec, Dtype
from impl.codecs.rounding_noise import Clock
from impl.comm.wire import Observer
from impl.engine.muon import Muon
from impl.errors import raised
from impl.plan.traffic import Event
from impl.policy.policy import Policy
from impl.policy.shard_layout import UnitGeometry
from impl.policy.topology import Topology
from impl.unit.unit import Unit
from impl.unit.whole_values import WholeValues
from impl.zero import Zero, find_blocks, plan_units

# Allowed difference of two losses: relative for losses above 1, absolute for losses below.  Two computations that add
# in another order round differently.
TOLERANCE: Final = 1e-4
# Two parts of the allowed difference between two computations of a Muon step.  The first is a share of each weight,
# which is rounded three times.  The second is a share of the learning rate: sums of bf16 in another order may change an
# element of the update by a few units of 2^-8.
_MUON_ULPS: Final = 3 * 2.0**-24
_MUON_ERROR: Final = 2.0**-5
same_loss: Final = partial(math.isclose, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


# Gathered weights by the parameter's name: a dict for forward passes, and a dict for backward passes.
_Gathered = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]


class TrialError(RuntimeError):
    """Raised when a trial ran, but a check of its results failed; the message names the numbers that differ.

    Attributes:
        losses: The trial's losses by step, up to the first that is not finite.
        validations: Its validations, up to the first whose loss is not finite.
    """

    def __init__(
        self, message: str, losses: Sequence[float] = (), validations: Sequence[Validation] = ()
    ) -> None:
        super().__init__(message)
        self.losses, self.validations = list(losses), list(validations)


@dataclass(frozen=True, slots=True)
class ComparedLoss:
    """Mean loss over one rank's batches of one step, computed in several ways that are then compared.

    All fields are losses in evaluation mode, except ``trained`` and the number ``step``.
    """

    reference: float  # of a single process in fp32
    expected: float  # of a single process with the weights as the ranks gather them (quantised, cast)
    # Of a single process: the loss that the step itself should have in training.  None before training, and for models
    # whose losses in training mode and in evaluation mode may differ, as with dropout.
    trained: float | None = None
    step: int = 0  # the step whose batches the losses are of; 0 for the comparison before training
    # Loss of the sharded model in evaluation mode.  NaN until the model has run; None if the model is not run in
    # evaluation mode, since only the loss of the training step is compared, with ``trained``.
    sharded: float | None = math.nan


@dataclass(slots=True)
class Compared:
    """Results of the comparisons on one rank."""

    losses: list[ComparedLoss] = field(default_factory=list)  # before training, then before later steps
    gradient_errors: list[GradientError] = field(default_factory=list)  # by step and unit
    # Sums of the errors of messages, each with its place: the step, purpose, unit and hop of the messages.
    communicated: list[tuple[Place, list[float]]] = field(default_factory=list)
    errors: list[QuantisationError] = field(default_factory=list)  # of the grid of codecs, over all ranks
    lossless: list[LosslessSize] = field(default_factory=list)  # over all ranks
    # Like ``communicated``, for one unit's messages before the drawn step.  These errors are checked, but not recorded.
    drawn: list[tuple[Place, list[float]]] = field(default_factory=list)
    wrong: str | None = (
        None  # the first fault that this rank found itself, in gathered weights or in messages
    )
    seconds: float = 0.0  # of all comparisons before later steps
    costs: dict[str, float] = field(default_factory=dict)  # CPU seconds by check


class Comparison:
    """Compares one rank's losses and gradients with a single process's, and its messages with exact values.

    The results are noted in ``compared``.  All ranks must call each of the methods.
    """

    def __init__(self, trial: Trial, model: nn.Module, data: Batches, rank: Rank) -> None:
        self.trial, self.data, self.rank = trial, data, rank
        self.compared = Compared()
        total = trial.warmup + trial.steps
        # Further repeats would only measure the same errors again.
        self.measures = trial.measure_quantisation and trial.repeat == 0
        self.steps = sorted(communication_error.measured_steps(total)) if self.measures else []
        drawn = communication_error.drawn_step(trial.seed, trial.repeat, trial.warmup, total)
        # The check gathers masters through torch.distributed itself, not through the engine's wire.  With transport
        # "staged" this is gloo, which cannot gather tensors of a GPU.  In workload rlhf, the sharded model generates
        # its batch, which a single process cannot repeat.
        checks = trial.workload == "train" and trial.cluster.transport != "staged"
        # A strategy of the user's own may have other weights on each node.
        checks = checks and not trial.own_strategy
        self.drawn = drawn if checks and drawn not in self.steps else None
        # The step in which Muon's update of one matrix is computed again (:meth:`after_step`).
        self.stepped_again = drawn if checks and trial.optimizer.orthogonalises else None
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
                self._first = self._single_process(model)

    def before_training(self, strategy: Strategy) -> None:
        """Compare the sharded model's loss and reduced gradients with those of a single process.

        The results are noted in ``compared``.  Nothing is done if only a later step is to be compared
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
                model, gathered = self._same_masters(strategy.zero)
                assert gathered is not None  # noqa: S101  # a user's class gathers
                self.compared.wrong = communication_error.beyond_bound(strategy.zero, gathered[0])
                expected, gradient = self._single_process(model, gathered=gathered)
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
        """Rehearse step ``index``, and note in ``compared`` how its messages differ from exact values.

        A rehearsal runs the passes of the step, but changes nothing that training depends on.  If our engine trains and
        the step is not step 0, loss and gradients are also compared with a single process
        (:meth:`_compare_later_step`).

        Args:
            index: Number of the step.
            strategy: The strategy.
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
        """Check one unit's weights before step ``index``, and prepare the comparison of the step with a single process.

        First, the gathered weights of one unit are compared with the unit's masters (its fp32 weights).  The trial's
        seed and repeat choose the unit.  Faults are noted in ``compared``.  The second part depends on the trial:

        - If the policy sends differences of weights or has a bit budget, there is no comparison with a single process.
        - If the model, the reduction or the gather is the user's own, this method makes the comparison itself: it runs
          the passes of the step as a rehearsal, and compares the rehearsal with a single process.  To save time, each
          batch is cut to its first sequence.
        - In all other trials, a single process computes the loss and gradients that the step should give, and
          :meth:`compare_drawn_step` compares the step with them.

        Args:
            index: Number of the step.
            strategy: The strategy.
            zero: The strategy's engine.
            count: Returns what this node has sent so far, as an array.  Element 0 has the bytes of the node's network
                interface, or 0 if they are not known.  All ranks must call this function at once.
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

        An unsharded model computes them.  Then this rank's gradient of ``unit`` is reduced once with the engine, so
        that the observer of the rehearsal sees the messages of a reduction.  The messages of the step itself are not
        observed, because this would take time in a timed step.
        """
        with counted(self.compared.costs, "drawn step: single process"):
            model, _ = self._same_masters(zero)
            clock = Clock(self.trial.seed, zero.clock.step)
            expected, gradient = self._single_process(model, index, clock, unit=unit.geometry)
        assert gradient is not None and gradient.latest is not None  # noqa: S101, PT018  # the unit has a gradient
        with counted(self.compared.costs, "drawn step: messages"):
            unit.reduction.average(gradient.latest)
        self._awaited = replace(expected, sharded=None), gradient

    def compare_drawn_step(self, index: int, strategy: Strategy, zero: Zero) -> None:
        """Compare the reduced gradients of the drawn step with those that a single process has computed for it.

        Call this method in every step, after the backward passes and before the optimizer's step.  It does nothing
        except in the one step that :meth:`before_drawn_step` has prepared.  It sends no message.  The difference is
        noted in ``compared``.  The step's loss is compared later, by :mod:`harness.runs.merge_ranks`.
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
        """Remove the gradient errors of step ``index`` from ``compared``, because its gradients have overflowed."""
        errors = self.compared.gradient_errors
        self.compared.gradient_errors = [error for error in errors if error.step != index]

    def watched_matrix(self, zero: Zero, optimizer: torch.optim.Optimizer) -> MatrixWitness | None:
        """Return an observer of one matrix that Muon updates; :meth:`after_step` uses its notes to check one step.

        In the checked step, the observer (:class:`MatrixWitness`) notes this rank's part of the matrix, of its momentum
        and of its gradient.  The trial's seed and repeat choose the matrix and the step.  Returns None if no step is to
        be checked, or if this rank's optimizer is not Muon.
        """
        if self.stepped_again is None or not isinstance(optimizer, Muon):
            return None
        matrices, rank = optimizer.owners.matrices, zero.wire.mesh.rank
        matrix = matrices[draw(f"{self.trial.seed}/{self.trial.repeat}/stepped matrix", len(matrices))]
        unit = zero.units[matrix.unit]
        start, end = unit.geometry.part(matrix.slot, rank)
        spans = zip(unit.geometry.spans(rank), unit.master_shard.masters, strict=True)
        master, first = next((m, span[1]) for span, (group, m) in spans if group == matrix.slot.spec.group)
        part = slice(start - first, end - first)
        return MatrixWitness(optimizer, matrix, master, part, self.stepped_again, self.rank.rank)

    def after_step(self, index: int, strategy: Strategy, zero: Zero, witness: MatrixWitness) -> str | None:
        """Recompute Muon's step of one whole matrix, and compare the result with the matrix after step ``index``.

        ``witness`` has noted this rank's part of the step (:meth:`watched_matrix`).  All ranks must call this method.

        Returns:
            A sentence on the element that differs most.  None if all elements are within the tolerance, or if the
            optimizer skipped the step.
        """
        assert strategy.wire is not None  # noqa: S101  # the engine has one
        parts, unit, slot = witness.parts, zero.units[witness.matrix.unit], witness.matrix.slot
        if parts is None:  # the step was skipped, on all ranks
            return None
        number = unit.geometry.slots.index(slot)
        with strategy.wire.observed(Observer()):
            value, momentum, gradient, after = (
                WholeValues(unit).gather_member(number, part)
                for part in (parts.value, parts.momentum, parts.gradient, parts.after)
            )
        geometry = unit.geometry
        bounds = [geometry.overlap(slot, rank) for rank in range(geometry.shards)]
        places = [(first - slot.offset, end - slot.offset) for first, end in bounds]
        expected, rate = muon_step(self.trial, index, value, momentum, gradient, zero.policy.owned, places)
        # Both multiply in bf16, and may add up in another order.
        off = (after - expected).abs() - (_MUON_ULPS * expected.abs() + _MUON_ERROR * rate)
        if bool((off <= 0).all()):
            return None
        at = int(off.argmax())
        return (
            f"after step {index} element {at} of matrix {slot.spec.name!r} is {float(after.view(-1)[at]):.9g}, but "
            f"Muon gives {float(expected.view(-1)[at]):.9g} from the matrix's whole momentum and gradient"
        )

    def _compare_later_step(self, index: int, strategy: Strategy, zero: Zero, checks: TrainingChecks) -> None:
        """Compare loss and reduced gradients of a rehearsal of step ``index`` with those of a single process.

        The single process has the same masters (fp32 weights), and encodes them once with the policy's codecs.  It
        cannot reproduce what the engine keeps from earlier steps.  Nothing is therefore compared if the policy sends
        differences of weights or has a bit budget.  Gradients are not compared if the policy has error feedback, or if
        a user's own reduction keeps values from earlier steps.
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

        Call this inside a rehearsal, which restores everything that training depends on.

        Args:
            index: Number of the step.
            strategy: The strategy.
            zero: The strategy's engine, from which the single process gets its weights.
            data: The batches to use.  In the drawn step (the one step that seed and repeat choose for a check), these
                may be only a part of the trial's batches.
            unit: The unit that is checked in the drawn step; None in other steps.

        Returns:
            The losses of the single process.  In the drawn step, the field ``trained`` is the loss of the trial's whole
            batches; it is None for a user's own model.
        """
        model, gathered = self._same_masters(zero)
        clock = Clock(self.trial.seed, zero.clock.step)
        expected, gradient = self._single_process(model, index, clock, data, unit, gathered=gathered)
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

    def _same_masters(self, zero: Zero) -> tuple[nn.Module, _Gathered | None]:
        """Build an unsharded model from the engine's masters (fp32 weights).

        Returns:
            (model, gathered).  ``gathered`` is None without a user's own gather.  With such a gather, the model has
            the masters, but must compute with the weights in ``gathered``: those that the user's gather returns now.
            The engine's next passes gather the same weights.
        """
        if ":" in self.trial.model.name:  # may have buffers
            with next(zero.model.parameters()).device:
                model = models.of_trial(self.trial)
            model.load_state_dict(zero.full_state_dict())
        else:
            values: dict[str, Tensor] = {}
            for unit in zero.units:
                names = [slot.spec.name for slot in unit.geometry.slots]
                values.update(zip(names, WholeValues(unit).masters(), strict=True))
            model = models.with_values(self.trial, values)
        own = zero.policy.own_gather is not None
        return model, communication_error.gathered_weights(zero) if own else None

    def after_steps(self, strategy: Strategy) -> None:
        """Measure the errors of a grid of codecs on the trained weights and gradients, and note them in ``compared``.

        The gradients are computed by the passes of one further step, whose optimizer step is left out.  Nothing is done
        without our engine, or if the suite measures no errors.
        """
        if strategy.zero is None or not self.measures:
            return
        self.rank.report(Progress("trying codecs"))
        run_passes(self.trial, strategy, self.data, self.trial.warmup + self.trial.steps)
        self.compared.errors = quantisation_error.measure(strategy.zero)
        self.compared.lossless = quantisation_error.measure_lossless(strategy.zero)

    def _single_process(
        self,
        model: nn.Module,
        step: int = 0,
        clock: Clock | None = None,
        data: Batches | None = None,
        unit: UnitGeometry | None = None,
        *,
        gathered: _Gathered | None = None,
    ) -> tuple[ComparedLoss, FirstGradient | None]:
        """Compute losses and gradients with the unsharded model; all ranks must call this method.

        Args:
            model: The unsharded model.
            step: The step whose batches are used.
            clock: Determines the stochastic rounding of weights; by default the clock of the first step.
            data: Where batches come from; by default the trial's batches.
            unit: The unit to check in the drawn step (the one step that seed and repeat choose for a check); None in
                other steps.  With a unit, the result differs in two ways.  The gradient also keeps this rank's own
                gradient of the unit, as ``latest``.  The loss with fp32 weights, ``reference``, is not computed, and
                has the value of ``expected`` instead.
            gathered: The weights that a user's own gather returned for forward and backward passes; None without one.

        Returns:
            (losses on this rank's batches, mean gradient of all ranks).  The gradient is None if the trial only
            decodes, or if its peer (DeepSpeed) does not show its gradients.
        """
        trial, topology, whole = self.trial, self.rank.topology, self.trial.resolved_policy()
        policy = None if whole is None else whole.policy_at(clock.step if clock else 0)
        data, reference = data or self.data, math.nan
        try:
            if unit is None:
                reference = mean_loss(model, batches_of(data, step))
        except Exception as error:  # an error of a user's own model becomes a Refusal, unless memory ran out
            if ":" not in trial.model.name or kind_of(error) != "crashed":
                raise
            raise Refusal(
                f"model {trial.model.name!r} raised {raised(error)}; its forward() gets a batch's inputs and targets, "
                "and must return their loss"
            ) from error
        # Layouts stay None for DeepSpeed, which does not show its reduced gradients.
        layouts: Sequence[Layout] | None = None
        family, columns = trial.host or family_of(trial.strategy), dict[str, Tensor]()
        with contextlib.ExitStack() as entered:
            units: Sequence[UnitGeometry | GroupGeometry] = ()
            if family == "fsdp2":
                # With peer.group = "node", each node is one copy of the states, sharded among its own ranks.
                sharing = topology if trial.peer.group == "all" else Topology(1, topology.ranks_per_node)
                units = fsdp2_groups(model, find_blocks(model), sharing)
            elif whole is not None:
                units = plan_units(model, topology, whole, group_of=group_of(trial.optimizer, model))
            elif family == "ddp":
                layouts = model_layouts(model)
            if units:
                layouts = layouts_of(units, policy, topology)
            if gathered is not None:
                entered.enter_context(computing_with(model, gathered[0]))
                columns = dict(gathered[1])
            elif policy is not None and family != "ddp":  # DDP has whole weights on every rank
                columns = by_columns(model, policy, units)
                if unit is None:
                    entered.enter_context(as_gathered(model, policy, units, clock or Clock(trial.seed)))
                else:  # the caller needs the model no more
                    quantise(model, policy, units, clock or Clock(trial.seed))
            computed = as_computed(trial, model)
            if trial.workload == "generate" or layouts is None:
                loss = mean_loss(computed, batches_of(data, step))
                return ComparedLoss(reference, loss, None, step), None
            loss, gradient = self._gradient(
                computed, layouts, data, step, columns=columns, policy=policy, unit=unit
            )
            if data is self.data and unit is not None:
                return ComparedLoss(loss, loss, loss, step), gradient
            if unit is not None:
                # The rehearsal in evaluation mode does not run the code of the training step, so the loss of the step
                # itself is compared too.  Presets have no dropout: their losses in both modes are equal.
                preset = ":" not in trial.model.name
                trained = mean_loss(computed, batches_of(self.data, step)) if preset else None
                return ComparedLoss(loss, loss, trained, step), gradient
            trained = None  # known for later steps if training mode gives the same loss
            if step:
                with torch.no_grad():
                    computed.train()
                    losses = [float(computed(*batch)) for batch in batches_of(data, step)]
                trained = loss if same_loss(math.fsum(losses) / len(losses), loss) else None
        return ComparedLoss(reference, loss, trained, step), gradient

    def _group(self) -> slice:
        """Return a slice of rank numbers: the ranks over which gradients are averaged.

        With local steps, these are the ranks of this rank's state group, which trains apart from other groups.
        Otherwise they are all ranks.
        """
        policy, topology, rank = self.trial.resolved_policy(), self.rank.topology, self.rank.rank
        ranks = topology.world if policy is None else policy.averaged_ranks(topology)
        return slice(rank - rank % ranks, rank - rank % ranks + ranks)

    def _gradient(
        self,
        model: nn.Module,
        layouts: Sequence[Layout],
        data: Batches,
        step: int,
        *,
        columns: Mapping[str, Tensor],
        policy: Policy | None,
        unit: UnitGeometry | None,
    ) -> tuple[float, FirstGradient]:
        """Compute this rank's mean loss of a step's batches, and the gradient averaged over all ranks.

        With local steps, the gradient is averaged over this rank's state group, which trains apart from other groups.

        Args:
            model: The unsharded model.
            layouts: How gradients are sharded.
            data: Where batches come from.
            step: The step whose batches are used.
            columns: The weights for backward passes, by parameter name.  If the dict is empty, backward passes compute
                with the model's weights, as forward passes do.  It is not empty if ``policy.planes`` is not 1, or with
                a user's own gather.
            policy: The policy of the step; None if another engine trains (a peer, such as DDP).
            unit: A unit whose gradient on this rank, of the last micro-batch, is kept as ``latest`` in the result; None
                to keep none.

        Returns:
            (mean loss, mean gradient).
        """
        trial, policy = self.trial, None if self.trial.host is not None else policy
        compute, scale = (_type_of(trial), None) if policy is None else (policy.compute, policy.loss_scale)
        rounding = ROUNDING[compute]
        # If hpZ keeps its copy of the weights as plain numbers, not encoded (as frames), backward passes compute with
        # weights that were rounded to the type of these numbers.
        if policy is not None and policy.secondary_format != "frames":
            rounding = max(rounding, ROUNDING[policy.secondary_format])
        apart = 0 if policy is None or policy.local_steps is None else policy.group_ranks(self.rank.topology)
        first = FirstGradient(layouts, trial.seed, trial.accumulation, rounding, step, apart)
        times = 1.0 if scale is None else scale.initial
        parameters = dict(model.named_parameters())
        losses: list[float] = []
        with evaluating(model):
            for micro in data.step(step):
                for batch in micro:
                    loss = model(*batch)
                    losses.append(float(loss.detach()))
                    with computing_with(model, columns):
                        (loss * times).backward()
                gradients = {name: parameter.grad for name, parameter in parameters.items()}
                first.add(gradients, times)
                first.latest = None if unit is None else packed(unit, gradients).view(-1)
                for parameter in parameters.values():
                    parameter.grad = None
        first.average()
        return math.fsum(losses) / len(losses), first


def compares_first(trial: Trial, drawn: int | None) -> bool:
    """Return whether a trial's loss and gradients are compared with a single process's before training begins.

    Most trials make this comparison only during training, in one step that is chosen at random from seed and repeat
    (the *drawn* step).  A trial makes the comparison before training if one of these is true:

    - The trial is the first repeat.
    - No step is drawn.
    - Another engine trains the model (a peer, such as DDP), or our policy runs inside FSDP2 or DDP.
    - The policy of the drawn step has differences, error feedback, a bit budget or a loss scale.  With these, the loss
      or the gradients of the drawn step are not always compared.
    - The trial has no warm-up steps.  The comparison then makes the first passes of the process, which are slow and
      would otherwise be timed.

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


def muon_step(  # noqa: PLR0917  # its arguments are one step
    trial: Trial,
    index: int,
    value: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    owned: tuple[Codec, Codec],
    places: Sequence[tuple[int, int]],
) -> tuple[Tensor, float]:
    """Compute one step of a whole matrix by the formula of ``torch.optim.Muon``.

    As in training, each rank's part of the momentum and of the update is encoded and decoded, with the codecs
    ``owned``.

    Args:
        trial: The trial, whose optimizer is Muon.
        index: Number of the step, which decides the learning rate.
        value: The matrix (rows, columns) before the step.
        momentum: The momentum, of the same shape, before the step.
        gradient: The mean gradient, of the same shape.
        owned: The codec in which parts of the momentum are sent, and the codec in which parts of the update are sent.
        places: The (first, end) elements of each rank's part in the matrix.

    Returns:
        (matrix after the step, learning rate as Muon adjusts it to the matrix's shape).
    """

    def sent(codec: Codec, whole: Tensor) -> Tensor:
        decoded = whole.float().contiguous()
        for first, end in places:
            part = decoded.view(-1)[first:end].clone()
            frame = torch.empty(codec.frame_bytes(end - first), dtype=torch.uint8, device=part.device)
            reference.encode(codec, part, frame)
            reference.decode(codec, frame, part)
            decoded.view(-1)[first:end] = part
        return decoded

    arguments, _ = muon_arguments(trial.optimizer)
    optimizer = torch.optim.Muon([nn.Parameter(value)], **arguments)  # gives all options their defaults
    set_rates(optimizer, trial.schedule(), index)
    (how,) = optimizer.param_groups
    direction = momentum.lerp(gradient, 1 - how["momentum"])
    if how["nesterov"]:
        direction = gradient.lerp(direction, how["momentum"])
    options = how["ns_coefficients"], how["ns_steps"], how["eps"]
    update = sent(owned[1], torch_muon._zeropower_via_newtonschulz(sent(owned[0], direction), *options))  # noqa: SLF001
    rate = torch_muon._adjust_lr(how["lr"], how["adjust_lr_fn"], value.shape)  # noqa: SLF001
    return value * (1 - how["lr"] * how["weight_decay"]) - rate * update, rate


@contextlib.contextmanager
def _rehearsal(
    strategy: Strategy, unit: str | None = None
) -> Iterator[communication_error.ReductionObserver]:
    """Context for passes that send the same messages as a training step, but have no effect on later training.

    When the context ends, gradients and gathered weights are dropped.  Buffers, random states and the state of codecs
    are restored.

    Yields:
        An observer of the reductions of the unit named ``unit``, or of all units if ``unit`` is None.
    """
    assert strategy.wire is not None  # noqa: S101  # callers compare only trials with a wire
    observed, device = communication_error.ReductionObserver(unit), next(strategy.model.parameters()).device
    random = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with strategy.wire.observed(observed), strategy.rehearsing(), random:
        yield observed


def _copied_between_nodes(zero: Zero, name: str, count: Callable[[], NDArray[np.int64]]) -> str | None:
    """Check that hpZ's backward gather of a unit sends no weights between nodes; return a sentence if it does.

    With hpZ inside nodes, each node keeps a copy of the weights, so that a backward gather needs no other node.  This
    function gathers the unit's weights once as in forward and once as in backward.  It reads the bytes from the node's
    network interface, independently of the engine's own counts.  The backward gather may send at most half as much as
    the forward gather, or 4096 bytes if this is more.  All ranks must call this function together.

    Args:
        zero: The engine.
        name: Name of the unit.
        count: Returns what this node has sent so far.  Element 0 is the bytes of the node's network interface, or 0 if
            these bytes are not known.

    Returns:
        A sentence with the bytes that were sent.  None if the gather sent no weights between nodes, if the policy has
        no hpZ inside nodes, or if the node has no network interface of its own, so that its bytes are not known.
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
        The error of each unit's gradient.  Units of which nothing could be compared are left out.
    """
    scale = strategy.loss_scale
    errors = (gradient.compare(layout, *strategy.mean_gradient(layout), scale) for layout in gradient.layouts)
    return [error for error in errors if error is not None]


def _type_of(trial: Trial) -> Dtype:
    """Return the less precise type in which a peer (a library such as DDP) computes or sends: ``bf16`` or ``fp32``.

    The type is ``bf16`` if the peer computes in bf16 or sends messages in bf16.  For all other trials it is ``fp32``.
    """
    if trial.strategy not in PEERS:
        return "fp32"
    compute = trial.peer.compute
    return "bf16" if "bf16" in (compute, PEERS[trial.strategy].wire(compute)) else "fp32"
