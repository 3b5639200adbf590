"""Reductions of one's own for tests: right ones, and wrong ones that each break one claim."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import torch
from torch import Tensor

from impl.unit.own_reduction import ReductionMethod


class Mean(ReductionMethod):
    """The mean, by sending everything."""

    laws = ("exact", "same_on_all_ranks", "zero")

    def start(self, gradient: Tensor) -> None:
        self.sent = self.wire.all_to_all(self.unit.rows(gradient, self.wire.size()))

    def finish(self) -> Tensor:
        return self.sent.wait().mean(0)

    def bytes(self, unit: Any, topology: Any) -> Any:
        return [("all_to_all", "world", 4 * unit.shard)]


class Hops(Mean):
    """The mean of a node's ranks, then of the nodes', around rings; it declares no bytes."""

    bytes = None  # type: ignore[assignment]
    laws = ("exact",)

    def start(self, gradient: Tensor) -> None:
        self.sums = gradient
        for axis in ("local", "node"):
            part = self.sums.clone()
            for _ in range(self.wire.size(axis) - 1):
                part = self.wire.shift(part, axis).wait()
                self.sums = self.sums + part

    def finish(self) -> Tensor:
        return self.sums[self.unit.own] / self.wire.size()


class Dither(Mean):
    """Unbiased: every rank rounds to a multiple of a step, up or down at random."""

    laws = ("unbiased", "bound")
    bias = 0.0

    def __init__(self, unit: Any, wire: Any) -> None:
        super().__init__(unit, wire)
        draw = torch.Generator().manual_seed(wire.rank)
        self.kept["random"] = draw.get_state()

    def start(self, gradient: Tensor) -> None:
        draw = torch.Generator()
        draw.set_state(self.kept["random"])
        step = gradient.abs().max() / 4 + 1e-30
        up = torch.rand(gradient.shape, generator=draw) + self.bias
        self.kept["random"] = draw.get_state()
        super().start((gradient / step + up).floor() * step)

    @staticmethod
    def error_bound(unit: Any) -> float:
        return float("inf")


class Biased(Dither):
    laws = ("unbiased",)
    bias = 0.4


class Infinite(Mean):
    def finish(self) -> Tensor:
        return super().finish() + torch.inf


class Counting(Mean):
    """Its mean depends on how often it may advance."""

    count = 0

    def advance(self) -> None:
        self.count += 1

    def finish(self) -> Tensor:
        return super().finish() * (1 + self.count)


class Forgetful(Mean):
    """Has a state that it does not return."""

    def __init__(self, unit: Any, wire: Any) -> None:
        super().__init__(unit, wire)
        self.last = torch.zeros(unit.shard)

    def finish(self) -> Tensor:
        self.last = super().finish() + self.last
        return self.last


@functools.cache
def _common(_: int) -> dict[int, Tensor]:
    return {}


class Shared(Mean):
    """Units of one rank add to one tensor."""

    def finish(self) -> Tensor:
        mean, held = super().finish(), _common(threading.get_ident())
        held[0] = held.get(0, torch.zeros(())) + mean.sum()
        return mean + held[0]


class Reusing(Mean):
    """Returns the same memory each time."""

    def __init__(self, unit: Any, wire: Any) -> None:
        super().__init__(unit, wire)
        self.out = torch.zeros(unit.shard)

    def finish(self) -> Tensor:
        return self.out.copy_(super().finish())


class Ready(Mean):
    """Finishes without a start."""

    def finish(self) -> Tensor:
        return super().finish() if hasattr(self, "sent") else torch.zeros(self.unit.shard)


class Understating(Mean):
    def bytes(self, unit: Any, topology: Any) -> Any:
        return [("all_to_all", "world", 4 * unit.shard + 16)]


class Selfish(Mean):
    """Each rank weighs its own gradient more."""

    def finish(self) -> Tensor:
        rows = self.sent.wait()
        return rows.mean(0) + rows[self.wire.rank] / 8


class Never(Mean):
    def finish(self) -> Tensor:
        return super().finish() + 1


class Halved(Mean):
    laws = ("exact",)

    def finish(self) -> Tensor:
        return super().finish() / 2


class Unfull(Halved):
    laws = ("exact_at_full_rank",)

    @staticmethod
    def full_rank(unit: Any) -> dict[str, Any]:
        return {}


class Beyond(Halved):
    laws = ("bound",)

    @staticmethod
    def error_bound(unit: Any) -> float:
        return 0.25


class Scaled(Mean):
    """Its mean depends on how it is sharded."""

    def finish(self) -> Tensor:
        return super().finish() * self.unit.shard


class Stuck(Mean):
    """One rank computes for some seconds, and sends nothing meanwhile."""

    def __init__(self, unit: Any, wire: Any, seconds: float = 2.5) -> None:
        super().__init__(unit, wire)
        self.seconds = seconds

    def start(self, gradient: Tensor) -> None:
        if self.wire.rank == self.wire.size() - 1:
            time.sleep(self.seconds)
        super().start(gradient)


class Untupled(Mean):
    def bytes(self, unit: Any, topology: Any) -> Any:
        return {"all_to_all": 4 * unit.shard}


class Needing(Mean):
    def __init__(self, unit: Any, wire: Any, *, share: float) -> None:
        super().__init__(unit, wire)


WRONG = {
    "mean": Infinite, "advance": Counting, "resume": Forgetful, "apart": Shared, "keep": Reusing, "unstarted": Ready,
    "bytes": Understating, "same_on_all_ranks": Selfish, "zero": Never, "exact": Halved, "exact_at_full_rank": Unfull,
    "bound": Beyond, "unbiased": Biased,
}  # fmt: skip
"""By claim, a class that breaks it."""
