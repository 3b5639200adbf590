"""Optimizers as users write them, for tests: what may step shards, and what may not."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer


class OneByOne(Optimizer):
    """Updates each tensor by itself, by :meth:`update`."""

    def __init__(self, params: Any, lr: float | Tensor = 0.01, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self.update(group, p, p.grad, self.state[p])

    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        raise NotImplementedError

    def stepped(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]


def moments(grad: Tensor, state: Any) -> Tensor:
    """Adam's direction."""
    mean = state.setdefault("mean", torch.zeros_like(grad)).lerp_(grad, 0.1)
    square = state.setdefault("square", torch.zeros_like(grad)).lerp_(grad**2, 0.1)
    return mean / (square.sqrt() + 1e-6)


# Elementwise ones


class Lion(OneByOne):
    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        mean = state.setdefault("mean", torch.zeros_like(p))
        p.mul_(1 - group["lr"] * 0.1).sub_(torch.sign(mean * 0.9 + grad * 0.1) * group["lr"])
        mean.lerp_(grad, 0.01)


class SignSGD(OneByOne):
    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        p.sub_(grad.sign() * group["lr"])


class HalvesGradients(torch.optim.SGD):
    """Changes gradients in place."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        super().step()


class ThroughData(OneByOne):
    """As before ``no_grad()``: writes through ``.data``."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for p in self.stepped():
            p.data.add_(p.grad.data, alpha=-0.01)  # type: ignore[union-attr]


class ScheduleFree(OneByOne):
    """Holds averages in the weights' place while it is evaluated."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr, trains=True, count=0)

    def swap(self, *, trains: bool) -> None:
        for group in self.param_groups:
            if group["trains"] != trains:
                group["trains"] = trains
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], 0.1 if trains else 1 - 1 / 0.9)

    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        if not group["trains"]:
            raise RuntimeError("call swap(trains=True) first")
        z = state.setdefault("z", p.clone())
        state["count"] = count = state.get("count", 0) + 1
        p.lerp_(z, 1 / count).add_(grad, alpha=group["lr"] * (0.9 * (1 - 1 / count) - 1))
        z.sub_(grad, alpha=group["lr"])


class Lookahead(Optimizer):
    """Holds another optimizer, and copies of the weights from its construction on."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.count = inner, 0
        self.param_groups, self.state = inner.param_groups, inner.state
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        if self.count % 3 == 0:
            for group, kept in zip(self.param_groups, self.slow, strict=True):
                for p, slow in zip(group["params"], kept, strict=True):
                    p.copy_(slow.lerp_(p, 0.5))


class StateById(OneByOne):
    """Has its state under ``id(p)`` from its construction on."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.means = {id(p): torch.zeros_like(p) for group in self.param_groups for p in group["params"]}

    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        p.sub_(self.means[id(p)].lerp_(grad, 0.1), alpha=group["lr"])


class StateInLists(OneByOne):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.tensors = [p for group in self.param_groups for p in group["params"]]
        self.means = [torch.zeros_like(p) for p in self.tensors]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, mean in zip(self.tensors, self.means, strict=True):
            if p.grad is not None:
                p.sub_(mean.lerp_(p.grad, 0.1), alpha=0.01)


class ByName(OneByOne):
    """Has a rate of each name's own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.02 if name == "0" else 0.01)


class OwnArguments(OneByOne):
    """Its constructor's arguments are attributes, not options."""

    def __init__(self, params: Any, rate: float, *, limit: float) -> None:
        super().__init__(params, rate)
        self.limit = limit

    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        p.sub_(grad.clamp(-self.limit, self.limit) * group["lr"])


class CountsForAll(OneByOne):
    """Counts steps in its class."""

    steps = 0

    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        type(self).steps += 1
        p.sub_(grad, alpha=group["lr"])


# Others


class Lamb(OneByOne):
    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        way = moments(grad, state)
        p.sub_(way * (p.norm() / way.norm()).clamp(0, 10) * group["lr"])


class Lars(OneByOne):
    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        p.sub_(grad * (group["lr"] * p.norm() / (grad.norm() + 1e-9)))


class NovoGrad(OneByOne):
    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        square = grad.square().sum()
        state["square"] = torch.lerp(state.get("square", square), square, 0.02)
        p.sub_(grad / state["square"].sqrt(), alpha=group["lr"])


