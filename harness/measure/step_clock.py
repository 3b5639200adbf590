"""Times the parts of a step, and the waits for communication in them; keeps raw values."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

import torch

from harness.records.trial_record import Step

_DIGITS: Final = 6  # after the point: what scheduling adds to a reading is above a microsecond
Part = Literal["generate", "score", "forward", "backward", "optimizer"]


def now(device: torch.device) -> float:
    """Seconds of the clock once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class StepClock:
    """Times each step by part, with CPU seconds; ``exposed`` returns seconds waited for messages, or None."""

    def __init__(
        self, exposed: Callable[[], float | None] = lambda: None, device: torch.device | None = None
    ) -> None:
        self._exposed, self._device = exposed, device or torch.device("cpu")
        self._seconds: dict[str, float] = {}
        self._waited: dict[str, float] = {}
        self._begun = self._computed = 0.0
        self.steps: list[Step] = []
        self.note: Callable[[str, float], None] | None = None  # called with each part and its beginning

    def begin(self) -> None:
        """Begin a step."""
        self._seconds = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
        self._waited = {}
        self._begun = now(self._device)
        self._computed = time.process_time()  # read inside the wall clock's readings, not around them

    @contextlib.contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Time the body as a part of the step; a part may occur several times and adds up."""
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
        """Leave the body's time out of the step."""
        wall, computed = now(self._device), time.process_time()
        yield
        self._computed += time.process_time() - computed
        self._begun += now(self._device) - wall

    def end(self, *, index: int, warmup: bool, loss: float, norm: float | None) -> None:
        """End the step and keep its times; ``index`` counts from the first warm-up step."""
        computed = time.process_time() - self._computed
        seconds = {"total": now(self._device) - self._begun, "cpu_seconds": computed, **self._seconds}
        waited = {
            f"exposed_{part}": self._waited.get(part) for part in ("forward", "backward", "generate", "score")
        }
        times: dict[str, Any] = {name: t and round(t, _DIGITS) for name, t in (seconds | waited).items()}
        loss = float(f"{loss:.9g}")  # as many digits as tell any two fp32 apart
        self.steps.append(Step(index=index, warmup=warmup, loss=loss, gradient_norm=norm, **times))
