"""CPU usage over an interval: of this process, and, by the kernel's ticks, of the CPUs that it may use."""

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
_COLUMNS: Final = {  # of psutil; guests are in user and nice
    "user": ("user", "nice"), "system": ("system",), "interrupts": ("irq", "softirq"), "steal": ("steal",),
}  # fmt: skip


class ProcessorMeter:
    """Measures CPU usage from its construction on."""

    def __init__(self) -> None:
        self._busy, self._ran, self._begun = busy_seconds(), time.process_time(), time.perf_counter()

    def use(self) -> ProcessorUse | None:
        """The machine's so far, ``ranks`` of this process alone; None where the kernel does not count it."""
        now, ran, busy = time.perf_counter(), time.process_time(), busy_seconds()
        if self._busy is None or busy is None:
            return None
        # The kernel may correct a count downwards.
        spent = {name: max(busy[name] - before, 0.0) for name, before in self._busy.items()}
        seconds = now - self._begun
        return ProcessorUse(seconds=seconds, processors=cores(), ranks=ran - self._ran, **spent)


def busy_seconds() -> dict[str, float] | None:
    """CPU seconds since boot of all CPUs that this process may use; None where they are not counted."""
    try:
        times = psutil.cpu_times(percpu=True)
    except (OSError, ValueError):
        return None
    numbers = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(times))
    cpus = [times[number] for number in numbers if number < len(times)]
    if not any(map(any, cpus)) or not hasattr(cpus[0], "steal"):  # some sandboxes report zeros
        return None
    return {
        name: math.fsum(getattr(cpu, column) for cpu in cpus for column in columns)
        for name, columns in _COLUMNS.items()
    }


class ThreadClock:
    """Measures from its construction on how long this thread took, and how long of that it slept."""

    def __init__(self) -> None:
        self._begun, self._ran, self._waited = time.perf_counter(), time.thread_time(), _waited()

    def read(self) -> tuple[float, float | None]:
        """Wall-clock seconds, and those in which the thread slept; None if unknown."""
        seconds, ran, waited = time.perf_counter() - self._begun, time.thread_time() - self._ran, _waited()
        if waited is None or self._waited is None:
            return seconds, None
        return seconds, max(seconds - ran - (waited - self._waited), 0.0)


def _waited() -> float | None:
    """Seconds so far that this thread was ready and waited for a CPU; None where they are not counted."""
    try:
        return int(SCHEDULED.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
