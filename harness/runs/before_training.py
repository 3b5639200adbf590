"""Losses and gradients before training, of a single process and of the sharded model, on equal batches.

Both in evaluation mode, on each rank's batches of the first step.  The sharded model's pass is a step without
its optimizer: nothing that it leaves behind reaches the training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from harness.measure.first_gradient import (
    ROUNDING,
    FirstGradient,
    GradientError,
    Layout,
    of_groups,
    of_model,
    of_units,
)
from harness.measure.reference_loss import (
    as_computed,
    as_computed_by,
    as_gathered,
    as_gathered_by_fsdp2,
    evaluating,
    mean_loss,
)
from harness.strategies.strategy import Strategy
from harness.suites.peers import PEERS, family_of
from harness.suites.trial import Trial
from harness.workloads.data import Data
from impl.adapters.joined import fsdp2_groups
from impl.codecs.codec import Dtype
from impl.plan.policy import Policy
from impl.plan.topology import Topology
from impl.plan.traffic import Event
from impl.zero import find_blocks, plan_units


@dataclass(frozen=True, slots=True)
class Found:
    """What the sharded model has before training.

    Attributes:
        loss: mean of its batches.
        errors: of reduced gradients, by unit.
        events: the passes that were run, as ``impl.plan.traffic`` has them: predictions count them too.
    """

    loss: float
    errors: list[GradientError]
    events: list[Event]


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


def sharded(trial: Trial, strategy: Strategy, data: Data, expected: Expected) -> Found:
    """The sharded model's loss, and errors of its reduced gradients; all ranks must call it."""
    first = expected.gradient
    if first is None:
        found = mean_loss(strategy.model, data.first())
        strategy.weights_changed()  # what the check gathered must not serve the first step
        return Found(found, [], [])
    losses: list[float] = []
    events: list[Event] = []
    with evaluating(strategy.model):
        for number, micro in enumerate(data.step(0)):
            strategy.begin(last=number == trial.accumulation - 1)
            for batch in micro:
                loss = strategy.model(*batch)
                strategy.backward(loss / trial.accumulation)
                losses.append(float(loss.detach()))
            strategy.finish_backward()
            events += ["forward", "backward" if strategy.reduced else "accumulate"]
    scale = strategy.loss_scale
    compared = [first.compare(one, *strategy.mean_gradient(one), scale) for one in first.layouts]
    strategy.forget_gradients()
    mean = math.fsum(losses) / len(losses)
    return Found(mean, [error for error in compared if error is not None], [*events, "changed"])
