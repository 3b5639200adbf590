"""Predicts the bytes that a trial sends and holds, and a machine's time for its step, without running it.

A preset is planned by the shapes of its parameters, and another model is built on the meta device;
``impl.plan.traffic`` counts the bytes of their units.  So models and clusters that do not fit here, such as
100 B parameters on 64x16, are predicted in seconds.  By symmetry every node sends what node 0 sends.
Activations are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar

from harness.errors import Refusal
from harness.records.trial_record import Record
from harness.suites.peers import PEERS, zero_stage
from harness.suites.trial import Model, Trial
from harness.workloads.preset_parameters import parameters_of
from impl.adapters.traffic import GroupGeometry, predict_hosted
from impl.errors import raised
from impl.plan import traffic
from impl.plan.bit_budget import at_most
from impl.plan.policy import Policy
from impl.plan.shard_layout import FROZEN, UnitGeometry
from impl.plan.step_time import Machine, Step, StepTime, Work, step_of, step_time
from impl.plan.topology import Topology
from impl.plan.traffic import Event, LedgerKey
from impl.plan.unit_plan import Placed

if TYPE_CHECKING:
    from torch import nn

FP32_BYTES: Final = 4
BYTES_PER_MBIT: Final = 1e6 / 8
Models = dict[str, "nn.Module | Refusal"]
"""Models, or refusals to build them, by their JSON."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A preset by its parameters, which is enough to plan it; :class:`torch.nn.Module` takes torch."""

    placed: Sequence[Placed]
    blocks: Sequence[str]


_Key = TypeVar("_Key", bound=Hashable)


def model_to_plan(trial: Trial, models: Models) -> nn.Module | Listed | Refusal:
    """The model of a trial, as it is planned: on the meta device, or as a list where that is enough."""
    policy = trial.resolved_policy()
    cut = policy is not None and policy.memory.largest_unit
    if ":" in trial.model.name or trial.host is not None or trial.workload == "rlhf" or cut:
        return build_model(trial.model, trial.sequence, models)
    try:
        return Listed(*parameters_of(trial.model, trial.sequence))
    except Refusal as error:
        return error


def build_model(model: Model, sequence: int, models: Models) -> nn.Module | Refusal:
    """Build the model on the meta device, once; returns a Refusal if it cannot be built."""
    key = f"{model.model_dump_json()}/{sequence}"
    if key not in models:
        from harness.workloads import models as workload

        try:
            with workload.unfilled():
                models[key] = workload.build(model, sequence)
        except Refusal as error:
            models[key] = error
        except (Exception, SystemExit) as error:  # a user's own function may raise anything
            models[key] = Refusal(f"model {model.name!r} cannot be built: {raised(error)}")
    return models[key]


def per_node_bytes(
    policy: Policy,
    topology: Topology,
    units: Sequence[UnitGeometry | GroupGeometry],
    trial: Trial,
    *,
    judges: bool = False,
) -> tuple[int, int]:
    """Mean bytes that the ranks of one node send in a timed step, to other nodes and inside it; with a budget
    an upper bound, as if its codecs were chosen anew after each step.

    All nodes send the same, so the ranks of node 0 are enough.  ``units`` are those of the model that trains
    or decodes, maybe inside a host; or of the ``judges`` of workload ``rlhf``.
    """
    loads, later = _loads(policy, trial)
    beginnings = _beginnings(policy, trial)
    if judges:  # their weights never change, so those kept in earlier steps are still current
        timed: list[Event] = ["evaluate"] * trial.steps
        loads, later, beginnings = (timed, timed), 0, [(1, ["evaluate"] * trial.warmup)]
    zero_units = [unit for unit in units if isinstance(unit, UnitGeometry)]  # all but FSDP2's groups

    def nbytes(rank: int, events: list[Event]) -> dict[LedgerKey, int]:
        if trial.host is None:
            ledger = traffic.predict(policy, topology, zero_units, rank, events).sent
        else:
            ledger = predict_hosted(trial.host, policy, topology, units, rank=rank, events=events)
        return {key: sent.bytes for key, sent in ledger.items()}

    total = {"inter": 0, "intra": 0}
    for rank in range(topology.ranks_per_node):
        for steps, before in beginnings:
            none, first, both = (nbytes(rank, [*before, *load]) for load in ([], *loads))
            step = _step(none, first, both, later)
            for link, size in at_most(policy, topology, zero_units, step).items():
                total[link] += steps * size
    return total["inter"] // trial.steps, total["intra"] // trial.steps


