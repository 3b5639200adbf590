"""Computes learning-rate schedules (a warm-up, then a decay) as a factor of the optimizer's rate.  No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Decay = Literal["none", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The factor of an optimizer's learning rate in each of ``steps`` steps.

    Step s (counted from 0) of a warm-up of w steps has the factor ``start + (1 - start) (s + 1) / w``.  Then,
    with ``p = (s + 1 - w) / (steps - w)``, a linear decay has ``floor + (1 - floor) (1 - p)`` and a cosine
    decay ``floor + (1 - floor) (1 + cos(pi p)) / 2``, so that the last step, and every step after it, has
    ``floor``.  Without a decay these steps have the factor 1.

    Raises ValueError: for a negative warm-up, a warm-up longer than ``steps`` before a decay, or factors outside
    [0, 1].
    """

    steps: int  # of the whole schedule, warm-up included
    warmup: int = 0  # steps of the warm-up
    start: float = 0.0  # factor before the first step of the warm-up
    shape: Literal["linear", "log"] = (
        "linear"  # of the warm-up; ``log`` has an effect only with ``as_deepspeed``
    )
    decay: Decay = "none"  # shape of the decay after the warm-up
    floor: float = 0.0  # factor at the end of the decay
    # Whether steps are counted as in DeepSpeed, which applies a schedule only after the first step: that step has
    # the factor ``start``, or 0 with a cosine.  Steps of the schedule are counted from the second step, and a
    # warm-up or a linear decay uses ``s`` in place of ``s + 1`` in the formulas above.
    as_deepspeed: bool = False

    def __post_init__(self) -> None:
        if not self.warmup >= 0 or (self.decay != "none" and self.warmup > self.steps):
            raise ValueError(f"the warm-up has {self.warmup} steps: expected 0 to {self.steps}")
        if not (0 <= self.start <= 1 and 0 <= self.floor <= 1):
            raise ValueError(
                f"start = {self.start:g} and floor = {self.floor:g}: expected numbers from 0 to 1"
            )

    def factor(self, step: int) -> float:
        """Returns the factor of step ``step`` (from 0); suits ``torch.optim.lr_scheduler.LambdaLR``."""
        if self.as_deepspeed:
            return self._as_deepspeed(step - 1)
        if step < self.warmup:
            return self.start + (1 - self.start) * (step + 1) / self.warmup
        return self._decayed(step + 1 - self.warmup)

    def _as_deepspeed(self, iteration: int) -> float:
        if iteration < 0:
            return 0.0 if self.decay == "cosine" else self.start
        if iteration < self.warmup:
            share = iteration / self.warmup
            if self.shape == "log":
                share = math.log(iteration + 1) / math.log(self.warmup)
            return self.start + (1 - self.start) * share
        return self._decayed(iteration - self.warmup + (self.decay == "cosine"))

    def _decayed(self, done: int) -> float:
        share = min(1.0, done / max(1, self.steps - self.warmup))
        if self.decay == "none":
            return 1.0
        left = 1 - share if self.decay == "linear" else (1 + math.cos(math.pi * share)) / 2
        return self.floor + (1 - self.floor) * left
