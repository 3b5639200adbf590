"""How long a trace of about 100 MB takes to be read and to be cut into tasks, per byte of the file."""

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

COPIES = 60  # of the real trace's three steps
APART = 800_000.0  # microseconds from one copy to the next


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The steps of a real trace of a GPU, repeated, and indented as torch writes them."""
    whole = json.loads(gzip.decompress(REAL.read_bytes()))
    path = tmp_path_factory.mktemp("large") / "rank0.json"
    path.write_text(json.dumps(whole | {"traceEvents": [*_copies(whole["traceEvents"])]}, indent=1))
    return path


def _copies(events: list[dict[str, Any]]) -> Any:
    for copy in range(COPIES):
        for event in events:
            name, args = event["name"], event["args"]
            if name.startswith(kineto.STEP):
                name = f"{kineto.STEP}{int(name.removeprefix(kineto.STEP)) + 3 * copy}"
            if args.get("correlation") is not None:
                args = args | {"correlation": args["correlation"] + copy * 10**9}
            yield event | {"name": name, "args": args, "ts": event["ts"] + copy * APART}


def test_reading(benchmark: BenchmarkFixture, large: Path) -> None:
    """Reading the events, cutting them into tasks, and joining the steps."""
    benchmark.extra_info["bytes"] = large.stat().st_size
    traced = benchmark.pedantic(lambda: joint.join([kineto.read(large)], 1, None), rounds=3)
    assert len(traced.steps) == 3 * COPIES - 1
