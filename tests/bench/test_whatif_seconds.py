"""How long traces of about 100 MB, of one rank or of eight, take to be read and to be joined, per byte."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness.whatif import joint, kineto
from tests.harness.whatif.written import REAL

pytestmark = pytest.mark.bench

COPIES = 64  # of the real trace's three steps, in the files of all ranks together
APART = 800_000.0  # microseconds from one copy to the next


@pytest.fixture(scope="module", params=[1, 8])
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The steps of a real trace of a GPU, repeated, and indented as torch writes them; of each rank the same."""
    whole, folder = json.loads(gzip.decompress(REAL.read_bytes())), tmp_path_factory.mktemp("large")
    ranks = int(request.param)
    paths = [folder / f"rank{rank}.json" for rank in range(ranks)]
    for rank, path in enumerate(paths):
        world = max(2, ranks)
        about = whole["distributedInfo"] | {"rank": rank, "world_size": world}
        events = [*_copies(whole["traceEvents"], COPIES // ranks, world)]
        path.write_text(json.dumps(whole | {"distributedInfo": about, "traceEvents": events}, indent=1))
    return paths


def _copies(events: list[dict[str, Any]], copies: int, world: int) -> Any:
    group = {"Group size": world, "Process Group Ranks": str([*range(world)])}
    for copy in range(copies):
        for event in events:
            name, args = event["name"], event["args"]
            if name.startswith(kineto.STEP):
                name = f"{kineto.STEP}{int(name.removeprefix(kineto.STEP)) + 3 * copy}"
            if args.get("correlation") is not None:
                args = args | {"correlation": args["correlation"] + copy * 10**9}
            if "Group size" in args:
                args = args | group
            yield event | {"name": name, "args": args, "ts": event["ts"] + copy * APART}


def test_reading(benchmark: BenchmarkFixture, large: list[Path]) -> None:
    """Reading the events, cutting them into tasks, and joining the steps of all ranks."""
    benchmark.extra_info["bytes"] = sum(path.stat().st_size for path in large)
    traced = benchmark.pedantic(lambda: joint.join(map(kineto.read, large), 1, None), rounds=3)
    assert len(traced.steps) == 3 * COPIES // len(large) - 1
    assert traced.topology.world == max(2, len(large))
