"""What cannot run, decided before anything starts: trials on this machine, and a folder of results.

A suite is planned trial by trial: what it sends and holds (:mod:`harness.runs.predict`), and why it
cannot run here, or will be a failure on record without having run.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from harness.errors import LinkError, Refusal
from harness.measure import machine
from harness.records.memory_parts import on_device, on_host, sum_parts, without_training
from harness.records.record import Failure, Record, path_of, read, read_all
from harness.runs.predict import (
    Models,
    build_model,
    copied_bytes,
    peer_memory,
    per_node_bytes,
    step_of_trial,
)
from harness.strategies import deepspeed
from harness.suites.labels import at, counted, varying_paths
from harness.suites.peers import DEEPSPEED, PEERS
from harness.suites.trial import RECIPE, Cluster, Trial
from harness.workloads import trial_dataset
from harness.workloads.input_digests import digests, own_objects
from impl.adapters.traffic import GroupGeometry
from impl.codecs.codec import CodecError
from impl.deepspeed.recipe import Finding, laid_out
from impl.plan import memory as held
from impl.plan.policy import Policy, PolicyError
from impl.plan.shard_layout import GeometryError, PaddingError, UnitGeometry, padding_share
from impl.plan.step_time import Step

if TYPE_CHECKING:
    from torch import nn

# What a rank's process holds before it has a model: the interpreter, torch and gloo's threads.
PROCESS_BYTES: Final = 200 << 20


@dataclass(frozen=True, slots=True)
class Host:
    """Resources of the machine that would run the trials."""

    memory: int  # bytes that processes may use
    gpus: tuple[int, ...]  # bytes of each GPU
    namespaces: Callable[[], str | None]  # checks (once) why network namespaces do not work; None if they do


@dataclass(slots=True)
class Forecast:
    """Prediction for one trial."""

    trial: Trial
    parameters: int | None = None  # elements of the model, without padding
    padded: int | None = None  # elements of its units, with padding; None for peers
    inter: int | None = None  # bytes between nodes in a step or generation, of all ranks; None for peers
    intra: int | None = None  # the same inside nodes
    egress: int | None = None  # bytes that one node sends to the others in one step
    memory: dict[str, int] | None = None  # bytes of one rank, by part, without activations
    wire_seconds: float | None = None  # time that ``egress`` takes at the link's rate; None without a rate
    problems: tuple[str, ...] = ()  # why it cannot run here
    failure: Failure | None = None  # as it will be on record without having run
    copied: int = 0  # bytes that one rank copies between host and device in one step, both ways
    secondary: tuple[int, int] | None = None  # bytes of hpZ's copy on one rank, as frames and in 16 bits
    findings: tuple[Finding, ...] = ()  # how each key of a DeepSpeed configuration is handled
    step: Step | None = None  # what a step asks of a machine; None for peers and generation

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it cannot run here or, where it can, why it will be a failure on record."""
        return self.problems or (() if self.failure is None else (self.failure.message,))

    @property
    def padding(self) -> float:
        """Of its units, as a share of the model's elements; 0 where it has no units."""
        return padding_share([(self.parameters, self.padded)]) if self.parameters and self.padded else 0.0


def this_host() -> Host:
    """The machine that this process runs on."""
    gpus = tuple(int(gpu["memory_gib"] * 2**30) for gpu in machine.facts()["gpus"])
    return Host(machine.memory_bytes(), gpus, cache(namespaces))


def any_host() -> Host:
    """One with whatever trials may need: of a node that a launcher has yet to give."""
    return Host(sys.maxsize, (sys.maxsize,) * 1024, lambda: None)


def forecast(trials: Iterable[Trial], host: Host) -> list[Forecast]:
    """Predict every trial; repeats of a trial share their prediction."""
    models, done = Models(), dict[str, Forecast]()
    forecasts = []
    for trial in trials:
        first = trial.model_copy(update={"repeat": 0, "seed": 0})
        if first.id not in done:
            done[first.id] = _forecast(first, host, models)
        forecasts.append(replace(done[first.id], trial=trial))
    return forecasts


