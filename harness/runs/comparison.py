"""Compares a trial with a single process and with exact values, at stated steps, outside of what is timed.

Before training, in evaluation mode on each rank's batches of the first step: the sharded model's loss and its
reduced gradients beside those of a single process (:mod:`harness.measure.first_gradient`).  Just before the
first, a middle and the last step, where errors are measured: what is sent beside exact values
(:mod:`harness.measure.communication_error`).  After the steps: a grid of codecs, nothing sent
(:mod:`harness.measure.quantisation_error`).  Nothing that a comparison leaves behind reaches the training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import torch
from pydantic import PlainSerializer, PlainValidator, TypeAdapter
from torch import nn

from harness.cluster.rank import ERRORS, GRID, Progress, Rank
from harness.measure import communication_error, quantisation_error
from harness.measure.communication_error import Found, Place, Sums
from harness.measure.first_gradient import (
    ROUNDING,
    FirstGradient,
    GradientError,
    Layout,
    of_groups,
    of_model,
    of_units,
)
from harness.measure.quantisation_error import Key, Squares
from harness.measure.reference_loss import (
    as_computed,
    as_computed_by,
    as_gathered,
    as_gathered_by_fsdp2,
    evaluating,
    mean_loss,
)
from harness.records.record import GradientCheck
from harness.strategies.strategy import Strategy
from harness.strategies.training import run_passes
from harness.suites.peers import PEERS, family_of
from harness.suites.trial import Trial
from harness.workloads.data import Data
from impl.adapters.joined import fsdp2_groups
from impl.codecs.codec import Dtype
from impl.plan.policy import Policy
from impl.plan.topology import Topology
from impl.plan.traffic import Event
from impl.zero import find_blocks, plan_units

TOLERANCE: Final = 1e-4  # of the loss, or absolute below 1: sums of two processes round differently


class TrialError(RuntimeError):
    """A trial ran, but a check of its results failed; the message names the numbers."""


def _as_pairs(key: Any, value: Any) -> tuple[PlainSerializer, PlainValidator]:
    """How pydantic writes a dictionary whose keys are not text, and reads it: as a list of pairs."""
    pairs: TypeAdapter[list[tuple[Any, Any]]] = TypeAdapter(list[tuple[key, value]])
    return (
        PlainSerializer(lambda found: pairs.dump_python(list(found.items()), mode="json")),
        PlainValidator(
            lambda found: found if isinstance(found, dict) else dict(pairs.validate_python(found))
        ),
    )


@dataclass(frozen=True, slots=True)
class FirstLoss:
    """Mean losses of one rank's batches of the first step, in evaluation mode.

    ``reference`` is of a single process in fp32, ``expected`` of one with weights as all-gathered,
    ``found`` of the sharded model.
    """

    reference: float
    expected: float
    found: float


@dataclass(slots=True)
class Compared:
    """What one rank compared.

    Attributes:
        first_loss: before training.
        gradient_errors: of the reduced gradients before training, by unit.
        communicated: error sums of what was sent.
        errors: error sums of the grid of codecs.
    """

    first_loss: FirstLoss
    gradient_errors: list[GradientError] = field(default_factory=list)
    communicated: Annotated[Found, *_as_pairs(Place, Sums)] = field(default_factory=dict)
    errors: Annotated[dict[Key, Squares], *_as_pairs(Key, Squares)] = field(default_factory=dict)


def merge(ranks: Sequence[Compared], trial: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record that hold what all ranks compared, in rank order.

    Args:
        ranks: what each compared.
        trial: as on record; a control is wrong on purpose.

    Raises:
        TrialError: for a loss before training that is not a single process's, reduced gradients that are
            farther from it than the codecs promise, or errors of what was sent that a codec cannot make.
    """
    control = trial.get("control")
    losses = [rank.first_loss for rank in ranks]
    for number, rank in enumerate(ranks):
        _check_loss(number, rank.first_loss)
        for error in rank.gradient_errors if control != "unordered" else ():
            _check_gradient(number, error)
    first_gradients = checks_of([rank.gradient_errors for rank in ranks])
    reference = math.fsum(loss.reference for loss in losses) / len(losses)
    errors, sent = [rank.errors for rank in ranks], [rank.communicated for rank in ranks]
    communicated = communication_error.errors_of(sent)
    if communicated and not control:
        policy = Trial.from_canonical(trial).resolved_policy() or Policy()
        if (wrong := communication_error.refusal(communicated, policy)) is not None:
            raise TrialError(wrong)
    return {
        "reference_loss": reference,
        "first_gradients": first_gradients,
        "communication_errors": communicated,
        "quantisation": quantisation_error.errors_of(errors),
    }


