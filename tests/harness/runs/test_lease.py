"""One run has a results folder, also where hosts share it."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from harness.records.record import RecordError
from harness.runs import lease
from harness.runs.lease import LEASE, STALE_SECONDS, Lease


def of_another_host(folder: Path, age: float) -> None:
    """A lease that a run elsewhere renewed ``age`` seconds ago."""
    path = folder / LEASE
    path.write_text(json.dumps({"token": "x", "host": "elsewhere", "kernel": "y"}), encoding="utf-8")
    then = (folder / LEASE).stat().st_mtime - age
    os.utime(path, (then, then))


def test_another_hosts_run_is_waited_for(tmp_path: Path) -> None:
    """A lease that was renewed lately refuses in one line that names the host, and is not touched."""
    of_another_host(tmp_path, STALE_SECONDS / 2)
    before = (tmp_path / LEASE).read_bytes()
    with pytest.raises(RecordError, match="a run on host elsewhere is writing there"), Lease(tmp_path):
        pass
    assert (tmp_path / LEASE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [LEASE]


def test_a_lease_that_nobody_renews_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one alone of many that want it at once; the others are told."""
    monkeypatch.setattr(lease, "_kernel", lambda: threading.current_thread().name)  # as many hosts
    of_another_host(tmp_path, 2 * STALE_SECONDS)
    had, told, ready = [], [], threading.Barrier(8)
    done = threading.Event()

    def take(number: int) -> None:
        mine = Lease(tmp_path)
        ready.wait()
        try:
            with mine:
                had.append(number)
                done.wait(10)
        except RecordError as error:
            told.append(str(error))

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    while len(had) + len(told) < 8:
        done.wait(0.01)
    done.set()
    for thread in threads:
        thread.join()
    assert len(had) == 1
    assert {words.partition(": ")[2][:11] for words in told} <= {"a run on ho"}


def test_what_lost_its_lease_writes_nothing_more(tmp_path: Path) -> None:
    """A run that was suspended for long finds another's lease, says so, and leaves that in peace."""
    with Lease(tmp_path) as mine:
        mine.check()
        of_another_host(tmp_path, 0)
        with pytest.raises(RecordError, match="elsewhere took it over"):
            mine.check()
    assert json.loads((tmp_path / LEASE).read_text(encoding="utf-8"))["host"] == "elsewhere"


def test_a_run_renews_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it has it; afterwards there is none."""
    monkeypatch.setattr(lease, "RENEWED_SECONDS", 0.01)
    with Lease(tmp_path):
        path = tmp_path / LEASE
        os.utime(path, (0, 0))
        until = threading.Event()
        for _ in range(1000):
            if path.stat().st_mtime > 0:
                break
            until.wait(0.01)
        assert path.stat().st_mtime > 0
    assert not list(tmp_path.iterdir())


def test_a_killed_runs_lease_on_this_host_is_no_obstacle(tmp_path: Path) -> None:
    """The lock says that it has ended, so nobody waits."""
    Lease(tmp_path).__enter__()  # and never left, as by kill -9
    with Lease(tmp_path) as mine:
        mine.check()
