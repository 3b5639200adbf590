"""Refuses a trial whose fields are each valid but contradict each other.

:func:`check` is called for every trial of a suite before anything runs.  Settings that are possible but have no
effect in any trial are refused by :mod:`harness.suites.ineffective`; settings that this machine cannot run, by
:mod:`harness.runs.feasibility`.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator
from typing import Any, Final

from harness.suites.model_sizes import PRESETS as MODELS
from harness.suites.model_sizes import GPTShape
from harness.suites.peers import DEEPSPEED, PEERS, family_of
from harness.suites.trial import MUON, RECIPE, Cluster, LearningRates, Trial
from impl.adapters.traffic import check_host
from impl.policy.policy import Offload

_WITHOUT: Final = {  # for each workload, the fields that it does not use
    "train": ("generate", "rlhf"),
    "generate": (
        "rlhf", "validate_every", "measure_quantisation", "clip", "activation_checkpointing",
        "optimizer.schedule", "accumulation", "control",
    ),
    "rlhf": ("validate_every", "measure_quantisation", "control", "accumulation"),
}  # fmt: skip

_OPTIMIZER_TWICE: Final = (
    "deepspeed_config has {0!r}, but the suite's `optimizer` is used; remove {0!r} from deepspeed_config"
)
# Two error messages end with this text.
PACED_NCCL: Final = (
    "with cluster.transport = 'nccl' the host would sleep for each message while it enqueues work for the GPU, so "
    "that nothing overlaps; set cluster.transport = 'staged', cluster.rate = 'unshaped', or "
    "cluster.link = 'namespaces', which holds NCCL's sockets to the rate"
)


def check(trial: Trial) -> None:
    """Check that a trial's fields can be combined.

    Raises:
        ValueError: With one line that names the fields, their values and what to change.
    """
    if (tokens := trial.tokens_per_rank) % trial.sequence:
        raise ValueError(f"tokens_per_rank = {tokens}: expected a multiple of sequence = {trial.sequence}")
    total = trial.warmup + trial.steps
    if (trial.validate_every or 0) > total:
        every = f"validate_every = {trial.validate_every}"
        raise ValueError(
            f"{every}: the trial has {total} steps in all; set at most {total}, or 0 to validate only after the last "
            "step"
        )
    trial.schedule()  # raises if the warm-up is longer than the trial
    for rules in (
        _configured, _threads, _cluster, _own_strategy, _workload, _own_gather, _muon, _local_steps, _control,
    ):  # fmt: skip
        if (why := next(rules(trial), None)) is not None:
            raise ValueError(why)
    policy = trial.resolved_policy()
    if policy is not None:
        policy.check(trial.topology())
        if trial.host is not None:
            check_host(trial.host, policy)
        if policy.schedule and trial.workload != "train":
            counts = "a schedule counts steps of training"
            raise ValueError(
                f"policy.schedule with workload = {trial.workload!r}: {counts}; set workload = 'train', or remove "
                "policy.schedule"
            )
        if policy.planes != 1 and trial.activation_checkpointing:
            planes = (
                f"policy.planes = {policy.planes!r} is not supported with activation_checkpointing = true"
            )
            raise ValueError(f"{planes}; set policy.planes = 1, or remove activation_checkpointing")


def _threads(trial: Trial) -> Iterator[str]:
    """Yield an error for each field that ``cluster.ranks = "threads"`` does not support, such as ``cluster.rate``.

    With this setting, all ranks are threads of one process.
    """
    cluster, usual, threads = trial.cluster, Cluster(), "cluster.ranks = 'threads'"
    if cluster.ranks == "processes":
        return
    why = {
        **dict.fromkeys(("rate", "latency", "slow", "inner_rate", "hcas"), "has no link between nodes"),
        **dict.fromkeys(("transport", "launcher"), "runs all ranks in one process"),
    }
    for name, conflict in why.items():
        if (value := getattr(cluster, name)) != getattr(usual, name):
            yield (
                f"cluster.{name} = {value!r}: {threads} {conflict}; remove cluster.{name}, or set cluster.ranks = "
                "'processes'"
            )
    if cluster.link not in ("auto", "none"):
        link = f"cluster.link = {cluster.link!r}: {threads} has no link between nodes"
        yield f"{link}; remove cluster.link, or set cluster.ranks = 'processes'"
    if trial.workload == "generate":
        yield (
            f"workload = 'generate': {threads} measures no seconds, which tokens per second need; set "
            "workload = 'train', or cluster.ranks = 'processes'"
        )
    if trial.host is not None or (trial.strategy in PEERS and trial.strategy != "single"):
        strategy = (
            f"strategy = {trial.strategy!r}: {threads} has no process groups, which torch's and DeepSpeed's"
        )
        yield f"{strategy} engines need; choose another strategy, or set cluster.ranks = 'processes'"


def _cluster(trial: Trial) -> Iterator[str]:
    """Yield an error for each field of ``cluster`` that contradicts another field of ``cluster`` or the strategy.

    For example, ``cluster.rate`` contradicts ``cluster.link = "none"``, which limits no rate.
    """
    cluster, transport = trial.cluster, f"cluster.transport = {trial.cluster.transport!r}"
    shapes, rate = cluster.link in ("auto", "namespaces"), cluster.rate
    if cluster.link == "none" and rate is not None:
        yield f"cluster.rate = {rate:g} Mbit/s: cluster.link = 'none' has no rate; remove one of the two"
    if cluster.link == "shaped" and rate is None:
        yield "cluster.link = 'shaped': needs a cluster.rate; set cluster.rate, or set cluster.link = 'real'"
    if cluster.hcas is not None and (cluster.transport, cluster.link) != ("nccl", "real"):
        hcas = json.dumps(cluster.hcas)
        needed = "needs cluster.transport = 'nccl' and cluster.link = 'real'"
        yield f"cluster.hcas = {hcas}: {needed}; set both, or remove cluster.hcas"
    if cluster.latency is not None and cluster.link in ("none", "real", "shaped"):
        conflict = f"cluster.link = {cluster.link!r} cannot add latency"
        way_out = "remove cluster.latency, or set cluster.link = 'namespaces'"
        yield f"cluster.latency = {cluster.latency:g} ms: {conflict}; {way_out}"
    if cluster.slow < 1 and not (shapes and rate is not None and cluster.nodes > 2):
        slow = f"cluster.slow = {cluster.slow:g} slows the last of {cluster.nodes} nodes"
        yield (
            f"{slow}: needs a cluster.rate, 3 nodes or more, and cluster.link = 'auto' or 'namespaces'; set all three, "
            "or remove cluster.slow"
        )
    joined = cluster.transport == "gloo" and cluster.ranks_per_node > 1 and cluster.nodes > 1
    if cluster.inner_rate is not None and not (shapes and rate is not None and joined):
        needed = (
            "a cluster.rate, 2 nodes of 2 ranks or more, cluster.transport = 'gloo', and cluster.link = 'auto' or "
            "'namespaces'"
        )
        way_out = "set all of these, or remove cluster.inner_rate"
        yield f"cluster.inner_rate = {cluster.inner_rate:g} Mbit/s: needs {needed}; {way_out}"
    if cluster.device == "cuda" and trial.host == "ddp":
        yield f"cluster.device = 'cuda': strategy {trial.strategy!r} runs on the CPU only; set cluster.device = 'cpu'"
    cuda, threads = cluster.device == "cuda", cluster.ranks == "threads"
    if cuda != (cluster.transport in ("nccl", "staged")) and not threads:
        needed = "device 'cuda' needs transport 'nccl' or 'staged', and these two need device 'cuda'"
        for_cuda, for_cpu = (
            "transport = 'nccl', or cluster.device = 'cpu'",
            "transport = 'shm', or cluster.device = 'cuda'",
        )
        way_out = for_cuda if cuda else for_cpu
        yield f"cluster.device = {cluster.device!r}, {transport}: {needed}; set cluster.{way_out}"
    if cluster.transport == "staged" and trial.strategy in PEERS and trial.strategy != "single":
        conflict = f"strategy {trial.strategy!r} sends its own messages, which this transport cannot carry"
        yield f"{transport}: {conflict}; set cluster.transport = 'nccl'"
    if cluster.transport == "staged" and trial.measure_quantisation:
        yield (
            f"{transport}: cannot measure the errors of messages; remove measure_quantisation, or set "
            "cluster.transport = 'nccl'"
        )
    if cluster.transport == "nccl" and cluster.link == "paced" and cluster.nodes > 1 and rate is not None:
        yield f"cluster.link = 'paced': {PACED_NCCL}"
    # A backend of the user's own may send bytes that the ledger does not count.  A comparison of the ledger with the
    # counters of a network interface would report these bytes as a fault.
    if "." in cluster.transport and (cluster.link not in ("none", "paced") or cluster.device != "cpu"):
        needed = "cluster.link = 'none' or 'paced', and cluster.device = 'cpu'"
        yield f"{transport}: a backend of your own needs {needed}; set both, or remove cluster.transport"
    if len(set(cluster.hosts)) < len(cluster.hosts):
        yield f"cluster.hosts = {list(cluster.hosts)}: lists a host twice; list each host once"


def _own_strategy(trial: Trial) -> Iterator[str]:
    """Yield an error for each field that a strategy of the user's own does not allow."""
    if not trial.own_strategy:
        return
    own = f"strategy = {trial.strategy!r} of your own"
    if trial.workload != "train":
        yield f"workload = {trial.workload!r}: {own} can only train; set workload = 'train'"
    if trial.measure_quantisation:
        yield f"measure_quantisation: errors are not measured with {own}; remove measure_quantisation"
    if trial.control is not None:
        yield f"control = {trial.control!r}: {own} has no controls; remove control"


