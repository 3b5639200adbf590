"""Training loops for tests: with shards, and the single process that they must follow."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from impl.comm.mesh import Mesh
from impl.policy.policy import Policy
from impl.zero import Zero, shard
from tests.support.models import Net


def batch(step: int, rank: int, width: int = 16) -> Tensor:
    """(4, width) data of one rank in one micro-batch."""
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1000 * step + rank))


DRAWING = threading.Lock()  # thread ranks share torch's random numbers


def model(factory: Callable[..., nn.Module] = Net, **options: Any) -> Any:
    """A model with fixed values, the same on each thread rank that asks for it."""
    with DRAWING:
        torch.manual_seed(0)
        return factory(**options)


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """Step by the gradients of a loss, and clear them; returns the loss."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any, lr: float = 0.1, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, **options)


Optimize = Callable[[Any], torch.optim.Optimizer]
LossOf = Callable[[Any, int, int], Tensor]  # of a model, the number of a micro-batch and a rank


def single(  # noqa: PLR0917  # as train
    net: nn.Module,
    world: int,
    steps: int,
    accumulation: int = 1,
    width: int = 16,
    optimize: Optimize = adamw,
    loss_of: LossOf | None = None,
) -> list[float]:
    """Train ``net`` in one process on all ranks' batches; the mean loss of each step."""
    net = net.train()
    loss_of = loss_of or (lambda net, number, rank: net(batch(number, rank, width)))
    optimizer = optimize([p for p in net.parameters() if p.requires_grad])
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(accumulation):
            for rank in range(world):
                loss = loss_of(net, step * accumulation + micro, rank)
                (loss / world).backward()
                total += loss.item() / world / accumulation
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


class Training:
    """A copy of a model, sharded, in training on one rank."""

    def __init__(
        self,
        mesh: Mesh,
        net: nn.Module,
        policy: Policy,
        *,
        width: int = 16,
        optimize: Optimize = adamw,
        groups: Any = None,
        loss_of: LossOf | None = None,
        **options: Any,
    ) -> None:
        self.mesh, self.net, self.policy = mesh, copy.deepcopy(net), policy
        self.loss_of = loss_of or (lambda net, number, rank: net(batch(number, rank, width)))
        self.zero = shard(self.net, mesh=mesh, policy=policy, **options)
        self.optimizers = [optimize(self.zero.param_groups(groups))]

    def backward(self, number: int, *, local: bool = False) -> float:
        """The loss of a micro-batch after backward; ``local`` accumulates gradients if the policy can."""
        local = local and not self.policy.reduces_each_micro_batch
        with self.zero.accumulating() if local else contextlib.nullcontext():
            loss = self.loss_of(self.net, number, self.mesh.rank)
            self.zero.scaler.scaled(loss).backward()
        return loss.item()

    def step(self, number: int, accumulation: int = 1) -> float:
        """The mean loss of the micro-batches of a step."""
        first, last = accumulation * number, accumulation - 1
        losses = [self.backward(first + micro, local=micro < last) for micro in range(accumulation)]
        self.zero.step(*self.optimizers)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return sum(losses) / accumulation


def train(  # noqa: PLR0917  # thread ranks pass by position
    mesh: Mesh,
    net: nn.Module,
    policy: Policy,
    steps: int,
    micro_batches: int = 1,
    width: int = 16,
    **options: Any,
) -> tuple[list[float], dict[str, Tensor], Zero]:
    """Losses of some steps on this rank, the final state, the engine."""
    run = Training(mesh, net, policy, width=width, **options)
    losses = [run.step(number, micro_batches) for number in range(steps)]
    return losses, run.zero.full_state_dict(), run.zero


def booked(zero: Zero, **fields: str) -> int:
    """Bytes that this rank sent under ledger keys with these fields."""
    return sum(
        sent.bytes
        for key, sent in zero.wire.ledger.rows().items()
        if all(getattr(key, field) == value for field, value in fields.items())
    )


def mean_losses(results: list[Any]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*(result[0] for result in results), strict=True)]


def close(state: dict[str, Tensor], wanted: dict[str, Tensor], relative: float) -> bool:
    """Whether every entry is within ``relative`` of its largest value."""
    assert state.keys() == wanted.keys()
    return all(
        (state[name] - value).abs().max().item() <= relative * max(1e-3, value.abs().max().item())
        for name, value in wanted.items()
        if value.numel()
    )
