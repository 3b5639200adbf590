"""``zeropp snapshot``: keeps the weights, the changes of weights and each rank's gradients of chosen steps.

One process trains the trial's model on all ranks' batches, in fp32, as strategy ``single`` does, and sends
nothing.  What it keeps is what any policy of the trial would have to send.  A snapshot is one safetensors
file; its tensors are called ``KIND/UNIT@STEP``:

- ``weights`` (P,) fp32 before the step, laid out as the engine's unit is;
- ``changes`` (P,) fp32: the weights after the step less those before it;
- ``gradients`` (ranks, P) fp32, of each rank's batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from harness.errors import Refusal
from harness.strategies.optimizers import built, set_rates
from harness.suites.peers import DEEPSPEED, family_of
from harness.suites.trial import Trial
from harness.workloads import models
from harness.workloads.data import Data
from impl.plan.policy import MemoryLimits, Policy
from impl.plan.shard_layout import UnitGeometry
from impl.zero import plan_units


def take(trial: Trial, steps: Sequence[int], path: Path, told: Callable[[str], None]) -> None:
    """Train until the last of ``steps``, and write what was there before each of them; ``told`` is given a
    line for each. Of ``trial`` model, data, optimizer and topology are taken; its policy is not.

    Raises:
        Refusal: for steps that the trial has not, a peer of DeepSpeed's, or a file that cannot be written.
    """
    count = trial.warmup + trial.steps
    if not steps or min(steps) < 0 or max(steps) >= count:
        raise Refusal(f"--steps {', '.join(map(str, steps))}: expected some of 0 to {count - 1}")
    if trial.workload != "train":
        raise Refusal(f"workload = {trial.workload!r}: a snapshot is of training")
    if family_of(trial.strategy) == DEEPSPEED:
        raise Refusal(f"strategy = {trial.strategy!r}: its optimizer is DeepSpeed's; name another trial")
    from safetensors.torch import save_file

    torch.set_num_threads(trial.threads or 1)
    torch.manual_seed(trial.seed)
    model = models.of_trial(trial)
    topology = trial.topology()
    policy = Policy(memory=MemoryLimits(max_padding=float("inf")))
    units = plan_units(model, topology, policy)
    single = Data(trial.model_copy(update={"strategy": "single"}), 0, torch.device("cpu"))
    optimizer, schedule = built(trial.optimizer, model.parameters()), trial.schedule()
    kept: dict[str, Tensor] = {}
    for step in range(max(steps) + 1):
        if schedule is not None:
            set_rates(optimizer, schedule, step)
        gradients = _gradients(model, units, single, step, topology.world)
        before = _laid_out(model, units, lambda parameter: parameter.detach())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= topology.world * trial.accumulation
        if trial.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), trial.clip)
        optimizer.step()
        optimizer.zero_grad()
        if step not in steps:
            continue
        after = _laid_out(model, units, lambda parameter: parameter.detach())
        for unit in (one.name for one in units):
            kept[f"weights/{unit}@{step}"] = before[unit]
            kept[f"changes/{unit}@{step}"] = after[unit] - before[unit]
            kept[f"gradients/{unit}@{step}"] = gradients[unit]
        told(f"step {step} of {max(steps)} kept")
    try:
        save_file(kept, path, {"nodes": str(topology.nodes), "ranks_per_node": str(topology.ranks_per_node)})
    except OSError as error:
        raise Refusal(f"{path}: {error}") from None


def _laid_out(
    model: nn.Module, units: Sequence[UnitGeometry], of: Callable[[nn.Parameter], Tensor]
) -> dict[str, Tensor]:
    """(P,) fp32 of each unit, padding included."""
    named, found = dict(model.named_parameters()), {}
    for unit in units:
        flat = torch.zeros(unit.padded)
        for slot in unit.slots:
            flat[slot.offset : slot.end] = of(named[slot.spec.name]).reshape(-1)
        found[unit.name] = flat
    return found


def _gradients(
    model: nn.Module, units: Sequence[UnitGeometry], data: Data, step: int, world: int
) -> dict[str, Tensor]:
    """(ranks, P) of each unit: the sums of each rank's micro-batches; the model's own are the ranks' sum."""
    whole = {unit.name: torch.zeros(world, unit.padded) for unit in units}
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for micro in data.step(step):
        for rank, batch in enumerate(micro):
            model(*batch).backward()
            mine = _laid_out(model, units, _gradient)
            for unit in units:
                whole[unit.name][rank] += mine[unit.name]
            for total, parameter in zip(sums, model.parameters(), strict=True):
                total.add_(_gradient(parameter))
            model.zero_grad()
    for total, parameter in zip(sums, model.parameters(), strict=True):
        parameter.grad = total if parameter.requires_grad else None
    return whole


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
