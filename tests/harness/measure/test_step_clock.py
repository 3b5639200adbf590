"""The clock of a step counts wall-clock and CPU seconds."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.measure.step_clock import StepClock
from impl.comm.watchdog import Watchdog
from impl.policy.topology import Topology
from tests.support.simulated_stream import Stream


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


STEP: Any = (1, ("all_gather", "world", 4, 1, 16, "forward", "weights", "u", False), 0, "")


def test_a_gpus_parts_are_timed_without_holding_up_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for the device where a step begins and ends and around a pause, not between parts; seconds and
    exposed waits of each part are the stream's, and those of a step the host's without the pause.
    """
    stream, synchronised = Stream(), []

    def synchronise(device: torch.device) -> None:
        synchronised.append(device)
        stream.run()

    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronise)
    mesh: Any = SimpleNamespace(rank=0, topology=Topology(1, 1), store=lambda: None, counting="")
    watchdog, gpu = Watchdog(mesh, streams=True), torch.device("cuda", 0)
    clock = StepClock(watchdog.mark_exposed, gpu)
    for _ in range(2):
        clock.begin()
        begun = len(synchronised)
        for _ in range(2):  # micro-batches
            with clock.part("forward"):
                stream.queued.append(1.0)
                watchdog.wait(STEP, lambda: stream.queued.append(0.25))
            with clock.part("backward"):
                watchdog.wait(STEP, lambda: stream.queued.append(0.5))
                stream.queued.append(2.0)
        assert len(synchronised) == begun
        with clock.paused():
            stream.queued.append(64.0)
            time.sleep(0.5)
        assert len(synchronised) == begun + 2
        with clock.part("optimizer"):
            stream.queued.append(4.0)
        assert len(synchronised) == begun + 2
        clock.end(index=0, warmup=False, loss=0.0, norm=None)
    assert synchronised == [gpu] * 8
    for step in clock.steps:
        assert (step.forward, step.backward, step.optimizer) == (2.5, 5.0, 4.0)
        assert (step.exposed_forward, step.exposed_backward) == (0.5, 1.0)
        assert 0 < step.total < 0.5


def test_a_mark_is_read_when_the_device_has_passed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it earlier is an error, since waits before it are not known yet."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    mesh: Any = SimpleNamespace(rank=0, topology=Topology(1, 1), store=lambda: None, counting="")
    watchdog = Watchdog(mesh, streams=True)
    assert watchdog.mark_exposed()() == 0.0
    watchdog.wait(STEP, lambda: stream.queued.append(0.25))
    read = watchdog.mark_exposed()
    with pytest.raises(RuntimeError, match="exposed seconds are not known yet"):
        read()
    stream.run()
    assert read() == 0.25
