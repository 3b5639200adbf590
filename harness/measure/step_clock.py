"""Times the parts of a step, with what was waited for communication; keeps raw values."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final, Literal

import torch

from harness.records.record import Step

_DIGITS: Final = 6  # after the point: what scheduling adds to a reading is above a microsecond
Part = Literal["generate", "score", "forward", "backward", "optimizer"]


class StepClock:
    """Times each step by part, with the CPU seconds of the process.

    ``exposed`` returns seconds waited for communication so far, or None; it is read at the edges of every
    part.
    """

    def __init__(self, exposed: Callable[[], float | None], device: torch.device) -> None:
        self._exposed, self._device = exposed, device
        self._seconds: dict[str, float] = {}
        self._waited: dict[str, float] = {}
        self._begun = self._computed = 0.0
        self.steps: list[Step] = []
        self._note: Callable[[str, float], None] | None = None

    def begin(self) -> None:
        """Begin a step."""
        self._seconds = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
        self._waited = {}
        self._begun = self._now()
        self._computed = time.process_time()  # read inside the wall clock's readings, not around them

    @contextlib.contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Time the body as a part of the step; a part may occur several times and adds up."""
        start = self._now()
        waited = self._exposed()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start
        if self._note is not None:
            self._note(name, start)
        after = self._exposed()
        if waited is not None and after is not None:
            self._waited[name] = self._waited.get(name, 0.0) + after - waited

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What the body takes is no part of the step."""
        wall, computed = self._now(), time.process_time()
        yield
        self._computed += time.process_time() - computed
        self._begun += self._now() - wall

    @contextlib.contextmanager
    def noted(self, note: Callable[[str, float], None]) -> Iterator[None]:
        """Inside, ``note`` is called after each part with its name and its begin on the clock."""
        self._note = note
        try:
            yield
        finally:
            self._note = None

    def end(self, *, index: int, warmup: bool, loss: float, norm: float | None) -> None:
        """End the step and return its times; ``index`` counts from the first warm-up step."""
        computed = time.process_time() - self._computed
        waited = {name: round(seconds, _DIGITS) for name, seconds in self._waited.items()}
        self.steps.append(
            Step(
                index=index,
                warmup=warmup,
                total=round(self._now() - self._begun, _DIGITS),
                exposed_forward=waited.get("forward"),
                exposed_backward=waited.get("backward"),
                exposed_generate=waited.get("generate"),
                exposed_score=waited.get("score"),
                loss=float(f"{loss:.9g}"),  # as many digits as tell any two fp32 apart
                gradient_norm=norm,
                cpu_seconds=round(computed, _DIGITS),
                **{name: round(seconds, _DIGITS) for name, seconds in self._seconds.items()},
            )
        )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
