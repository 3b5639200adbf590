"""Measures the CPU seconds of this process, and of all programs together on the CPUs that this process may use."""

from __future__ import annotations

import math
import os
import time
from typing import Final

import psutil

from harness.measure.machine import cores
from harness.records.trial_record import ProcessorUse

# For each kind of CPU seconds in a record, the counts of psutil that are added up.  The counts ``user`` and ``nice``
# already include the time of guests (virtual machines).
_COLUMNS: Final = {
    "user": ("user", "nice"), "system": ("system",), "interrupts": ("irq", "softirq"), "steal": ("steal",),
}  # fmt: skip


class ProcessorMeter:
    """Measures CPU usage since the meter was constructed."""

    def __init__(self) -> None:
        self._busy, self._ran, self._begun = busy_seconds(), time.process_time(), time.perf_counter()

    def use(self) -> ProcessorUse | None:
        """Return the CPU seconds since this meter was constructed.

        The field ``ranks`` has the CPU seconds of this process.  The fields ``user``, ``system``, ``interrupts`` and
        ``steal`` have the seconds of all programs together, on the CPUs that this process may use.  Returns None if
        the system does not count CPU seconds separately by these kinds.
        """
        now, ran, busy = time.perf_counter(), time.process_time(), busy_seconds()
        if self._busy is None or busy is None:
            return None
        # A difference may be negative, since the kernel sometimes corrects a count downwards.
        spent = {name: max(busy[name] - before, 0.0) for name, before in self._busy.items()}
        seconds = now - self._begun
        return ProcessorUse(seconds=seconds, processors=cores(), ranks=ran - self._ran, **spent)


def busy_seconds() -> dict[str, float] | None:
    """Return CPU seconds since boot by kind (``user``, ``system``, ``interrupts``, ``steal``).

    The seconds are summed over the CPUs that this process may use.  Returns None on systems that do not count them by
    kind.
    """
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
