"""Computes learning-rate schedules, which are a warm-up and then a decay, as a factor of the learning rate.

Pure: no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Decay = Literal["none", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A learning-rate schedule over ``steps`` steps, as the factor by which each step multiplies the learning rate.

    Steps s are counted from 0.  In a warm-up of w steps, the factor is ``start + (1 - start) (s + 1) / w``.

    After the warm-up, let ``p = (s + 1 - w) / (steps - w)``.  Without a decay the factor is 1.  With a linear decay it
    is ``floor + (1 - floor) (1 - p)``.  With a cosine decay it is ``floor + (1 - floor) (1 + cos(pi p)) / 2``.  With
    either decay, the factor is ``floor`` in the last step after the warm-up, and in every later step.

    These formulas hold with ``as_deepspeed=False``.  With ``as_deepspeed=True``, the schedule begins with the second
    step, as DeepSpeed's schedules do.  The first step has the factor ``start``, or 0 with a cosine decay.  In later
    steps, the formulas hold with the changes that the comment at the field lists.

    Raises ValueError: if ``warmup`` is negative; if ``warmup`` is larger than ``steps`` and there is a decay; or if
    ``start`` or ``floor`` is outside [0, 1].
    """

    steps: int  # number of steps of the whole schedule, warm-up included
    warmup: int = 0  # number of steps of the warm-up
    start: float = 0.0  # factor before the first step of the warm-up
    shape: Literal["linear", "log"] = (
        "linear"  # shape of the warm-up; ``log`` has an effect only with ``as_deepspeed``
    )
    decay: Decay = "none"  # shape of the decay after the warm-up
    floor: float = 0.0  # factor at the end of the decay
    # Whether steps are counted as in DeepSpeed, which applies a schedule only after the first step.  The first step has
    # the factor ``start``, or 0 with a cosine decay.  From the second step on, the formulas hold with two changes:
    # s is 0 in the second step, and in a warm-up or a linear decay ``s`` takes the place of ``s + 1``.
    as_deepspeed: bool = False

    def __post_init__(self) -> None:
        if not self.warmup >= 0 or (self.decay != "none" and self.warmup > self.steps):
            raise ValueError(
                f"warmup={self.warmup} is outside a schedule of {self.steps} steps: set warmup from 0 to {self.steps}"
            )
        if not (0 <= self.start <= 1 and 0 <= self.floor <= 1):
            raise ValueError(
                f"start={self.start:g} and floor={self.floor:g}: set both to numbers from 0 to 1"
            )

    def factor(self, step: int) -> float:
        """Returns the factor by which step number ``step``, counted from 0, multiplies the learning rate.

        The method can be given to ``torch.optim.lr_scheduler.LambdaLR``.
        """
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
