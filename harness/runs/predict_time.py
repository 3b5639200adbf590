"""Predicts how long a trial's step takes on a machine: :mod:`impl.plan.step_time`, asked for trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from harness.records.record import Foreseen, Record
from harness.suites.trial import Trial
from impl.plan.machine import Machine
from impl.plan.shard_layout import FROZEN, UnitGeometry
from impl.plan.step_time import Step, StepTime, Work, step_of, step_time

BYTES_PER_MBIT = 1e6 / 8


def step_asked(trial: Trial, units: Sequence[UnitGeometry], parameters: int) -> Step | None:
    """What a trial's step asks of a machine; None for what is no step of this engine's training."""
    policy = trial.resolved_policy()
    if policy is None or trial.host is not None or trial.workload != "train":
        return None
    return Step(
        policy=policy,
        topology=trial.topology(),
        units=units,
        parameters=parameters,
        tokens=trial.tokens_per_rank,
        micro_batches=trial.accumulation,
        recompute=trial.activation_checkpointing,
        rate=_rate(trial),
    )


def predict(trial: Trial, step: Step | None, egress: int | None, machine: Machine) -> StepTime | None:
    """A trial's predicted step; None for what this engine does not train, or whose bytes are not known."""
    if step is None or egress is None:
        return None
    if machine.overlap == "schedule":
        latency = machine.latency + (trial.cluster.latency or 0.0) / 1e3
        return step_of(replace(machine, latency=latency), step)
    tokens = step.tokens * step.micro_batches
    work = Work(parameters=step.parameters, tokens=tokens, egress_bytes=egress, rate=step.rate)
    return step_time(machine, work)


def foreseen(machine: Machine, step: StepTime) -> Foreseen:
    """A predicted step as it is put on record."""
    return Foreseen(
        machine=machine.name,
        calibrated=step.calibrated,
        seconds=step.seconds,
        compute=step.compute,
        wire=step.wire,
        spread=step.spread,
    )


def units_of(trial: Trial, record: Record) -> list[UnitGeometry]:
    """The units that a record names, without their parameters."""
    policy, topology = trial.resolved_policy(), trial.topology()
    group = 0 if policy is None else policy.group_ranks(topology)
    return [
        UnitGeometry(name, (), padded, topology.world, not name.endswith(FROZEN), group)
        for name, _, padded in record.units
    ]


def _rate(trial: Trial) -> float:
    """Bytes a second of the slowest node's link; infinite where there is none, or no limit."""
    rate = trial.slowest_mbit if trial.cluster.nodes > 1 else None
    return math.inf if rate is None else rate * BYTES_PER_MBIT
