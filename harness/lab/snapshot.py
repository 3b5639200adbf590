"""``zeropp snapshot``: saves the weights, their changes and each rank's gradients at chosen steps of a trial.

One process trains the trial's model in fp32 on the batches of all ranks, as strategy ``single`` does, and sends
nothing.  The snapshot therefore has the exact values that ranks encode before they send them, whatever the policy.  A
snapshot is one safetensors file with tensors named ``KIND/UNIT@STEP``, where KIND is one of

- ``weights``: (P,) fp32 before the step, laid out as the engine lays out the unit;
- ``changes``: (P,) fp32, the weights after the step minus the weights before;
- ``gradients``: (ranks, P) fp32, a row from each rank's batches.

A unit is a set of parameters that the engine gathers and reduces together; P is its number of elements with padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from harness.errors import Refusal
from harness.measure.unsharded_loss import packed
from harness.strategies import optimizers
from harness.suites.peers import DEEPSPEED, family_of
from harness.suites.trial import Trial
from harness.whole_file import written_whole
from harness.workloads import models
from harness.workloads.rank_batches import RankBatches
from impl.policy.policy import MemoryLimits, Policy
from impl.policy.shard_layout import UnitGeometry
from impl.zero import plan_units


def take(trial: Trial, steps: Sequence[int], path: Path, report: Callable[[str], None]) -> None:
    """Train a trial's model up to the last of the chosen steps, and write a snapshot of these steps.

    Args:
        trial: The trial.  Its policy is ignored.
        steps: The steps to save, counted from 0 at the first warm-up step.
        path: The file to write.
        report: Called with a line of text after each saved step.

    Raises:
        Refusal: If a chosen step lies beyond the trial's last step, if the trial does not train or trains with
            DeepSpeed, or if the file cannot be written.
    """
    count = trial.warmup + trial.steps
    if max(steps) >= count:
        raise Refusal(
            f"--steps {', '.join(map(str, steps))}: the trial does not have all of these steps; expected numbers from "
            f"0 to {count - 1}"
        )
    if trial.workload != "train":
        raise Refusal(
            f"workload = {trial.workload!r}: zeropp snapshot needs a trial that trains; name a trial with workload = "
            "'train'"
        )
    if family_of(trial.strategy) == DEEPSPEED:
        raise Refusal(
            f"strategy = {trial.strategy!r} trains with DeepSpeed's optimizer, which zeropp snapshot cannot run; name "
            "a trial with another strategy"
        )
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    torch.set_num_threads(trial.threads or 1)
    torch.manual_seed(trial.seed)
    model = models.of_trial(trial)
    topology = trial.topology()
    policy = Policy(memory=MemoryLimits(max_padding=float("inf")))
    units = plan_units(model, topology, policy)
    single = RankBatches(trial.model_copy(update={"strategy": "single"}), 0, torch.device("cpu"))
    optimizer, schedule = optimizers.of_model(trial.optimizer, model), trial.schedule()
    parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for step in range(max(steps) + 1):
        optimizers.set_rates(optimizer, schedule, step)
        gradients = _gradients(model, units, single, step, topology.world)
        for unit in units:
            mean = gradients[unit.name].sum(0) / (topology.world * trial.accumulation)
            for slot in unit.slots:
                parameter = parameters[slot.spec.name]
                if parameter.requires_grad:
                    parameter.grad = mean[slot.offset : slot.end].view_as(parameter).clone()
        if trial.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), trial.clip)
        before = _flatten(units, parameters)
        optimizer.step()
        optimizer.zero_grad()
        if step in steps:
            after = _flatten(units, parameters)
            for name, gradient in gradients.items():
                tensors[f"weights/{name}@{step}"] = before[name]
                tensors[f"changes/{name}@{step}"] = after[name] - before[name]
                tensors[f"gradients/{name}@{step}"] = gradient
            report(f"saved step {step} of {max(steps)}")
    metadata = {"nodes": str(topology.nodes), "ranks_per_node": str(topology.ranks_per_node)}
    try:
        with written_whole([path]) as (unfinished,):
            save_file(tensors, unfinished, metadata)
    except SafetensorError as error:
        raise Refusal(f"{path}: cannot be written: {error}; name another file with --out") from None


def _flatten(units: Sequence[UnitGeometry], values: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Join the values of the parameters of each unit, and return a padded (P,) fp32 tensor for each unit's name.

    A unit is a set of parameters that the engine gathers together.  ``values`` has a tensor or None for each parameter,
    by the parameter's name.  For None, the elements are zeros.
    """
    return {unit.name: packed(unit, values).flatten() for unit in units}


def _gradients(
    model: nn.Module, units: Sequence[UnitGeometry], data: RankBatches, step: int, world: int
) -> dict[str, Tensor]:
    """Run the passes of one step on the batches of all ranks; return the gradients (ranks, P) of each unit, by name.

    The row of a rank is the sum of the gradients of this rank's micro-batches.  ``data`` gives the batches of all
    ``world`` ranks.
    """
    sums = {unit.name: torch.zeros(world, unit.padded) for unit in units}
    for micro in data.step(step):
        for rank, batch in enumerate(micro):
            model(*batch).backward()
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            for name, gradient in _flatten(units, gradients).items():
                sums[name][rank] += gradient
            model.zero_grad()
    return sums
