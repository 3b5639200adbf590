"""Divides all the time of a rank's thread into laps without gaps, as a check on the recorded times of steps.

:class:`~harness.measure.step_clock.StepClock` records how long a step took.  The clock of this module accounts for all
time since it was created: each reading ends one lap and begins the next, so no time is left out or counted twice.
There are four kinds of laps:

- ``step``: a step, without its checks;
- ``check``: a check in a step or just after it, which sends no messages;
- ``apart``: validations and comparisons between steps, which send messages;
- ``between``: everything else.

For each lap the clock computes the wall-clock seconds.  It also computes for how many of these seconds the thread ran,
slept while it waited for something, or was ready to run but had no CPU.  It adds these up for each step and for each
kind of lap.  Checks judge the time outside steps by the seconds in which the thread ran or slept, since a thread is not
to blame if it had no CPU.

If torch computes with several threads, the measured thread also waits for the other compute threads, which may lack a
CPU.  In this case, the seconds in which the process's other threads run, or are ready to run, are not counted as sleep
of the measured thread.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch

from harness.records.training_faults import Spent

Kind = Literal["step", "check", "apart", "between"]
SCHEDULED: Final = Path("/proc/thread-self/schedstat")  # the kernel's counts of how a thread was scheduled
_THREADS: Final = Path("/proc/self/task")  # has a folder for each thread, named by its id
_THREAD: Final = getattr(resource, "RUSAGE_THREAD", None)  # Linux alone counts by thread


class _Reading(NamedTuple):
    """A thread's counters at one moment: the time, and how long the thread has run and has waited for a CPU.

    The counter of waits for a CPU is read twice, before and after the others, so ``stalled`` has two values.
    """

    seconds: float  # time.perf_counter()
    ran: float  # seconds that the thread has run on a CPU
    # Seconds that the thread has waited for a CPU, read before and after the other values; None if unknown.
    stalled: tuple[float, float] | None
    sleeps: int | None  # number of times that the thread gave its CPU up; None if not counted
    # Seconds that the process's other threads have run or waited for a CPU, read before and after the other values.
    # Both are 0 if torch computes with one thread.
    others: tuple[float, float]


class WitnessClock:
    """Divides the time of the thread that constructs the clock into laps, and adds up the laps of each kind.

    The kinds of laps are ``step``, ``check``, ``apart`` and ``between``.  The first lap is of kind ``between``.  The
    attribute ``spent`` has the seconds of each kind, and ``steps`` has those of each step.

    Args:
        device: Each reading waits until this device has finished its work.  None is the CPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._counts: int | None = None  # the kernel's counts of this thread, an open file
        with contextlib.suppress(OSError):
            self._counts = os.open(SCHEDULED, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._counts)
        self._thread = threading.get_native_id()
        # By the ids of the process's other threads: an open file with the kernel's counts, and the latest seconds.
        self._other_counts: dict[str, int] = {}
        self._other_seconds: dict[str, float] = {}
        weakref.finalize(self, _close, self._other_counts)
        self.kind: Kind = "between"
        self.spent: dict[Kind, Spent] = {kind: Spent() for kind in ("step", "check", "apart", "between")}
        self.steps: list[Spent] = []  # of each step, in order
        self._last = self._read()

    @property
    def counts_sleep(self) -> bool:
        """Whether the kernel tells a thread that sleeps apart from a thread that is ready to run but has no CPU."""
        return self._counts is not None

    def turn(self, kind: Kind) -> float:
        """End the present lap, and begin a lap of kind ``kind``.

        If the present lap is of kind ``between``, a lap of kind ``step`` begins a new step.  After a lap of any other
        kind, a lap of kind ``step`` continues the latest step.

        Returns:
            The moment at which the lap before this call ended and the new lap began, in seconds of
            ``time.perf_counter()``.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now, last, before = self._read(), self._last, self.kind
        if before == "between" and kind == "step":
            self.steps.append(Spent())
        lap = _lap(last, now)
        self.spent[before] += lap
        if before == "step":
            self.steps[-1] += lap
        self._last, self.kind = now, kind
        return now.seconds

    @contextlib.contextmanager
    def lap(self, kind: Kind) -> Iterator[None]:
        """Make the body of ``with`` a lap of kind ``kind``; then begin a lap of the kind that it interrupted."""
        before = self.kind
        self.turn(kind)
        yield
        self.turn(before)

    def _read(self) -> _Reading:
        others, before = self._others(), self._stalled()
        sleeps = None if _THREAD is None else resource.getrusage(_THREAD).ru_nvcsw
        ran, seconds = time.thread_time(), time.perf_counter()
        after = self._stalled()
        stalled = None if before is None or after is None else (before, after)
        return _Reading(seconds, ran, stalled, sleeps, (others, self._others()))

    def _stalled(self) -> float | None:
        """Return the seconds that the thread has waited for a CPU while it could run; None if not counted."""
        if self._counts is None:
            return None
        try:
            return int(os.pread(self._counts, 100, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return None

    def _others(self) -> float:
        """Return the seconds that the process's other threads have run or waited for a CPU; 0 with one compute thread.

        Threads that have ended are included, up to their latest reading.
        """
        if self._counts is None or torch.get_num_threads() == 1:
            return 0.0
        for thread in os.listdir(_THREADS):  # noqa: PTH208  # pathlib takes several times as long
            with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
                if int(thread) == self._thread:
                    continue
                if thread not in self._other_counts:
                    counts = os.open(f"{_THREADS}/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
                    self._other_counts[thread] = counts
                ran, stalled = os.pread(self._other_counts[thread], 100, 0).split()[:2]
                self._other_seconds[thread] = (int(ran) + int(stalled)) / 1e9
        return math.fsum(self._other_seconds.values())


def _close(files: dict[str, int]) -> None:
    for file in files.values():
        os.close(file)


def _lap(begin: _Reading, end: _Reading) -> Spent:
    """Return the seconds between two readings, and for how many of them the thread ran, slept and waited for a CPU.

    A reading reads its counters one after the other, and the thread may lose its CPU in between.  Therefore the seconds
    of waiting are an upper bound: the counter of waits after the second reading, minus this counter before the first.
    The seconds of sleep are the time in which the thread neither ran nor waited for a CPU, less the time in which other
    threads of the process ran or waited for a CPU.  They are a lower bound.  The seconds of sleep are 0 if the thread
    never gave up its CPU of its own accord.  If waits are not counted, waiting and sleep are both 0.
    """
    seconds, ran = end.seconds - begin.seconds, end.ran - begin.ran
    if begin.stalled is None or end.stalled is None:
        return Spent(seconds, ran, 0.0, 0.0)
    stalled = end.stalled[1] - begin.stalled[0]
    awake = begin.sleeps is not None and end.sleeps == begin.sleeps
    others = end.others[1] - begin.others[0]
    return Spent(seconds, ran, 0.0 if awake else max(seconds - ran - stalled - others, 0.0), stalled)
