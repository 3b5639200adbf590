"""Times each step and its parts, and how long each part waited for messages; keeps the raw values."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from harness.records.trial_record import Step
from harness.witness.witness_clock import WitnessClock

_DIGITS: Final = 6  # decimals of seconds that are kept: scheduling disturbs a reading by over a microsecond
Part = Literal["generate", "score", "forward", "backward", "optimizer"]


def now(device: torch.device) -> float:
    """Wait until the device has finished its work, and return ``time.perf_counter()``, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True, slots=True, eq=False)
class _Instant:
    """A point in time on the host and, with a GPU, a CUDA event that was recorded in the current stream at this time.

    The GPU reaches the event when it has done all work that the host enqueued before.
    """

    host: float  # time.perf_counter()
    event: torch.cuda.Event | None

    @classmethod
    def take(cls, device: torch.device) -> _Instant:
        """Return the current point in time, without waiting for the device."""
        event = None
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
        return cls(time.perf_counter(), event)

    def since(self, earlier: _Instant) -> float:
        """Return the seconds from ``earlier`` to this instant.

        With a GPU, these are the seconds between the two CUDA events.  The GPU must have reached both events already.
        """
        if self.event is None or earlier.event is None:
            return self.host - earlier.host
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class StepClock:
    """Times each step and its parts, in wall-clock and CPU seconds.

    On a GPU, the parts of a step (such as ``forward``) are timed by CUDA events in the current stream, which are read
    at the end of the step.  The host therefore does not wait for the GPU between two parts.  The host does wait for the
    GPU at the beginning and end of each step.  The times of beginning and end are read from :attr:`witness`, a second
    clock that also measures the time between steps.

    Args:
        mark_exposed: A function without arguments, by which the clock measures waits for messages.  A call of it marks
            the present moment, and returns a second function.  The second function returns the seconds that the rank
            had waited for messages until the marked moment.  The clock calls ``mark_exposed`` at the beginning and end
            of each part, and the second functions at the end of the step.  ``mark_exposed`` returns None if the waits
            are not known, as when DDP, FSDP2 or DeepSpeed sends the messages itself.  An example is
            :meth:`impl.comm.wire.Wire.mark_exposed`.
        device: Device on which the steps run; by default the CPU.
    """

    def __init__(
        self,
        mark_exposed: Callable[[], Callable[[], float] | None] = lambda: None,
        device: torch.device | None = None,
    ) -> None:
        self._mark_exposed, self._device = mark_exposed, device or torch.device("cpu")
        self._parts: list[_Timed] = []  # parts of the current step, in order
        self._begun = self._computed = 0.0
        self.steps: list[Step] = []
        self.witness = WitnessClock(device)
        # If set, called at the end of each part with the part's name and the time at which the part began.
        self.note: Callable[[str, float], None] | None = None

    def begin(self) -> None:
        """Begin a step."""
        self._parts = []
        self._begun = self.witness.turn("step")
        # CPU time is read after the wall clock here, and before it in end(), so that no CPU time outside of the step
        # is counted.
        self._computed = time.process_time()

    @contextlib.contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Time the body of ``with`` as the part ``name`` of the step; if a part is repeated, its times are added up."""
        start, waited = _Instant.take(self._device), self._mark_exposed()
        yield
        end = _Instant.take(self._device)
        if self.note is not None:
            self.note(name, start.host)
        self._parts.append(_Timed(name, start, end, waited, self._mark_exposed()))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the body of ``with`` out of the step's time."""
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
        total = self.witness.turn("between") - self._begun  # waits for a GPU, whose events can then be read
        seconds = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
        waited: dict[str, float] = {}
        for part in self._parts:
            seconds[part.name] = seconds.get(part.name, 0.0) + part.end.since(part.start)
            if part.waited_before is not None and part.waited_after is not None:
                exposed = part.waited_after() - part.waited_before()
                waited[part.name] = waited.get(part.name, 0.0) + exposed
        seconds |= {"total": total, "cpu_seconds": computed}
        exposures = {
            f"exposed_{part}": waited.get(part) for part in ("forward", "backward", "generate", "score")
        }
        times: dict[str, Any] = {name: t and round(t, _DIGITS) for name, t in (seconds | exposures).items()}
        loss = float(f"{loss:.9g}")  # nine digits distinguish any two fp32 numbers
        self.steps.append(Step(index=index, warmup=warmup, loss=loss, gradient_norm=norm, **times))


@dataclass(frozen=True, slots=True, eq=False)
class _Timed:
    """A part of a step.

    With a GPU, the seconds of the part are known only when the GPU has reached the part's end.
    """

    name: Part
    start: _Instant
    end: _Instant
    waited_before: Callable[[], float] | None
    waited_after: Callable[[], float] | None
