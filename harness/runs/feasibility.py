"""Checks before a sweep whether its trials can run on this machine, and whether its results folder can be used.

:func:`forecast` predicts the bytes that each trial sends and the memory that it holds (:mod:`harness.runs.predict`).
It also says why a trial cannot run, and distinguishes two kinds of reasons:

- A *problem*, such as too few GPUs: the whole suite is refused (:func:`check_feasible`).
- A *failure* of one trial: the trial would exceed the suite's memory limit, or is to train with DeepSpeed, which cannot
  run it here.  The trial is recorded as failed without being run, and the other trials run.

:func:`check_folder` and :func:`check_inputs` refuse a results folder that holds results of other code or other inputs.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from harness.errors import LinkError, Refusal
from harness.measure import machine
from harness.records.memory_parts import on_device, on_host, sum_parts, without_training
from harness.records.trial_record import Failure, Record, path_of, read_all
from harness.runs.predict import (
    Listed,
    Models,
    copied_bytes,
    model_to_plan,
    peer_memory,
    per_node_bytes,
    rank_memory,
)
from harness.runs.trial_step import step_of_trial
from harness.strategies import deepspeed
from harness.suites import folder as suite_folder
from harness.suites.contradictions import PACED_NCCL
from harness.suites.labels import at, counted, varying_paths
from harness.suites.peers import DEEPSPEED, PEERS
from harness.suites.trial import MUON, RECIPE, Cluster, Optimizer, Trial
from harness.workloads import trial_dataset
from harness.workloads.input_digests import digests, own_objects
from impl import named_object
from impl.adapters.traffic import GroupGeometry, HostError
from impl.codecs.codec import Codec, CodecError
from impl.deepspeed.config_to_policy import Finding, laid_out
from impl.errors import ZeroError
from impl.plan import memory as held
from impl.plan import unit_plan
from impl.plan.owners import MOMENTUM_BYTES, owners_of
from impl.plan.step_time import Step
from impl.policy.own_method import (
    Declared,
    DeclaredGathers,
    MethodError,
    declares,
    planned_gathers,
    planned_messages,
)
from impl.policy.policy import Policy, PolicyError
from impl.policy.shard_layout import GeometryError, PaddingError, UnitGeometry, padding_share

if TYPE_CHECKING:
    from torch import nn

# Memory of a rank's process before it has a model: the interpreter, torch and gloo's threads.
PROCESS_BYTES: Final = 200 << 20


@dataclass(frozen=True, slots=True)
class Host:
    """Resources of the machine that would run the trials."""

    memory: int  # bytes that processes may use
    gpus: tuple[int, ...]  # bytes of each GPU
    namespaces: Callable[[], str | None]  # returns why network namespaces do not work; None if they do


@dataclass(slots=True)
class Forecast:
    """Prediction of the bytes that one trial sends, the memory that it holds, and how long its messages take.

    If the trial cannot run, ``problems`` or ``failure`` has the reasons.  In the comments, a *peer* is a trial that
    another engine trains: a single process, DDP, FSDP2 or DeepSpeed.
    """

    trial: Trial
    parameters: int | None = None  # elements of the model, without padding
    padded: int | None = None  # elements of its units, with padding; None for peers
    # Bytes that all ranks send between nodes in a step or generation; None for peers.
    inter: int | None = None
    intra: int | None = None  # bytes that all ranks send inside nodes in a step or generation; None for peers
    egress: int | None = None  # bytes that one node sends to all others in a step
    memory: dict[str, int] | None = None  # bytes of one rank by part, without activations
    wire_seconds: float | None = None  # time that ``egress`` takes at the link's rate; None without a rate
    problems: tuple[str, ...] = ()  # why the trial cannot run here
    failure: Failure | None = None  # the failure that is recorded, if the trial is not to be run
    copied: int = 0  # bytes that one rank copies between host and device in one step, both ways
    # Bytes of hpZ's copy of the weights on one rank, for two ways of keeping the copy: encoded in the codec of the
    # weights, and in bf16.  None without hpZ.
    secondary: tuple[int, int] | None = None
    findings: tuple[Finding, ...] = ()  # what becomes of each key of a DeepSpeed configuration
    step: Step | None = None  # work of a step, to predict its time; None for peers and generation
    # Names of the user's own objects that were not imported, by their role in the trial: ``{"model": "mine:Net"}``.
    # Fields of this prediction that depend on one of these objects are None.
    unread: dict[str, str] = field(default_factory=dict)
    paced: str | None = None  # why link ``auto`` becomes ``paced`` on this machine; None if it does not

    @property
    def reasons(self) -> tuple[str, ...]:
        """Sentences on why the trial is not run; empty if the trial can run.

        They are the trial's problems, because of which the whole suite is refused.  If there are no problems, they are
        the message of its failure, with which this trial alone is recorded.
        """
        return self.problems or (() if self.failure is None else (self.failure.message,))

    @property
    def padding(self) -> float:
        """Number of padding elements of all units together, divided by the model's elements; 0 if there are no units.

        A unit is a set of parameters that are gathered together.  Units are padded so that shards are equally long.
        """
        return padding_share([(self.parameters, self.padded)]) if self.parameters and self.padded else 0.0


def this_host() -> Host:
    """Return the resources of the machine that this process runs on."""
    gpus = tuple(int(gpu["memory_gib"] * 2**30) for gpu in machine.facts()["gpus"])
    return Host(machine.memory_bytes(), gpus, cache(namespaces))


def any_host() -> Host:
    """Return a :class:`Host` with unlimited resources, for predictions that must not depend on this machine."""
    return Host(sys.maxsize, (sys.maxsize,) * 1024, lambda: None)


def forecast(trials: Iterable[Trial], host: Host) -> list[Forecast]:
    """Predict for each trial the bytes that it sends, the memory that it holds, and whether it can run on ``host``.

    Trials that differ only in their seed or repeat share one prediction.  The forecasts have the order of ``trials``.
    """
    models, shared = Models(), dict[str, Forecast]()
    forecasts = []
    for trial in trials:
        first = trial.model_copy(update={"repeat": 0, "seed": 0})
        if first.id not in shared:
            shared[first.id] = _forecast(first, host, models)
        forecasts.append(replace(shared[first.id], trial=trial))
    return forecasts


def _forecast(trial: Trial, host: Host, models: Models) -> Forecast:
    unread, policy = _unread(trial), trial.resolved_policy()
    optimizer = None if "optimizer" in unread else _check_optimizer(trial)
    codecs = () if policy is None or not policy.readable else policy.own_codecs
    model = None if "model" in unread else model_to_plan(trial, models)
    methods = {"method": trial.own_method, "gather_method": trial.own_gather}
    owns = [own for role, own in methods.items() if own is not None and role not in unread]
    problems = [
        next(_rank_problems(trial, host), None),
        None if {"corpus", "tokenizer"} & unread.keys() else _refusal(lambda: trial_dataset.check(trial)),
        next(_link_problems(trial, host), None),
        _refusal(partial(_check_own_codecs, trial.cluster.device, codecs)) if codecs else None,
        optimizer if isinstance(optimizer, str) else None,
        *(_refusal(partial(getattr, own, "definition")) for own in owns),
        _refusal(partial(_check_strategy, trial.strategy)) if trial.own_strategy and not unread else None,
    ]
    if isinstance(model, Refusal):
        problems.append(str(model))
    elif trial.activation_checkpointing and model and not isinstance(model, Listed):  # a preset has blocks
        problems.append(_refusal(partial(_check_blocks, model)))
    prediction = Forecast(
        trial, problems=tuple(filter(None, problems)), paced=_why_paced(trial, host), unread=unread
    )
    if trial.strategy == RECIPE:
        prediction.findings = trial.recipe().findings
    if model is None or isinstance(model, Refusal):
        return prediction
    prediction.parameters = (
        sum(parameter.spec.numel for parameter in model.placed)
        if isinstance(model, Listed)
        else sum(parameter.numel() for parameter in model.parameters())
    )
    if trial.workload != "generate" and (why := _why_not_muon(trial, model)):
        prediction.problems += (why,)
        return prediction
    state = optimizer if isinstance(optimizer, int) else 0
    memory = peer_memory(trial, prediction.parameters, state)
    if trial.optimizer.orthogonalises and state:  # of peers, whose ranks hold whole matrices
        memory["optimizer"] -= (held.ADAM_BYTES - MOMENTUM_BYTES) * _matrix_elements(trial, model)
    if policy is not None and not policy.readable:  # neither padding nor frames have a known size
        return prediction
    if policy is not None:
        try:
            memory = _plan(prediction, policy, model, state) or memory
        except (CodecError, GeometryError, HostError, MethodError, PolicyError, ZeroError) as error:
            prediction.problems += (_layout_problem(trial, error),)
            return prediction
    if not isinstance(optimizer, int):  # refused or not imported, so that the size of its state is unknown
        return prediction
    prediction.memory = without_training(memory) if trial.workload == "generate" else memory
    prediction.problems += _memory_problems(trial, host, prediction.memory)
    if (why := beyond_limit(trial, prediction.memory)) is not None:
        prediction.failure = Failure(kind="memory", message=f"not run: {why}", log=None)
    elif (why := deepspeed.why_not(trial)) is not None:
        prediction.failure = Failure(kind="refused", message=why, log=None, by=DEEPSPEED)
    return prediction


def _matrices(trial: Trial, model: nn.Module | Listed) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of the trained parameters that Muon updates; an empty list without Muon."""
    if isinstance(model, Listed):
        return [(place.spec.name, tuple(place.spec.shape)) for place in model.placed if place.spec.group]
    from harness.strategies.optimizers import group_of

    group = group_of(trial.optimizer, model)
    if group is None:
        return []
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return [(name, tuple(p.shape)) for name, p in trained if group(name, p)]


