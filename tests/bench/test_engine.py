"""Training steps of the engine beside its peers', as ``zeropp bench engine`` takes them.

``extra_info``: tokens per second of each contender, and its share of those of compute alone.
"""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from harness.bench.engine import DEEPSPEED, measure, unequal, usual
from harness.cluster.rank import Rank
from harness.records.bench_record import Sample, together
from harness.strategies import deepspeed
from impl.comm.mesh import Mesh
from impl.plan.topology import Topology
from tests.support.ranks import on_processes

pytestmark = pytest.mark.bench


def _measure(mesh: Mesh, names: list[str]) -> list[Sample]:
    rank = Rank(mesh.rank, mesh.topology, None, None, lambda _: None, 1)  # type: ignore[arg-type]
    return measure(rank, names=names, model="gpt-small", compute="fp32", seconds=60.0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("topology", [Topology(1, 4), Topology(2, 2)], ids=str)
def test_step(benchmark: Any, topology: Topology) -> None:
    """All contenders, on one machine, unshaped."""
    missing = deepspeed.why_missing() is not None
    names = [name for name in usual("fp32", topology.nodes) if not (missing and name in DEEPSPEED)]
    ranks: list[Any] = []
    benchmark.pedantic(lambda: ranks.extend(on_processes(topology, _measure, names)), rounds=1, iterations=1)
    samples = together(ranks)
    assert unequal(samples) is None
    for sample in samples:
        pairs = zip(sample.reference_seconds, sample.seconds, strict=True)
        benchmark.extra_info[f"{sample.names['contender']} {sample.names['transport']}"] = {
            "tokens_per_second": round(sample.sizes["tokens"] / statistics.median(sample.seconds)),
            "of_alone": round(statistics.median(alone / took for alone, took in pairs), 3),
        }