def _forecast(trial: Trial, host: Host, models: Models) -> Forecast:
    import torch

    from harness.workloads.models import check_blocks
    from impl.adapters.joined import HostError
    from impl.ops import check_devices
    from impl.zero import ZeroError

    optimizer, policy = _check_optimizer(trial), trial.resolved_policy()
    codecs = () if policy is None else policy.own_codecs
    model = build_model(trial.model, trial.sequence, models)
    complaints = [
        next(_wrong_ranks(trial, host), None),
        _refused(lambda: trial_dataset.check(trial)),
        next(_wrong_link(trial, host), None),
        _refused(lambda: check_devices(torch.device(trial.cluster.device), codecs)),
        optimizer if isinstance(optimizer, str) else None,
    ]
    if isinstance(model, Refusal):
        complaints.append(str(model))
    elif trial.activation_checkpointing:
        complaints.append(_refused(partial(check_blocks, model)))
    found = Forecast(trial, problems=tuple(filter(None, complaints)))
    if trial.strategy == RECIPE:
        found.findings = trial.recipe().findings
    if isinstance(model, Refusal):
        return found
    found.parameters = sum(parameter.numel() for parameter in model.parameters())
    state = optimizer if isinstance(optimizer, int) else 0
    memory = peer_memory(trial, found.parameters, state)
    if policy is not None:
        try:
            memory = _plan(found, policy, model, state) or memory
        except (CodecError, GeometryError, HostError, PolicyError, ZeroError) as error:
            found.problems += (_unfit(trial, error),)
            return found
    if isinstance(optimizer, str):  # nobody knows what its state is
        return found
    found.memory = without_training(memory) if trial.workload == "generate" else memory
    found.problems += _too_big(trial, host, found.memory)
    if (why := beyond_limit(trial, found.memory)) is not None:
        found.failure = Failure(kind="memory", message=f"not run: {why}", log=None)
    elif (why := deepspeed.why_not(trial)) is not None:
        found.failure = Failure(kind="refused", message=why, log=None, by=DEEPSPEED)
    return found


def _plan(found: Forecast, policy: Policy, model: nn.Module, state: int) -> dict[str, int] | None:
    """Fill in what a trial of a policy sends; returns what our engine holds, None for another engine."""
    from harness.strategies.optimizers import with_state
    from harness.workloads.models import unfilled
    from harness.workloads.reinforcement import judges_of
    from impl.adapters.joined import hosted_units
    from impl.zero import plan_units

    trial, topology, memory = found.trial, found.trial.topology(), None
    units: Sequence[UnitGeometry | GroupGeometry]
    judges: list[UnitGeometry] = []  # of the frozen models of workload ``rlhf``
    if trial.host is not None:
        units = hosted_units(trial.host, model, topology, policy)
    else:
        units = own = plan_units(model, topology, policy)
        memory = with_state(held.memory(policy, topology, own, micro_batches=trial.accumulation), state)
        if trial.workload == "rlhf":
            with unfilled():
                judges = plan_units(judges_of(trial, model), topology, policy)
            memory = sum_parts(memory, held.memory(policy, topology, judges, backward=False))
        found.copied = copied_bytes(policy, topology, own, trial)
        found.secondary = held.secondary_either_way(policy, topology, [*own, *judges])
        found.step = step_of_trial(trial, own, found.parameters or 0)
        if trial.strategy == RECIPE:
            found.findings = laid_out(replace(trial.recipe(), policy=policy), own).findings
    inter, intra = per_node_bytes(policy, topology, units, trial)
    if judges:
        more = per_node_bytes(policy, topology, judges, trial, judges=True)
        inter, intra = inter + more[0], intra + more[1]
    found.padded = sum(unit.padded for unit in units)
    found.inter, found.intra, found.egress = inter * topology.nodes, intra * topology.nodes, inter
    if (rate := trial.slowest_mbit) is not None:
        found.wire_seconds = inter * 8 / (rate * 1e6)
    return memory


def beyond_limit(trial: Trial, memory: dict[str, int]) -> str | None:
    """How a rank's bytes by part exceed the trial's limit on its device; None if they keep within it."""
    if (limit := trial.memory_limit) is None:
        return None
    memory = on_device(memory)
    if (held := sum(memory.values())) <= limit:
        return None
    parts = ", ".join(f"{part} {gib(size)}" for part, size in memory.items() if size)
    return f"a rank holds {held:,} bytes ({parts}), memory_limit is {limit:,}"


def failure_after(trial: Trial, record: Record) -> Failure | None:
    """The failure of a trial that ran and whose engine held more than its limit in the predicted parts."""
    for rank in record.ranks:
        foreseen = rank.memory.formula or rank.memory.engine  # peers have no formula
        held_bytes = {part: size for part, size in rank.memory.engine.items() if part in foreseen}
        if (why := beyond_limit(trial, held_bytes)) is not None:
            return Failure(kind="memory", message=f"it ran, and {why}", log=None)
    return None


