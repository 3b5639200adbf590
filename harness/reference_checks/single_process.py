"""Computes with an unsharded model, in one process, what the sharded model of a trial should compute.

Each rank has an unsharded copy of the model and computes the losses of its own batches.  The gradients of all ranks are
averaged without the engine: :class:`~harness.measure.gradient_bounds.FirstGradient` does this.  The model computes with
the weights as the ranks gather them, that is, quantised and decoded by the reference implementation of the codecs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from harness.cluster.rank_processes import kind_of
from harness.errors import Refusal
from harness.measure import communication_error
from harness.measure.gradient_bounds import ROUNDING, FirstGradient, Layout, layouts_of, model_layouts
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
from harness.strategies.optimizers import group_of
from harness.suites.peers import PEERS, family_of
from harness.suites.trial import Trial
from harness.workloads import models
from harness.workloads.rank_batches import Batches, batches_of
from impl.adapters.joined import fsdp2_groups
from impl.adapters.traffic import GroupGeometry
from impl.codecs.codec import Dtype
from impl.codecs.rounding_noise import Clock
from impl.errors import raised
from impl.policy.policy import Policy
from impl.policy.shard_layout import UnitGeometry
from impl.policy.topology import Topology
from impl.unit.whole_values import WholeValues
from impl.zero import Zero, find_blocks, plan_units

# Allowed difference of two losses: relative for losses above 1, absolute for losses below.  Two computations that add
# in another order round differently.
TOLERANCE: Final = 1e-4
same_loss: Final = partial(math.isclose, rel_tol=TOLERANCE, abs_tol=TOLERANCE)

# Gathered weights by the parameter's name: a dict for forward passes, and a dict for backward passes.
Gathered = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]


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


@dataclass(frozen=True, slots=True)
class SingleProcess:
    """Computes one rank's losses, and the mean gradients of all ranks, with an unsharded model."""

    trial: Trial
    data: Batches
    topology: Topology

    def compute(  # the first five say which step is computed
        self,
        model: nn.Module,
        step: int = 0,
        clock: Clock | None = None,
        data: Batches | None = None,
        unit: UnitGeometry | None = None,
        *,
        gathered: Gathered | None = None,
    ) -> tuple[ComparedLoss, FirstGradient | None]:
        """Compute the losses and gradients of one step; all ranks must call this method.

        Args:
            model: The unsharded model.
            step: The step whose batches are used.
            clock: Determines the stochastic rounding of weights; by default the clock of the first step.
            data: Where batches come from; by default the trial's batches.
            unit: The unit (set of parameters that are reduced together) that is checked in the drawn step, the one step
                that seed and repeat choose for a check.  None in other steps.  With a unit, the result differs in two
                ways.  The gradient also keeps this rank's own gradient of the unit in the last micro-batch, as
                ``latest``.  The loss with fp32 weights, ``reference``, is not computed, and has the value of
                ``expected`` instead.  Afterwards the model keeps the quantised weights.
            gathered: The weights that a user's own gather returned for forward and backward passes; None without such a
                gather.

        Returns:
            (losses on this rank's batches, gradient averaged over ranks).  The gradient is None if the trial only
            decodes, or if its peer (DeepSpeed) does not show its gradients.

        Raises:
            Refusal: If a user's own model raised an error in its forward pass.
        """
        trial, data, clock = self.trial, data or self.data, clock or Clock(self.trial.seed)
        whole = trial.resolved_policy()
        policy = None if whole is None else whole.policy_at(clock.step)
        reference = math.nan if unit is not None else self._loss(model, data, step)
        units, layouts = self._units_and_layouts(model, whole, policy)
        columns = dict[str, Tensor]()
        with contextlib.ExitStack() as entered:
            if gathered is not None:
                entered.enter_context(computing_with(model, gathered[0]))
                columns = dict(gathered[1])
            elif policy is not None and self._family != "ddp":  # DDP has whole weights on every rank
                columns = by_columns(model, policy, units)
                if unit is None:
                    entered.enter_context(as_gathered(model, policy, units, clock))
                else:  # the caller needs the model no more
                    quantise(model, policy, units, clock)
            computed = as_computed(trial, model)
            if trial.workload == "generate" or layouts is None:
                loss = mean_loss(computed, batches_of(data, step))
                return ComparedLoss(reference, loss, None, step), None
            loss, gradient = self._gradient(
                computed, layouts, data, step, columns=columns, policy=policy, unit=unit
            )
            trained = self._trained(computed, data, step, unit, loss)
        return ComparedLoss(reference if unit is None else loss, loss, trained, step), gradient

    @property
    def _family(self) -> str | None:
        """The library that trains the model, or inside which our policy runs; None if our engine trains."""
        return self.trial.host or family_of(self.trial.strategy)

    def _loss(self, model: nn.Module, data: Batches, step: int) -> float:
        """Return the model's mean loss over the batches of step ``step``, computed with its fp32 weights.

        Raises:
            Refusal: If a user's own model raised an error.
        """
        try:
            return mean_loss(model, batches_of(data, step))
        except Exception as error:  # an error of a user's own model becomes a Refusal, unless memory ran out
            if ":" not in self.trial.model.name or kind_of(error) != "crashed":
                raise
            raise Refusal(
                f"model {self.trial.model.name!r} raised {raised(error)}; its forward() gets a batch's inputs and "
                "targets, and must return their loss"
            ) from error

    def _units_and_layouts(
        self, model: nn.Module, whole: Policy | None, policy: Policy | None
    ) -> tuple[Sequence[UnitGeometry | GroupGeometry], Sequence[Layout] | None]:
        """Return the units in which the trial gathers weights, and how its gradients are sharded.

        A unit is a set of parameters that are gathered together.

        Args:
            model: The unsharded model.
            whole: The trial's policy; None if a library trains the model without a policy of ours.
            policy: The policy of the step, which a schedule may change; None like ``whole``.

        Returns:
            (units, layouts).  A layout says how one reduced gradient is sharded.  DDP gathers no weights, so the units
            are empty.  With DeepSpeed the units are empty too, and the layouts are None, because DeepSpeed does not
            show its reduced gradients.
        """
        trial, topology = self.trial, self.topology
        units: Sequence[UnitGeometry | GroupGeometry]
        if self._family == "fsdp2":
            # With peer.group = "node", each node is one copy of the states, sharded among its own ranks.
            sharing = topology if trial.peer.group == "all" else Topology(1, topology.ranks_per_node)
            units = fsdp2_groups(model, find_blocks(model), sharing)
        elif whole is not None:
            units = plan_units(model, topology, whole, group_of=group_of(trial.optimizer, model))
        else:
            return (), model_layouts(model) if self._family == "ddp" else None
        return units, layouts_of(units, policy, topology) if units else None

    def _trained(
        self, model: nn.Module, data: Batches, step: int, unit: UnitGeometry | None, loss: float
    ) -> float | None:
        """Return the loss that the training step itself should have, or None if it is not known.

        The loss is not known before training (step 0), and for models whose losses in training mode and in evaluation
        mode may differ.

        Args:
            model: The model as the trial computes it.
            data: The batches over which ``loss`` was computed.
            step: The step.
            unit: The unit (set of parameters) that is checked in the drawn step, the one step that seed and repeat
                choose for a check; None in other steps.
            loss: The loss in evaluation mode.
        """
        if unit is None:
            if step == 0:
                return None
            with torch.no_grad():
                model.train()
                losses = [float(model(*batch)) for batch in batches_of(data, step)]
            return loss if same_loss(math.fsum(losses) / len(losses), loss) else None
        if data is self.data:
            return loss
        # The rehearsal in evaluation mode does not run the code of the training step, so the loss of the step itself is
        # compared too.  Presets have no dropout: their losses in both modes are equal.
        return None if ":" in self.trial.model.name else mean_loss(model, batches_of(self.data, step))

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
            columns: The weights for backward passes, by parameter name.  An empty dict means that backward passes
                compute with the model's weights, as forward passes do.  The dict has weights in two cases:
                ``policy.planes`` is not 1 (backward passes then use weights with blocks along columns), or a user's own
                class gathers weights.
            policy: The policy of the step; None if another engine trains (a peer, such as DDP).
            unit: The set of parameters whose gradient on this rank, of the last micro-batch, is kept as ``latest`` in
                the result; None to keep none.

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
        apart = 0 if policy is None or policy.local_steps is None else policy.group_ranks(self.topology)
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


