"""``zeropp train`` and ``zeropp run`` on fake GPUs, also on a NCCL that falls silent."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_gpu import build
from tests.fake_gpu.run import miniature

pytestmark = [pytest.mark.needs("fake GPU"), pytest.mark.timeout(290)]

_MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --batch-size 1 --max-padding 3"
)
_TRAIN = ("harness.cli", "train", "--device", "cuda", "--zero-stage", "3", *_MODEL.split())
_TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
# The error of a rank that waits for an exchange.
_NAMED = re.compile(r"could not finish exchange \d+, all_(gather|to_all) of ")


def _run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a module of Python with its arguments on fake GPUs."""
    return subprocess.run(
        [sys.executable, "-m", *command],
        env=build.environment(4, **variables),
        cwd=build.REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


def test_ranks_of_both_launchers_train_alike(tmp_path: Path) -> None:
    """Ranks that are forked and ranks of torchrun have the same losses, which fall from that of a uniform guess."""
    forked = _run(*_TRAIN, "--steps", "3", "--ranks-per-node", "2", "--save", str(tmp_path / "forked"))
    torchrun = _run(*_TORCHRUN, *_TRAIN, "--steps", "3", "--save", str(tmp_path / "torchrun"))
    losses, same = (re.findall(r"loss (\d+\.\d+)", process.stdout) for process in (forked, torchrun))
    assert len(losses) == 3, forked.stderr
    assert losses == same, torchrun.stderr
    assert abs(float(losses[0]) - math.log(256)) < 0.2
    assert float(losses[-1]) < float(losses[0])


def test_a_silent_nccl_ends_a_trial(tmp_path: Path) -> None:
    """The record of the trial has the error of a rank, which names the exchange that it waited for."""
    pytest.importorskip("impl.comm.hang_monitor")
    suite = miniature("1x4", tmp_path)
    changes = {
        "matrix.strategy": '["zeropp"]',
        "defaults.timeout_seconds": "80",
        "defaults.peer.compute": None,
    }
    lines = []
    for line in suite.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(" = ")
        if (value := changes.pop(key, value)) is not None:
            lines.append(f"{key} = {value}\n")
    assert not changes
    suite.write_text("".join(lines), encoding="utf-8")
    command = ("harness.cli", "run", str(suite), "--no-report", "--results", str(tmp_path))
    process = _run(*command, FAKE_NCCL_SILENT="15")
    assert process.returncode != 0
    (record,) = (tmp_path / suite.stem).glob("*.json")
    assert _NAMED.search(json.loads(record.read_text(encoding="utf-8"))["failure"]["message"])


def test_a_silent_nccl_ends_training() -> None:
    """The rank that waits prints the name of the exchange after the time-out of messages, which is two minutes."""
    pytest.importorskip("impl.comm.hang_monitor")
    process = _run(*_TRAIN, "--steps", "9", "--ranks-per-node", "2", FAKE_NCCL_SILENT="15")
    assert process.returncode != 0
    assert _NAMED.search(process.stderr)