def check_feasible(file: Path, found: Sequence[Forecast]) -> None:
    """Refuse a suite with a trial that cannot run here; ``plan`` shows them all."""
    if not (impossible := [one for one in found if one.problems]):
        return
    first = impossible[0].trial.canonical()
    varying = varying_paths([one.trial.canonical() for one in found])
    cell = ", ".join(f"{path} = {at(first, path)}" for path in varying)
    raise Refusal(
        f"{file}: {len(impossible)} of {len(found)} trials cannot run here; the first"
        f"{f' ({cell})' if cell else ''}: {impossible[0].problems[0]}"
    )


def check_folder(folder: Path) -> list[Record]:
    """The records of a results folder; refuses one that cannot be written, or has results of other code."""
    source = machine.code().get("source")
    there = read_all(folder) if folder.is_dir() else []
    strange = [record for record in there if record.measured and record.code.get("source") != source]
    if strange:
        raise Refusal(
            f"{folder}: holds {counted(len(strange), 'record')} of other code (hash of sources "
            f"{strange[0].code.get('source')}, here {source}), which are not put together; {_aside(folder)}"
        )
    check_writable(folder, f"{folder}: results folder")
    return there


def check_writable(folder: Path, name: str) -> None:
    """Refuse a folder, ``name`` in the message, that nothing can be written into; it need not exist yet."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise Refusal(f"{name} not writable: {place}: {error.strerror}") from None


def check_inputs(folder: Path, trials: Sequence[Trial]) -> None:
    """Refuse to skip trials whose corpus or model is no longer what their records were made of."""
    for trial in trials:
        path = path_of(folder, trial.id)
        record = read(path) if path.exists() else None
        if record is None or not record.settled or not record.measured:
            continue
        then, now = record.inputs, digests(trial)
        for name in sorted(name for name in then | now if then.get(name) != now.get(name)):
            before, after = then.get(name, "none")[:12], now.get(name, "none")[:12]
            source = trial.corpus if name == "corpus" else own_objects(trial).get(name, name)
            raise Refusal(
                f"{path}: was made of another {name.partition(' ')[0]} {source!r} (SHA-256 {before}, now "
                f"{after}), and results of both are not put together; {_aside(folder)}"
            )


def _aside(folder: Path) -> str:
    """What to do with a folder that a run cannot go on with."""
    return (
        f"keep it under another name (mv {folder} {folder}-before), or choose another folder with --results"
    )


def _unfit(trial: Trial, error: Exception) -> str:
    """Why a trial's units cannot be planned; for padding also the key that allows it, and what it is for."""
    if not isinstance(error, PaddingError):
        return str(error)
    said, align = f"{error}: policy.max_padding = {error.needed:.2f} in the suite", trial.policy.align
    own = trial.policy.model_copy(update={"align": 1})
    alone = trial.model_copy(update={"policy": own}).resolved_policy()
    if alone is None or alone.grain % align == 0:
        return said
    return (
        f"{said} (it is laid out for policy.align = {align}, the blocks of all policies of its suite; its "
        f"own are of {alone.grain})"
    )


def _ranks_here(trial: Trial) -> int:
    """Number of ranks on this machine: all of them, unless a launcher spreads nodes over machines."""
    if trial.strategy == "single":
        return 1
    cluster = trial.cluster
    return cluster.ranks_per_node if cluster.launcher != "local" else trial.topology().world