def _matrix_elements(trial: Trial, model: nn.Module | Listed) -> int:
    """Return the number of elements in all parameters that Muon updates."""
    return sum(math.prod(shape) for _, shape in _matrices(trial, model))


def _why_not_muon(trial: Trial, model: nn.Module | Listed) -> str | None:
    """Return why Muon cannot update the parameters that the trial gives to it.

    Returns None if Muon can update them, or if the trial does not use Muon.  The engine itself refuses such parameters
    too, but only when training begins.
    """
    if not trial.optimizer.orthogonalises:
        return None
    pattern, chosen = trial.optimizer.matrices, _matrices(trial, model)
    if not chosen:
        which = (
            f"a name like optimizer.matrices = {pattern!r}"
            if pattern
            else "2 dimensions and lies in a block of the model, as Muon needs"
        )
        missing = f"optimizer.name = {MUON!r}: no trained parameter of the model has {which}"
        return (
            f"{missing}; set optimizer.matrices to a pattern of matrices' names, or choose another optimizer"
        )
    for name, shape in chosen:
        if len(shape) != 2:
            return (
                f"optimizer.matrices = {pattern!r} also names {name!r} of shape {shape}, and Muon can step only "
                "parameters of 2 dimensions: set optimizer.matrices to a pattern that only such parameters match, or "
                "remove optimizer.matrices, so that Muon steps the matrices in the model's blocks"
            )
    return None


