"""``zeropp train`` on fake GPUs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
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
    *("--batch-size", "1", "--steps", "3", "--max-padding", "3", "--stage", "3"),
)
_TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")


def _losses(*command: str) -> list[str]:
    """Returns the losses that ``zeropp train`` prints; a part of a cent of a nat is the same on all devices."""
    process = subprocess.run(
        [sys.executable, "-m", *command],
        env=build.environment(2),
        cwd=build.REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return re.findall(r"loss (\d+\.\d{3})", process.stdout)


def test_ranks_of_both_launchers_train_as_on_a_cpu(tmp_path: Path) -> None:
    """Ranks that are forked, and those of torchrun, have the losses of ranks on the CPU, to three decimals."""

    def command(device: str, *ranks: str) -> Sequence[str]:
        return (
            "harness.cli",
            *_TRAIN,
            "--device",
            device,
            *ranks,
            "--save",
            str(tmp_path / "-".join((device, *ranks))),
        )

    two = ("--ranks-per-node", "2")
    cpu, forked = _losses(*command("cpu", *two)), _losses(*command("cuda", *two))
    assert len(cpu) == 3
    assert forked == cpu
    assert _losses(*_TORCHRUN, *command("cuda")) == cpu