def _too_big(trial: Trial, host: Host, memory: dict[str, int]) -> tuple[str, ...]:
    """Why the ranks do not fit this machine's memory, or its GPUs'; nothing if they do."""
    ranks, cuda, found = _ranks_here(trial), trial.cluster.device == "cuda", list[str]()
    offloaded, each = sum(on_host(memory).values()), sum(memory.values()) + _batch_bytes(trial)
    if cuda and host.gpus:
        shared = -(-ranks // len(host.gpus)) if trial.cluster.transport == "staged" else 1
        if (need := shared * (each - offloaded)) > min(host.gpus):
            whose = "a rank needs" if shared == 1 else f"{shared} ranks that share a GPU need"
            found.append(f"{whose} {gib(need)} without activations, a GPU here has {gib(min(host.gpus))}")
    size = PROCESS_BYTES + (offloaded if cuda else each)
    if ranks * size > host.memory and (offloaded or not cuda):
        said = f"x {gib(size)} = {gib(ranks * size)} without activations"
        said = f"offload {gib(ranks * size)}" if cuda else said
        found.append(f"{ranks} ranks {said}, this machine has {gib(host.memory)}")
    return tuple(f"too big for memory: {complaint}" for complaint in found)


def _batch_bytes(trial: Trial) -> int:
    """Bytes of a micro-batch and of all validation batches of one rank."""
    batches = 1 + (trial.validation_batches if trial.validate_every is not None else 0)
    parts = trial.topology().world if trial.strategy == "single" else 1
    return trial_dataset.micro_batch_bytes(trial) * batches * parts


def _wrong_ranks(trial: Trial, host: Host) -> Iterator[str]:
    """Why the machine cannot hold the ranks, whatever the model."""
    ranks, most, here = _ranks_here(trial), host.memory // PROCESS_BYTES, len(host.gpus)
    cuda, alone = trial.cluster.device == "cuda", trial.strategy == "single"
    if cuda and trial.cluster.transport != "staged" and not alone and ranks > here:
        yield f"cluster.device = 'cuda': {ranks} ranks need a GPU each, this machine has {here}"
    if cuda and not here:
        yield "cluster.device = 'cuda': this machine has no GPU that NVML shows"
    if ranks > most and not cuda:
        yield (
            f"{ranks} ranks are more than this machine can hold: {gib(PROCESS_BYTES)} each before any "
            f"model, at most {most} in {gib(host.memory)}"
        )


def _wrong_link(trial: Trial, host: Host) -> Iterator[str]:
    """Why nodes cannot be joined as asked from here, or the link cannot limit a peer's rate."""
    cluster, link, nodes, rate = trial.cluster, trial.cluster.link, trial.cluster.nodes, trial.cluster.rate
    if cluster.launcher == "local" and nodes > 1 and link in ("real", "shaped"):
        yield (
            f"cluster.link = {link!r}: {nodes} nodes are {nodes} machines, and cluster.launcher = 'local' "
            "starts all ranks on this one; expected 'torchrun'"
        )
    if link == "real" and rate is not None:
        yield (
            f"cluster.rate = {rate:g} Mbit/s is for predictions only: a real link is as fast as it is; "
            "expected 'unshaped', or cluster.link = 'shaped', which holds hosts' interfaces, or 'paced', "
            "which holds our own messages back"
        )
    if nodes > 1 and link == "namespaces" and (why := host.namespaces()):
        yield f"cluster.link = 'namespaces': {why}"
    if nodes > 1 and rate is not None and trial.strategy in PEERS and trial.strategy != "single":
        why = host.namespaces() if link in ("auto", "namespaces") else None
        why = "link 'paced' shapes our own wire only" if link == "paced" else why
        if why:
            yield f"strategy = {trial.strategy!r} at {rate:g} Mbit/s needs network namespaces: {why}"
    if cluster.launcher == "hosts" and (count := len(cluster.hosts)) < nodes:
        yield f"cluster.hosts has {count} names; expected one for each of {nodes} nodes"


def _refused(check: Callable[[], None]) -> str | None:
    """What a check refuses; None for nothing."""
    try:
        check()
    except (Refusal, ValueError) as error:
        return str(error)
    return None


def _check_optimizer(trial: Trial) -> str | int:
    """State bytes per element of the trial's optimizer, or why it does not work on 1-D shards."""
    from harness.strategies.optimizers import check_elementwise, state_bytes_per_element
    from impl.engine.optimizer_watch import NOT_ELEMENTWISE

    name = trial.optimizer.name
    sharded = trial.resolved_policy() is not None and trial.host is None
    if name in NOT_ELEMENTWISE and sharded:
        return f"optimizer.name = {name!r} is not elementwise and would be another algorithm on shards"
    try:
        if ":" in name and sharded:
            check_elementwise(trial.optimizer)
        return state_bytes_per_element(trial.optimizer)
    except Refusal as error:
        return str(error)


def namespaces(rate: str | None = "100 Mbit/s") -> str | None:
    """Why two nodes in network namespaces cannot be joined at a rate here; None if they can."""
    from harness.cluster.link import open_link

    asked = Cluster.model_validate({"link": "namespaces", "nodes": 2, "rate": rate})
    try:
        with open_link(asked, f"{os.getpid():x}"[-6:]):
            return None
    except LinkError as error:
        return str(error)


def gib(size: float) -> str:
    """Format bytes as GiB or, below 0.1 GiB, MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
