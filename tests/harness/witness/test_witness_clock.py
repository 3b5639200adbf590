"""The witness clock accounts for all time of a thread, by what the thread did."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from harness.measure.step_clock import StepClock
from harness.witness import witness_clock
from harness.witness.witness_clock import SCHEDULED, WitnessClock
from tests.harness.measure.test_step_clock import compute


def test_laps_leave_no_time_out() -> None:
    """From the first reading to the last, the seconds of all kinds of laps add up to the time that passed."""
    clock = WitnessClock()
    begin = clock.turn("between")
    before = sum(spent.seconds for spent in clock.spent.values())
    for _ in range(3):
        clock.turn("step")
        with clock.lap("check"):
            compute(0.001)
        clock.turn("between")
    with clock.lap("apart"):
        time.sleep(0.01)
    passed = clock.turn("between") - begin
    assert abs(sum(spent.seconds for spent in clock.spent.values()) - before - passed) < 1e-9
    assert len(clock.steps) == 3
    assert clock.kind == "between"


def test_a_lap_has_what_the_thread_did_in_it() -> None:
    """Computing is in the seconds that it ran, and a pause in those that it slept; the two are in their own laps."""
    clock = WitnessClock()
    with clock.lap("step"):
        compute(0.05)
        with clock.lap("check"):
            time.sleep(0.05)
    step, check = clock.spent["step"], clock.spent["check"]
    assert 0.05 <= step.ran <= step.seconds
    assert check.ran < 0.04
    if SCHEDULED.exists():
        assert step.slept < 0.02
        assert 0.0 < check.slept <= check.seconds


@pytest.fixture
def compute_threads() -> Iterator[None]:
    """Restore torch's number of compute threads after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("compute_threads")
@pytest.mark.skipif(not SCHEDULED.exists(), reason="the kernel does not count how threads are scheduled")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_wait_for_another_compute_thread_is_no_sleep(threads: int) -> None:
    """With several compute threads, a thread may wait for another that computes, or lacks a CPU; only a wait in which
    no thread does anything is sleep.
    """
    torch.set_num_threads(threads)
    clock = WitnessClock()
    computed, ended = threading.Event(), threading.Event()

    def work() -> None:
        compute(0.2)
        computed.set()
        ended.wait()  # a compute thread stays for further work

    other = threading.Thread(target=work)
    with clock.lap("step"):
        other.start()
        computed.wait()
    with clock.lap("check"):
        time.sleep(0.2)
    ended.set()
    other.join()
    assert clock.spent["step"].seconds > 0.2
    assert (clock.spent["step"].slept > 0.1) == (threads == 1)
    assert clock.spent["check"].slept > 0.1


def test_without_the_kernels_counts_nothing_slept(tmp_path: Path) -> None:
    """Where the kernel does not count how long a thread waits for a CPU, a pause cannot be told from that."""
    with mock.patch.object(witness_clock, "SCHEDULED", tmp_path / "none"):
        clock = WitnessClock()
    assert not clock.counts_sleep
    with clock.lap("step"):
        time.sleep(0.01)
    assert clock.spent["step"].seconds >= 0.01
    assert clock.spent["step"].slept == 0.0


def test_a_step_is_as_long_as_its_witness_says() -> None:
    """A step's total is what the witness has for it, without the pause in it, to the rounding of its record."""
    clock = StepClock()
    for index in range(2):
        clock.begin()
        with clock.part("forward"):
            compute(0.002)
        with clock.paused():
            time.sleep(0.01)
        clock.end(index=index, warmup=False, loss=1.0, norm=None)
    for step, spent in zip(clock.steps, clock.witness.steps, strict=True):
        assert abs(step.total - spent.seconds) < 1e-6
        assert step.total < 0.01 + clock.witness.spent["step"].stalled + spent.ran
