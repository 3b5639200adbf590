"""Python calls of a training step, of this project and of FSDP2: a small step on a GPU waits for them."""

from __future__ import annotations

from typing import Any

import pytest

from impl.plan.topology import Topology
from tests.support.python_calls import calls_of_step
from tests.support.ranks import on_processes

pytestmark = pytest.mark.bench


@pytest.mark.parametrize("name", ["zero3", "zeropp"])
@pytest.mark.parametrize("topology", [Topology(1, 4), Topology(2, 2)], ids=str)
def test_step(benchmark: Any, topology: Topology, name: str) -> None:
    """A step of two units on rank 0, and what a further unit adds."""
    counts: list[Any] = []

    def count() -> None:
        counts.extend(on_processes(topology, calls_of_step, units, name)[0] for units in (2, 3))

    benchmark.pedantic(count, rounds=1, iterations=1)
    for label, two, three in zip(("ours", "FSDP2"), *counts, strict=True):
        benchmark.extra_info[label] = {**two._asdict(), "further_unit": three.calls - two.calls}
