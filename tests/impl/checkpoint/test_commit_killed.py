"""A save that is killed, at any point, leaves the checkpoint before it usable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from impl.checkpoint.save_load import load, save
from impl.comm.mesh import Mesh
from impl.plan.topology import Topology
from impl.zero import shard
from tests.support.ranks import on_threads
from tests.support.strategies import EXACT
from tests.support.training import model

PAIR = Topology(1, 2)
OPERATIONS = ("mkdir", "fsync", "rename", "unlink", "rmdir")  # of the disk


class Killed(BaseException):
    """The process is gone: no handler may act on it."""


def numbered(mesh: Mesh, folder: Path, number: int, keep: int | None = None) -> None:
    zero = shard(model(depth=1), mesh=mesh, policy=EXACT)
    with torch.no_grad():
        for unit in zero.units:
            unit.master_shard.master.fill_(number)
    zero.weights_changed()
    save(folder, zero, extra=number, keep=keep)


def sound(mesh: Mesh, folder: Path) -> int:
    """Load the newest checkpoint, and make sure that it is whole: the number that it was saved with."""
    zero = shard(model(depth=1), mesh=mesh, policy=EXACT)
    number = load(folder, zero).extra
    weights = [v for name, v in zero.full_state_dict().items() if name != "scale"]
    assert all(bool((value == number).all()) for value in weights)
    return int(number)


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