def _unread(trial: Trial) -> dict[str, str]:
    """Return the user's own objects of a trial that must not be imported now, by role: ``{"model": "mine:Net"}``.

    Such an object is a model, optimizer, codec or the like that the suite names as ``module:name``.  ``zeropp plan``
    imports none of them by default.  The returned dict is empty whenever importing is allowed.
    """
    if named_object.allowed():
        return {}
    policy = trial.resolved_policy()
    codecs = () if policy is None else (codec for codec in policy.own_codecs if not codec.readable)
    names = {"model": trial.model.name, "optimizer": trial.optimizer.name, "tokenizer": trial.tokenizer or ""}
    names |= {} if trial.own_method is None else {"method": trial.own_method.name}
    names |= {} if trial.own_gather is None else {"gather_method": trial.own_gather.name}
    names |= {"strategy": trial.strategy} if trial.own_strategy else {}
    names |= {f"codec {number}": str(codec) for number, codec in enumerate(codecs)}
    if named_object.is_name(trial.corpus) and not suite_folder.path_of(trial.corpus).exists():
        names["corpus"] = trial.corpus
    return {role: name for role, name in names.items() if ":" in name}


def _check_own_codecs(device: str, codecs: Sequence[Codec]) -> None:
    """Raise an error if one of ``codecs``, which are a user's own, does not support ``device``."""
    import torch

    from impl.ops import check_devices

    check_devices(torch.device(device), codecs)