def _step(
    none: Mapping[_Key, int], first: Mapping[_Key, int], both: Mapping[_Key, int], later: int
) -> dict[_Key, int]:
    """Bytes of a step by those sent before it, after its first and after its second micro-batch (or token);
    each of the ``later`` ones sends as much as the second.
    """
    return {
        key: first.get(key, 0) - none.get(key, 0) + later * (size - first.get(key, 0))
        for key, size in both.items()
    }


def _loads(policy: Policy, trial: Trial) -> tuple[tuple[list[Event], list[Event]], int]:
    """Passes of a step of one and of two micro-batches (or tokens), and the number that follows the first."""
    if trial.workload == "generate":
        return (["evaluate"], ["evaluate"] * 2), trial.generate.tokens - 1
    norms = 0 if trial.clip is None else 1
    first, both = (traffic.passes(policy, micro_batches=n, norms=norms) for n in (1, 2))
    if trial.workload == "rlhf":
        return (["evaluate", *first], ["evaluate", "evaluate", *first]), trial.generate.tokens - 1
    return (first, both), trial.accumulation - 1


def _beginnings(policy: Policy, trial: Trial) -> list[tuple[int, list[Event]]]:
    """Numbers of timed steps, by the events before them: with differences, most follow an earlier step."""
    if policy.differences is None:
        return [(trial.steps, [])]
    every = policy.refresh or trial.warmup + trial.steps
    whole = sum(index % every == 0 for index in range(trial.warmup, trial.warmup + trial.steps))
    return [(whole, []), (trial.steps - whole, traffic.passes(policy))]


def copied_bytes(policy: Policy, topology: Topology, units: Sequence[UnitGeometry], trial: Trial) -> int:
    """Bytes that one rank copies between host and device in one step, both ways."""
    loads, later = _loads(policy, trial)
    first, both = (traffic.predict(policy, topology, units, 0, load).copied for load in loads)
    return sum(_step({}, first, both, later).values())


def peer_memory(trial: Trial, parameters: int, state: int) -> dict[str, int]:
    """A rank's bytes of weights and gradients in fp32 and of the optimizer, ``state`` bytes an element; FSDP2
    shards all of them, DeepSpeed by its stage.
    """
    peer = PEERS.get(trial.host or trial.strategy)
    family = "" if peer is None else peer.family
    stage = zero_stage(trial.peer_configuration()) if family == "deepspeed" else 3 * (family == "fsdp2")

    def elements(least: int) -> int:
        return -(-parameters // trial.topology().world) if stage >= least else parameters

    return {
        "masters": FP32_BYTES * elements(3),
        "gradients": FP32_BYTES * elements(2),
        "optimizer": state * elements(1),
    }


def step_of_trial(trial: Trial, units: Sequence[UnitGeometry], parameters: int) -> Step | None:
    """The work of a trial's step; None where this engine does not train."""
    policy = trial.resolved_policy()
    if policy is None or trial.host is not None or trial.workload != "train":
        return None
    rate = trial.slowest_mbit if trial.cluster.nodes > 1 else None
    return Step(
        policy=policy,
        topology=trial.topology(),
        units=units,
        parameters=parameters,
        tokens=trial.tokens_per_rank,
        micro_batches=trial.accumulation,
        recompute=trial.activation_checkpointing,
        rate=math.inf if rate is None else rate * BYTES_PER_MBIT,
    )


def predict(trial: Trial, step: Step | None, egress: int | None, machine: Machine) -> StepTime | None:
    """A trial's predicted step; None where this engine does not train, or the bytes are unknown."""
    if step is None or egress is None:
        return None
    if machine.overlap == "schedule":
        latency = machine.latency + (trial.cluster.latency or 0.0) / 1e3
        inside = machine.inside
        if (inner := trial.cluster.inner_rate) is not None:  # the ranks of a node share it
            inside = min(inside or math.inf, inner * BYTES_PER_MBIT / trial.cluster.ranks_per_node)
        return step_of(replace(machine, latency=latency, inside=inside), step)
    tokens = step.tokens * step.micro_batches
    work = Work(parameters=step.parameters, tokens=tokens, egress_bytes=egress, rate=step.rate)
    return step_time(machine, work)


def units_of(trial: Trial, record: Record) -> list[UnitGeometry]:
    """The units that a record names, without their parameters."""
    policy, topology = trial.resolved_policy(), trial.topology()
    group = 0 if policy is None else policy.group_ranks(topology)
    return [
        UnitGeometry(name, (), padded, topology.world, not name.endswith(FROZEN), group)
        for name, _, padded in record.units
    ]
