"""A program that saves again and again, to be killed."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from impl.checkpoint import atomic_files
from impl.checkpoint.save_load import latest, load, save
from impl.comm.mesh import Mesh
from impl.plan.policy import preset
from impl.plan.topology import Topology
from impl.zero import Zero, shard
from tests.support.strategies import ROOMY
from tests.support.training import model

NET = model(depth=1)
OPERATIONS = ("create", "write", "sync", "sync_folder", "make_folder", "rename", "remove_folder")


def counted(kill: Callable[[int], None]) -> dict[str, Callable[..., Any]]:
    """The operations of :mod:`impl.checkpoint.atomic_files`, each of which calls ``kill`` with its number
    first.
    """
    done = [0]

    def stopping(operation: Callable[..., Any]) -> Callable[..., Any]:
        def stop(*args: Any) -> Any:
            done[0] += 1
            kill(done[0])
            return operation(*args)

        return stop

    return {name: stopping(getattr(atomic_files, name)) for name in OPERATIONS}


def numbered(mesh: Mesh, folder: Path, number: int, keep: int | None = None) -> None:
    """Save a model of which every weight is ``number``."""
    zero = shard(copy.deepcopy(NET), mesh=mesh, policy=preset("zero3", memory=ROOMY))
    with torch.no_grad():
        for unit in zero.units:
            for _, master in unit.master_shard.masters:
                master.fill_(number)
    zero.weights_changed()
    save(folder, zero, extra=number, keep=keep)


def sound(mesh: Mesh, folder: Path) -> int:
    """Load the newest checkpoint, and make sure that it is whole: the number that it was saved with."""
    zero: Zero = shard(copy.deepcopy(NET), mesh=mesh, policy=preset("zero3", memory=ROOMY))
    number = load(folder, zero).extra
    weights = [v for name, v in zero.full_state_dict().items() if name != "scale"]
    assert all(bool((value == number).all()) for value in weights)
    return int(number)


def main(folder: Path, stop_at: int) -> None:
    """Save 1, 2, 3, ...; kill this process before operation ``stop_at`` of the disk, or never for 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = Mesh.create(Topology(1, 1))

    def kill(number: int) -> None:
        if number == stop_at:
            os.kill(os.getpid(), signal.SIGKILL)

    newest = latest(folder)
    first = 0 if newest is None else int(newest.name.partition("-")[2])
    for name, operation in counted(kill).items():
        setattr(atomic_files, name, operation)
    for number in range(first + 1, 10_000):
        numbered(mesh, folder, number, keep=2)
