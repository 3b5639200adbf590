"""Refuses combinations of a trial's fields that are valid alone and impossible together."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator
from typing import Any, Final

from harness.suites.model_sizes import PRESETS as MODELS
from harness.suites.model_sizes import GPTShape
from harness.suites.peers import DEEPSPEED, PEERS, family_of
from harness.suites.trial import RECIPE, LearningRates, Trial
from impl.adapters.traffic import check_host
from impl.plan.policy import Offload

_WITHOUT: Final = {  # fields that a workload does not use
    "train": ("generate", "rlhf"),
    "generate": (
        "rlhf", "validate_every", "measure_quantisation", "clip", "activation_checkpointing",
        "optimizer.schedule", "accumulation", "control",
    ),
    "rlhf": ("validate_every", "measure_quantisation", "control", "accumulation"),
}  # fmt: skip


def check(trial: Trial) -> None:
    """Refuse fields that are impossible together, by a ValueError that names them."""
    if (tokens := trial.tokens_per_rank) % trial.sequence:
        raise ValueError(f"tokens_per_rank = {tokens}: expected a multiple of sequence = {trial.sequence}")
    total = trial.warmup + trial.steps
    if (trial.validate_every or 0) > total:
        every = f"validate_every = {trial.validate_every}"
        raise ValueError(f"{every}: the trial has {total} steps in all; 0 validates after the last alone")
    trial.schedule()  # refuses a warm-up that is too long
    for rules in (_configured, _cluster, _workload, _control):
        if (why := next(rules(trial), None)) is not None:
            raise ValueError(why)
    policy = trial.resolved_policy()
    if policy is not None:
        policy.check(trial.topology())
        if trial.host is not None:
            check_host(trial.host, policy)
        if policy.planes > 1 and trial.activation_checkpointing:
            planes = f"policy.planes = {policy.planes}: expected 1"
            raise ValueError(f"activation_checkpointing = true with {planes}")


def _cluster(trial: Trial) -> Iterator[str]:
    """Links that cannot be shaped as the fields say, and transports that cannot carry the messages."""
    cluster, transport = trial.cluster, f"cluster.transport = {trial.cluster.transport!r}"
    shapes, rate = cluster.link in ("auto", "namespaces"), cluster.rate
    if cluster.link == "none" and rate is not None:
        yield f"cluster.rate = {rate:g} Mbit/s: expected another cluster.link than 'none', which shapes none"
    if cluster.link == "shaped" and rate is None:
        yield "cluster.link = 'shaped': expected a cluster.rate to hold it to, or cluster.link = 'real'"
    if cluster.hcas is not None and (cluster.transport, cluster.link) != ("nccl", "real"):
        hcas = json.dumps(cluster.hcas)
        yield f"cluster.hcas = {hcas}: expected cluster.transport = 'nccl' and cluster.link = 'real' with it"
    if cluster.latency is not None and cluster.link in ("none", "real", "shaped"):
        yield f"cluster.latency = {cluster.latency:g} ms: nothing adds it to cluster.link = {cluster.link!r}"
    if cluster.slow < 1 and not (shapes and rate is not None and cluster.nodes > 2):
        slow = f"cluster.slow = {cluster.slow:g} for the last of {cluster.nodes} nodes"
        yield f"{slow}: expected a rate, 3 nodes or more, and cluster.link = 'namespaces'"
    joined = cluster.transport == "gloo" and cluster.ranks_per_node > 1 and cluster.nodes > 1
    if cluster.inner_rate is not None and not (shapes and rate is not None and joined):
        needed = "a cluster.rate, nodes of 2 ranks or more, transport 'gloo' and link 'namespaces'"
        yield f"cluster.inner_rate = {cluster.inner_rate:g} Mbit/s: expected {needed}"
    if cluster.device == "cuda" and trial.host is not None:
        yield f"cluster.device = 'cuda': strategy {trial.strategy!r} runs on the CPU; expected 'cpu'"
    if (cluster.device == "cuda") != (cluster.transport in ("nccl", "staged")):
        yield f"cluster.device = {cluster.device!r}, {transport}: 'cuda' goes with 'nccl' and 'staged' alone"
    if cluster.transport == "staged" and trial.strategy in PEERS and trial.strategy != "single":
        yield f"{transport}: strategy {trial.strategy!r} sends past our wire; expected 'nccl'"
    if cluster.transport == "staged" and trial.measure_quantisation:
        yield f"{transport}: errors of what is sent are not measured there"
    # A user's own backend may send more than the wire books.
    if "." in cluster.transport and (cluster.link not in ("none", "paced") or cluster.device != "cpu"):
        yield f"{transport}: expected cluster.link = 'none' or 'paced', and cluster.device = 'cpu'"
    if len(set(cluster.hosts)) < len(cluster.hosts):
        yield f"cluster.hosts = {list(cluster.hosts)}: a host stands there twice"


def _workload(trial: Trial) -> Iterator[str]:
    """Fields and values that only another workload can use."""
    generate, usual, workload = trial.generate, Trial(), f"workload = {trial.workload!r}"
    length = generate.prompt + generate.tokens
    lengths = f"generate.prompt = {generate.prompt} and generate.tokens = {generate.tokens}"
    for path in _WITHOUT[trial.workload]:
        field = operator.attrgetter(path)
        if field(trial) != field(usual):
            yield f"{path} = {field(trial)}: {workload} has no use for it; expected it left out"
    if trial.workload == "train":
        return
    if not isinstance(MODELS.get(trial.model.name), GPTShape):
        able = ", ".join(name for name, shape in MODELS.items() if isinstance(shape, GPTShape))
        yield f"{workload}: model {trial.model.name!r} cannot; expected one of {able}"
    if length > trial.sequence or (trial.workload == "rlhf" and length < trial.sequence):
        most = "at most " if trial.workload == "generate" else ""
        yield f"{lengths}: together {most}sequence = {trial.sequence} with {workload}"
    if trial.workload == "generate":
        return
    if (policy := trial.resolved_policy()) is None or trial.host is not None:
        yield f"{workload}: strategy {trial.strategy!r} has no engine of ours for frozen models"
    elif policy.offload != Offload():
        yield f"policy.offload_optimizer, policy.offload_weights: expected none with {workload}"
    if (sequences := trial.tokens_per_rank // trial.sequence) % (group := trial.rlhf.group):
        batch = f"tokens_per_rank = {trial.tokens_per_rank} are {sequences} sequences"
        yield f"{batch}: expected a multiple of rlhf.group = {group}"


def _control(trial: Trial) -> Iterator[str]:
    """Controls with nothing to spoil: no copy of hpZ, no two hops of our own engine, or one sequence."""
    policy, topology = trial.resolved_policy(), trial.topology()
    engine_policy = None if trial.host is not None else policy
    strategy = f"control = {trial.control!r}: strategy {trial.strategy!r}"
    if trial.control == "half_batch" and (tokens := trial.tokens_per_rank) < 2 * trial.sequence:
        yield f"control = 'half_batch': tokens_per_rank = {tokens} is one sequence; expected two"
    if trial.control == "unordered":
        axes = () if policy is None or policy.reduce == "ring" else policy.reduce_axes(topology)
        reached = math.prod(axis.size for axis, _ in axes)
        if engine_policy is None or len(axes) < 2 or reached < topology.world:
            yield f"{strategy} on {topology} reduces in {len(axes)} hops; expected two, over all ranks"
    if trial.control in ("stale_secondary", "late_secondary"):
        if engine_policy is None or not engine_policy.secondary_ranks(topology):
            yield f"{strategy} keeps no secondary shard; expected one with hpZ"
        elif engine_policy.sends_copy:
            yield f"{strategy} sends the copy, which has to be new; expected one codec of weights"


def _configured(trial: Trial) -> Iterator[str]:
    """A DeepSpeed configuration that contradicts the trial, or is not used."""
    sequences = trial.tokens_per_rank // trial.sequence
    if family_of(trial.strategy) == DEEPSPEED:
        yield from _for_deepspeed(trial, sequences)
    elif trial.strategy == RECIPE:
        yield from _for_recipe(trial, sequences)
    elif trial.deepspeed_config is not None:
        expected = f"{RECIPE!r} or {DEEPSPEED!r}"
        yield f"deepspeed_config with strategy = {trial.strategy!r}: expected strategy = {expected}"


def _for_recipe(trial: Trial, sequences: int) -> Iterator[str]:
    recipe = trial.recipe()
    yield from _unequal("clip", trial.clip, "gradient_clipping", recipe.clip)
    yield from _unequal("accumulation", trial.accumulation, "accumulation", recipe.accumulation)
    if recipe.micro_batch is not None:
        yield from _unequal("sequences of a rank", sequences, "micro-batch", recipe.micro_batch)
    rate = trial.optimizer.arguments.get("lr")
    if recipe.peak is not None and rate is not None:
        yield from _unequal("optimizer.arguments.lr", rate, "warmup_max_lr", recipe.peak)
    if recipe.schedule is not None and trial.optimizer.schedule != LearningRates():
        yield "optimizer.schedule beside a scheduler of deepspeed_config: expected one of them"
    if any(finding.key.startswith("optimizer.") for finding in recipe.findings):
        yield "deepspeed_config has 'optimizer', which the suite's optimizer says; leave it out"


def _for_deepspeed(trial: Trial, sequences: int) -> Iterator[str]:
    table = trial.peer_configuration()
    if trial.workload == "generate":
        yield f"workload = 'generate': strategy {trial.strategy!r} trains; expected workload = 'train'"
    for key in ("optimizer", "scheduler"):
        if key in table:
            yield f"deepspeed_config has {key!r}, which the suite's optimizer says; leave it out"
    for kind in ("fp16", "bf16"):
        enabled = table[kind].get("enabled") if isinstance(table.get(kind), dict) else None
        if enabled not in ("auto", None, trial.peer.compute == kind):
            yield from _unequal("peer.compute", trial.peer.compute, f"{kind}.enabled", enabled)
    batch = sequences * trial.accumulation * trial.topology().world
    for name, value, key in (
        ("clip", trial.clip or 0.0, "gradient_clipping"),
        ("accumulation", trial.accumulation, "gradient_accumulation_steps"),
        ("sequences of a rank", sequences, "train_micro_batch_size_per_gpu"),
        ("sequences of all ranks", batch, "train_batch_size"),
    ):
        if table.get(key) not in (None, "auto"):
            yield from _unequal(name, value, key, table[key])


def _unequal(name: str, value: Any, key: str, configured: Any) -> Iterator[str]:
    if value != configured:
        other = f"{key} = {json.dumps(configured)} of deepspeed_config"
        yield f"{name} = {json.dumps(value)}, but {other}: expected the same"