def _check_loss(rank: int, loss: FirstLoss) -> None:
    allowed = TOLERANCE * max(1.0, abs(loss.expected))
    if not abs(loss.found - loss.expected) <= allowed:  # also if either is NaN
        raise TrialError(
            f"before training the loss of rank {rank} is {loss.found:.6f}, of a single process on the same "
            f"batches with equal weights {loss.expected:.6f}: they differ by more than {allowed:g}"
        )


def _check_gradient(rank: int, error: GradientError) -> None:
    if not error.share <= 1:
        raise TrialError(
            f"before training rank {rank}'s reduced gradient of unit {error.unit!r} has an element "
            f"{error.found:.6g}, a single process's {error.expected:.6g}: they differ by more than the "
            f"codecs allow, {error.allowed:.3g}"
        )


def checks_of(ranks: Sequence[Sequence[GradientError]]) -> list[GradientCheck]:
    """What all ranks compared, by unit."""
    units = dict.fromkeys(error.unit for rank in ranks for error in rank)
    mine = {unit: [error for rank in ranks for error in rank if error.unit == unit] for unit in units}
    return [
        GradientCheck(
            unit=unit,
            elements=sum(error.elements for error in errors),
            share=max(error.share for error in errors),
        )
        for unit, errors in mine.items()
    ]


@dataclass(frozen=True, slots=True)
class Expected:
    """What a single process has before training.

    Attributes:
        reference: loss with the fp32 weights.
        loss: with weights as all-gathered.
        gradient: with those, in the policy's compute type; None where nothing is compared.
    """

    reference: float
    loss: float
    gradient: FirstGradient | None = None


class Comparison:
    """A trial's comparisons on one rank; all ranks must call each method.

    Made of the unsharded model, before it is sharded.

    Attributes:
        compared: what was found so far.
        events: the passes that were run before training, as ``impl.plan.traffic`` has them.
    """

    def __init__(self, trial: Trial, model: nn.Module, data: Data, rank: Rank) -> None:
        self.trial, self.data, self.rank = trial, data, rank
        self.expected = single_process(trial, model, data, rank.topology)
        total = trial.warmup + trial.steps
        # Further repeats send the same, and would take their time for it.
        self.measures = trial.measure_quantisation and trial.repeat == 0
        self.steps = sorted(communication_error.measured_steps(total)) if self.measures else []
        self.compared: Compared
        self.events: list[Event] = []

    def before_training(self, strategy: Strategy) -> None:
        """Compare the sharded model's loss and reduced gradients with a single process's."""
        expected, first = self.expected, self.expected.gradient
        if first is None:
            found, errors = mean_loss(strategy.model, self.data.first()), []
            strategy.weights_changed()  # what the check gathered must not serve the first step
        else:
            with evaluating(strategy.model):
                passes = run_passes(self.trial, strategy, self.data, 0)
            scale = strategy.loss_scale
            compared = [first.compare(one, *strategy.mean_gradient(one), scale) for one in first.layouts]
            strategy.forget_gradients()
            found, errors = passes.mean, [error for error in compared if error is not None]
            self.events = [*passes.events, "changed"]
        self.compared = Compared(FirstLoss(expected.reference, expected.loss, found), errors)

    def is_due(self, index: int, strategy: Strategy) -> bool:
        """Whether what step ``index`` is about to send is compared with exact values."""
        return strategy.wire is not None and index in self.steps

    def before_step(self, index: int, strategy: Strategy) -> None:
        """Compare what step ``index`` is about to send with exact values, in passes of its own.

        They leave no trace but these: the next step, and the ledger, are as without them.
        """
        self.rank.report(Progress(ERRORS, self.steps.index(index) + 1, len(self.steps)))
        policy, device = self.trial.resolved_policy(), next(strategy.model.parameters()).device
        differ = policy is not None and communication_error.outcomes_differ(policy)
        found = self.compared.communicated
        for repeated in (1, communication_error.REPEATED) if differ and index == self.steps[-1] else (1,):
            observed = communication_error.Observed()
            random = torch.random.fork_rng([device] if device.type == "cuda" else [])
            assert strategy.wire is not None  # noqa: S101  # it is due
            with strategy.wire.observed(observed), strategy.rehearsing(), random:
                if repeated == 1:
                    found |= strategy.weight_errors(index)
                for _ in range(repeated):
                    run_passes(self.trial, strategy, self.data, index)
            found |= communication_error.of_gradients(index, observed, repeated=repeated)

    def after_steps(self, strategy: Strategy) -> None:
        """Try a grid of codecs on this rank's weights, and on gradients of one more backward pass."""
        if strategy.zero is None or not self.measures:
            return
        self.rank.report(Progress(GRID))
        run_passes(self.trial, strategy, self.data, self.trial.warmup + self.trial.steps)
        self.compared.errors = quantisation_error.measure(strategy.zero)


