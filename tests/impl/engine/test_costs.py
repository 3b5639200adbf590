"""A step makes few Python calls, for which a GPU's small steps wait, and moves no byte of memory twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from impl.comm.mesh import Mesh
from impl.plan.policy import preset
from impl.plan.topology import Topology
from impl.zero import shard
from tests.support.python_calls import calls_of_gather, calls_of_step
from tests.support.ranks import each_rank, on_processes
from tests.support.strategies import ROOMY
from tests.support.training import sgd

STEP, UNIT, FILES, GATHER = 409, 250, 20, 60


def test_a_step_makes_few_python_calls() -> None:
    """Of two units, on one of four gloo ranks, fewer than FSDP2's, in few files; and what a third adds."""
    (two, fsdp2), (three, _) = (
        on_processes(Topology(1, 4), calls_of_step, units, "zero3")[0] for units in (2, 3)
    )
    assert two.calls <= min(STEP, fsdp2.calls)
    assert two.files <= FILES
    assert three.calls - two.calls <= UNIT


def test_a_gather_makes_few_python_calls() -> None:
    """From the hook before a module to weights that it sees, in one hop and in two."""
    for topology, name in ((Topology(1, 4), "zero3"), (Topology(2, 2), "zeropp")):
        assert on_processes(topology, calls_of_gather, name)[0].calls <= GATHER


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
            given = [arg for arg in args if isinstance(arg, Tensor)]
            self.nbytes += sum(arg.nbytes for arg in given[-1:]) + out.nbytes
        return out


@each_rank(1, 1)
def test_one_rank_moves_no_byte_twice(mesh: Mesh) -> None:
    """Weights are cast straight to where they are computed with, gradients to where they are stepped from."""
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    zero = shard(net, mesh=mesh, policy=preset("zero3", compute="bf16", memory=ROOMY))
    optimizer = sgd(zero.param_groups())
    for _ in range(2):  # after a step
        with _Moved() as moved:
            net(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < moved.nbytes / (DEPTH * WIDTH * WIDTH) <= MOST
