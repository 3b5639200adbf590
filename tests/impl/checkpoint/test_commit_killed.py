"""A save that is killed, at any point, leaves the checkpoint before it usable."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from harness.cluster.rank_processes import start_server
from impl.plan.topology import Topology
from tests.impl.checkpoint.killed import main, number_of, numbered, sound
from tests.support.ranks import on_threads

PAIR, ONE = Topology(1, 2), Topology(1, 1)
OPERATIONS = ("mkdir", "fsync", "rename", "unlink", "rmdir")  # of the disk


class Killed(BaseException):
    """The process is gone: no handler may act on it."""


def _stop_before(monkeypatch: pytest.MonkeyPatch, operation: int) -> None:
    """Let the disk stop for good before its n-th operation."""
    done = [0]

    def stopping(name: str) -> Any:
        real = getattr(os, name)

        def stop(*args: Any, **options: Any) -> Any:
            done[0] += 1
            if done[0] >= operation:
                raise Killed
            return real(*args, **options)

        return stop

    for name in OPERATIONS:
        monkeypatch.setattr(os, name, stopping(name))


def test_a_save_stopped_before_any_operation_leaves_the_one_before(tmp_path: Path) -> None:
    """Two ranks, and the disk stops for good before its n-th operation, for every n of a save with keep=1:
    what is loaded then, after what is left was there, is whole, and the one before or the new one.
    """
    whole, stops = False, 0
    while not whole:
        stops += 1
        folder = tmp_path / str(stops)
        on_threads(PAIR, numbered, folder, 1)
        with pytest.MonkeyPatch.context() as monkeypatch:
            _stop_before(monkeypatch, stops)
            try:
                on_threads(PAIR, numbered, folder, 2, 1)
                whole = True
            except (Killed, SystemExit):  # of this rank, or of the other that it left
                pass
        (number,) = set(on_threads(PAIR, sound, folder))
        assert number == 2 if whole else number in (1, 2)
        on_threads(PAIR, numbered, folder, 3, 1)  # and saving goes on, over what is left
        assert on_threads(PAIR, sound, folder) == [3, 3]
        assert len(list(folder.iterdir())) == 1
    assert stops > 14  # operations of one save


def test_a_process_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """SIGKILL at a random moment of a process that saves all the time."""
    chance = random.Random(5)
    before = 0
    start_server()  # which has imported torch
    for _ in range(3):
        child = multiprocessing.get_context("forkserver").Process(target=main, args=(tmp_path,), daemon=True)
        child.start()
        while number_of(tmp_path) <= before:
            assert child.is_alive()
            time.sleep(0.01)
        time.sleep(chance.random() * 0.2)
        child.kill()
        child.join()
        (number,) = on_threads(ONE, sound, tmp_path)
        assert number > before
        before = number
