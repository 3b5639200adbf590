"""Predicts the seconds of a trial's step on a machine, from the trial's units and bytes.

A unit is a set of parameters that are gathered and reduced together.  This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from harness.suites.trial import Trial
from harness.workloads.preset_parameters import parameters_of_trial
from impl.plan.owners import owners_of
from impl.plan.prefetch_schedule import small_units
from impl.plan.step_time import Machine, Step, StepTime, Work, step_of, step_time
from impl.plan.unit_plan import plan_units
from impl.policy.shard_layout import UnitGeometry

BYTES_PER_MBIT: Final = 1e6 / 8


def step_of_trial(trial: Trial, units: Sequence[UnitGeometry], parameters: int) -> Step | None:
    """Return the work of a trial's step (computation and messages), from which :func:`predict` computes its seconds.

    Args:
        trial: The trial.
        units: The units of the model (sets of parameters that are gathered together), either planned or read from the
            trial's record.  A record does not list the parameters of a unit, but Muon's work depends on them.  If the
            trial uses Muon and the units come from a record, this function therefore plans the units again.
        parameters: Number of elements of the model.

    Returns:
        The work.  None in each of these cases, in which the step's time is not modelled:

        - a peer such as DDP trains the model;
        - FSDP2 or DDP runs the policy;
        - the workload is not ``train``;
        - a class of the user's own gathers weights or reduces gradients;
        - Muon needs units that are planned again, but the model is a user's function, which is not built here.
    """
    policy = trial.resolved_policy()
    own = policy is not None and (policy.phases[0].own_reduce is not None or policy.own_gather is not None)
    if policy is None or own or trial.host is not None or trial.workload != "train":
        return None
    owners = None
    if trial.optimizer.orthogonalises:
        if not any(unit.slots for unit in units):  # units from a record, which lack their parameters
            if ":" in trial.model.name:
                return None
            units = plan_units(*parameters_of_trial(trial), trial.topology(), policy)
        owners = owners_of(policy, trial.topology(), units)
    rate = trial.slowest_mbit if trial.cluster.nodes > 1 else None
    streams = trial.cluster.transport == "nccl"
    return Step(
        policy=policy,
        topology=trial.topology(),
        units=units,
        parameters=parameters,
        tokens=trial.tokens_per_rank,
        micro_batches=trial.accumulation,
        steps=(trial.warmup, trial.warmup + trial.steps),
        recompute=trial.activation_checkpointing,
        rate=math.inf if rate is None else rate * BYTES_PER_MBIT,
        owners=owners,
        small=small_units(policy, trial.topology(), units) if streams else frozenset(),
    )


def predict(trial: Trial, step: Step | None, egress: float | None, machine: Machine) -> StepTime | None:
    """Predict the seconds of a trial's step on a machine.

    Args:
        trial: The trial.
        step: The step's work (:func:`step_of_trial`); None if it is not known.
        egress: Bytes that a node sends to other nodes in a step; None if they are not known.
        machine: The machine.

    Returns:
        The predicted seconds.  Returns None if ``step`` or ``egress`` is None.
    """
    if step is None or egress is None:
        return None
    if machine.overlap == "schedule":
        latency = machine.latency + (trial.cluster.latency or 0.0) / 1e3
        inside = machine.inside
        if (inner := trial.cluster.inner_rate) is not None:  # the ranks of a node share this rate
            inside = min(inside or math.inf, inner * BYTES_PER_MBIT / trial.cluster.ranks_per_node)
        return step_of(replace(machine, latency=latency, inside=inside), step)
    tokens = step.tokens * step.micro_batches
    work = Work(parameters=step.parameters, tokens=tokens, egress_bytes=egress, rate=step.rate)
    return step_time(machine, work)
