"""Our collectives against gloo's own of the same fp32 tensor, interleaved in one run of four processes.

``extra_info`` holds, by collective, algorithm, codec and transport, how many times as fast as gloo's the
median round was, and the bytes that all ranks sent over gloo's.
"""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from harness.bench.collectives import measure
from harness.cluster.rank import Rank
from harness.records.bench_record import together
from impl.comm.mesh import Mesh
from impl.plan.topology import Topology
from tests.support.ranks import on_processes

pytestmark = pytest.mark.bench


def _measure(mesh: Mesh, mebibytes: int) -> Any:
    rank = Rank(mesh.rank, mesh.topology, None, None, lambda _: None, 1)  # type: ignore[arg-type]
    return measure(rank, mebibytes=mebibytes, seconds=15.0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("topology", [Topology(1, 4), Topology(2, 2)], ids=str)
@pytest.mark.parametrize("mebibytes", [1, 16, 64])
def test_collective(benchmark: Any, topology: Topology, mebibytes: int) -> None:
    """Every algorithm, codec and transport, on one machine, unshaped."""
    ranks: list[Any] = []
    benchmark.pedantic(
        lambda: ranks.extend(on_processes(topology, _measure, mebibytes)), rounds=1, iterations=1
    )
    for sample in together(ranks):
        pairs = zip(sample.reference_seconds, sample.seconds, strict=True)
        name = " ".join(str(sample.names[part]) for part in ("operation", "algorithm", "codec", "transport"))
        benchmark.extra_info[name] = {
            "times_gloo": round(statistics.median(gloo / took for gloo, took in pairs), 2),
            "bytes_of_gloo": round(sum(sample.sent.values()) / sample.sizes["reference_sent"], 3),
        }
