"""Fields of a cluster that are fine alone and contradict each other."""

from __future__ import annotations

import pytest

from harness.suites import contradictions
from harness.suites.trial import Cluster, Trial

_ADAPTERS = {"device": "cuda", "transport": "nccl", "link": "real"}
_SHAPED = {"link": "shaped", "rate": "1 Gbit/s"}


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"link": "shaped"}, "cluster.link = 'shaped': expected a cluster.rate"),
        ({"slow": 0.5, "rate": "1 Gbit/s"}, "for the last of 2 nodes"),
        ({"slow": 0.5, "nodes": 3}, "expected a rate"),
        (_SHAPED | {"latency": "2 ms"}, "cluster.latency = 2 ms: nothing adds it to cluster.link = 'shaped'"),
        ({"transport": "own.backend"}, "expected cluster.link = 'none' or 'paced'"),
        ({"hosts": ["a", "a"]}, "a host stands there twice"),
        ({"link": "real", "hcas": 2}, "cluster.hcas = 2: expected cluster.transport = 'nccl'"),
        (_ADAPTERS | _SHAPED | {"hcas": ["mlx5_0"]}, r"cluster.hcas = \[.mlx5_0.\]: .*'real' with it"),
    ],
)
def test_a_means_of_throttling_that_holds_nothing_is_refused(cluster: dict[str, object], words: str) -> None:
    """In a line that names the fields and their values."""
    with pytest.raises(ValueError, match=words):
        contradictions.check(Trial(cluster=Cluster.model_validate(cluster)))


@pytest.mark.parametrize("hcas", [0, [], True, ["=mlx5_0,mlx5_1"], ["mlx5_0", ""], 1.5])
def test_adapters_have_names_or_a_number(hcas: object) -> None:
    """Anything else is refused where it is written."""
    with pytest.raises(ValueError, match="hcas"):
        Cluster.model_validate(_ADAPTERS | {"hcas": hcas})


@pytest.mark.parametrize("hcas", [1, ["mlx5_0", "mlx5_1"]])
def test_adapters_make_another_trial(hcas: object) -> None:
    """Its canonical form has them, and gives it back; without them it is that of before there were any."""
    plain = Trial(cluster=Cluster.model_validate(_ADAPTERS))
    asked = Trial(cluster=Cluster.model_validate(_ADAPTERS | {"hcas": hcas}))
    contradictions.check(asked)
    assert "hcas" not in plain.canonical()["cluster"]
    assert asked.canonical()["cluster"]["hcas"] == hcas
    assert asked.id != plain.id
    assert Trial.from_canonical(asked.canonical()) == asked
