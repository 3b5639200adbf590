"""Predicts, without running a trial, the bytes that the trial sends and the bytes of memory that it holds.

Both are computed from the model's units, the sets of parameters that are gathered and reduced together.  The units of a
preset model are planned from the shapes of its parameters; any other model is built on the meta device, where tensors
have no values.  Then :mod:`impl.plan.traffic` counts the bytes that the units' messages take.  Therefore models and
clusters that do not fit on this machine, such as 100 B parameters on 64x16 ranks, are predicted within seconds.
Activations are not counted.

Only the ranks of node 0 are computed, because all nodes send the same number of bytes.  The exception is Muon: each
matrix is sent to one rank, its owner, and so these messages are computed for the ranks of all nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from harness.errors import Refusal
from harness.records.trial_record import Record
from harness.suites.peers import PEERS, zero_stage
from harness.suites.trial import Model, Trial
from harness.workloads.preset_parameters import parameters_of_trial
from impl.adapters.traffic import GroupGeometry, predict_hosted
from impl.errors import raised
from impl.plan import traffic
from impl.plan.bit_budget import at_most
from impl.plan.local_steps import meeting_steps
from impl.plan.memory import memory
from impl.plan.owners import Owners
from impl.plan.traffic import Book, Event, LedgerKey, Link
from impl.plan.unit_plan import Placed
from impl.policy.own_method import Declared, DeclaredGathers
from impl.policy.policy import Policy
from impl.policy.shard_layout import FROZEN, UnitGeometry
from impl.policy.topology import Axis, Topology

if TYPE_CHECKING:
    from torch import nn

FP32_BYTES: Final = 4
Models = dict[str, "nn.Module | Refusal"]
"""Models that were built on the meta device, by the model's JSON and the sequence length.

