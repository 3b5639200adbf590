"""Ranks are started and watched."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.cluster import link
from harness.cluster.port import Port
from harness.cluster.rank import Progress, Rank
from harness.cluster.rank_processes import Launch, LaunchError, run_ranks
from impl.policy.topology import Topology
from tests.harness.cluster import targets

ROOT = Path(__file__).resolve().parents[3]


def local(topology: Topology, log: Path, seconds: float = 60) -> Launch:
    ports = (Port("lo", "127.0.0.1"),) * topology.nodes
    return Launch(topology, ports, None, threads=1, timeout_seconds=seconds, log=log)


def test_results_come_back_in_rank_order(tmp_path: Path) -> None:
    """Every rank knows its number and node and has its threads; results are in the order of ranks."""
    progress: list[Progress] = []
    places = run_ranks(targets.place, "word", local(Topology(2, 2), tmp_path / "log"), progress.append)
    assert places == [("word", rank, rank // 2, 4, 1) for rank in range(4)]
    assert progress == [Progress("placed", 1, 2)]
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("raise", "crashed", "rank 1: ZeroDivisionError: a planted error"),
        ("refuse", "refused", "rank 1: 7 does not divide 4"),
        ("memory", "memory", "rank 1: RuntimeError"),
        ("leave", "crashed", "rank 1 ended with status 3"),
        ("signal", "crashed", "rank 1 was killed by signal 11"),
        ("kill", "killed", "rank 1 was killed by signal 9"),
        ("disk", "disk", "rank 1: OSError: [Errno 28] No space left on device"),
    ],
)
def test_the_rank_that_failed_is_named(tmp_path: Path, how: str, kind: str, message: str) -> None:
    """A rank that fails ends the others; the error names it, and the log of all ranks is kept."""
    with pytest.raises(LaunchError) as caught:
        run_ranks(targets.crash, how, local(Topology(1, 3), tmp_path / "logs" / "log"))
    assert caught.value.kind == kind
    assert message in str(caught.value)
    log = caught.value.log.read_text()
    assert all(f"rank {rank} was here" in log for rank in range(3))


@pytest.mark.long
def test_a_hanging_rank_leaves_its_stack(tmp_path: Path) -> None:
    """After its timeout a trial is killed, and the log shows where every rank was."""
    with pytest.raises(LaunchError) as caught:
        run_ranks(targets.hang, None, local(Topology(1, 2), tmp_path / "log", seconds=8))
    assert caught.value.kind == "timeout"
    log = (tmp_path / "log").read_text()
    assert "in hang" in log
    assert "in barrier" in log


def test_a_message_that_never_arrives_ends_the_trial_with_its_name(tmp_path: Path) -> None:
    """Long before the trial's own limit; the log shows where the main thread stood."""
    with pytest.raises(LaunchError) as caught:
        run_ranks(targets.never_answer, None, local(Topology(1, 2), tmp_path / "log", seconds=600))
    assert caught.value.kind == "crashed"
    assert "WireError: rank " in str(caught.value)
    assert "could not finish exchange 1, all_gather of 16 B along world" in str(caught.value)
    assert "for backward weights blocks.7: no exchange has completed for" in str(caught.value)
    assert "in never_answer" in (tmp_path / "log").read_text()


def test_what_several_ranks_say_is_in_the_log_once(tmp_path: Path) -> None:
    """Equal output of several ranks is in the log once, under the numbers of all of them."""
    with pytest.raises(LaunchError, match="a planted error"):
        run_ranks(targets.fail_alike, None, local(Topology(1, 3), tmp_path / "log"))
    log = (tmp_path / "log").read_text()
    assert log.startswith("== rank 0, 1, 2 ==\nTraceback")
    assert log.count("Traceback") == 1


@pytest.mark.parametrize(("launcher", "gpus"), [("local", [0, 1, 2]), ("torchrun", [0, 0, 0])])
def test_every_node_takes_a_gpu(launcher: str, gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of a calibration takes a GPU of its own, since NCCL refuses two ranks on one GPU."""
    current, devices = list[int](), list[str]()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(link, "exchange", lambda *args, **_: devices.append(args[3]))
    for node in range(3):
        node_rank = Rank(node, Topology(3, 1), Port(None, ""), None, lambda _: None, 1)
        link.measure_link(node_rank, (8, 1, "nccl", launcher))
    assert current == gpus
    assert devices == [f"cuda:{gpu}" for gpu in gpus]


def until(condition: Callable[[], object], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
