"""``zeropp train`` on fake GPUs."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_gpu import build

pytestmark = pytest.mark.needs("fake GPU")

_TRAIN = (
    *(
        "train",
        "--num-layers",
        "2",
        "--hidden-size",
        "64",
        "--num-attention-heads",
        "2",
        "--seq-length",
        "32",
    ),
    *("--batch-size", "1", "--steps", "3", "--max-padding", "3", "--zero-stage", "3"),
)
_TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")


def _losses(*command: str) -> list[str]:
    """Returns the losses of each step that ``zeropp train`` prints."""
    process = subprocess.run(
        [sys.executable, "-m", *command],
        env=build.environment(2),
        cwd=build.REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return re.findall(r"loss (\d+\.\d+)", process.stdout)


def test_ranks_of_both_launchers_train_alike(tmp_path: Path) -> None:
    """Ranks that are forked and ranks of torchrun have the same losses, which fall from that of a uniform guess."""
    train = ("harness.cli", *_TRAIN, "--device", "cuda")
    forked = _losses(*train, "--ranks-per-node", "2", "--save", str(tmp_path / "forked"))
    assert _losses(*_TORCHRUN, *train, "--save", str(tmp_path / "torchrun")) == forked
    first, *_, last = map(float, forked)
    assert abs(first - math.log(256)) < 0.2
    assert last < first
