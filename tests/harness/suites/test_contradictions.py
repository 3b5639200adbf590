"""Fields of a trial that are each valid but contradict each other are refused."""

from __future__ import annotations

from typing import Any, Final

import pytest

from harness.suites.contradictions import check
from harness.suites.trial import Cluster, Trial

_ADAPTERS: Final = {"device": "cuda", "transport": "nccl", "link": "real"}
_SHAPED: Final = {"link": "shaped", "rate": "1 Gbit/s"}
_THREADS: Final = {"ranks": "threads"}
_STAGED: Final[dict[str, Any]] = {"cluster": {"device": "cuda", "transport": "staged"}}
_GENERATE: Final[dict[str, Any]] = {"workload": "generate"}
_RLHF: Final[dict[str, Any]] = {
    "workload": "rlhf", "generate": {"prompt": 11, "tokens": 5}, "rlhf": {"group": 3}, "strategy": "zero3",
    "sequence": 16, "tokens_per_rank": 96,
}  # fmt: skip
_UNORDERED: Final[dict[str, Any]] = {"control": "unordered"}
_STALE: Final[dict[str, Any]] = {"control": "stale_secondary"}
_FSDP2: Final[dict[str, Any]] = {"strategy": "fsdp2+qgz"}
_DDP: Final[dict[str, Any]] = {"strategy": "ddp+qgz"}
_MUON: Final[dict[str, Any]] = {"optimizer": {"name": "Muon"}}
_ONE_NODE: Final = {"nodes": 1, "ranks_per_node": 4}


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"link": "shaped"}, "cluster.link = 'shaped': needs a cluster.rate"),
        ({"link": "none", "rate": "50 Mbit/s"}, "cluster.rate = 50 Mbit/s"),
        ({"slow": 0.5, "rate": "1 Gbit/s"}, "cluster.slow = 0.5 slows the last of 2 nodes: needs .*3 nodes"),
        ({"slow": 0.5, "nodes": 3}, "needs a cluster.rate"),
        (_SHAPED | {"latency": "2 ms"}, "cluster.latency = 2 ms: cluster.link = 'shaped' cannot add"),
        ({"transport": "own.backend"}, "needs cluster.link = 'none' or 'paced'"),
        ({"transport": "nccl"}, "cluster.device = 'cpu', cluster.transport = 'nccl': device 'cuda' needs"),
        ({"device": "cuda"}, "cluster.transport = 'shm': .* transport 'nccl' or 'staged'"),
        (
            {"device": "cuda", "transport": "nccl", "link": "paced", "rate": "1 Gbit/s"},
            "cluster.link = 'paced': with .* 'nccl' the host would sleep .* 'staged', .* or .* 'namespaces'",
        ),
        ({"hosts": ["a", "a"]}, "lists a host twice"),
        ({"link": "real", "hcas": 2}, "cluster.hcas = 2: needs cluster.transport = 'nccl'"),
        (
            _THREADS | {"rate": "50 Mbit/s"},
            "cluster.rate = 50.0: cluster.ranks = 'threads' has no link between",
        ),
        (_THREADS | {"latency": "2 ms"}, "cluster.latency = 2.0: cluster.ranks = 'threads' has no link"),
        (
            _THREADS | {"slow": 0.5},
            "cluster.slow = 0.5: .* remove cluster.slow, or set cluster.ranks = 'processes'",
        ),
        (_THREADS | {"transport": "gloo"}, "cluster.transport = 'gloo': .* runs all ranks in one process"),
        (
            _THREADS | {"launcher": "torchrun"},
            "cluster.launcher = 'torchrun': .* runs all ranks in one process",
        ),
        (_THREADS | {"link": "namespaces"}, "cluster.link = 'namespaces': .* no link between nodes"),
        (_ADAPTERS | _SHAPED | {"hcas": ["mlx5_0"]}, r"cluster.hcas = \[.mlx5_0.\]: .*'real'; set both"),
    ],
)
def test_a_link_or_transport_that_cannot_be_is_refused(cluster: dict[str, Any], message: str) -> None:
    """The message names the fields and their values."""
    with pytest.raises(ValueError, match=message):
        check(Trial(cluster=Cluster.model_validate(cluster)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens_per_rank": 100}, "tokens_per_rank = 100: expected a multiple of sequence = 128"),
        (
            {"cluster": _THREADS, "strategy": "ddp"},
            "strategy = 'ddp': cluster.ranks = 'threads' has no process groups",
        ),
        (
            _GENERATE | {"cluster": _THREADS},
            "workload = 'generate': .* no seconds, which tokens per second need",
        ),
        (
            _MUON | {"strategy": "fsdp2"},
            "optimizer.name = 'Muon': strategy 'fsdp2' gives the optimizer shards",
        ),
        (_MUON | _FSDP2, "optimizer.name = 'Muon': strategy 'fsdp2.qgz' gives the optimizer shards"),
        (
            _MUON | {"policy": {"offload_optimizer": 0.5}},
            "policy.offload_optimizer = 0.5: keeps masters on the host, .* remove it",
        ),
        (
            {
                "strategy": "zero3",
                "workload": "rlhf",
                "sequence": 64,
                "tokens_per_rank": 512,
                "policy": {"gather": "examples.differences:Differences"},
            },
            "policy.gather = 'examples.*': not supported with workload = 'rlhf': .*; set workload = 'train', or ",
        ),
        ({"optimizer": {"matrices": "*.weight"}}, "optimizer.matrices = .*: has no effect with .* 'AdamW'"),
        (_FSDP2 | {"cluster": _THREADS}, "strategy = 'fsdp2.qgz': .* choose another strategy"),
        (
            _STAGED | {"strategy": "fsdp2"},
            "strategy 'fsdp2' sends its own messages, .* set cluster.transport = 'nccl'",
        ),
        (_STAGED | {"measure_quantisation": True}, "'staged': cannot measure the errors of messages"),
        ({"optimizer": {"schedule": {"warmup": 99}}}, "warmup = 99: the trial has 10 steps in all"),
        ({"generate": {"tokens": 5}}, "generate = .*: has no effect with workload = 'train'"),
        (
            _GENERATE | {"model": {"name": "bert-small"}},
            "'bert-small' is no preset GPT; choose one of gpt-tiny",
        ),
        (_GENERATE | {"model": {"name": "a:b"}}, "model 'a:b' is no preset GPT"),
        (
            _GENERATE | {"sequence": 32},
            "generate.tokens = 32: .* needs sequence >= 64, the sum of both, but sequence = 32",
        ),
        (_GENERATE | {"clip": 1.0}, "clip = 1.0: has no effect with workload = 'generate'; remove clip"),
        (_GENERATE | {"rlhf": {"group": 3}}, "rlhf = group=3.* has no effect"),
        (_GENERATE | {"optimizer": {"schedule": {"decay": "linear"}}}, "schedule = .* has no effect"),
        (_RLHF | {"strategy": "ddp"}, "strategy 'ddp' cannot shard frozen models"),
        (_RLHF | {"strategy": "fsdp2+qwz"}, r"strategy 'fsdp2\+qwz' cannot shard frozen"),
        (
            _RLHF | {"sequence": 32},
            "workload = 'rlhf' needs sequence = 16, the sum of both, but sequence = 32",
        ),
        (_RLHF | {"tokens_per_rank": 64}, "gives 4 sequences: expected a multiple of rlhf.group = 3"),
        (_RLHF | {"validate_every": 1}, "validate_every = 1: has no effect with"),
        (_RLHF | {"policy": {"offload_weights": 1.0}}, "not supported with workload = 'rlhf'"),
        (_RLHF | {"model": {"name": "bert-tiny"}}, "model 'bert-tiny' is no preset GPT"),
        ({"policy": {"secondary": 3}}, "hpZ group of 3 ranks does not fit 2 nodes x 2 ranks"),
        (
            {"control": "half_batch", "tokens_per_rank": 128},
            "128 is one sequence, but this control needs two or more",
        ),
        (_UNORDERED | {"strategy": "zero3", "policy": {"reduce": "ring"}}, "in 0 hops; .* needs two"),
        (_UNORDERED | {"strategy": "fsdp2"}, "in 0 hops; .* needs two"),
        (_UNORDERED | {"strategy": "qgz", "cluster": _ONE_NODE}, "in 1 hops; .* needs two"),
        (_STALE | {"strategy": "zero3"}, "'zero3' keeps no secondary"),
        (_STALE | {"strategy": "fsdp2+exact"}, r"'fsdp2\+exact' keeps no secondary"),
        (_FSDP2 | {"policy": {"secondary": 2}}, "secondary = 2 inside fsdp2: FSDP2 gathers anew in backward"),
        (_FSDP2 | {"policy": {"feedback": "classic"}}, "feedback = classic inside fsdp2"),
        (_DDP | {"cluster": {"device": "cuda"}}, "set cluster.device = 'cpu'"),
        (_DDP | {"policy": {"weights": "int8:64"}}, "weights = int8:64 inside ddp: DDP keeps whole weights"),
        (
            _DDP | {"policy": {"gradients": "int4:64:stochastic"}},
            "stochastic inside ddp: stochastic rounding needs",
        ),
        (_DDP | {"policy": {"gather": "flat"}}, "gather = flat inside ddp"),
    ],
)
def test_impossible_together(fields: dict[str, Any], message: str) -> None:
    """The message names both fields."""
    with pytest.raises(ValueError, match=message):
        check(Trial.model_validate(fields))


@pytest.mark.parametrize("hcas", [1, ["mlx5_0", "mlx5_1"]])
def test_adapters_have_names_or_a_number(hcas: object) -> None:
    """The canonical form keeps a number or names of adapters; a trial without them has the same form as before they
    existed.
    """
    plain = Trial(cluster=Cluster.model_validate(_ADAPTERS))
    trial = Trial(cluster=Cluster.model_validate(_ADAPTERS | {"hcas": hcas}))
    check(trial)
    for wrong in (0, [], True, ["=mlx5_0,mlx5_1"], ["mlx5_0", ""], 1.5):
        with pytest.raises(ValueError, match="hcas"):
            Cluster.model_validate(_ADAPTERS | {"hcas": wrong})
    assert "hcas" not in plain.canonical()["cluster"]
    assert trial.canonical()["cluster"]["hcas"] == hcas
    assert trial.id != plain.id
    assert Trial.from_canonical(trial.canonical()) == trial