def _check_strategy(name: str) -> None:
    """Raise a Refusal if a user's own strategy cannot be imported, or is no subclass of our ``Strategy``."""
    from harness.strategies.strategy import strategy_class

    strategy_class(name)


def _check_blocks(model: nn.Module) -> None:
    """Raise a Refusal if a model has no blocks, that is, no repeated parts.

    Only trials that checkpoint activations need this check, since activations are checkpointed block by block.
    """
    from harness.workloads.models import check_blocks

    check_blocks(model)


def _units(
    trial: Trial, policy: Policy, model: nn.Module | Listed
) -> tuple[Sequence[UnitGeometry | GroupGeometry], list[UnitGeometry]]:
    """Return the units of a trial's model, and the units of its frozen scoring models.

    A unit is a set of parameters that are gathered and reduced together.

    Returns:
        Two lists.  The first has the units of the model; if the policy runs inside FSDP2, it has FSDP2's parameter
        groups instead.  The second has the units of the frozen models that score in workload ``rlhf``; it is empty in
        other workloads.
    """
    topology = trial.topology()
    if isinstance(model, Listed):
        return unit_plan.plan_units(model.placed, model.blocks, topology, policy), []
    from harness.workloads.models import unfilled
    from harness.workloads.reinforcement import judges_of
    from impl.adapters.joined import hosted_units
    from impl.zero import plan_units

    if trial.host is not None:
        return hosted_units(trial.host, model, topology, policy), []
    from harness.strategies.optimizers import group_of

    units = plan_units(model, topology, policy, group_of=group_of(trial.optimizer, model))
    if trial.workload != "rlhf":
        return units, []
    with unfilled():
        return units, plan_units(judges_of(trial, model), topology, policy)


def _plan(
    prediction: Forecast, policy: Policy, model: nn.Module | Listed, state: int
) -> dict[str, int] | None:
    """Predict the bytes that a trial sends, and return the memory that its ranks need.

    Bytes sent, bytes copied, padded elements and the work of a step are written into ``prediction``.  Bytes sent and
    the work of a step are left out if they cannot be predicted, because a class of the user's own sends messages that
    it does not declare.

    Args:
        prediction: The prediction of the trial, which this function completes.
        policy: The trial's policy.
        model: The trial's model.
        state: Number of bytes that the optimizer keeps for each element.

    Returns:
        Bytes of memory by part, of the rank that needs the most.  None if the policy runs inside a host engine (FSDP2
        or DDP), whose memory :func:`~harness.runs.predict.peer_memory` predicts.
    """
    trial, topology, memory, owners = prediction.trial, prediction.trial.topology(), None, None
    units, judges = _units(trial, policy, model)
    if trial.host is None:
        planned = [unit for unit in units if isinstance(unit, UnitGeometry)]
        memory = rank_memory(policy, topology, planned, trial)
        memory = held.with_state(memory, state)
        if (owners := owners_of(policy, topology, planned)) is not None:
            each = (held.with_muon(memory, planned, owners, rank) for rank in range(topology.world))
            memory = max(each, key=lambda parts: sum(parts.values()))
        if judges:
            frozen = rank_memory(policy, topology, judges, trial, backward=False)
            memory = sum_parts(
                memory, frozen | {"messages": 0}
            )  # they use the buffers of the model's messages
        prediction.copied = copied_bytes(policy, topology, planned, trial)
        prediction.secondary = held.secondary_either_way(policy, topology, [*planned, *judges])
        prediction.step = step_of_trial(trial, planned, prediction.parameters or 0)
        if trial.strategy == RECIPE:
            prediction.findings = laid_out(replace(trial.recipe(), policy=policy), planned).findings
    zero_units = [unit for unit in units if isinstance(unit, UnitGeometry)]
    methods: Declared | None = None
    gathers: DeclaredGathers | None = None
    known = not trial.own_strategy
    if (own := trial.own_method) is not None:
        methods = None if "method" in prediction.unread else planned_messages(own, topology, zero_units)
        known = known and methods is not None and declares(own)
    if (own := trial.own_gather) is not None:
        gathers = None if "gather_method" in prediction.unread else planned_gathers(own, topology, zero_units)
        known = known and gathers is not None and declares(own)
    if not known:  # measured, not predicted
        prediction.padded, prediction.step = sum(unit.padded for unit in units), None
        return memory
    inter, intra = per_node_bytes(
        policy, topology, units, trial, methods=methods, gathers=gathers, owners=owners
    )
    if judges:
        judged = per_node_bytes(policy, topology, judges, trial, judges=True)
        inter, intra = inter + judged[0], intra + judged[1]
    prediction.padded = sum(unit.padded for unit in units)
    prediction.inter, prediction.intra = inter * topology.nodes, intra * topology.nodes
    prediction.egress = inter
    if (rate := trial.slowest_mbit) is not None:
        prediction.wire_seconds = inter * 8 / (rate * 1e6)
    return memory


