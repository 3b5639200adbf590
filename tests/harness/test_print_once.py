"""An error that all ranks of torchrun meet is printed once, and no rank's own error is lost."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from harness import print_once
from harness.print_once import speaks


def test_equal_errors_are_printed_once_and_different_ones_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank to fail prints an error, again after a restart; without torchrun or its store, all ranks do."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(print_once, "_PATIENCE", timedelta(milliseconds=200))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    assert [speaks(error) for error in "aabab"] == [True, False, True, False, False]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert [speaks("a"), speaks("a")] == [True, False]
    monkeypatch.setenv("MASTER_PORT", "none")
    assert speaks("a")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert speaks("a")


@pytest.mark.long
def test_torchrun_prints_a_refusal_once() -> None:
    """If both ranks of a real torchrun refuse the same flags, the refusal is printed once."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python",
        sys.executable, "-m", "harness.cli", "train", "--fp16", "--bf16",
    ]  # fmt: skip
    process = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert process.returncode != 0
    assert process.stderr.count("zeropp: flags: fp16.enabled = true: contradicts bf16.enabled = true") == 1
