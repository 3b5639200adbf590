"""An error that all ranks of torchrun meet is one line; no rank's own error is lost."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from harness.cluster import print_once as once
from harness.cluster.print_once import saying


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The environment and the store that torchrun's agent gives its ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    named = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    return store


def spoke(words: str) -> bool:
    with saying(words) as alone:
        return alone


def test_equal_words_are_printed_once_and_different_ones_each(agent: dist.TCPStore) -> None:
    """By the first that fails; after a restart of the job, once more."""
    assert [spoke("a"), spoke("a"), spoke("b"), spoke("a"), spoke("b")] == [True, False, True, False, False]


def test_a_restarted_job_speaks_again(agent: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store outlives a restart."""
    assert spoke("a")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert spoke("a")


def test_others_wait_until_the_words_are_out(agent: dist.TCPStore) -> None:
    """Torchrun ends all ranks when one has ended: none ends silently before the line is printed."""
    found: list[bool] = []
    with saying("a") as alone:
        other = threading.Thread(target=lambda: found.append(spoke("a")))
        other.start()
        other.join(timeout=0.2)
        assert alone
        assert other.is_alive()
    other.join()
    assert found == [False]


def test_no_words_are_lost(agent: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the rank that claimed them ended without printing, where no store answers, without torchrun."""
    monkeypatch.setattr(once, "_PATIENCE", timedelta(milliseconds=200))
    first = saying("a")
    assert first.__enter__()  # and never leaves
    assert spoke("a")
    monkeypatch.setenv("MASTER_PORT", "none")
    assert spoke("b")
    assert spoke("b")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert spoke("b")


@pytest.mark.long
def test_torchrun_prints_a_refusal_once() -> None:
    """Both ranks refuse the same flags with status 2; processes of torchrun take seconds."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python",
        sys.executable, "-m", "harness.cli", "train", "--fp16", "--bf16",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0
    assert done.stderr.count("zeropp: --fp16 and --bf16: expected at most one of them") == 1
