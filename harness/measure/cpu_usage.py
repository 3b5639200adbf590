"""What the processors of a machine did over a time: for a process and its like, and for everybody else.

The system counts (``/proc/stat``, in ticks of 10 ms as a rule) who had each processor; where it does not,
nothing is known.  Of the machine's processors only those count that this process may use.
"""

from __future__ import annotations

import os
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final, Self

from harness.measure.machine import cores

STAT: Final = Path("/proc/stat")
_COLUMNS: Final = 8  # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user and nice


@dataclass(frozen=True, slots=True)
class Busy:
    """Processor seconds of all processors that a process may use.

    Attributes:
        user: of programs, niced ones too.
        system: of the kernel on behalf of programs.
        interrupts: of the kernel on behalf of devices and the network, on nobody's account.
        steal: that the machine's own host gave to others.
    """

    user: float
    system: float
    interrupts: float
    steal: float

    def __sub__(self, earlier: Self) -> Busy:
        """What came since; a count that the system corrected downwards adds nothing."""
        return Busy(
            *(max(now - then, 0.0) for now, then in zip(astuple(self), astuple(earlier), strict=True))
        )


@dataclass(frozen=True, slots=True)
class Spent:
    """One process's view of a time.

    Attributes:
        seconds: wall-clock.
        computed: processor seconds of this process, all its threads.
        processors: how many it may use.
        machine: what these did for everybody; None where it was not asked for or the system does not tell.
    """

    seconds: float
    computed: float
    processors: int
    machine: Busy | None


class ProcessorMeter:
    """Runs from its making on.

    Args:
        machine: whether to ask for the whole machine.
    """

    def __init__(self, *, machine: bool) -> None:
        self._machine = busy() if machine else None
        self._computed, self._begun = time.process_time(), time.perf_counter()

    def spent(self) -> Spent:
        """What has been spent so far."""
        seconds, computed = time.perf_counter() - self._begun, time.process_time() - self._computed
        after = busy() if self._machine is not None else None
        found = None if after is None or self._machine is None else after - self._machine
        return Spent(seconds, computed, cores(), found)


def busy(stat: Path = STAT) -> Busy | None:
    """Processor seconds since the system began; None where it does not count them.

    Args:
        stat: what the system says, in the form of Linux.
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
        if (
            not name.startswith("cpu")
            or not number.isdecimal()
            or (ours is not None and int(number) not in ours)
        ):
            continue
        if len(counts) < _COLUMNS or not all(count.isdecimal() for count in counts[:_COLUMNS]):
            return None
        total = [sum(pair) for pair in zip(total, map(int, counts[:_COLUMNS]), strict=True)]
    if not any(total):  # some sandboxes have the file, and zeros in it
        return None
    user, nice, system, _, _, irq, softirq, steal = (count * tick for count in total)
    return Busy(user + nice, system, irq + softirq, steal)
