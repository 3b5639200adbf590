"""Tests of data parallel groups beside other kinds of parallelism: each rank shards over some of the ranks only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import zeropp
from tests.support.models import Net
from tests.support.ranks import on_processes
from tests.support.strategies import EXACT, ROOMY
from tests.support.training import adamw, batch, booked, model, single

WIDTH, HIDDEN, STEPS = 16, 32, 4


class MLP(nn.Module):
    """A residual MLP of plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Sequential):
    """Two MLPs; returns a loss."""

    def __init__(self) -> None:
        super().__init__(MLP(), MLP())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


class _Copied(torch.autograd.Function):
    """Copies activations to all tensor parallel ranks; gradients are added up (Megatron's f)."""

    @staticmethod
    def forward(context: Any, x: Tensor, group: Any) -> Tensor:
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=context.group)
        return total, None


class _Summed(torch.autograd.Function):
    """Adds partial results up over all tensor parallel ranks; gradients are copied (Megatron's g)."""

    @staticmethod
    def forward(_: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ParallelMLP(nn.Module):
    """This rank's slice of an :class:`MLP`: rows of ``up`` and columns of ``down``."""

    def __init__(self, whole: MLP, group: Any) -> None:
        super().__init__()
        self.group, ranks, rank = group, group.size(), group.rank()
        self.norm, own = whole.norm, slice(rank * HIDDEN // ranks, (rank + 1) * HIDDEN // ranks)
        self.up = nn.Linear(WIDTH, HIDDEN // ranks)
        self.down = nn.Linear(HIDDEN // ranks, WIDTH, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(whole.up.weight[own])
            self.up.bias.copy_(whole.up.bias[own])
            self.down.weight.copy_(whole.down.weight[:, own])

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(_Copied.apply(self.norm(x), self.group)))
        return x + _Summed.apply(self.down(hidden), self.group)


POLICIES = {
    "exact": EXACT,
    "zeropp": zeropp.preset(
        "zeropp", memory=ROOMY, weights=zeropp.codec("int8:32"), gradients=(zeropp.codec("int4:32:clip"),) * 2
    ),
}


def _tensor_parallel(_: Any, name: str) -> tuple[list[float], dict[str, Tensor], int, int]:
    """Train with two tensor parallel slices, each sharded over two ranks.

    Returns losses, the whole weights put together from slices, and the bytes of gradients and weights in all.
    """
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = devices["tp"].get_group()
    net = model(Stack)
    for number in range(2):
        net[number] = ParallelMLP(net[number], tp)
    zero = zeropp.shard(net, mesh=devices["dp"], policy=POLICIES[name])
    optimizer, losses = adamw(zero.param_groups()), []
    rank = devices.get_local_rank("dp")
    for step in range(STEPS):
        loss = net(batch(step, rank))
        loss.backward()
        zero.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = {}
    for key, slice_of in zero.full_state_dict().items():
        parts = [torch.empty_like(slice_of) for _ in range(tp.size())]
        dist.all_gather(parts, slice_of, group=tp)
        if "norm" in key:
            assert torch.equal(*parts)  # what both slices hold whole stays equal
            whole[key] = parts[0]
        else:
            whole[key] = torch.cat(parts, dim=1 if "down" in key else 0)
    return losses, whole, booked(zero, purpose="gradients"), booked(zero, purpose="weights")


@pytest.mark.parametrize(("name", "within"), [("exact", 1e-5), ("zeropp", 0.05)])
def test_tensor_parallel_slices_are_sharded_over_data_parallel_ranks(name: str, within: float) -> None:
    """2-way tensor parallelism x 2-way ZeRO++ trains as one process does, to rounding or to the codecs' errors."""
    found = on_processes(zeropp.Topology(1, 4), _tensor_parallel, name)
    net = model(Stack)
    wanted = single(net, 2, STEPS)
    for first in (0, 1):  # the two tensor parallel slices see the same data: ranks 0 and 2, and ranks 1 and 3
        means = [sum(pair) / 2 for pair in zip(found[first][0], found[first + 2][0], strict=True)]
        assert means == pytest.approx(wanted, rel=within)
    assert wanted[-1] < wanted[0]
    for losses, whole, gradients, weights in found:
        assert losses
        assert whole.keys() == net.state_dict().keys()
        trained, mine = (
            torch.cat([state[key].flatten() for key in whole]) for state in (net.state_dict(), whole)
        )
        assert (mine - trained).norm() <= 2 * within * trained.norm()
        assert gradients > 0
        assert weights > 0
    if name == "zeropp":
        exact = on_processes(zeropp.Topology(1, 4), _tensor_parallel, "exact")
        assert all(mine[2] < theirs[2] for mine, theirs in zip(found, exact, strict=True))


class Wide(Net):
    """A larger model, for the second group."""

    def __init__(self) -> None:
        super().__init__(hidden=64, depth=2, tied=True)


def _different_models(mesh: Any) -> tuple[list[float], tuple[int, ...]]:
    """Train one model on ranks 0 and 1, and another with another policy on ranks 2 and 3, at the same time."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    second = mesh.rank > 1
    net = model(Wide if second else Stack)
    zero = zeropp.shard(
        net, mesh=groups[second], policy=zeropp.preset("exact", memory=ROOMY, stage=2 if second else 3)
    )
    part = zero.wire.mesh
    optimizer, losses = adamw(zero.param_groups()), []
    for step in range(STEPS + 2 * second):  # and more steps in one of them
        loss = net(batch(step, part.rank))
        loss.backward()
        zero.step(optimizer, max_norm=1e9)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, part.global_ranks


def test_two_groups_of_ranks_train_different_models_at_once() -> None:
    """Each group follows one process, with its own model, policy and number of steps."""
    found = on_processes(zeropp.Topology(1, 4), _different_models)
    for first, factory, steps in ((0, Stack, STEPS), (2, Wide, STEPS + 2)):
        means = [sum(pair) / 2 for pair in zip(found[first][0], found[first + 1][0], strict=True)]
        assert means == pytest.approx(single(model(factory), 2, steps), rel=1e-5)
        assert found[first][1] == (first, first + 1)