def beyond_limit(trial: Trial, memory: dict[str, int]) -> str | None:
    """Return a sentence if a rank holds more bytes on its device than the trial's ``memory_limit``; else None.

    Returns None too if the trial has no limit.

    Args:
        trial: The trial.
        memory: Bytes that the rank holds, by part.  Parts in host memory are not counted.
    """
    if (limit := trial.memory_limit) is None:
        return None
    memory = on_device(memory)
    if (held := sum(memory.values())) <= limit:
        return None
    parts = ", ".join(f"{part} {gib(size)}" for part, size in memory.items() if size)
    return f"a rank holds {held:,} bytes ({parts}), and memory_limit is {limit:,}"


def failure_after(trial: Trial, record: Record) -> Failure | None:
    """Return a Failure if a rank of a trial that has run held more bytes than the trial's ``memory_limit``; else None.

    A part of memory, such as ``gradients``, is counted only if it was also predicted.  If another engine than ours has
    trained, nothing was predicted on the ranks, and all parts are counted.
    """
    for rank in record.ranks:
        predicted = rank.memory.formula or rank.memory.engine  # peers have no formula
        counted_bytes = {part: size for part, size in rank.memory.engine.items() if part in predicted}
        if (why := beyond_limit(trial, counted_bytes)) is not None:
            return Failure(kind="memory", message=f"it ran, and {why}", log=None)
    return None


def check_feasible(file: Path, forecasts: Sequence[Forecast]) -> None:
    """Raise a Refusal if any of a suite's trials cannot run here.

    The message says which settings the first such trial has, and why it cannot run.  ``zeropp plan`` shows all such
    trials.

    Args:
        file: The suite's file, for the message.
        forecasts: The forecasts of all trials of the suite.
    """
    if not (impossible := [forecast for forecast in forecasts if forecast.problems]):
        return
    first = impossible[0].trial.canonical()
    varying = varying_paths([forecast.trial.canonical() for forecast in forecasts])
    setting = ", ".join(f"{path} = {at(first, path)}" for path in varying)
    raise Refusal(
        f"{file}: {len(impossible)} of {len(forecasts)} trials cannot run here; the first"
        f"{f' ({setting})' if setting else ''}: {impossible[0].problems[0]}"
    )


