"""FSDP2 with this project's collectives on fake GPUs: as strategies of a suite, and in the guide's scripts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_gpu import build

pytestmark = [pytest.mark.needs("fake GPU"), pytest.mark.timeout(290)]

SUITE = """
name = "{transport}"
question = "?"
[defaults]
model.name = "gpt-tiny"
sequence = 32
tokens_per_rank = 64
steps = 3
warmup = 1
clip = 1.0
accumulation = 2
policy.max_padding = 9.0
[defaults.cluster]
nodes = 2
ranks_per_node = 2
link = "none"
device = "cuda"
transport = "{transport}"
[matrix]
strategy = ["fsdp2+exact", "fsdp2+qwz+qgz"]
"""


def _records(folder: Path, transport: str, gpus: int) -> dict[str, Any]:
    """Run a suite on so many fake GPUs; returns its records by strategy."""
    file = folder / f"{transport}.toml"
    file.write_text(SUITE.format(transport=transport), encoding="utf-8")
    command = [sys.executable, "-m", "harness.cli", "run", str(file), "--no-report", "--results", str(folder)]
    environment = build.environment(gpus)
    process = subprocess.run(
        command, env=environment, cwd=build.REPOSITORY, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    records = [json.loads(path.read_text(encoding="utf-8")) for path in (folder / transport).glob("*.json")]
    return {record["trial"]["strategy"]: record for record in records}


def _losses(record: Any) -> list[list[float]]:
    return [[step["loss"] for step in rank["steps"]] for rank in record["ranks"]]


def test_fsdp2_trains_on_gpus(tmp_path: Path) -> None:
    """Every check of the trials passes over NCCL, and with ranks that share a GPU; the losses of both are equal."""
    over_nccl, staged = (
        _records(tmp_path, transport, gpus) for transport, gpus in (("nccl", 4), ("staged", 1))
    )
    assert over_nccl.keys() == staged.keys() == {"fsdp2+exact", "fsdp2+qwz+qgz"}
    for record in (*over_nccl.values(), *staged.values()):
        assert record["predicted"]["equal"]
        assert record["ran"]["host"] == "fsdp2"
        assert record["ran"]["kernels"] == "cuda"
        exposed = record["ranks"][0]["steps"][0]["exposed_forward"]
        assert (exposed is None) is (record["trial"]["cluster"]["transport"] == "nccl")
    for strategy, record in over_nccl.items():
        assert _losses(record) == _losses(staged[strategy])


def _scripts() -> Iterator[str]:
    """The guide's script with our engine, and with FSDP2, for a small model."""
    text = (build.REPOSITORY / "docs" / "guide" / "gpu_loop.md").read_text(encoding="utf-8")
    script, setup, step = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    script, changed = re.subn("WIDTH, LAYERS, STEPS = .*", "WIDTH, LAYERS, STEPS = 128, 1, 4", script)
    assert changed == 1
    yield script
    for old, new in (
        (r"^mesh = .*?^optimizer = [^\n]*\n", setup),
        (r" *zero\.step\(optimizer, max_norm=1\.0\)\n", step),
        (r"zero\.wire\.ledger", "joined.ledger"),
    ):
        script, changed = re.subn(old, lambda _, new=new: new, script, flags=re.MULTILINE | re.DOTALL)
        assert changed == 1
    yield script


def test_the_guides_scripts_train(tmp_path: Path) -> None:
    """Both scripts of docs/guide/gpu_loop.md run under torchrun; their losses begin alike, and a ledger is printed."""
    pytest.importorskip("zeropp")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    losses = []
    for number, script in enumerate(_scripts()):
        path = tmp_path / f"{number}.py"
        path.write_text(script, encoding="utf-8")
        process = subprocess.run(
            [*torchrun, str(path)],
            env=build.environment(2),
            cwd=build.REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr[-3000:]
        losses.append([float(loss) for loss in re.findall(r"loss (\d+\.\d+)", process.stdout)])
        assert len(losses[-1]) == 4
        assert re.search(r"^weights +0 +\d[\d,]*", process.stdout, re.MULTILINE)
    ours, in_fsdp2 = losses
    assert in_fsdp2 == pytest.approx(ours, abs=0.1)
