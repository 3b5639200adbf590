"""CPU usage is computed from the system's counts."""

from __future__ import annotations

import os
from collections import namedtuple

import psutil
import pytest

from harness.measure.cpu_usage import ProcessorMeter, busy_seconds
from tests.harness.measure.test_step_clock import compute

Times = namedtuple("Times", "user nice system idle iowait irq softirq steal guest guest_nice")  # noqa: PYI024


def read(monkeypatch: pytest.MonkeyPatch, *times: tuple[float, ...]) -> dict[str, float] | None:
    """Busy seconds where the system counts ``times`` of its processors, from the first on."""
    monkeypatch.setattr(psutil, "cpu_times", lambda **_: times)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1}, raising=False)
    return busy_seconds()


def test_counts_of_this_process_processors_are_by_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Niced programs count as programs and soft interrupts as interrupts; idle time, guests and other CPUs do not
    count.
    """
    busy = read(monkeypatch, Times(*[1.0] * 10), Times(1.0, 0.2, 0.3, 40.0, 0.5, 0.06, 0.07, 0.8, 0.9, 0.1))
    assert busy == pytest.approx({"user": 1.2, "system": 0.3, "interrupts": 0.13, "steal": 0.8})


def test_what_the_system_does_not_count_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """If counts are zeros or lack columns, the result is None rather than a wrong number."""
    assert read(monkeypatch, Times(*[1.0] * 10), Times(*[0.0] * 10)) is None
    assert read(monkeypatch, (1.0,) * 4, (1.0,) * 4) is None
    assert read(monkeypatch, Times(*[1.0] * 10)) is None


def test_what_this_process_computes_is_in_what_the_machine_did() -> None:
    """Half a second of computing is in this process's seconds, and the machine's seconds are not less."""
    meter = ProcessorMeter()
    compute(0.5)
    use = meter.use()
    assert (use is None) == (busy_seconds() is None)
    if use is not None:
        assert 0.5 <= use.ranks <= use.seconds * use.processors
        assert use.user + use.system >= 0.8 * use.ranks  # ticks are samples
