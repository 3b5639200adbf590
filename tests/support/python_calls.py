"""Counts the Python calls of a training step, by the package whose files they are in."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import impl
from impl.comm.mesh import Mesh
from impl.plan.policy import MemoryLimits, preset
from impl.zero import shard
from tests.support.training import update

OURS = str(Path(impl.__file__).parent)
FSDP2 = str(Path(fsdp.__file__).parent / "_fully_shard")


class Calls(NamedTuple):
    """Python calls of one part of a step, the functions called, and the files that they are in."""

    calls: int
    functions: int
    files: int


@contextmanager
def counted(package: str) -> Iterator[Counter[CodeType]]:
    """Count the calls of functions in files under ``package`` that the body makes on this thread."""
    calls: Counter[CodeType] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls[frame.f_code] += 1

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def summed(calls: Counter[CodeType]) -> Calls:
    return Calls(calls.total(), len(calls), len({code.co_filename for code in calls}))


WIDTH: Final = 256  # of the smallest units that ZeRO++'s blocks do not pad too much


class Block(nn.Module):
    """A unit: a linear layer with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


def calls_of_step(mesh: Mesh, units: int, name: str = "zero3") -> tuple[Calls, Calls]:
    """Calls of a step, after three others, of ``units`` blocks sharded by this project and by FSDP2."""
    model = nn.Sequential(*(Block() for _ in range(units)))
    peer = copy.deepcopy(model)
    zero = shard(model, mesh=mesh, policy=preset(name))
    ours = _calls_of_step(model, torch.optim.SGD(zero.param_groups(), lr=1e-3), OURS)
    devices = init_device_mesh("cpu", (mesh.topology.world,))
    for block in (*peer, peer):
        fsdp.fully_shard(block, mesh=devices)
    return ours, _calls_of_step(peer, torch.optim.SGD(peer.parameters(), lr=1e-3), FSDP2)


def _calls_of_step(model: nn.Module, optimizer: torch.optim.Optimizer, package: str) -> Calls:
    x = torch.ones(4, WIDTH)
    for _ in range(3):
        update(optimizer, model(x).sum())
    with counted(package) as calls:
        update(optimizer, model(x).sum())
    return summed(calls)


def calls_of_gather(mesh: Mesh, name: str) -> Calls:
    """Calls from the hook before a block to its visible weights, nothing being gathered ahead."""
    model = nn.Sequential(Block(), Block())
    zero = shard(model, mesh=mesh, policy=preset(name, memory=MemoryLimits(prefetch=0)))
    x = torch.ones(4, WIDTH)
    with torch.no_grad():
        for _ in range(2):
            model(x)
        with counted(OURS) as calls:
            zero.hooks._pre_forward(model[0], (x,), {})
        assert zero.units[0].gathered
        zero.hooks._post_forward(model[0], (x,), {}, x)
    return summed(calls)
