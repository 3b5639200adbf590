"""Optimizers' states are saved by parameter name, for all states by element and all divisions into groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from impl.checkpoint.commit import checkpoints
from impl.checkpoint.save_load import CheckpointError, save
from impl.comm.mesh import Mesh
from impl.policy.topology import Topology
from impl.zero import Zero
from tests.impl.checkpoint.checkpointed import NET, Run, contents, same
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import EXACT


class Mixed(torch.optim.Optimizer):
    """State by element: momentum in 16 bits, a count and a sum in 64; and a number of 64 bits."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for master in group["params"]:
                if master.grad is None:
                    continue
                state = self.state[master]
                if not state:
                    state["mean"] = torch.zeros_like(master, dtype=torch.bfloat16)
                    state["count"] = torch.zeros_like(master, dtype=torch.int64)
                    state["sum"] = torch.zeros_like(master, dtype=torch.float64)
                    state["seen"] = torch.tensor(1 << 40)
                state["mean"].mul_(0.9).add_(master.grad.bfloat16())
                state["count"] += (master.grad != 0).long() << 40  # padding has no gradient, and no state
                state["sum"] += master.grad.double() / 3
                state["seen"] += 1
                master.add_(state["mean"].float(), alpha=-group["lr"])


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
        torch.optim.Adagrad,
        torch.optim.NAdam,
        lambda groups, lr: torch.optim.AdamW(groups, lr=torch.tensor(lr), amsgrad=True, betas=(0.8, 0.9)),
        Mixed,
    ],
    ids=["sgd", "momentum", "adagrad", "nadam", "tensor_lr", "mixed types"],
)
def test_every_elementwise_optimizer_is_saved(tmp_path: Path, optimizer: Any) -> None:
    """States by element of any type, numbers and tensors among options: another world loads and saves the same."""
    on_threads(Topology(2, 1), _optimizer, tmp_path, optimizer, False)
    on_threads(Topology(1, 3), _optimizer, tmp_path, optimizer, True)
    (tensors, numbers), (resaved, numbers_again) = [contents(path) for path in checkpoints(tmp_path)]
    assert same(resaved, tensors)
    assert numbers_again == numbers


def _optimizer(mesh: Mesh, folder: Path, optimizer: Any, loads: bool) -> None:
    run = Run(mesh, EXACT, NET, optimizer=optimizer)
    if loads:
        run.load(folder)
    else:
        run.step(0)
    run.save(folder)
    run.step(1)


def _split(zero: Zero, at: int, lr: float = 1e-2) -> torch.optim.Optimizer:
    """AdamW with the engine's first group in two groups, as if some of its masters were on the host."""
    first, *rest = zero.param_groups({1: {"weight_decay": 0.0}})
    masters = first["params"]
    halves = [{"params": masters[:at], "lr": lr}, {"params": masters[at:]}]
    return torch.optim.AdamW([*halves, *rest], lr=1e-2)


@pytest.mark.parametrize("at", [0, 3])
@each_rank(1, 2)
def test_a_group_may_lie_on_two_devices(mesh: Mesh, tmp_path: Path, at: int) -> None:
    """A group of the engine may be two of the optimizer's, divided anywhere, unless their options differ."""
    run, resumed = (Run(mesh, EXACT, NET) for _ in range(2))
    run.optimizers = [_split(run.zero, 1)]
    run.step(0)
    run.save(tmp_path)
    loss = run.step(1)
    resumed.optimizers = [_split(resumed.zero, at)] if at else resumed.optimizers
    resumed.load(tmp_path)
    assert resumed.step(1) == loss
    assert same(resumed.state(), run.state())
    save(tmp_path, resumed.zero, [_split(resumed.zero, 2, lr=0.5)])
    with pytest.raises(
        CheckpointError,
        match=r"has different options \(such as lr\) for .* which are in one optimizer group here",
    ):
        resumed.load(tmp_path)