def check_folder(folder: Path) -> list[Record]:
    """Return the records of a results folder.

    Raises:
        Refusal: If the folder cannot be written, or holds results of another version of the code.
        RecordError: If a record cannot be read.
    """
    source = machine.code().get("source")
    records = read_all(folder) if folder.is_dir() else []
    foreign = [record for record in records if record.measured and record.code.get("source") != source]
    if foreign:
        raise Refusal(
            f"{folder}: holds {counted(len(foreign), 'record')} of another version of the code (hash of "
            f"sources {foreign[0].code.get('source')}, here {source}), and a suite cannot mix results of two versions; "
            f"{_advice(folder)}"
        )
    check_writable(folder, f"{folder}: results folder")
    return records


def check_writable(folder: Path, name: str) -> None:
    """Raise a Refusal if nothing can be written into a folder.

    Args:
        folder: The folder, which need not exist yet.
        name: The beginning of the error message, which names the folder.
    """
    existing = next(
        path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink()
    )
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise Refusal(
            f"{name} cannot be written: {existing}: {error.strerror}; choose another folder"
        ) from None


def check_inputs(folder: Path, trials: Mapping[str, Trial], records: Sequence[Record]) -> None:
    """Raise a Refusal if the inputs of a record have changed since the record was written.

    Inputs are the corpus, and the user's own models, optimizers and other objects.  A record is checked if it has
    measurements, and if its trial belongs to this suite.

    Args:
        folder: The results folder.
        trials: The trials of the suite, by id.
        records: The records in the folder.
    """
    for record in records:
        trial, path = trials.get(record.id), path_of(folder, record.id)
        if trial is None or not record.settled or not record.measured:
            continue
        before, now = record.inputs, digests(trial)
        for name in sorted(name for name in before | now if before.get(name) != now.get(name)):
            old, new = before.get(name, "none")[:12], now.get(name, "none")[:12]
            raise Refusal(
                f"{path}: was measured with another version of {input_text(trial, name)} (SHA-256 {old}, now {new}), "
                f"and a suite cannot mix results of two versions; {_advice(folder)}"
            )


def input_text(trial: Trial, name: str) -> str:
    """Name an input of a trial, such as its corpus or a user's model, for an error message: ``model 'mine:Net'``.

    ``name`` is a key of the field ``inputs`` of the trial's record, such as ``corpus``, ``model`` or
    ``file words.txt of mine``.
    """
    kind, _, rest = name.partition(" ")
    source = trial.corpus if name == "corpus" else own_objects(trial).get(name, rest or name)
    return f"{kind} {source!r}"


def _advice(path: Path) -> str:
    """Return the end of an error message: what a user can do if new results may not be added to the folder ``path``."""
    return f"keep the results under another name (mv {path} {path}-before), or choose another folder with --results"


def _layout_problem(trial: Trial, error: Exception) -> str:
    """Return an error message that says why a trial's units cannot be planned.

    A unit is a set of parameters that are gathered together.  ``error`` is the exception that the planning raised.  If
    the units need too much padding, the message also names the setting that allows this padding.  Units are padded to a
    multiple of the quantisation blocks of all policies in the suite.  If a smaller multiple would be enough for this
    trial's policy alone, the message says so.
    """
    if not isinstance(error, PaddingError):
        return str(error)
    problem, align = f"{error}: set policy.max_padding = {error.needed:.2f} in the suite", trial.policy.align
    unaligned = trial.policy.model_copy(update={"align": 1})
    policy = trial.model_copy(update={"policy": unaligned}).resolved_policy()
    if policy is None or policy.grain % align == 0:
        return problem
    return (
        f"{problem} (its units are aligned to {align} elements, the least common multiple of the blocks of all "
        f"policies in the suite; this trial's policy alone would need only {policy.grain})"
    )


def _local_ranks(trial: Trial) -> int:
    """Return the number of ranks on this machine.

    If a launcher starts the nodes, these are the ranks of one node; otherwise they are all ranks of the trial.
    Strategy ``single`` has one rank.
    """
    if trial.strategy == "single":
        return 1
    cluster = trial.cluster
    return cluster.ranks_per_node if cluster.launcher != "local" else trial.topology().world


