"""A NCCL that never answers ends a trial and ``zeropp train``, and the error names the exchange."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_gpu import build
from tests.fake_gpu.run import miniature

pytest.importorskip("impl.comm.hang_monitor")
pytestmark = [pytest.mark.needs("fake GPU"), pytest.mark.timeout(290)]

_ANSWERED = "15"  # NCCL calls that are answered: some of the first step's
_SLACK_SECONDS = 120  # for what comes before the first exchange and after the error


def _run(seconds: float, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``zeropp`` on a NCCL that falls silent, and return its end, which must come within ``seconds``."""
    return subprocess.run(
        [sys.executable, "-m", "harness.cli", *arguments],
        env=build.environment(4, FAKE_NCCL_SILENT=_ANSWERED),
        cwd=build.REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds + _SLACK_SECONDS,
    )


def test_a_trial_ends_with_the_name_of_the_exchange(tmp_path: Path) -> None:
    """The record of the trial has the error of the rank, which names what it waited for."""
    suite = miniature("1x4", tmp_path)
    text = suite.read_text(encoding="utf-8")
    text = text.replace("defaults.timeout_seconds = 1800", "defaults.timeout_seconds = 80")
    strategies = '["zero3", "qwz", "hpz", "qgz", "zeropp", "fsdp2"]'
    assert strategies in text
    suite.write_text(text.replace(strategies, '["zeropp"]'), encoding="utf-8")
    process = _run(80, "run", str(suite), "--no-report", "--results", str(tmp_path))
    assert process.returncode != 0
    (record,) = (tmp_path / suite.stem).glob("*.json")
    message = json.loads(record.read_text(encoding="utf-8"))["failure"]["message"]
    assert re.search(r"could not finish exchange \d+, all_(gather|to_all) of ", message)


def test_training_ends_with_the_name_of_the_exchange() -> None:
    """The error is printed, after the time-out of the messages."""
    size = ("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2", "--seq-length", "32")
    more = (
        "--batch-size",
        "1",
        "--steps",
        "9",
        "--zero-stage",
        "3",
        "--max-padding",
        "3",
        "--device",
        "cuda",
    )
    process = _run(150, "train", *size, *more, "--ranks-per-node", "2")
    assert process.returncode != 0
    assert re.search(r"could not finish exchange \d+, all_(gather|to_all) of ", process.stderr)