class LargestOne(OneByOne):
    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        p.sub_(grad / grad.abs().max() * group["lr"])


class Centralised(OneByOne):
    """Gradient centralisation, of tensors with more than ``above`` dimensions."""

    above = 1

    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        if grad.dim() > self.above:
            grad = grad - grad.mean(tuple(range(1, grad.dim())), keepdim=True)
        p.sub_(grad, alpha=group["lr"])


class CentralisedConvolutions(Centralised):
    above = 3


class DecaysMatrices(OneByOne):
    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        p.mul_(1 - group["lr"] * 0.1 * (p.dim() > 1)).sub_(grad, alpha=group["lr"])


class Clips(OneByOne):
    """By the norm of all gradients that it sees."""

    def __init__(self, params: Any, most: float) -> None:
        super().__init__(params)
        self.most = most

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = torch.stack([p.grad.norm() for p in self.stepped() if p.grad is not None]).norm()
        for p in self.stepped():
            p.sub_(p.grad * (self.most / norm).clamp(max=1.0) * 0.01)


class MeanOverAll(OneByOne):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        mean = torch.stack([p.grad.abs().mean() for p in self.stepped() if p.grad is not None]).mean()
        for p in self.stepped():
            p.sub_(p.grad / mean * 0.01)


class Blockwise(OneByOne):
    """Holds its mean in 8 bits, with a scale for each block, if it is large, as bitsandbytes does."""

    def __init__(self, params: Any, block: int, smallest: int = 0) -> None:
        super().__init__(params)
        self.block, self.smallest = block, smallest

    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        mean = state.get("mean", torch.zeros_like(p)).lerp(grad, 0.1)
        p.sub_(mean, alpha=group["lr"])
        state["mean"] = mean
        if p.numel() >= self.smallest:
            blocks = nn.functional.pad(mean.flatten(), (0, -p.numel() % self.block)).view(-1, self.block)
            scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
            state["mean"] = ((blocks / scale).round() * scale).flatten()[: p.numel()].view_as(p)


class Langevin(OneByOne):
    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        p.sub_(grad, alpha=group["lr"]).add_(torch.randn_like(p), alpha=0.01)


class OwnNoise(OneByOne):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.draw = torch.Generator().manual_seed(0)

    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        p.sub_(grad, alpha=group["lr"]).add_(torch.randn(p.shape, generator=self.draw), alpha=0.01)


class RandomRate(OneByOne):
    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        p.sub_(grad, alpha=group["lr"] * random.random())


class Prodigy(OneByOne):
    """Finds its rate, from 1e-6 on, by sums over all weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 1.0, rate=1e-6, above=0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first, below = self.param_groups[0], 0.0
        rate, above = first["rate"], first["above"]
        for p in self.stepped():
            state = self.state[p]
            start = state.setdefault("start", p.clone())
            above += rate * float((p.grad * (start - p)).sum())  # type: ignore[operator]
            total = state.setdefault("sum", torch.zeros_like(p)).add_(p.grad, alpha=rate)
            below += float(total.abs().sum())
        first["above"], first["rate"] = above, max(rate, above / below)
        for p in self.stepped():
            p.sub_(moments(p.grad, self.state[p]), alpha=first["rate"])  # type: ignore[arg-type]


class SAM(OneByOne):
    """Takes the gradient a step of ``rho`` up, in a closure, for another optimizer."""

    def __init__(self, params: Any, rho: float = 0.05, lr: float = 0.01) -> None:
        super().__init__(params, lr, rho=rho)
        self.inner = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            raise ValueError("a closure is needed")
        norm = torch.stack([p.grad.norm() for p in self.stepped() if p.grad is not None]).norm()
        before = [(p, p.clone()) for p in self.stepped()]
        for p, _ in before:
            p.add_(p.grad * 0.05 / norm)
        with torch.enable_grad():
            closure()
        for p, values in before:
            p.copy_(values)
        self.inner.step()


class DoesNothing(OneByOne):
    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        pass


class Raises(OneByOne):
    def update(self, group: Any, p: Tensor, grad: Tensor, state: Any) -> None:
        raise ValueError("no curvature was given")


class HasALock(Lion):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.lock = threading.Lock()
