"""A save that is killed, at any point, leaves the checkpoint before it usable."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from harness.cluster.rank_processes import start_server
from impl.checkpoint import atomic_files
from impl.checkpoint.commit import checkpoints
from impl.checkpoint.save_load import latest
from impl.plan.topology import Topology
from tests.impl.checkpoint.killed import counted, main, numbered, sound
from tests.support.ranks import on_threads

PAIR, ONE = Topology(1, 2), Topology(1, 1)


class Killed(BaseException):
    """The process is gone: no handler may act on it."""


def test_a_save_stopped_before_any_operation_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, and the disk stops for good before its n-th operation, for every n of a save with keep=1:
    what is loaded then, after what is left was there, is whole, and the one before or the new one.
    """
    real = counted(lambda _: None)
    whole, stops = False, 0
    while not whole:
        stops += 1
        folder = tmp_path / str(stops)
        on_threads(PAIR, numbered, folder, 1)

        def kill(number: int, stop: int = stops) -> None:
            if number >= stop:
                raise Killed

        for name, operation in counted(kill).items():
            monkeypatch.setattr(atomic_files, name, operation)
        try:
            on_threads(PAIR, numbered, folder, 2, 1)
            whole = True
        except (Killed, SystemExit):  # of this rank, or of the other that it left
            pass
        for name, operation in real.items():
            monkeypatch.setattr(atomic_files, name, operation)
        (number,) = set(on_threads(PAIR, sound, folder))
        assert number == 2 if whole else number in (1, 2)
        on_threads(PAIR, numbered, folder, 3, 1)  # and saving goes on, over what is left
        assert on_threads(PAIR, sound, folder) == [3, 3]
        assert len(list(folder.iterdir())) == 1
    assert stops > 20  # operations of one save


def _child(folder: Path, stop_at: int) -> ForkServerProcess:
    """A process that saves, of the server that has imported torch."""
    start_server()
    child = multiprocessing.get_context("forkserver").Process(
        target=main, args=(folder, stop_at), daemon=True
    )
    child.start()
    return child


def test_a_process_killed_at_an_operation_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """SIGKILL before an operation of the third save, again and again in one folder."""
    for stop_at in (33, 29, 40):
        child = _child(tmp_path, stop_at)
        child.join(120)
        assert child.exitcode == -signal.SIGKILL
        assert on_threads(ONE, sound, tmp_path) == [int(checkpoints(tmp_path)[-1].name.partition("-")[2])]


def test_a_process_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """SIGKILL at a random moment of a process that saves all the time."""
    chance = random.Random(5)
    before = 0
    for _ in range(3):
        child = _child(tmp_path, 0)
        while latest(tmp_path) is None or sound_number(tmp_path) <= before:
            assert child.is_alive()
            time.sleep(0.01)
        time.sleep(chance.random() * 0.2)
        child.kill()
        child.join()
        (number,) = on_threads(ONE, sound, tmp_path)
        assert number > before
        before = number


def sound_number(folder: Path) -> int:
    """Of the newest checkpoint, by its name."""
    newest = latest(folder)
    return 0 if newest is None else int(newest.name.partition("-")[2])
