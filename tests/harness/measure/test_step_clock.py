"""The clock of a step counts wall-clock and CPU seconds."""

from __future__ import annotations

import threading
import time

import torch

from harness.measure.step_clock import StepClock


def compute(seconds: float) -> None:
    """Keep a processor busy until this thread has had ``seconds`` of it."""
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


def test_processor_seconds_are_those_of_all_threads_of_the_step_alone() -> None:
    """Computing in another thread counts; sleeping in a step, and computing between steps, do not."""
    clock = StepClock(lambda: None, torch.device("cpu"))
    before = time.process_time()
    for index in range(2):
        compute(0.05)
        clock.begin()
        with clock.part("forward"):
            compute(0.02)
        helper = threading.Thread(target=compute, args=(0.03,))
        helper.start()
        with clock.part("backward"):
            time.sleep(0.05)
        helper.join()
        clock.end(index=index, warmup=False, loss=0.0, norm=None)
    elsewhere = 2 * 0.05
    by_step = [step.cpu_seconds for step in clock.steps]
    assert all(seconds is not None and seconds >= 0.05 for seconds in by_step)
    assert sum(seconds or 0.0 for seconds in by_step) <= time.process_time() - before - elsewhere
