"""Applies fp16's loss scale, clips by the global norm, and has the optimizers step.

With a loss scale the mean gradients are unscaled where they are smallest, in the fp32 shards, and a step
whose gradients overflowed is skipped on all ranks.  Whether they did is read off their global norm, which all
ranks compute from the same bits; a NaN or infinity reaches it through every codec.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from impl.engine.gradient_clipping import clip_factor
from impl.errors import ZeroError
from impl.plan.policy import LARGEST_SCALE, LossScale


class Gradients(Protocol):
    """The mean gradients of an engine: :class:`impl.engine.engine.Zero`."""

    def grad_norm(self, norm_type: float) -> Tensor:
        """() their global norm."""

    def scale_gradients(self, factor: float) -> None:
        """Multiply them."""

    def forget_overflow(self) -> None:
        """Drop what codecs carry of them."""


class Stepped(NamedTuple):
    """What became of a step.

    Attributes:
        norm: global norm of the unscaled mean gradient, before clipping; None if nothing asked for it.
        done: whether the optimizer stepped; False after an overflow, on all ranks alike.
    """

    norm: float | None
    done: bool


class LossScaleError(ArithmeticError):
    """Gradients overflow at the smallest loss scale: the scale is not what is wrong."""


class LossScaler:
    """The loss scale of one run.

    Args:
        setting: how it begins and moves; None keeps it at 1 and steps whatever comes.

    Attributes:
        skipped: steps that overflowed so far.
        reached: whether the backward pass that is under way began at a loss that :meth:`scaled` gave.
    """

    def __init__(self, setting: LossScale | None) -> None:
        self._setting = setting
        self.scale = 1.0 if setting is None else setting.initial
        self.skipped = 0
        self._since = 0  # steps since the scale last changed
        self.reached = False
        self._unscaled = 0  # backward passes since the last step

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss whose backward pass is to be run."""
        if self.scale == 1.0:
            return loss
        scaled = loss * self.scale
        if scaled.requires_grad:
            scaled.register_hook(self._reach)  # type: ignore[no-untyped-call]
        return scaled

    def _reach(self, _: Tensor) -> None:
        self.reached = True

    def passed(self) -> None:
        """A backward pass is over."""
        self._unscaled += self.scale != 1.0 and not self.reached
        self.reached = False

    def forget(self) -> None:
        """The gradients of all passes since the last step are not used."""
        self._unscaled, self.reached = 0, False

    def step(
        self,
        zero: Gradients,
        optimizers: Sequence[torch.optim.Optimizer],
        max_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> Stepped:
        """Unscale, clip, and step, or skip the step after an overflow; all ranks must call it.

        Without a loss scale nothing is skipped: a norm that is not finite makes clipped gradients NaN.

        Args:
            zero: the engine.
            optimizers: over its masters, all that step together.
            max_norm: largest global norm; None does not clip.
            norm_type: which norm, as :meth:`impl.engine.engine.Zero.grad_norm` takes it.

        Raises:
            LossScaleError: for an overflow at the smallest scale of a dynamic one.
            ZeroError: for gradients of losses that were not scaled: the scale would divide them too.
        """
        if self._unscaled:
            raise ZeroError(
                f"step() after {self._unscaled} backward passes whose loss was not scaled: it would divide "
                f"their gradients by the loss scale of {self.scale:g}; run "
                "zero.scaler.scaled(loss).backward() (model.zero_grad() drops these)"
            )
        if self._setting is None and max_norm is None:
            _step(optimizers)
            return Stepped(None, done=True)
        norm = float(zero.grad_norm(norm_type)) / self.scale
        if not math.isfinite(norm):
            zero.forget_overflow()
            if self._setting is not None:
                self._overflowed(self._setting)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                return Stepped(norm, done=False)
        factor = 1.0 / self.scale
        if max_norm is not None:
            factor *= float(clip_factor(torch.tensor(norm, dtype=torch.float64), max_norm))
        if factor != 1.0:
            zero.scale_gradients(factor)
        _step(optimizers)
        self._since += 1
        if self._setting is not None and self._setting.window and self._since >= self._setting.window:
            self.scale, self._since = min(self.scale * 2.0, LARGEST_SCALE), 0
        return Stepped(norm, done=True)

    def _overflowed(self, setting: LossScale) -> None:
        self.skipped += 1
        if setting.window:  # a fixed scale stays, and every overflow is a skipped step
            if self.scale <= setting.least:
                raise LossScaleError(
                    f"gradients overflow at a loss scale of {self.scale:g}, the smallest allowed"
                )
            self.scale, self._since = max(self.scale / 2.0, setting.least), 0

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on with."""
        return {"scale": self.scale, "skipped": self.skipped, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self.scale, self.skipped = float(state["scale"]), int(state["skipped"])
        self._since = int(state["since"])


def _step(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
