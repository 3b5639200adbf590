"""A program that saves again and again, to be killed."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from impl.checkpoint.save_load import latest, load, save
from impl.comm.mesh import Mesh
from impl.plan.policy import preset
from impl.plan.topology import Topology
from impl.zero import Zero, shard
from tests.support.strategies import ROOMY
from tests.support.training import model


def numbered(mesh: Mesh, folder: Path, number: int, keep: int | None = None) -> None:
    """Save a model of which every weight is ``number``."""
    zero = shard(model(depth=1), mesh=mesh, policy=preset("zero3", memory=ROOMY))
    with torch.no_grad():
        for unit in zero.units:
            for _, master in unit.master_shard.masters:
                master.fill_(number)
    zero.weights_changed()
    save(folder, zero, extra=number, keep=keep)


def sound(mesh: Mesh, folder: Path) -> int:
    """Load the newest checkpoint, and make sure that it is whole: the number that it was saved with."""
    zero: Zero = shard(model(depth=1), mesh=mesh, policy=preset("zero3", memory=ROOMY))
    number = load(folder, zero).extra
    weights = [v for name, v in zero.full_state_dict().items() if name != "scale"]
    assert all(bool((value == number).all()) for value in weights)
    return int(number)


def number_of(folder: Path) -> int:
    """Of the newest checkpoint, by its name; 0 for none."""
    newest = latest(folder)
    return 0 if newest is None else int(newest.name.partition("-")[2])


def main(folder: Path) -> None:
    """Save n + 1, n + 2, ... without end, after the newest checkpoint's n."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = Mesh.create(Topology(1, 1))
    for number in range(number_of(folder) + 1, 10_000):
        numbered(mesh, folder, number, keep=2)
