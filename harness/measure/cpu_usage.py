"""CPU usage over an interval: of this process, and of the whole machine.

The machine's comes from ``/proc/stat``, usually in ticks of 10 ms, and is None where there is none.  Only
the CPUs that this process may use are counted.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from harness.measure.machine import cores

STAT: Final = Path("/proc/stat")
SCHEDULED: Final = Path("/proc/thread-self/schedstat")
_COLUMNS: Final = 8  # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user and nice


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU usage of one interval.

    Attributes:
        seconds: wall-clock.
        computed: CPU seconds of this process, all its threads.
        processors: CPUs that it may use.
        machine: what :func:`busy` counted meanwhile; None if not asked for or not available.
    """

    seconds: float
    computed: float
    processors: int
    machine: dict[str, float] | None


class ProcessorMeter:
    """Measures CPU usage from its construction on, if asked the whole machine's too."""

    def __init__(self, *, machine: bool) -> None:
        self._machine = busy() if machine else None
        self._computed, self._begun = time.process_time(), time.perf_counter()

    def spent(self) -> Spent:
        """The usage so far."""
        seconds, computed = time.perf_counter() - self._begun, time.process_time() - self._computed
        after = busy() if self._machine is not None else None
        found = None if after is None or self._machine is None else grown(after, self._machine)
        return Spent(seconds, computed, cores(), found)


def grown(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """The difference of two readings; a counter that the kernel corrected downwards counts as 0."""
    return {name: max(seconds - before[name], 0.0) for name, seconds in after.items()}


def busy(stat: Path = STAT) -> dict[str, float] | None:
    """Read the CPU seconds since boot of all CPUs that this process may use; None where they are not counted.

    ``user`` are programs', niced ones too, ``system`` the kernel's on their behalf, ``interrupts`` its
    own for devices and the network, charged to no process, and ``steal`` what the hypervisor gave to others.
    """
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
        tick = 1 / os.sysconf("SC_CLK_TCK")
    except (OSError, UnicodeDecodeError, ValueError):
        return None
    ours = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    total = [0] * _COLUMNS
    for line in lines:
        name, *counts = line.split()
        number = name.removeprefix("cpu")
        if name == number or not number.isdecimal() or (ours is not None and int(number) not in ours):
            continue
        if len(counts) < _COLUMNS or not all(count.isdecimal() for count in counts[:_COLUMNS]):
            return None
        total = [sum(pair) for pair in zip(total, map(int, counts[:_COLUMNS]), strict=True)]
    if not any(total):  # some sandboxes have the file, and zeros in it
        return None
    user, nice, system, _, _, irq, softirq, steal = (count * tick for count in total)
    return {"user": user + nice, "system": system, "interrupts": irq + softirq, "steal": steal}


class ThreadClock:
    """Measures from its construction on how long this thread took, and for how much of it it slept."""

    def __init__(self) -> None:
        self._begun, self._ran, self._waited = time.perf_counter(), time.thread_time(), _waited()

    def read(self) -> tuple[float, float | None]:
        """Wall-clock seconds, and those in which the thread neither ran nor waited for a CPU; None where the
        kernel does not count the latter.
        """
        seconds, ran, waited = time.perf_counter() - self._begun, time.thread_time() - self._ran, _waited()
        if waited is None or self._waited is None:
            return seconds, None
        return seconds, max(seconds - ran - (waited - self._waited), 0.0)


def _waited() -> float | None:
    """Seconds that this thread was ready so far and waited for a CPU; None where they are not counted."""
    try:
        return int(SCHEDULED.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