def single_process(trial: Trial, model: nn.Module, data: Data, topology: Topology) -> Expected:
    """Loss and gradient of the unsharded model; all ranks must call it, and it is left as it was."""
    exact = mean_loss(model, data.first())
    policy, host = trial.resolved_policy(), trial.host
    if policy is None:
        twin = as_computed_by(trial, model, next(model.parameters()).device)
        layouts: Sequence[Layout] | None = None  # DeepSpeed keeps its reduced gradients to itself
        if family_of(trial.strategy) == "ddp":
            layouts = of_model(model)
        elif family_of(trial.strategy) == "fsdp2":
            layouts = of_groups(fsdp2_groups(model, find_blocks(model), topology), None, topology)
        return Expected(exact, *_loss_and_gradient(trial, twin, data, layouts))
    if host == "fsdp2":
        groups = fsdp2_groups(model, find_blocks(model), topology)
        with as_gathered_by_fsdp2(model, policy.weights, groups):
            layouts = of_groups(groups, policy, topology)
            return Expected(exact, *_loss_and_gradient(trial, model, data, layouts))
    units = plan_units(model, topology, policy)
    layouts = of_units(units, policy, topology)
    if host == "ddp":  # whole weights on every rank: none are gathered
        return Expected(exact, *_loss_and_gradient(trial, model, data, layouts))
    with as_gathered(model, policy, units, trial.seed):
        twin = as_computed(model, policy)
        return Expected(exact, *_loss_and_gradient(trial, twin, data, layouts, policy))


def _loss_and_gradient(
    trial: Trial,
    model: nn.Module,
    data: Data,
    layouts: Sequence[Layout] | None,
    policy: Policy | None = None,
) -> tuple[float, FirstGradient | None]:
    """This rank's mean loss of the first step's batches, and the mean gradient over all ranks.

    No gradient without layouts, or of a trial that decodes.
    """
    if trial.workload == "generate" or layouts is None:
        return mean_loss(model, data.first()), None
    compute, scale = (_type_of(trial), None) if policy is None else (policy.compute, policy.loss_scale)
    rounding = ROUNDING[compute]
    if policy is not None and policy.secondary_format != "frames":  # backward computes with a rounded copy
        rounding = max(rounding, ROUNDING[policy.secondary_format])
    first = FirstGradient(layouts, trial.seed, trial.accumulation, rounding)
    times = 1.0 if scale is None else scale.initial
    parameters = dict(model.named_parameters())
    losses: list[float] = []
    with evaluating(model):
        for micro in data.step(0):
            for batch in micro:
                loss = model(*batch)
                losses.append(float(loss.detach()))
                (loss * times).backward()
            first.add({name: parameter.grad for name, parameter in parameters.items()}, times)
            for parameter in parameters.values():
                parameter.grad = None
    first.average()
    return math.fsum(losses) / len(losses), first


def _type_of(trial: Trial) -> Dtype:
    """The coarser of the types in which a peer computes and sends; of hosts, whose codecs say it, fp32."""
    if trial.strategy not in PEERS:
        return "fp32"
    compute = trial.peer.compute
    return "bf16" if "bf16" in (compute, PEERS[trial.strategy].wire(compute)) else "fp32"