def _workload(trial: Trial) -> Iterator[str]:
    """Yield an error for each field that has no effect with the trial's workload, or whose value does not fit it."""
    generate, usual, workload = trial.generate, Trial(), f"workload = {trial.workload!r}"
    length = generate.prompt + generate.tokens
    lengths = f"generate.prompt = {generate.prompt} and generate.tokens = {generate.tokens}"
    for path in _WITHOUT[trial.workload]:
        field = operator.attrgetter(path)
        if field(trial) != field(usual):
            yield f"{path} = {field(trial)}: has no effect with {workload}; remove {path}"
    if trial.workload == "train":
        return
    if not isinstance(MODELS.get(trial.model.name), GPTShape):
        able = ", ".join(name for name, shape in MODELS.items() if isinstance(shape, GPTShape))
        yield f"{workload}: model {trial.model.name!r} is no preset GPT; choose one of {able}"
    if length > trial.sequence or (trial.workload == "rlhf" and length < trial.sequence):
        needed = f"sequence {'>=' if trial.workload == 'generate' else '='} {length}"
        yield (
            f"{lengths}: {workload} needs {needed}, the sum of both, but sequence = {trial.sequence}; change one of "
            "the three"
        )
    if trial.workload == "generate":
        return
    if (policy := trial.resolved_policy()) is None or trial.host is not None:
        conflict = f"strategy {trial.strategy!r} cannot shard frozen models"
        yield f"{workload}: {conflict}; choose a strategy of this project's own engine, such as 'zero3' or 'zeropp'"
    elif policy.offload != Offload():
        yield f"policy.offload_optimizer and policy.offload_weights are not supported with {workload}; remove them"
    if (sequences := trial.tokens_per_rank // trial.sequence) % (group := trial.rlhf.group):
        batch = f"tokens_per_rank = {trial.tokens_per_rank} gives {sequences} sequences"
        yield f"{batch}: expected a multiple of rlhf.group = {group}"


def _muon(trial: Trial) -> Iterator[str]:
    """Yield an error for each setting with which the optimizer Muon cannot train, such as strategy ``fsdp2``.

    With any other optimizer, only ``optimizer.matrices`` is an error, since Muon alone reads it.
    """
    optimizer, strategy = trial.optimizer, f"strategy {trial.strategy!r}"
    if not optimizer.orthogonalises:
        if optimizer.matrices:
            chosen, name = (
                f"optimizer.matrices = {optimizer.matrices!r}",
                f"optimizer.name = {optimizer.name!r}",
            )
            yield f"{chosen}: has no effect with {name}; remove it, or set optimizer.name = {MUON!r}"
        return
    name = f"optimizer.name = {MUON!r}"
    family = trial.host or family_of(trial.strategy)
    if family in ("fsdp2", DEEPSPEED):
        yield (
            f"{name}: {strategy} gives the optimizer shards of matrices, and Muon needs whole matrices; choose a "
            "strategy of this project's own engine, such as 'zero3' or 'zeropp', or choose 'ddp' or 'single'"
        )
    policy = trial.resolved_policy()
    if policy is not None and (share := policy.offload.optimizer):
        conflict = "keeps masters on the host, where matrices are not orthogonalised"
        yield f"policy.offload_optimizer = {share:g}: {conflict}; remove it, or choose another optimizer than {MUON}"


def _own_gather(trial: Trial) -> Iterator[str]:
    """Yield an error if workload ``rlhf`` is combined with a user's class that gathers weights.

    Such a class is checked by a loss: with the weights that it gathers, a single process must compute the same loss for
    the same batch as the sharded model.  With ``rlhf`` the ranks generate the batch, which a single process cannot
    repeat.
    """
    if trial.own_gather is not None and trial.workload == "rlhf":
        gather = f"policy.gather = {trial.policy.gather!r}"
        conflict = (
            "your class is checked by the loss of a single process, which cannot generate the training batch"
        )
        way_out = "set workload = 'train', or policy.gather = 'hierarchical'"
        yield f"{gather}: not supported with workload = 'rlhf': {conflict}; {way_out}"


def _local_steps(trial: Trial) -> Iterator[str]:
    """Yield an error for each field, such as the workload or the optimizer, that conflicts with ``policy.local_steps``.

    With local steps, groups of ranks train for several steps without exchanging anything with each other.  No error is
    yielded if ``policy.local_steps`` is not set.
    """
    policy, total = trial.resolved_policy(), trial.warmup + trial.steps
    if policy is None or (every := policy.local_steps) is None:
        return
    local_steps = f"policy.local_steps = {every}"
    if trial.workload != "train":
        yield f"{local_steps}: has no effect with workload = {trial.workload!r}; remove it, or set workload = 'train'"
    if every > total:
        yield (
            f"{local_steps}: the trial has {total} steps in all, so that groups would never exchange anything; set at "
            f"most {total}, or more steps"
        )
    if trial.optimizer.orthogonalises:
        yield (
            f"optimizer.name = {MUON!r}: not supported with {local_steps}; remove policy.local_steps, or choose "
            "another optimizer"
        )
    if trial.control == "unordered":
        yield (
            f"control = 'unordered': needs a reduction over all ranks, but {local_steps} averages gradients inside "
            "groups only; remove one of the two"
        )


def _control(trial: Trial) -> Iterator[str]:
    """Yield an error if the fault that ``control`` names could have no effect in this trial.

    A control is a fault that is put into the engine on purpose, to see whether a comparison of losses notices it
    (:mod:`harness.strategies.controls`).  For example, ``stale_secondary`` keeps hpZ's copies of the weights from being
    renewed, so it needs a policy with hpZ.
    """
    policy, topology = trial.resolved_policy(), trial.topology()
    engine_policy = None if trial.host is not None else policy
    strategy = f"control = {trial.control!r}: strategy {trial.strategy!r}"
    if trial.control == "half_batch" and (tokens := trial.tokens_per_rank) < 2 * trial.sequence:
        yield (
            f"control = 'half_batch': tokens_per_rank = {tokens} is one sequence, but this control needs two or more; "
            f"set tokens_per_rank = {2 * trial.sequence} or more"
        )
    if trial.control == "unordered":
        axes = () if policy is None or policy.reduce == "ring" else policy.reduce_axes(topology)
        reached = math.prod(axis.size for axis, _ in axes)
        if engine_policy is None or len(axes) < 2 or reached < topology.world:
            found = f"{strategy} on {topology} reduces gradients in {len(axes)} hops"
            yield f"{found}; this control needs two hops over all ranks: choose a strategy with qgZ"
    scheduled = policy is not None and bool(policy.schedule)
    if trial.control == "late_schedule" and not scheduled:
        yield f"{strategy} has no policy.schedule that could be late; set policy.schedule, or remove control"
    if trial.control in ("stale_secondary", "late_secondary", "unordered") and scheduled:
        yield f"{strategy} has a policy.schedule, and this control spoils its first span only; remove one of the two"
    if trial.control in ("stale_secondary", "late_secondary"):
        if engine_policy is None or not engine_policy.secondary_ranks(topology):
            yield f"{strategy} keeps no secondary shard; choose a strategy with hpZ"
        elif engine_policy.sends_copy:
            conflict = "sends its secondary shard in the forward pass too, so that the shard must be current"
            yield f"{strategy} {conflict}; set a single codec in policy.weights, and policy.differences = 'none'"


def _configured(trial: Trial) -> Iterator[str]:
    """Yield an error for each field that contradicts the trial's DeepSpeed configuration (``deepspeed_config``).

    If ``deepspeed_config`` is set for a strategy that does not read it, this is an error too.
    """
    sequences = trial.tokens_per_rank // trial.sequence
    if family_of(trial.strategy) == DEEPSPEED:
        yield from _for_deepspeed(trial, sequences)
    elif trial.strategy == RECIPE:
        yield from _for_recipe(trial, sequences)
    elif trial.deepspeed_config is not None:
        way_out = f"set strategy = {RECIPE!r} or {DEEPSPEED!r}, or remove deepspeed_config"
        yield f"deepspeed_config: strategy {trial.strategy!r} does not read it; {way_out}"


def _for_recipe(trial: Trial, sequences: int) -> Iterator[str]:
    """Yield an error for each field that contradicts the trial's DeepSpeed configuration, for strategy ``recipe``.

    With ``recipe``, our own engine trains as the DeepSpeed configuration asks.  ``sequences`` is the number of
    sequences in a rank's micro-batch.
    """
    recipe = trial.recipe()
    yield from _unequal("clip", trial.clip, "gradient_clipping", recipe.clip)
    yield from _unequal("accumulation", trial.accumulation, "accumulation", recipe.accumulation)
    if recipe.micro_batch is not None:
        yield from _unequal("tokens_per_rank / sequence", sequences, "micro-batch", recipe.micro_batch)
    rate = trial.optimizer.arguments.get("lr")
    if recipe.peak is not None and rate is not None:
        yield from _unequal("optimizer.arguments.lr", rate, "warmup_max_lr", recipe.peak)
    if recipe.schedule is not None and trial.optimizer.schedule != LearningRates():
        yield "optimizer.schedule: deepspeed_config has a 'scheduler' too; remove one of the two"
    if any(finding.key.startswith("optimizer.") for finding in recipe.findings):
        yield _OPTIMIZER_TWICE.format("optimizer")


def _for_deepspeed(trial: Trial, sequences: int) -> Iterator[str]:
    """Yield an error for each field that contradicts the trial's DeepSpeed configuration, for strategies of DeepSpeed.

    ``sequences`` is the number of sequences in a rank's micro-batch.
    """
    table = trial.peer_configuration()
    if trial.workload == "generate":
        yield f"workload = 'generate': strategy {trial.strategy!r} can only train; set workload = 'train'"
    for key in ("optimizer", "scheduler"):
        if key in table:
            yield _OPTIMIZER_TWICE.format(key)
    for kind in ("fp16", "bf16"):
        enabled = table[kind].get("enabled") if isinstance(table.get(kind), dict) else None
        if enabled not in ("auto", None, trial.peer.compute == kind):
            yield from _unequal("peer.compute", trial.peer.compute, f"{kind}.enabled", enabled)
    batch = sequences * trial.accumulation * trial.topology().world
    for name, value, key in (
        ("clip", trial.clip or 0.0, "gradient_clipping"),
        ("accumulation", trial.accumulation, "gradient_accumulation_steps"),
        ("tokens_per_rank / sequence", sequences, "train_micro_batch_size_per_gpu"),
        ("sequences of a step on all ranks", batch, "train_batch_size"),
    ):
        if table.get(key) not in (None, "auto"):
            yield from _unequal(name, value, key, table[key])


def _unequal(name: str, value: Any, key: str, configured: Any) -> Iterator[str]:
    """Yield an error if a field of the trial and a key of its DeepSpeed configuration have different values.

    Args:
        name: Name of the field.
        value: Value of the field.
        key: Name of the key.
        configured: Value of the key.
    """
    if value != configured:
        other = f"deepspeed_config has {key} = {json.dumps(configured)}"
        yield f"{name} = {json.dumps(value)}, but {other}: set both to the same value"