def checked_step(trial: Trial) -> int | None:
    """Return the index of the drawn step, in which a trial of our engine is compared with a single process.

    The step is chosen at random from the trial's seed and repeat number.  The result is None if the trial has too few
    steps, or if a single process cannot repeat the trial's steps.
    """
    # The check gathers masters through torch.distributed itself, not through the engine's wire.  With transport
    # "staged" this is gloo, which cannot gather tensors of a GPU.  In workload rlhf, the sharded model generates its
    # batch, which a single process cannot repeat.  A strategy of the user's own may have other weights on each node.
    if trial.workload != "train" or trial.cluster.transport == "staged" or trial.own_strategy:
        return None
    total = trial.warmup + trial.steps
    return communication_error.drawn_step(trial.seed, trial.repeat, trial.warmup, total)


def model_of_masters(trial: Trial, zero: Zero) -> tuple[nn.Module, Gathered | None]:
    """Build an unsharded model from the engine's masters (fp32 weights).

    Returns:
        (model, gathered).  ``gathered`` is None unless a user's own class gathers weights.  With such a class, the
        model's weights are the masters, but the caller must compute with ``gathered``: the weights that the class
        returns for forward and for backward passes when it gathers now.  The engine's next passes gather the same
        weights.
    """
    if ":" in trial.model.name:  # may have buffers
        with next(zero.model.parameters()).device:
            model = models.of_trial(trial)
        model.load_state_dict(zero.full_state_dict())
    else:
        values: dict[str, Tensor] = {}
        for unit in zero.units:
            names = [slot.spec.name for slot in unit.geometry.slots]
            values.update(zip(names, WholeValues(unit).masters(), strict=True))
        model = models.with_values(trial, values)
    own = zero.policy.own_gather is not None
    return model, communication_error.gathered_weights(zero) if own else None


def _type_of(trial: Trial) -> Dtype:
    """Return the less precise type in which a peer (a library such as DDP) computes or sends: ``bf16`` or ``fp32``.

    The type is ``bf16`` if the peer computes in bf16 or sends messages in bf16.  For all other trials it is ``fp32``.
    """
    if trial.strategy not in PEERS:
        return "fp32"
    compute = trial.peer.compute
    return "bf16" if "bf16" in (compute, PEERS[trial.strategy].wire(compute)) else "fp32"
