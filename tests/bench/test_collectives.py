"""Our all-gathers and reduce-scatters beside gloo's, between processes on one host.

A group has one operation and size.  A round is timed by the test, which tells all ranks to begin and waits for the
last.  ``extra_info`` holds the bytes that all ranks send in a call, from the wire's ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture

from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.policy.topology import Topology
from impl.quantized_collectives import quantized_all_gather, quantized_reduce_scatter
from tests.bench.running_ranks import Ranks, running

pytestmark = pytest.mark.bench

TOPOLOGY: Final = Topology(2, 2)
CODECS: Final = ("fp32", "int8:2048", "int4:256")
ROUNDS: Final = 9
CASES: Final = (
    ("all_gather", "gloo", "fp32"),
    *(("all_gather", algorithm, codec) for algorithm in ("flat", "hierarchical") for codec in CODECS),
    ("reduce_scatter", "gloo", "fp32"),
    *(
        ("reduce_scatter", algorithm, codec)
        for algorithm in ("ring", "one_hop", "two_hop")
        for codec in CODECS
    ),
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Four ranks on two emulated nodes."""
    with running(TOPOLOGY) as started:
        yield started


@pytest.mark.parametrize("mebibytes", [1, 16])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_collective(
    benchmark: BenchmarkFixture, ranks: Ranks, case: tuple[str, str, str], mebibytes: int
) -> None:
    """One collective on a tensor of fp32 elements; an all-gather ends when the whole tensor is decoded."""
    operation, algorithm, codec = case
    sent = ranks.prepare(prepared, operation, algorithm, codec, mebibytes)
    benchmark.group = f"collectives: {operation}, {mebibytes} MiB"
    if algorithm == "gloo":
        benchmark.extra_info["reference"] = True
    else:
        benchmark.extra_info["sent_bytes"] = sum(sent)
    benchmark.pedantic(ranks.round, rounds=ROUNDS, warmup_rounds=2)


class Call:
    """A collective on one rank; ``facts`` are the bytes that this rank sends in a call, 0 for gloo's."""

    def __init__(self, run: Callable[[], object], wire: Wire | None) -> None:
        self.run, self.facts = run, 0
        if wire is not None:
            run()  # the first call allocates shared memory
            wire.ledger.booked.clear()
            run()
            self.facts = wire.ledger.total("inter") + wire.ledger.total("intra")

    def __call__(self) -> None:
        self.run()


def prepared(mesh: Mesh, operation: str, algorithm: str, codec: str, mebibytes: int) -> Call:
    """Return a collective of this rank on a tensor of ``mebibytes``."""
    world = mesh.topology.world
    whole = torch.randn(mebibytes << 18, generator=torch.Generator().manual_seed(mesh.rank))
    part, out = whole[: whole.numel() // world].clone(), torch.empty_like(whole)
    if algorithm == "gloo":
        # torch 2.13 renames these functions and warns about the old names; torch 2.11 has only the old ones.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        run = partial(gather, out, part) if operation == "all_gather" else partial(reduce, part, whole)
        return Call(run, None)
    wire, chosen = Wire(mesh), _options(operation, algorithm)
    if operation == "all_gather":
        rows = out.view(world, -1)
        return Call(partial(quantized_all_gather, part, codec, mesh, wire=wire, out=rows, **chosen), wire)
    return Call(partial(quantized_reduce_scatter, whole, codec, mesh, wire=wire, **chosen), wire)


def _options(operation: str, algorithm: str) -> dict[str, Any]:
    return {"gather" if operation == "all_gather" else "reduce": algorithm}
