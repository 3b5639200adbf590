"""Local steps in a single process: what groups of ranks that train apart and meet must follow."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import Tensor, nn

from impl.plan.local_steps import fragments_of, meets
from impl.policy.policy import Policy
from impl.policy.topology import Topology
from impl.zero import plan_units
from tests.support.training import Optimize, adamw, batch


def diloco(  # noqa: PLR0917  # as single
    net: nn.Module,
    policy: Policy,
    topology: Topology,
    steps: int,
    micro_batches: int = 1,
    optimize: Optimize = adamw,
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Train each group's copy of ``net`` by itself, and meet as DiLoCo and Streaming DiLoCo say.

    Returns the mean loss of each step, and the state of each group's copy.
    """
    size = policy.group_ranks(topology)
    groups = [range(first, first + size) for first in range(0, topology.world, size)]
    workers = [copy.deepcopy(net) for _ in groups]
    anchor = {name: p for name, p in copy.deepcopy(net).named_parameters() if p.requires_grad}
    optimizers = [optimize([p for p in worker.parameters() if p.requires_grad]) for worker in workers]
    momentum = policy.outer_momentum
    outer = torch.optim.SGD(anchor.values(), lr=policy.outer_rate, momentum=momentum, nesterov=momentum > 0)
    units = plan_units(net, topology, policy)
    fragment = {
        slot.spec.name: number
        for unit, number in zip(units, fragments_of(policy, units), strict=True)
        for slot in unit.slots
    }
    losses = []
    for step in range(steps):
        total = 0.0
        for worker, ranks, optimizer in zip(workers, groups, optimizers, strict=True):
            for micro, rank in itertools.product(range(micro_batches), ranks):
                loss = worker(batch(step * micro_batches + micro, rank))
                (loss / size).backward()
                total += loss.item() / topology.world / micro_batches
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total)
        outer.zero_grad()
        models = [dict(worker.named_parameters()) for worker in workers]
        due = [name for name in anchor if meets(policy, step + 1, fragment[name])]
        with torch.no_grad():
            for name in due:
                moved = [anchor[name] - parameters[name] for parameters in models]
                anchor[name].grad = torch.stack(moved).mean(0)
            outer.step()
            for name, parameters in itertools.product(due, models):
                parameters[name].copy_(anchor[name])
    return losses, [worker.state_dict() for worker in workers]
