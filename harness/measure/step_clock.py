"""Times the parts of each step, and how long each part waited for communication; keeps the raw values."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

import torch

from harness.measure.witness_clock import WitnessClock
from harness.records.trial_record import Step

_DIGITS: Final = 6  # decimals of seconds that are kept: scheduling disturbs a reading by over a microsecond
Part = Literal["generate", "score", "forward", "backward", "optimizer"]


def now(device: torch.device) -> float:
    """Wait until the device has finished its work, and return the time of the clock in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class StepClock:
    """Times each step and its parts, in wall-clock and CPU seconds.

    A step begins and ends at readings of ``witness``, which also says what lies between steps.

    Args:
        exposed: Returns the seconds waited for messages so far; None if they are not known, as for peers.
        device: Its work is waited for at each reading.
    """

    def __init__(
        self, exposed: Callable[[], float | None] = lambda: None, device: torch.device | None = None
    ) -> None:
        self._exposed, self._device = exposed, device or torch.device("cpu")
        self._seconds: dict[str, float] = {}
        self._waited: dict[str, float] = {}
        self._begun = self._computed = 0.0
        self.steps: list[Step] = []
        self.witness = WitnessClock(device)
        self.note: Callable[[str, float], None] | None = (
            None  # called at a part's end: its name, its beginning
        )

    def begin(self) -> None:
        """Begin a step."""
        self._seconds = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
        self._waited = {}
        self._begun = self.witness.turn("step")
        self._computed = time.process_time()  # read after the wall clock here, and before it in end()

    @contextlib.contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Time the body of ``with`` as a part of the step; times of a part that occurs repeatedly add up."""
        start = now(self._device)
        waited = self._exposed()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + now(self._device) - start
        if self.note is not None:
            self.note(name, start)
        after = self._exposed()
        if waited is not None and after is not None:
            self._waited[name] = self._waited.get(name, 0.0) + after - waited

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the body of ``with`` out of the step."""
        wall, computed = self.witness.turn("check"), time.process_time()
        yield
        self._computed += time.process_time() - computed
        self._begun += self.witness.turn("step") - wall

    def end(self, *, index: int, warmup: bool, loss: float, norm: float | None) -> None:
        """End the step and append it to ``steps``.

        Args:
            index: Number of the step, from 0 at the first warm-up step.
            warmup: Whether it is a warm-up step.
            loss: Mean loss of its batches.
            norm: Norm of the gradient before clipping; None if it was not computed.
        """
        computed = time.process_time() - self._computed
        total = self.witness.turn("between") - self._begun
        seconds = {"total": total, "cpu_seconds": computed, **self._seconds}
        waited = {
            f"exposed_{part}": self._waited.get(part) for part in ("forward", "backward", "generate", "score")
        }
        times: dict[str, Any] = {name: t and round(t, _DIGITS) for name, t in (seconds | waited).items()}
        loss = float(f"{loss:.9g}")  # nine digits distinguish any two fp32 numbers
        self.steps.append(Step(index=index, warmup=warmup, loss=loss, gradient_norm=norm, **times))
