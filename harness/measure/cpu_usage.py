"""Measures CPU usage: of this process, of the CPUs that it may use (from the kernel's counts), and of a thread."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Final

import psutil

from harness.measure.machine import cores
from harness.records.trial_record import ProcessorUse

SCHEDULED: Final = Path("/proc/thread-self/schedstat")
_COLUMNS: Final = {  # our names, and the counts of psutil that they add up; user and nice include guests
    "user": ("user", "nice"), "system": ("system",), "interrupts": ("irq", "softirq"), "steal": ("steal",),
}  # fmt: skip


class ProcessorMeter:
    """Measures CPU usage from the moment it is constructed."""

    def __init__(self) -> None:
        self._busy, self._ran, self._begun = busy_seconds(), time.process_time(), time.perf_counter()

    def use(self) -> ProcessorUse | None:
        """Return the CPU seconds so far; field ``ranks`` has only those of this process.

        Returns None on systems that do not count them.
        """
        now, ran, busy = time.perf_counter(), time.process_time(), busy_seconds()
        if self._busy is None or busy is None:
            return None
        # A difference may be negative, since the kernel sometimes corrects a count downwards.
        spent = {name: max(busy[name] - before, 0.0) for name, before in self._busy.items()}
        seconds = now - self._begun
        return ProcessorUse(seconds=seconds, processors=cores(), ranks=ran - self._ran, **spent)


def busy_seconds() -> dict[str, float] | None:
    """Return the CPU seconds since boot, summed over the CPUs that this process may use; None if not counted."""
    try:
        times = psutil.cpu_times(percpu=True)
    except (OSError, ValueError):
        return None
    numbers = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(times))
    cpus = [times[number] for number in numbers if number < len(times)]
    if not any(map(any, cpus)) or not hasattr(cpus[0], "steal"):  # some sandboxes report only zeros
        return None
    return {
        name: math.fsum(getattr(cpu, column) for cpu in cpus for column in columns)
        for name, columns in _COLUMNS.items()
    }


class ThreadClock:
    """Measures wall-clock time from its construction on, and for how much of it the thread slept."""

    def __init__(self) -> None:
        self._begun, self._ran, self._stalled = time.perf_counter(), time.thread_time(), stalled()

    def read(self) -> tuple[float, float | None]:
        """Return the wall-clock seconds and, of these, the seconds that the thread slept (None if not known)."""
        seconds, ran, now = time.perf_counter() - self._begun, time.thread_time() - self._ran, stalled()
        if now is None or self._stalled is None:
            return seconds, None
        return seconds, max(seconds - ran - (now - self._stalled), 0.0)


def stalled() -> float | None:
    """Return the seconds that this thread has waited for a CPU while it could run; None if not counted."""
    try:
        return int(SCHEDULED.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