The value is a Refusal if the model cannot be built.
"""


@dataclass(frozen=True, slots=True)
class Listed:
    """The parameters and blocks of a preset model, which suffice to plan the model's units without torch.

    A block is a repeated part of the model.  A unit is a set of parameters that are gathered together.
    """

    placed: Sequence[Placed]  # the parameters
    blocks: Sequence[str]  # names of the blocks


_Key = TypeVar("_Key", bound=Hashable)


def model_to_plan(trial: Trial, models: Models) -> nn.Module | Listed | Refusal:
    """Return a trial's model in the cheapest form from which its units can be planned.

    A unit is a set of parameters that are gathered together.  For a preset, the form is usually the list of its
    parameters (:class:`Listed`).  In all other cases it is the model on the meta device, or a Refusal if the model
    cannot be built.  ``models`` keeps models on the meta device, so that equal models are built only once.
    """
    policy = trial.resolved_policy()
    cut = policy is not None and policy.memory.largest_unit
    if ":" in trial.model.name or trial.host is not None or trial.workload == "rlhf" or cut:
        return build_model(trial.model, trial.sequence, models)
    try:
        return Listed(*parameters_of_trial(trial))
    except Refusal as error:
        return error


def rank_memory(
    policy: Policy, topology: Topology, units: Sequence[UnitGeometry], trial: Trial, *, backward: bool = True
) -> dict[str, int]:
    """Predict how many bytes each part of a rank's memory takes, with the transport and the micro-batches of a trial.

    :func:`impl.plan.memory.memory` lists the parts.  ``units`` are the sets of parameters that are gathered together.
    ``policy`` may differ from the trial's own policy.  ``backward`` is False for units that only run forward.
    """
    transport, threads = trial.cluster.transport, trial.cluster.ranks == "threads"

    def in_place(axis: Axis) -> bool:  # as Wire.lets_go()
        return not threads and (transport == "gloo" or (transport == "shm" and topology.crosses(axis)))

    return memory(
        policy,
        topology,
        units,
        micro_batches=trial.accumulation,
        backward=backward,
        streams=transport == "nccl",
        in_place=in_place,
    )


def build_model(model: Model, sequence: int, models: Models) -> nn.Module | Refusal:
    """Return ``model`` on the meta device, or a Refusal if it cannot be built.

    ``sequence`` is the length of the sequences that the model gets.  The result is kept in ``models``, so that equal
    models are built only once.
    """
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
    methods: Declared | None = None,
    gathers: DeclaredGathers | None = None,
    owners: Owners | None = None,
) -> tuple[int, int]:
    """Return the bytes that the ranks of one node send in a timed step, to other nodes and inside the node.

    If timed steps send different numbers of bytes, the result is their mean.

    A bit budget chooses codecs during training.  With a bit budget, the result is an upper bound, which holds whatever
    codecs are chosen.  It assumes that in every step, ranks send the messages by which they choose codecs.

    Args:
        policy: The trial's policy.
        topology: The trial's nodes and ranks.
        units: The sets of parameters that are gathered and reduced together: those of the model that trains or decodes,
            or FSDP2's groups of parameters.  If ``judges`` is True, those of the judges.
        trial: The trial.
        judges: Whether ``units`` belong to the judges, the frozen models that score in workload ``rlhf``.
        methods: The messages that a user's own reduction declares, by unit name; None without such a reduction.
        gathers: Functions that return the messages that a user's own gather declares, by unit name; None without such a
            gather.
        owners: For Muon, the rank that orthogonalises each matrix (its owner); None for other optimizers.  Nodes send
            different numbers of bytes to owners; these bytes are averaged over nodes.

    Returns:
        (bytes to other nodes, bytes inside the node).
    """
    loads, later = _loads(policy, trial)
    beginnings = _beginnings(policy, trial)
    if judges:  # the judges' weights never change, so hpZ's copies of them from earlier steps are still valid
        timed: list[Event] = ["evaluate"] * trial.steps
        loads, later, beginnings = (timed, timed), 0, [(1, policy, ["evaluate"] * trial.warmup)]
    elif (
        policy.own_gather is not None and trial.workload == "train"
    ):  # with a user's own gather, each step may send other bytes, so all steps are predicted
        norms = 0 if trial.clip is None else 1
        passes = traffic.passes(policy, micro_batches=trial.accumulation, norms=norms)
        loads, later = (passes * trial.steps,) * 2, 0
        beginnings = [(1, policy, passes * trial.warmup)]
    zero_units = [unit for unit in units if isinstance(unit, UnitGeometry)]  # without FSDP2's groups

    def of_rank(rank: int, phase: Policy, before: list[Event]) -> tuple[list[Book], dict[Link, int]]:
        """Predict the bytes that a rank sends in one step, or in all timed steps.

        For judges, and for training with a user's own gather, the result is the sum over all timed steps, and "the
        step" below means all of them.

        Args:
            rank: Number of the rank.
            phase: The policy that is in force in the step.
            before: The passes that the rank runs before the step.

        Returns:
            (books, sent).  ``books`` are predictions of the messages of the step's passes, from which ``sent`` was
            computed; the list is empty if FSDP2 or DDP runs the policy.  ``sent`` is the bytes of the step by kind of
            link.
        """
        books = list[Book]()

        def nbytes(events: list[Event]) -> dict[LedgerKey, int]:
            if trial.host is None:
                own = {"methods": methods, "gathers": gathers}
                books.append(traffic.predict(phase, topology, zero_units, rank, events, **own))  # type: ignore[arg-type]
                ledger = books[-1].sent
            else:
                ledger = predict_hosted(trial.host, policy, topology, units, rank=rank, events=events)
            return {key: sent.bytes for key, sent in ledger.items()}

        none = nbytes(before) if before else {}
        first = nbytes([*before, *loads[0]])
        both = nbytes([*before, *loads[1]]) if later else first
        return books, at_most(phase, topology, zero_units, _step(none, first, both, later))

    total = {"inter": 0, "intra": 0}
    for steps, phase, before in beginnings:
        found = list[
            tuple[list[Book], dict[Link, int]]
        ]()  # results of the ranks so far, without ranks that send the same bytes as an earlier one
        for rank in range(topology.ranks_per_node):
            same = (sent for books, sent in found if books and all(book.fits(rank) for book in books))
            step = next(same, None)
            if step is None:
                books, step = of_rank(rank, phase, before)
                found.append((books, step))
            for link, size in step.items():
                total[link] += steps * size
    inter, intra = total["inter"] // trial.steps, total["intra"] // trial.steps
    if owners is not None:
        books = [traffic.Book(topology, rank) for rank in range(topology.world)]
        for book in books:
            book.optimizer_step(owners)
        sent = [(key.link, each.bytes) for book in books for key, each in book.sent.items()]
        inter += sum(nbytes for link, nbytes in sent if link == "inter") // topology.nodes
        intra += sum(nbytes for link, nbytes in sent if link == "intra") // topology.nodes
    return inter, intra


def _step(
    none: Mapping[_Key, int], first: Mapping[_Key, int], both: Mapping[_Key, int], later: int
) -> dict[_Key, int]:
    """Return the bytes of a step with any number of micro-batches, from the bytes of steps with one and with two.

    Each micro-batch after the second is assumed to send as much as the second.  For example, if 10 bytes were sent
    before the step, 30 until the end of a step with one micro-batch, and 45 until the end of a step with two, a step
    with four micro-batches sends 20 + 3 * 15 = 65 bytes.  The dicts have such counts for each kind of message.

    In workloads ``generate`` and ``rlhf``, generated tokens take the place of micro-batches.

    Args:
        none: Bytes sent before the step.
        first: Bytes sent until the end of a step with one micro-batch.
        both: Bytes sent until the end of a step with two micro-batches.
        later: Number of micro-batches in the step, minus one.
    """
    return {
        key: first.get(key, 0) - none.get(key, 0) + later * (size - first.get(key, 0))
        for key, size in both.items()
    }


def _loads(policy: Policy, trial: Trial) -> tuple[tuple[list[Event], list[Event]], int]:
    """Return the passes (``forward``, ``backward`` and so on) of a step with one micro-batch, and of a step with two.

    From the bytes of these two short steps, :func:`_step` extrapolates to the trial's number of micro-batches.  In
    workloads ``generate`` and ``rlhf``, generated tokens take the place of micro-batches.

    Returns:
        ``((first, both), later)``: the passes of the step with one micro-batch, the passes of the step with two, and
        the trial's number of micro-batches in a step, minus one.
    """
    if trial.workload == "generate":
        return (["evaluate"], ["evaluate"] * 2), trial.generate.tokens - 1
    norms = 0 if trial.clip is None else 1
    first, both = (traffic.passes(policy, micro_batches=n, norms=norms) for n in (1, 2))
    if trial.workload == "rlhf":
        return (["evaluate", *first], ["evaluate", "evaluate", *first]), trial.generate.tokens - 1
    return (first, both), trial.accumulation - 1


def _beginnings(policy: Policy, trial: Trial) -> list[tuple[int, Policy, list[Event]]]:
    """Sort a trial's timed steps into kinds that send the same bytes, so that one step of each kind can be predicted.

    The bytes of a step may depend on earlier steps.  The result therefore also has, for each kind, the passes that must
    be run first, so that a step of this kind can follow.

    - With local steps, :func:`_local_beginnings` gives the kinds.
    - With a schedule, steps with different policies are of different kinds.
    - If the policy sends differences (the changes of weights since they were last sent), there are two kinds: steps
      that send the weights themselves, and steps that send differences.  A step of the second kind begins after the
      passes of one step of the first kind.
    - In all other trials, all steps are of one kind.

    Returns:
        For each kind, (number of timed steps, policy of the step, passes before the step).
    """
    if (local := policy.local_steps) is not None:
        kinds_apart = _local_beginnings(local, meeting_steps(policy), trial)
        return [(count, policy, before) for count, before in kinds_apart]
    if not policy.schedule and policy.differences is None:
        return [(trial.steps, policy, [])]
    if all(phase.differences is None for phase in policy.phases):
        counts = policy.phase_counts(trial.warmup, trial.warmup + trial.steps)
        return [(count, policy.phases[number], []) for number, count in counts.items()]
    kinds, phases = Counter[tuple[int, bool]](), policy.phases
    before, since = -1, 0  # the phase of the last step, and the steps since whole weights were sent
    for index in range(trial.warmup + trial.steps):
        number = policy.phase_at(index)
        now = phases[number]
        anew = before < 0 or now.gathering != phases[before].gathering
        anew = anew or now.differences is None or 0 < now.refresh <= since
        before, since = number, 1 if anew else since + 1
        kinds[number, anew] += index >= trial.warmup
    return [
        (count, phases[number], [] if anew else traffic.passes(policy))
        for (number, anew), count in kinds.items()
        if count
    ]


def _local_beginnings(local: int, meeting: Sequence[int], trial: Trial) -> list[tuple[int, list[Event]]]:
    """Sort the timed steps of a trial with local steps into kinds that send the same bytes.

    With local steps, groups of ranks train apart, in rounds of ``local`` steps, and exchange weights after some steps
    of each round.  All steps that no exchange follows are one kind.  Steps that an exchange follows are of one kind if
    they have the same number in their rounds.  For example, if a round has 4 steps and an exchange after the 4th, there
    are two kinds: the 4th steps of all rounds, and all other steps.

    Args:
        local: Number of steps in a round.
        meeting: The steps of a round, counted from 1, after which groups exchange weights.
        trial: The trial.

    Returns:
        For each kind, (number of timed steps, passes before the step).
    """
    end = trial.warmup + trial.steps
    timed = {step: (end - step) // local - (trial.warmup - step) // local for step in meeting}
    kinds: list[tuple[int, list[Event]]] = [
        (timed[step], ["step"] * (step - 1)) for step in meeting if timed[step]
    ]
    # The first step of a round that nothing is exchanged after, if there is one.
    other = next((step for step, met in enumerate(meeting, 1) if step != met), len(meeting) + 1)
    if rest := trial.steps - sum(timed.values()):
        kinds.append((rest, ["step"] * (other - 1)))
    return kinds


def copied_bytes(policy: Policy, topology: Topology, units: Sequence[UnitGeometry], trial: Trial) -> int:
    """Return the bytes that one rank copies between host and device in one step, both directions added up."""
    loads, later = _loads(policy, trial)
    first = traffic.predict(policy.phases[0], topology, units, 0, loads[0]).copied
    both = traffic.predict(policy.phases[0], topology, units, 0, loads[1]).copied if later else first
    return sum(_step({}, first, both, later).values())


def peer_memory(trial: Trial, parameters: int, state: int) -> dict[str, int]:
    """Return the bytes of ``masters``, ``gradients`` and ``optimizer`` state that one rank of a peer holds.

    A peer is another engine than ours: a single process, DDP, FSDP2 or DeepSpeed.  Its ``masters`` are its fp32
    weights.  If a policy runs inside FSDP2 or DDP, the bytes are those of FSDP2 or DDP.

    Weights and gradients are fp32.  FSDP2 shards weights, gradients and optimizer state over all ranks or, with
    ``peer.group = "node"``, over the ranks of a node.  DeepSpeed shards the optimizer state from stage 1, gradients
    from stage 2, and weights in stage 3.  DDP and a single process shard nothing.

    Args:
        trial: The trial.
        parameters: Number of elements of the model.
        state: Bytes of optimizer state per element.
    """
    peer = PEERS.get(trial.host or trial.strategy)
    family = "" if peer is None else peer.family
    stage = zero_stage(trial.peer_configuration()) if family == "deepspeed" else 3 * (family == "fsdp2")
    shards = trial.cluster.ranks_per_node if trial.peer.group == "node" else trial.topology().world

    def elements(least: int) -> int:
        return -(-parameters // shards) if stage >= least else parameters

    return {
        "masters": FP32_BYTES * elements(3),
        "gradients": FP32_BYTES * elements(2),
        "optimizer": state * elements(1),
    }


def units_of(trial: Trial, record: Record) -> list[UnitGeometry]:
    """Return the units (sets of parameters that are gathered together) that a trial's record names.

    A record has the padded size of each unit, but does not list the unit's parameters, so these lists are empty here.
    """
    policy, topology = trial.resolved_policy(), trial.topology()
    group = 0 if policy is None else policy.group_ranks(topology)
    return [
        UnitGeometry(name, (), padded, topology.world, not name.endswith(FROZEN), group)
        for name, _, padded in record.units
    ]
