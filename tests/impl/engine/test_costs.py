"""A step makes few Python calls, which GPUs wait for in small steps, and copies no memory twice."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import impl
from impl.comm.mesh import Mesh
from impl.policy.policy import MemoryLimits
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import shard
from tests.support.ranks import each_rank, on_processes
from tests.support.strategies import ROOMY
from tests.support.training import sgd, update

OURS = str(Path(impl.__file__).parent)
FSDP2 = str(Path(fsdp.__file__).parent / "_fully_shard")
STEP, UNIT, FILES, GATHER = 409, 215, 21, 51
BLOCK = 256  # wide: of the smallest units that ZeRO++'s blocks do not pad too much


@contextmanager
def counted(package: str) -> Iterator[Counter[CodeType]]:
    """Count the calls that the body makes, on this thread, of functions in files under ``package``."""
    calls: Counter[CodeType] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls[frame.f_code] += 1

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def blocks(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(BLOCK, BLOCK)) for _ in range(count)))


def calls_of_step(model: nn.Module, optimizer: torch.optim.Optimizer, package: str) -> tuple[int, int]:
    """Return the Python calls of a step after three others, and the files of the functions called."""
    x = torch.ones(4, BLOCK)
    for _ in range(3):
        update(optimizer, model(x).sum())
    with counted(package) as calls:
        update(optimizer, model(x).sum())
    return calls.total(), len({code.co_filename for code in calls})


def both(mesh: Mesh, units: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the calls of a step of a model of ``units`` units, sharded by this project and by FSDP2."""
    model, peer = blocks(units), blocks(units)
    zero = shard(model, mesh=mesh, policy=preset("zero3"))
    devices = init_device_mesh("cpu", (mesh.topology.world,))
    for block in (*peer, peer):
        fsdp.fully_shard(block, mesh=devices)
    return (
        calls_of_step(model, torch.optim.SGD(zero.param_groups(), lr=1e-3), OURS),
        calls_of_step(peer, torch.optim.SGD(peer.parameters(), lr=1e-3), FSDP2),
    )


def test_a_step_makes_few_python_calls() -> None:
    """On one of four gloo ranks, a step makes few calls, no more than FSDP2's, in few files; a third unit adds few."""
    ((two, files), (fsdp2, _)), ((three, _), _) = (
        on_processes(Topology(1, 4), both, units)[0] for units in (2, 3)
    )
    assert two <= min(STEP, fsdp2)
    assert files <= FILES
    assert three - two <= UNIT


def calls_of_gather(mesh: Mesh, name: str) -> int:
    """Count the calls from the hook before a block until its weights are visible, with nothing gathered ahead."""
    model, x = blocks(2), torch.ones(4, BLOCK)
    zero = shard(model, mesh=mesh, policy=preset(name, memory=MemoryLimits(prefetch=0)))
    with torch.no_grad():
        for _ in range(2):
            model(x)
        with counted(OURS) as calls:
            zero.hooks._pre_forward(model[0], (x,), {})
        assert zero.units[0].gathered
        zero.hooks._post_forward(model[0], (x,), {}, x)
    return calls.total()


def test_a_gather_makes_few_python_calls() -> None:
    """The calls from the hook before a module until it sees its weights are few, with one hop and with two."""
    for topology, name in ((Topology(1, 4), "zero3"), (Topology(2, 2), "zeropp")):
        assert on_processes(topology, calls_of_gather, name)[0] <= GATHER


WIDTH, DEPTH = 64, 6
MOST = 16  # bytes a parameter: a cast into the flat buffer is 6, and one into the masters' gradients 6
COPIES = {"aten::copy_", "aten::_to_copy", "aten::clone", "aten::add_", "aten::div_", "aten::zero_"}


class _Moved(TorchDispatchMode):
    """Adds up the bytes that copies and sums in place read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.name().split(".")[0] in COPIES:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            self.nbytes += sum(tensor.nbytes for tensor in tensors[-1:]) + out.nbytes
        return out


@each_rank(1, 1)
def test_one_rank_moves_no_byte_twice(mesh: Mesh) -> None:
    """On one rank, weights are cast straight to the flat buffer, and gradients go straight to the masters."""
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    zero = shard(net, mesh=mesh, policy=preset("zero3", compute="bf16", memory=ROOMY))
    optimizer = sgd(zero.param_groups())
    for _ in range(2):  # after a step
        with _Moved() as moved:
            net(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < moved.nbytes / (DEPTH * WIDTH * WIDTH) <= MOST
