"""What fields of a trial may not say together, each fine alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from harness.suites.model_sizes import PRESETS as MODELS
from harness.suites.model_sizes import GPTShape
from harness.suites.peers import DEEPSPEED, PEERS, family_of
from harness.suites.trial import RECIPE, Generate, LearningRates, Reinforcement, Trial
from impl.adapters.traffic import check_host
from impl.plan.policy import Offload


def check_recipe(trial: Trial) -> None:
    """Refuse, by a ValueError, a DeepSpeed configuration that says other than the trial, or is not used."""
    if words := next(_beside_recipe(trial), None):
        raise ValueError(words)


def check(trial: Trial) -> None:
    """Refuse fields that are fine alone and impossible together, by a ValueError that names them."""
    if words := next(_contradictions(trial), None):
        raise ValueError(words)


def _contradictions(trial: Trial) -> Iterator[str]:
    cluster, tokens = trial.cluster, trial.tokens_per_rank
    try:
        trial.schedule()
    except ValueError as error:
        yield str(error)
    if tokens % trial.sequence:
        yield f"tokens_per_rank = {tokens}: expected a multiple of sequence = {trial.sequence}"
    yield from _beside_recipe(trial)
    if cluster.link == "none" and cluster.rate is not None:
        yield (
            f"cluster.rate = {cluster.rate:g} Mbit/s: with cluster.link = 'none' nothing shapes the "
            "link; expected 'unshaped', or another link"
        )
    if cluster.link == "shaped" and cluster.rate is None:
        yield "cluster.link = 'shaped': expected a cluster.rate to hold it to, or cluster.link = 'real'"
    if cluster.hcas is not None and (cluster.transport, cluster.link) != ("nccl", "real"):
        yield (
            f"cluster.hcas = {json.dumps(cluster.hcas)}: expected cluster.transport = 'nccl' and "
            f"cluster.link = 'real' with it, not {cluster.transport!r} and {cluster.link!r}"
        )
    if cluster.link in ("none", "real", "shaped") and cluster.latency is not None:
        yield (
            f"cluster.latency = {cluster.latency:g} ms: nothing adds it to cluster.link = "
            f"{cluster.link!r}; expected another link, or no latency"
        )
    if cluster.slow < 1 and (
        cluster.nodes < 3 or cluster.rate is None or cluster.link not in ("auto", "namespaces")
    ):
        yield (
            f"cluster.slow = {cluster.slow:g} of the rate for the last of {cluster.nodes} nodes: expected a "
            "cluster.rate, 3 nodes or more (of two, both are as slow as one), and cluster.link = 'namespaces'"
        )
    shapeable = cluster.rate is not None and cluster.link in ("auto", "namespaces")
    if cluster.inner_rate is not None and not (
        shapeable and cluster.transport == "gloo" and cluster.ranks_per_node > 1 and cluster.nodes > 1
    ):
        yield (
            f"cluster.inner_rate = {cluster.inner_rate:g} Mbit/s: expected a cluster.rate, 2 nodes and 2 "
            "ranks a node or more, cluster.transport = 'gloo' and cluster.link = 'namespaces'"
        )
    yield from _beyond_workload(trial)
    yield from _beside_control(trial)
    on_gpus = ("nccl", "staged")
    if cluster.transport in on_gpus and cluster.device != "cuda":
        yield f"cluster.transport = {cluster.transport!r}: expected cluster.device = 'cuda' with it"
    if cluster.device == "cuda" and cluster.transport not in on_gpus and trial.host is None:
        yield (
            "cluster.device = 'cuda': expected cluster.transport = 'nccl' or 'staged', not "
            f"{cluster.transport!r}"
        )
    if cluster.transport == "staged":  # only our wire stages what it sends
        if trial.strategy in PEERS and trial.strategy != "single":
            sends = f"strategy {trial.strategy!r} sends past our wire"
            yield f"cluster.transport = 'staged': {sends}; expected 'nccl'"
        if trial.measure_quantisation:
            yield "cluster.transport = 'staged': errors of what is sent are not measured there"
    counted = cluster.link not in ("none", "paced")  # a backend of the user's may say more than the wire
    wrong = ["cluster.link = 'none' or 'paced', not {0.link!r}"] * counted
    wrong += ["cluster.device = 'cpu', not {0.device!r}"] * (cluster.device != "cpu")
    if "." in cluster.transport and wrong:
        yield f"cluster.transport = {cluster.transport!r}: expected {' and '.join(wrong).format(cluster)}"
    if len(set(cluster.hosts)) < len(cluster.hosts):
        yield f"cluster.hosts = {list(cluster.hosts)}: a host stands there twice"
    policy = trial.resolved_policy()
    if policy is not None:
        policy.check(trial.topology())
        if trial.host is not None:
            check_host(trial.host, policy)
        if policy.planes > 1 and trial.activation_checkpointing:
            yield (
                f"activation_checkpointing = true: blocks run again in backward, for which policy.planes = "
                f"{policy.planes} has another plane than forward's; expected 1"
            )
    if trial.host is not None and cluster.device != "cpu":
        yield (
            f"cluster.device = {cluster.device!r}: strategy {trial.strategy!r} carries messages inside "
            f"{trial.host} on the CPU; expected 'cpu'"
        )


def _beside_control(trial: Trial) -> Iterator[str]:
    """A control spoils the copy of hpZ, or the order of two hops, in our own engine, or halves a batch."""
    policy, topology = trial.resolved_policy(), trial.topology()
    if trial.control is None:
        return
    if trial.control == "half_batch":
        if trial.tokens_per_rank < 2 * trial.sequence:
            tokens = trial.tokens_per_rank
            yield f"control = 'half_batch': tokens_per_rank = {tokens} is one sequence; expected two"
        return
    if trial.control == "unordered":
        axes = () if policy is None or policy.reduce == "ring" else policy.reduce_axes(topology)
        if (
            trial.host is not None
            or len(axes) < 2
            or math.prod(axis.size for axis, _ in axes) < topology.world
        ):
            yield (
                f"control = 'unordered': strategy {trial.strategy!r} on {topology} reduces gradients in "
                f"{len(axes)} hops; expected two, over all ranks"
            )
    elif policy is None or trial.host is not None or not policy.secondary_ranks(topology):
        yield (
            f"control = {trial.control!r}: strategy {trial.strategy!r} keeps no secondary shard; expected "
            "one with hpZ"
        )
    elif policy.sends_copy:
        yield (
            f"control = {trial.control!r}: forward passes of strategy {trial.strategy!r} send the copy, that "
            "has to be new; expected one codec of weights, and no differences"
        )
    if trial.workload != "train":
        yield f"control = {trial.control!r}: expected workload = 'train'"


def _beyond_workload(trial: Trial) -> Iterator[str]:
    """What only another workload can do."""
    generate = trial.generate
    if trial.workload != "rlhf" and trial.rlhf != Reinforcement():
        yield "rlhf.group, rlhf.kl: expected workload = 'rlhf' with them"
    if trial.workload == "train":
        if generate != Generate():
            yield "generate.prompt, generate.tokens: expected workload = 'generate' or 'rlhf' with them"
        return
    if not isinstance(MODELS.get(trial.model.name), GPTShape):
        able = ", ".join(name for name, shape in MODELS.items() if isinstance(shape, GPTShape))
        yield f"workload = {trial.workload!r}: model {trial.model.name!r} cannot; expected one of {able}"
    if generate.prompt + generate.tokens > trial.sequence:
        yield (
            f"generate.prompt = {generate.prompt} and generate.tokens = {generate.tokens}: together at "
            f"most sequence = {trial.sequence}"
        )
    if trial.workload == "rlhf":
        yield from _beyond_reinforcement(trial)
        return
    if trial.validate_every is not None or trial.measure_quantisation or trial.clip is not None:
        yield (
            "workload = 'generate' trains nothing: expected no validate_every, no clip and no "
            "measure_quantisation"
        )
    if trial.activation_checkpointing or trial.optimizer.schedule != LearningRates():
        yield (
            "workload = 'generate' trains nothing: expected neither activation_checkpointing nor "
            "optimizer.schedule"
        )
    if trial.accumulation > 1:
        yield f"accumulation = {trial.accumulation}: expected 1 with workload = 'generate'"


def _beyond_reinforcement(trial: Trial) -> Iterator[str]:
    """What cannot be said of a step that generates, scores and trains."""
    policy, sequences = trial.resolved_policy(), trial.tokens_per_rank // trial.sequence
    if policy is None or trial.host is not None:
        yield (
            f"workload = 'rlhf': strategy {trial.strategy!r} has no engine of ours for its frozen models; "
            "expected a policy"
        )
    elif policy.offload != Offload():
        yield "policy.offload_optimizer, policy.offload_weights: expected none with workload = 'rlhf'"
    if trial.generate.prompt + trial.generate.tokens < trial.sequence:
        yield (
            f"generate.prompt = {trial.generate.prompt} and generate.tokens = {trial.generate.tokens}: with "
            f"workload = 'rlhf' expected together sequence = {trial.sequence}, which is trained on"
        )
    if sequences % trial.rlhf.group:
        yield (
            f"tokens_per_rank = {trial.tokens_per_rank} of sequence = {trial.sequence} are {sequences} "
            f"sequences: expected a multiple of rlhf.group = {trial.rlhf.group}"
        )
    if trial.validate_every is not None or trial.measure_quantisation or trial.control is not None:
        yield "workload = 'rlhf': expected no validate_every, no measure_quantisation and no control"
    if trial.accumulation > 1:
        yield f"accumulation = {trial.accumulation}: expected 1 with workload = 'rlhf'"


def _beside_recipe(trial: Trial) -> Iterator[str]:
    if family_of(trial.strategy) == DEEPSPEED:
        yield from _beside_deepspeed(trial)
        return
    if trial.strategy != RECIPE:
        if trial.deepspeed_config is not None:
            yield (
                f"deepspeed_config with strategy = {trial.strategy!r}: expected strategy = {RECIPE!r} or "
                f"{DEEPSPEED!r}"
            )
        return
    found = trial.recipe()
    sequences = trial.tokens_per_rank // trial.sequence
    for name, says, theirs in (
        ("clip", "gradient_clipping of deepspeed_config says", found.clip),
        ("accumulation", "the batches of deepspeed_config make", found.accumulation),
    ):
        if (ours := getattr(trial, name)) != theirs:
            yield f"{name} = {ours}, but {says} {theirs}: expected the same"
    if found.micro_batch not in (None, sequences):
        yield (
            f"tokens_per_rank = {trial.tokens_per_rank} of sequence = {trial.sequence} are {sequences} "
            f"sequences, but deepspeed_config says {found.micro_batch} of a rank: expected the same"
        )
    rate = trial.optimizer.arguments.get("lr")
    if found.peak is not None and rate is not None and found.peak != rate:
        yield (
            f"optimizer.arguments.lr = {rate}, but warmup_max_lr of deepspeed_config says "
            f"{found.peak:g}: expected the same"
        )
    if found.schedule is not None and trial.optimizer.schedule != LearningRates():
        yield "optimizer.schedule beside a scheduler of deepspeed_config: expected one of them"
    if any(finding.key.startswith("optimizer.") for finding in found.findings):
        yield (
            "deepspeed_config has an optimizer: a trial's is said by optimizer.name and "
            "optimizer.arguments; leave it out"
        )


def _beside_deepspeed(trial: Trial) -> Iterator[str]:
    """What a configuration for DeepSpeed itself may not say, since the trial says it."""
    table, sequences = trial.peer_configuration(), trial.tokens_per_rank // trial.sequence
    if trial.workload == "generate":
        yield f"workload = 'generate': strategy {trial.strategy!r} trains; expected workload = 'train'"
    for key, field in (
        ("optimizer", "optimizer.name and optimizer.arguments"),
        ("scheduler", "optimizer.schedule"),
    ):
        if key in table:
            yield f"deepspeed_config has {key!r}: a trial's is said by {field}; leave it out"
    for kind in ("fp16", "bf16"):
        asked = table[kind].get("enabled", "auto") if isinstance(table.get(kind), dict) else "auto"
        ours = trial.peer.compute == kind
        if asked not in ("auto", None, ours):
            yield (
                f"deepspeed_config says {kind}.enabled = {json.dumps(asked)}, and peer.compute = "
                f"{trial.peer.compute!r} makes it {json.dumps(ours)}: expected the same"
            )
    world = trial.topology().world
    for key, value, says in (
        ("gradient_clipping", trial.clip or 0.0, f"clip = {trial.clip}"),
        ("gradient_accumulation_steps", trial.accumulation, f"accumulation = {trial.accumulation}"),
        ("train_micro_batch_size_per_gpu", sequences, f"{sequences} sequences of a rank"),
        ("train_batch_size", sequences * trial.accumulation * world, f"{world} ranks' sequences"),
    ):
        if table.get(key, value) not in (value, None, "auto"):
            yield (
                f"deepspeed_config says {key} = {table[key]}, and {says} of the trial makes it {value}: "
                "expected the same"
            )
