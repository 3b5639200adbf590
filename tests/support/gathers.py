"""Gathers of one's own for tests: right ones, and wrong ones that each break one claim."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import torch
from torch import Tensor

from impl.unit.own_gather import GatherMethod


class Whole(GatherMethod):
    """The weights, by sending everything."""

    laws = ("exact", "same_on_all_ranks", "zero")

    def start(self, weights: Tensor, gather: Any) -> None:
        self.sent = self.wire.all_gather(weights.to(self.wire.dtype))

    def finish(self) -> Tensor:
        return self.unit.whole(self.sent.wait())

    def bytes(self, unit: Any, topology: Any, gather: Any) -> Any:
        return [("all_gather", "world", unit.shard * (self.wire.dtype or torch.float32).itemsize)]


class Hops(Whole):
    """The weights in fp32, between nodes in start() and inside them by rings in advance(); it declares no bytes."""

    bytes = None  # type: ignore[assignment]
    laws = ("exact",)

    def start(self, weights: Tensor, gather: Any) -> None:
        self.between, self.rows = self.wire.all_gather(weights, "node"), None

    def advance(self) -> None:
        if self.rows is None:
            part, me, size = self.between.wait(), self.wire.index("local"), self.wire.size("local")
            rows = [part] * size
            for step in range(1, size):
                rows[(me - step) % size] = part = self.wire.shift(part, "local").wait()
            self.rows = torch.stack(rows, 1).flatten(0, 1)  # of all ranks, in rank order

    def finish(self) -> Tensor:
        self.advance()
        assert self.rows is not None
        return self.unit.whole(self.rows).to(self.wire.dtype)


class Kept(Whole):
    """Sends nothing while the weights have not changed, and whole weights again every second step."""

    laws = ("exact", "same_on_all_ranks", "zero")

    def __init__(self, unit: Any, wire: Any) -> None:
        super().__init__(unit, wire)
        self.kept["whole"] = torch.zeros(unit.numel, dtype=wire.dtype, device=wire.device)

    def start(self, weights: Tensor, gather: Any) -> None:
        self.sent = None  # type: ignore[assignment]
        if gather.change != "unchanged":
            super().start(weights, gather)
            self.twice = self.wire.all_gather(weights) if gather.steps % 2 == 0 else None

    def finish(self) -> Tensor:
        if self.sent is not None:
            self.kept["whole"] = super().finish()
            if self.twice is not None:
                self.kept["whole"] = self.unit.whole(self.twice.wait()).to(self.wire.dtype)
        return self.kept["whole"]

    def bytes(self, unit: Any, topology: Any, gather: Any) -> Any:
        if gather.change == "unchanged":
            return []
        twice = [("all_gather", "world", 4 * unit.shard)] if gather.steps % 2 == 0 else []
        return super().bytes(unit, topology, gather) + twice


class Dither(Whole):
    """Unbiased: every rank rounds its shard to a multiple of a step, up or down at random."""

    laws = ("unbiased",)
    bias = 0.0

    def __init__(self, unit: Any, wire: Any) -> None:
        super().__init__(unit, wire)
        self.kept["random"] = self.kept["last"] = torch.Generator().manual_seed(wire.rank).get_state()

    def start(self, weights: Tensor, gather: Any) -> None:
        draw = torch.Generator()
        if gather.change != "unchanged":
            self.kept["last"] = self.kept["random"]
        draw.set_state(self.kept["last"])
        step = weights.abs().max() / 4 + 1e-30
        up = torch.rand(weights.shape, generator=draw) + self.bias
        self.kept["random"] = draw.get_state()
        rounded = (weights / step + up).floor() * step
        super().start(rounded, gather)

    bytes = None  # type: ignore[assignment]


class Biased(Dither):
    laws = ("unbiased",)
    bias = 0.4


class Infinite(Whole):
    def finish(self) -> Tensor:
        return super().finish() + torch.inf


class Restless(Whole):
    """Finds other weights in every gather, changed or not."""

    def __init__(self, unit: Any, wire: Any) -> None:
        super().__init__(unit, wire)
        self.kept["count"] = torch.zeros((), dtype=torch.int64)

    def finish(self) -> Tensor:
        self.kept["count"] = self.kept["count"] + 1
        return super().finish() + self.kept["count"]


class Counting(Whole):
    """Its weights depend on how often it may advance."""

    count = 0

    def advance(self) -> None:
        self.count += 1

    def finish(self) -> Tensor:
        return super().finish() * (1 + self.count)


class Forgetful(Whole):
    """Has a state that it does not return."""

    def __init__(self, unit: Any, wire: Any) -> None:
        super().__init__(unit, wire)
        self.last = torch.zeros(unit.numel, dtype=wire.dtype)

    def finish(self) -> Tensor:
        self.last = super().finish() + self.last
        return self.last


@functools.cache
def _common(_: int) -> dict[int, Tensor]:
    return {}


class Shared(Whole):
    """Units of one rank add to one tensor."""

    def finish(self) -> Tensor:
        whole, held = super().finish(), _common(threading.get_ident())
        held[0] = held.get(0, torch.zeros(())) + whole.sum()
        return (whole + held[0]).to(whole.dtype)


class Ready(Whole):
    """Finishes without a start."""

    def finish(self) -> Tensor:
        if not hasattr(self, "sent"):
            return torch.zeros(self.unit.numel, dtype=self.wire.dtype)
        return super().finish()


class Understating(Whole):
    """Declares that backward sends nothing."""

    def bytes(self, unit: Any, topology: Any, gather: Any) -> Any:
        return [] if gather.phase == "backward" else super().bytes(unit, topology, gather)


class Selfish(Whole):
    """Each rank finds other weights."""

    def finish(self) -> Tensor:
        return super().finish() + self.wire.rank / 8


class Never(Whole):
    def finish(self) -> Tensor:
        return super().finish() + 1


class Halved(Whole):
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


class Unsettled(Halved):
    laws = ("settles",)

    @staticmethod
    def settles_after(unit: Any) -> int:
        return 3


class Stuck(Whole):
    """One rank computes for some seconds, and sends nothing meanwhile."""

    def __init__(self, unit: Any, wire: Any, seconds: float = 2.5) -> None:
        super().__init__(unit, wire)
        self.seconds = seconds

    def start(self, weights: Tensor, gather: Any) -> None:
        if self.wire.rank == self.wire.size() - 1:
            time.sleep(self.seconds)
        super().start(weights, gather)


WRONG = {
    "whole": Infinite, "advance": Counting, "resume": Forgetful, "repeat": Restless, "apart": Shared,
    "unstarted": Ready, "bytes": Understating, "same_on_all_ranks": Selfish, "zero": Never, "exact": Halved,
    "exact_at_full_rank": Unfull, "bound": Beyond, "unbiased": Biased, "settles": Unsettled,
}  # fmt: skip
"""By claim, a class that breaks it."""