def _memory_problems(trial: Trial, host: Host, memory: dict[str, int]) -> tuple[str, ...]:
    """Return sentences on why the trial's ranks do not fit into the memory of ``host``, or of its GPUs.

    ``memory`` has the bytes of one rank by part, without activations.  Returns an empty tuple if the ranks fit.
    """
    ranks, cuda, problems = _local_ranks(trial), trial.cluster.device == "cuda", list[str]()
    offloaded, per_rank = sum(on_host(memory).values()), sum(memory.values()) + _batch_bytes(trial)
    if cuda and host.gpus:
        sharing = -(-ranks // len(host.gpus)) if trial.cluster.transport == "staged" else 1
        sharing = sharing if trial.measures_time else ranks
        if (size := sharing * (per_rank - offloaded)) > min(host.gpus):
            need = "a rank needs" if sharing == 1 else f"{sharing} ranks that share a GPU need"
            problems.append(
                f"{need} {gib(size)} without activations, but a GPU here has {gib(min(host.gpus))}"
            )
    size, processes = offloaded if cuda else per_rank, ranks if trial.measures_time else 1
    whole = ranks * size + processes * PROCESS_BYTES
    if whole > host.memory and (offloaded or not cuda):
        need = f"x {gib(whole / ranks)} = {gib(whole)} without activations"
        need = f"offload {gib(whole)}" if cuda else need
        problems.append(f"{ranks} ranks {need}, but this machine has {gib(host.memory)}")
    return tuple(
        f"too big for memory: {problem}; choose a smaller model, or fewer ranks on this machine"
        for problem in problems
    )


def _batch_bytes(trial: Trial) -> int:
    """Return the bytes of one rank's micro-batch and of all its validation batches.

    Strategy ``single`` holds the batches of all ranks.
    """
    batches = 1 + (trial.validation_batches if trial.validate_every is not None else 0)
    parts = trial.topology().world if trial.strategy == "single" else 1
    return trial_dataset.micro_batch_bytes(trial) * batches * parts


def _rank_problems(trial: Trial, host: Host) -> Iterator[str]:
    """Yield a sentence for each reason why this machine cannot run a trial's number of ranks, whatever its model.

    Possible reasons are too few GPUs, or too little memory for so many processes.
    """
    ranks, most, gpus = _local_ranks(trial), host.memory // PROCESS_BYTES, len(host.gpus)
    cuda, single = trial.cluster.device == "cuda", trial.strategy == "single"
    apart = trial.cluster.transport != "staged" and trial.measures_time
    if cuda and apart and not single and ranks > gpus:
        shared = "let ranks share GPUs with cluster.transport = 'staged', or set cluster.device = 'cpu'"
        yield f"cluster.device = 'cuda': {ranks} ranks need a GPU each, but this machine has {gpus}; {shared}"
    if cuda and not gpus:
        yield (
            "cluster.device = 'cuda': NVML shows no GPU on this machine; set cluster.device = 'cpu', or install a "
            "driver"
        )
    if ranks > most and not cuda and trial.measures_time:
        yield (
            f"{ranks} ranks are more than this machine can hold: {gib(PROCESS_BYTES)} each before any "
            f"model, at most {most} in {gib(host.memory)}; set a smaller cluster.nodes or cluster.ranks_per_node"
        )


def _why_paced(trial: Trial, host: Host) -> str | None:
    """Return why a trial with ``cluster.link = "auto"`` runs over link ``paced`` on ``host``; None if it does not.

    With link ``auto``, nodes become network namespaces, between which the kernel limits the rate.  If ``host`` cannot
    make namespaces, the link becomes ``paced``: ranks then delay their own messages.
    """
    cluster = trial.cluster
    shaped = cluster.link == "auto" and cluster.launcher == "local" and cluster.nodes > 1
    return host.namespaces() if shaped and cluster.rate is not None else None


def _link_problems(trial: Trial, host: Host) -> Iterator[str]:
    """Yield a sentence for each reason why this machine cannot emulate the trial's link between nodes or its rate."""
    cluster, link, nodes, rate = trial.cluster, trial.cluster.link, trial.cluster.nodes, trial.cluster.rate
    if cluster.launcher == "local" and nodes > 1 and link in ("real", "shaped"):
        yield (
            f"cluster.link = {link!r}: needs {nodes} machines for {nodes} nodes, but cluster.launcher = 'local' "
            "starts all ranks on this one; set cluster.launcher to 'torchrun', 'hosts' or 'slurm', or set "
            "cluster.link = 'auto'"
        )
    if link == "real" and rate is not None:
        yield (
            f"cluster.rate = {rate:g} Mbit/s: with cluster.link = 'real' a rate is for predictions only; to run, "
            "set cluster.rate = 'unshaped', or set cluster.link to 'shaped' (the kernel limits the hosts' interfaces) "
            "or to 'paced' (ranks delay their own messages)"
        )
    if nodes > 1 and link == "namespaces" and (why := host.namespaces()):
        yield f"cluster.link = 'namespaces': {why}"
    needed = {
        "cluster.slow": cluster.slow < 1,
        "cluster.inner_rate": cluster.inner_rate is not None,
        "cluster.latency without a rate": bool(cluster.latency) and rate is None,
    }
    local = nodes > 1 and cluster.launcher == "local"
    if cluster.transport == "nccl" and (why := _why_paced(trial, host)):
        yield f"cluster.link = 'auto' would be 'paced' here ({why}), and {PACED_NCCL}"
    for name in (name for name, asked in needed.items() if asked and local and link == "auto"):
        if why := host.namespaces():
            yield f"{name} needs network namespaces: {why}"
    if nodes > 1 and rate is not None and trial.strategy in PEERS and trial.strategy != "single":
        why = host.namespaces() if link in ("auto", "namespaces") else None
        paced = (
            "link 'paced' delays only our own engine's messages; set cluster.link = 'namespaces', or remove "
            "cluster.rate"
        )
        why = paced if link == "paced" else why
        if why:
            yield f"strategy = {trial.strategy!r} at {rate:g} Mbit/s needs network namespaces: {why}"
    if cluster.launcher == "hosts" and (count := len(cluster.hosts)) < nodes:
        yield (
            f"cluster.hosts has {counted(count, 'name')}; expected one for each of {nodes} nodes: add names, or set a "
            "smaller cluster.nodes"
        )


def _refusal(check: Callable[[], object]) -> str | None:
    """Call ``check``, and return the message of its Refusal or ValueError; None if it raises none."""
    try:
        check()
    except (Refusal, ValueError) as error:
        return str(error)
    return None


def _check_optimizer(trial: Trial) -> str | int:
    """Return the bytes of state that the trial's optimizer keeps for each element.

    If the optimizer cannot be built, or cannot step our engine's 1-D shards, returns a sentence that says so instead.
    """
    if _usual(trial.optimizer):
        return held.ADAM_BYTES
    from harness.strategies.optimizers import check_elementwise, state_bytes_per_element

    try:
        if trial.resolved_policy() is not None and trial.host is None:
            check_elementwise(trial.optimizer)
        return state_bytes_per_element(trial.optimizer)
    except Refusal as error:
        return str(error)


def _usual(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is Adam or AdamW with arguments that torch is known to accept.

    Such an optimizer need not be built to learn the size of its state.
    """
    known = optimizer.name in ("Adam", "AdamW") and optimizer.arguments.keys() <= {"lr", "weight_decay"}
    return known and all(type(value) is float and value >= 0 for value in optimizer.arguments.values())


def namespaces(rate: str | None = "100 Mbit/s") -> str | None:
    """Try to join two network namespaces by a link of ``rate``; return why that fails on this machine, else None."""
    from harness.cluster.link import open_link

    cluster = Cluster.model_validate({"link": "namespaces", "nodes": 2, "rate": rate})
    try:
        with open_link(cluster, f"{os.getpid():x}"[-6:]):
            return None
    except LinkError as error:
        return str(error)


def gib(size: float) -> str:
    """Format bytes as GiB or, below 0.1 GiB, as MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
