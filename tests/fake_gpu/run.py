"""``python -m tests.fake_gpu.run``: what needs a GPU, on fake GPUs, in stages, with a table at the end.

Each stage is a command under a time limit, with a log in ``--results``.  The exit status is 1 if a stage failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.fake_gpu import build
from tests.gpu_campaign import Ended, Stage, run, table

GPUS: Final = 8
SHORT: Final = ("gpu tests", "races", "count")  # the others take longer
# What becomes small in suites/gpu_node.toml.
_MINIATURE: Final = {
    "repeats": 1, "defaults.model.name": "gpt-tiny", "defaults.sequence": 32, "defaults.steps": 4,
    "defaults.warmup": 2, "defaults.optimizer.schedule.warmup": 2, "defaults.policy.max_padding": 3.0,
    "matrix.tokens_per_rank": [64],
}  # fmt: skip
_CLUSTERS: Final = {
    "1x4": {"nodes": 1, "ranks_per_node": 4, "link": "none", "launcher": "local"},
    "2x2": {"nodes": 2, "ranks_per_node": 2, "link": "none", "launcher": "torchrun"},
}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def miniature(cluster: str, folder: Path) -> Path:
    """Write suites/gpu_node.toml with a tiny model, for one of the clusters above; returns its path."""
    text = (build.REPOSITORY / "suites" / "gpu_node.toml").read_text(encoding="utf-8")
    given = {key: value for key, value in _flat(tomllib.loads(text)) if not key.startswith("matrix.cluster.")}
    fields = given | _MINIATURE | {"name": f"gpu_node_{cluster}"}
    fields |= {f"defaults.cluster.{key}": value for key, value in _CLUSTERS[cluster].items()}
    path = folder / f"gpu_node_{cluster}.toml"
    path.write_text("".join(f"{key} = {json.dumps(fields[key])}\n" for key in fields), encoding="utf-8")
    return path


def stages(results: Path) -> Iterator[Stage]:
    """All stages: the tests first, then the commands that users call."""
    pytest = ("-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider")
    zeropp, to = ("-m", "harness.cli"), ("--results", str(results))
    yield Stage("tests", (*pytest, "tests/fake_gpu"), 900)
    # tests/bench measures rates, and compares rows of 64 M elements, which take minutes on a CPU.
    yield Stage("gpu tests", (*pytest, "-m", "gpu", "tests", "--ignore=tests/bench"), 900)
    yield Stage("gpu_first", ("-m", "tests.gpu_first", "--tiny", "--out", str(results / "first.jsonl")), 240)
    yield Stage("gpu_campaign", ("-m", "tests.gpu_campaign", "--tiny", "--minutes", "8", *to), 500)
    one, two = miniature("1x4", results), miniature("2x2", results)
    yield Stage("gpu_node 1x4", (*zeropp, "run", str(one), *to), 300)
    yield Stage("gpu_node 2x2", ("-m", "tests.fake_gpu.nodes", "run", str(two), *to), 300)
    yield Stage("races", ("-m", "tests.fake_gpu.races"), 600)
    yield Stage("count", ("-m", "tests.fake_gpu.count"), 240)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages, and print their table."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_gpu.run", description=__doc__)
    parser.add_argument("--results", type=Path, help="folder of logs and records; default: a temporary one")
    parser.add_argument("--only", help="the stages whose names contain this text")
    parser.add_argument("--short", action="store_true", help=f"only the stages {', '.join(SHORT)}")
    options = parser.parse_args(arguments)
    try:
        build.libraries()
    except build.NoLibrariesError as problem:
        print(f"fake GPU: {problem}", file=sys.stderr)
        return 1
    os.environ.update(build.environment(GPUS))
    results = Path(options.results or tempfile.mkdtemp(prefix="fake-gpu-")).resolve()
    results.mkdir(parents=True, exist_ok=True)
    begun, ended = time.monotonic(), list[Ended]()
    for number, stage in enumerate(stages(results)):
        named = options.only is None or options.only in stage.name
        if named and (stage.name in SHORT or not options.short):
            log = results / f"{number}-{stage.name.replace(' ', '-').replace(',', '')}.log"
            ended.append(run(stage, log, stage.seconds))
    print(table(ended))
    passed = sum(stage.status == "ok" for stage in ended)
    print(f"{time.monotonic() - begun:.0f} s; logs are in {results}")
    print(f"{passed} passed, {len(ended) - passed} failed")
    return int(passed < len(ended) or not ended)


if __name__ == "__main__":
    sys.exit(main())
