"""Predicts the bytes and memory of every trial before it runs, and whether it can run here.

The model is built on the meta device, its units are planned, and ``impl.plan.traffic`` counts their
bytes.  So models and clusters that do not fit here, such as 100 B parameters on 64x16, are predicted
in seconds.  By symmetry every node sends what node 0 sends.  Activations are not counted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Final

from harness.cluster.interrupts import cleaning_up
from harness.errors import CorpusError
from harness.measure import machine
from harness.records.memory_parts import on_device, on_host, without_training
from harness.strategies import deepspeed
from harness.suites.peers import PEERS, zero_stage
from harness.suites.trial import RECIPE, Model, Trial
from harness.workloads import samples
from impl.adapters.traffic import GroupGeometry, predict_hosted
from impl.codecs.codec import CodecError
from impl.deepspeed.recipe import Finding, laid_out
from impl.plan import memory as held
from impl.plan import traffic
from impl.plan.policy import Policy, PolicyError
from impl.plan.shard_layout import GeometryError, PaddingError, UnitGeometry, padding_share
from impl.plan.topology import Topology

if TYPE_CHECKING:
    from torch import nn

# What a rank's process holds before it has a model: the interpreter, torch and gloo's threads.
PROCESS_BYTES: Final = 200 << 20
FP32_BYTES: Final = 4


class PlanError(ValueError):
    """A trial cannot run; the message says why, with its numbers."""


@dataclass(frozen=True, slots=True)
class Host:
    """Resources of the machine that would run the trials.

    Attributes:
        memory: bytes that processes may use.
        gpus: bytes of each GPU.
        namespaces: checks (once) whether network namespaces work: None if so, else why not.
    """

    memory: int
    gpus: tuple[int, ...]
    namespaces: Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Forecast:
    """Prediction for one trial.

    Attributes:
        parameters: elements of the model, without padding.
        padded: elements of its units, with padding; None for peers.
        inter: bytes between nodes in one optimizer step, or one generation, all ranks together; None for
            peers whose bytes do not go through our wire.
        intra: the same inside nodes.
        egress: bytes that one node sends to the others in one step.
        memory: bytes of one rank, by part, without activations.
        wire_seconds: time that ``egress`` takes at the link's rate; None without a rate.
        problems: why it cannot run here.
        beyond_limit: how it exceeds its memory limit, so that it will not be run; None if it does not.
        refusal: why a peer's library cannot run it here, so that it will be a refusal on record; else None.
        copied: bytes that one rank copies between host and device in one step, both ways; 0 where nothing
            is offloaded.
        secondary: bytes of hpZ's copy on one rank, kept as frames and in 16 bits, whichever the policy keeps;
            None where it keeps none.
    """

    trial: Trial
    parameters: int | None = None
    padded: int | None = None
    inter: int | None = None
    intra: int | None = None
    egress: int | None = None
    memory: dict[str, int] | None = None
    wire_seconds: float | None = None
    problems: tuple[str, ...] = ()
    beyond_limit: str | None = None
    refusal: str | None = None
    copied: int = 0
    secondary: tuple[int, int] | None = None

    @property
    def padding(self) -> float:
        """Of its units, as a share of the model's elements; 0 where it has no units."""
        return padding_share([(self.parameters, self.padded)]) if self.parameters and self.padded else 0.0

    findings: tuple[Finding, ...] = ()


def this_host() -> Host:
    """The machine that this process runs on."""
    gpus = machine.facts()["gpus"]
    return Host(
        machine.memory_bytes(), tuple(int(gpu["memory_gib"] * 2**30) for gpu in gpus), cache(_namespaces)
    )


def any_host() -> Host:
    """One with whatever trials may need: of a node that a launcher has yet to give."""
    return Host(sys.maxsize, (sys.maxsize,) * 1024, lambda: None)


def forecast(trials: Iterable[Trial], host: Host) -> list[Forecast]:
    """Predict every trial; repeats of a trial share their prediction."""
    models: dict[str, nn.Module | PlanError] = {}
    done: dict[str, Forecast] = {}
    forecasts = []
    for trial in trials:
        first = trial.model_copy(update={"repeat": 0, "seed": 0})
        if first.id not in done:
            done[first.id] = replace(_forecast(first, host, models), findings=findings(first, models))
        forecasts.append(replace(done[first.id], trial=trial))
    return forecasts


def findings(trial: Trial, models: dict[str, nn.Module | PlanError] | None = None) -> tuple[Finding, ...]:
    """How each key of a trial's DeepSpeed configuration is handled on its model; none without one."""
    policy = trial.resolved_policy()
    if trial.strategy != RECIPE or policy is None:
        return ()
    from impl.zero import ZeroError, plan_units

    found = replace(trial.recipe(), policy=policy)
    model = _model(trial.model, trial.sequence, {} if models is None else models)
    if isinstance(model, PlanError):
        return found.findings
    try:
        return laid_out(found, plan_units(model, trial.topology(), policy)).findings
    except (CodecError, GeometryError, PolicyError, ZeroError):
        return found.findings


def _forecast(trial: Trial, host: Host, models: dict[str, nn.Module | PlanError]) -> Forecast:
    optimizer = _check_optimizer(trial)
    complaints = [
        _check_ranks(trial, host),
        _check_corpus(trial),
        _check_link(trial, host),
        _check_launcher(trial),
        _check_codecs(trial),
        optimizer if isinstance(optimizer, str) else None,
    ]
    model = _model(trial.model, trial.sequence, models)
    if trial.activation_checkpointing and not isinstance(model, PlanError):
        complaints.append(_check_blocks(model))
    problems = tuple(complaint for complaint in complaints if complaint)
    if isinstance(model, PlanError):
        return Forecast(trial, problems=(*problems, str(model)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    topology, policy = trial.topology(), trial.resolved_policy()
    found = Forecast(trial, parameters)
    state = optimizer if isinstance(optimizer, int) else 0
    memory: dict[str, int] | None = _peer_memory(trial, parameters, topology, state)
    if policy is not None:
        from harness.strategies.optimizers import with_state
        from impl.zero import ZeroError, plan_units

        units: Sequence[UnitGeometry | GroupGeometry]
        copied, secondary = 0, None
        try:
            if trial.host is not None:
                units, (inter, intra) = _hosted(trial, policy, model)
            else:
                units = own = plan_units(model, topology, policy)
                inter, intra = per_node_bytes(policy, topology, own, trial)
                memory = held.memory(policy, topology, own, micro_batches=trial.accumulation)
                if isinstance(optimizer, int):
                    memory = with_state(memory, optimizer)
                copied = _copied(policy, topology, own, trial)
                secondary = held.secondary_either_way(policy, topology, own)
        except (CodecError, GeometryError, PolicyError, ZeroError) as error:
            return replace(found, problems=(*problems, _unfit(trial, error)))
        rate = trial.cluster.rate
        found = replace(
            found,
            padded=sum(unit.padded for unit in units),
            inter=inter * topology.nodes,
            intra=intra * topology.nodes,
            egress=inter,
            wire_seconds=None if rate is None else inter * 8 / (rate * 1e6),
            copied=copied,
            secondary=secondary,
        )
    if isinstance(optimizer, str) or memory is None:  # nobody knows what its state is
        return replace(found, problems=problems)
    if trial.workload == "generate":
        memory = without_training(memory)
    problems += _too_big(trial, host, memory)
    return replace(
        found,
        memory=memory,
        problems=problems,
        beyond_limit=beyond_limit(trial, memory),
        refusal=deepspeed.why_not(trial),
    )


def _hosted(
    trial: Trial, policy: Policy, model: nn.Module
) -> tuple[Sequence[UnitGeometry | GroupGeometry], tuple[int, int]]:
    """Units of a policy inside FSDP2 or DDP, and its :func:`per_node_bytes`.

    Raises:
        PolicyError, GeometryError: if the host cannot run the policy.
    """
    from impl.adapters.joined import HostError, hosted_units

    assert trial.host is not None  # noqa: S101  # the caller asked
    topology, events = trial.topology(), _events(trial)
    try:
        units = hosted_units(trial.host, model, topology, policy)
    except HostError as error:
        raise PolicyError(str(error)) from None
    return units, _by_link(
        predict_hosted(trial.host, policy, topology, units, rank=rank, events=events)
        for rank in range(topology.ranks_per_node)
    )


def _unfit(trial: Trial, error: Exception) -> str:
    """Why a trial's units cannot be planned; for padding also the key that allows it, and what it is for."""
    if not isinstance(error, PaddingError):
        return str(error)
    said = f"{error}: policy.max_padding = {error.needed:.2f} in the suite"
    alone = trial.model_copy(
        update={"policy": trial.policy.model_copy(update={"align": 1})}
    ).resolved_policy()
    if alone is None or alone.grain % trial.policy.align == 0:
        return said
    return (
        f"{said} (it is laid out for policy.align = {trial.policy.align}, the blocks of all policies of its "
        f"suite; its own are of {alone.grain})"
    )


def _events(trial: Trial) -> list[traffic.Event]:
    """The events (passes, norms) of one step, for ``impl.plan.traffic``."""
    if trial.workload == "generate":
        return ["evaluate"] * trial.generate.tokens
    norm: list[traffic.Event] = [] if trial.clip is None else ["norm"]
    passes: list[traffic.Event] = ["forward", "backward"]
    return [*passes * trial.accumulation, *norm, "step"]


def beyond_limit(trial: Trial, memory: dict[str, int]) -> str | None:
    """How ``memory``, a rank's bytes by part, exceeds the trial's limit; None if it keeps within it.

    The limit is on the device's memory: what is offloaded to the host does not count.
    """
    memory = on_device(memory)
    held, limit = sum(memory.values()), trial.memory_limit
    if limit is None or held <= limit:
        return None
    parts = ", ".join(f"{part} {gib(size)}" for part, size in memory.items() if size)
    return f"a rank holds {held:,} bytes ({parts}), memory_limit is {limit:,}"


def per_node_bytes(
    policy: Policy, topology: Topology, units: Sequence[UnitGeometry], trial: Trial
) -> tuple[int, int]:
    """Bytes that the ranks of one node send in one step, to other nodes and inside it.

    All nodes send the same, so the ranks of node 0 are enough.
    """
    loads, later = _loads(trial)
    ranks = range(topology.ranks_per_node)
    one, two = (
        _by_link(traffic.predict(policy, topology, units, rank, load).sent for rank in ranks)
        for load in loads
    )
    return one[0] + later * (two[0] - one[0]), one[1] + later * (two[1] - one[1])


def _loads(trial: Trial) -> tuple[tuple[traffic.Load, traffic.Load], int]:
    """Loads of one and of two micro-batches (or tokens), and the number in a step after the first.

    Only the first all-gathers without a secondary shard: all later ones send equal bytes.
    """
    if trial.workload == "generate":
        one, two = (traffic.Load(steps=0, evaluations=tokens) for tokens in (1, 2))
        return (one, two), trial.generate.tokens - 1
    norms = 0 if trial.clip is None else 1
    one, two = (traffic.Load(micro_batches=n, norms=norms) for n in (1, 2))
    return (one, two), trial.accumulation - 1


def _copied(policy: Policy, topology: Topology, units: Sequence[UnitGeometry], trial: Trial) -> int:
    """Bytes that one rank copies between host and device in one step, both ways."""
    loads, later = _loads(trial)
    one, two = (sum(traffic.predict(policy, topology, units, 0, load).copied.values()) for load in loads)
    return one + later * (two - one)


def _by_link(ledgers: Iterable[Mapping[traffic.LedgerKey, traffic.Sent]]) -> tuple[int, int]:
    """Bytes that ranks send, to other nodes and inside theirs."""
    total = {"inter": 0, "intra": 0}
    for ledger in ledgers:
        for key, sent in ledger.items():
            total[key.link] += sent.bytes
    return total["inter"], total["intra"]


def _model(model: Model, sequence: int, models: dict[str, nn.Module | PlanError]) -> nn.Module | PlanError:
    """Build the model on the meta device, once; returns a PlanError if it cannot be built."""
    key = f"{model.model_dump_json()}/{sequence}"
    if key not in models:
        from harness.workloads import models as workload

        try:
            # A user's own function may begin what it cleans up.
            with cleaning_up() if ":" in model.name else nullcontext(), workload.unfilled():
                models[key] = workload.build(model, sequence)
        except workload.WorkloadError as error:
            models[key] = PlanError(str(error))
        except (Exception, SystemExit) as error:  # a user's own function may raise anything
            words = f"{type(error).__name__}: {' '.join(str(error).split())}"
            models[key] = PlanError(f"model {model.name!r} cannot be built: {words}")
    return models[key]


def _peer_memory(trial: Trial, parameters: int, topology: Topology, state: int) -> dict[str, int]:
    """Weights and gradients in fp32 and the optimizer's ``state`` bytes an element, each rank's share of what
    a peer shards: FSDP2 all, DeepSpeed by its stage.
    """
    peer = PEERS.get(trial.host or trial.strategy)
    family = "" if peer is None else peer.family
    stage = zero_stage(trial.peer_configuration()) if family == "deepspeed" else 3 * (family == "fsdp2")

    def held(least: int) -> int:
        return -(-parameters // topology.world) if stage >= least else parameters

    return {
        "masters": FP32_BYTES * held(3),
        "gradients": FP32_BYTES * held(2),
        "optimizer": state * held(1),
    }


def _ranks_here(trial: Trial) -> int:
    """Number of ranks on this machine: all of them, unless a launcher spreads nodes over machines."""
    if trial.strategy == "single":
        return 1
    cluster = trial.cluster
    return cluster.ranks_per_node if cluster.launcher != "local" else trial.topology().world


def _too_big(trial: Trial, host: Host, memory: dict[str, int]) -> tuple[str, ...]:
    """Why the ranks do not fit this machine's memory, or its GPUs'; nothing if they do."""
    ranks, each = _ranks_here(trial), sum(memory.values()) + _batch_bytes(trial)
    if trial.cluster.device == "cuda":
        each -= (offloaded := sum(on_host(memory).values()))
        found = []
        shared = -(-ranks // max(1, len(host.gpus))) if trial.cluster.transport == "staged" else 1
        if host.gpus and shared * each > min(host.gpus):
            whose = "a rank needs" if shared == 1 else f"{shared} ranks that share a GPU need"
            needs = f"{whose} {gib(shared * each)} without activations"
            found.append(f"{needs}, a GPU here has {gib(min(host.gpus))}")
        if offloaded and (need := ranks * (offloaded + PROCESS_BYTES)) > host.memory:
            found.append(f"{ranks} ranks offload {gib(need)}, this machine has {gib(host.memory)}")
        return tuple(f"too big for memory: {complaint}" for complaint in found)
    need = ranks * (each + PROCESS_BYTES)
    if need <= host.memory:
        return ()
    complaint = f"{ranks} ranks x {gib(each + PROCESS_BYTES)} = {gib(need)} without activations"
    return (f"too big for memory: {complaint}, this machine has {gib(host.memory)}",)


def _batch_bytes(trial: Trial) -> int:
    """Bytes of a micro-batch and of all validation batches of one rank."""
    batches = 1 + (trial.validation_batches if trial.validate_every is not None else 0)
    parts = trial.topology().world if trial.strategy == "single" else 1
    return samples.micro_batch_bytes(trial) * batches * parts


def _check_ranks(trial: Trial, host: Host) -> str | None:
    """Why the machine cannot hold the ranks, whatever the model; None if it can."""
    ranks = _ranks_here(trial)
    if trial.cluster.device == "cuda":
        if trial.cluster.transport != "staged" and trial.strategy != "single" and ranks > len(host.gpus):
            return (
                f"cluster.device = 'cuda': {ranks} ranks need a GPU each, this machine has {len(host.gpus)}"
            )
        return None if host.gpus else "cluster.device = 'cuda': this machine has no GPU that NVML shows"
    most = host.memory // PROCESS_BYTES
    if ranks > most:
        return (
            f"{ranks} ranks are more than this machine can hold: {gib(PROCESS_BYTES)} each before any "
            f"model, at most {most} in {gib(host.memory)}"
        )
    return None


def _check_corpus(trial: Trial) -> str | None:
    try:
        samples.check(trial)
    except CorpusError as error:
        return str(error)
    return None


def _check_link(trial: Trial, host: Host) -> str | None:
    """Why the link cannot be opened here, or cannot limit a peer's rate; None if it can."""
    cluster, peer = trial.cluster, trial.strategy in PEERS and trial.strategy != "single"
    if cluster.link in ("real", "shaped"):
        if cluster.launcher == "local" and cluster.nodes > 1:
            return (
                f"cluster.link = {cluster.link!r}: {cluster.nodes} nodes are {cluster.nodes} machines, and "
                "cluster.launcher = 'local' starts all ranks on this one; expected 'torchrun'"
            )
        if cluster.link == "real" and cluster.rate is not None:
            return (
                f"cluster.rate = {cluster.rate:g} Mbit/s is for predictions only: a real link is as fast "
                "as it is; expected 'unshaped', or cluster.link = 'shaped', which holds hosts' interfaces, "
                "or 'paced', which holds our own messages back"
            )
        return None
    if cluster.nodes == 1 or cluster.link == "none":
        return None
    if cluster.link == "namespaces" and (why := host.namespaces()):
        return f"cluster.link = 'namespaces': {why}"
    if peer and cluster.rate is not None:
        paced = "link 'paced' shapes our own wire only" if cluster.link == "paced" else host.namespaces()
        if paced:
            return (
                f"strategy = {trial.strategy!r} at {cluster.rate:g} Mbit/s needs network namespaces: {paced}"
            )
    return None


def _check_launcher(trial: Trial) -> str | None:
    cluster = trial.cluster
    if cluster.launcher == "local":
        return None
    if cluster.launcher == "hosts" and len(cluster.hosts) < cluster.nodes:
        return f"cluster.hosts has {len(cluster.hosts)} names; expected one for each of {cluster.nodes} nodes"
    return None


def _check_codecs(trial: Trial) -> str | None:
    """Why its codecs cannot run on its device: what ranks would refuse."""
    import torch

    from impl.ops import check_devices

    policy = trial.resolved_policy()
    try:
        check_devices(torch.device(trial.cluster.device), policy.own_codecs if policy else ())
    except ValueError as error:
        return str(error)
    return None


def _check_blocks(model: nn.Module) -> str | None:
    from harness.workloads import models as workload

    try:
        workload.check_blocks(model)
    except workload.WorkloadError as error:
        return str(error)
    return None


def _check_optimizer(trial: Trial) -> str | int:
    """State bytes per element of the trial's optimizer, or why it does not work on 1-D shards."""
    from harness.errors import Refusal
    from harness.strategies.optimizers import check_elementwise, state_bytes_per_element
    from impl.engine.optimizer_hooks import NOT_ELEMENTWISE

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


def _namespaces() -> str | None:
    """Why network namespaces do not work here; None if they do."""
    from harness.cluster.link import LinkError, Setting, open_link

    try:
        with cleaning_up(), open_link(Setting("namespaces", 2, 100.0), f"{os.getpid():x}"[-6:]):
            return None
    except LinkError as error:
        return str(error)


def gib(size: float) -> str:
    """Format bytes as GiB or, below 0.1 GiB, MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
