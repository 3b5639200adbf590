"""Tests that waits of a GPU's stream are timed by events, which are read when the device has passed them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from impl.comm.watchdog import Watchdog, WireError
from impl.policy.topology import Topology
from impl.transport.side_stream import Arrival
from tests.support.simulated_stream import Stream

STEP: Any = (1, ("all_gather", "world", 4, 1, 16, "forward", "weights", "u", False), 0, "")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Return the simulated stream."""
    device_stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", device_stream.event)
    return device_stream


@pytest.fixture
def watchdog(stream: Stream) -> Watchdog:
    mesh: Any = SimpleNamespace(rank=0, topology=Topology(1, 1), store=lambda: None, counting="")
    return Watchdog(mesh, streams=True)


def test_only_what_the_stream_waited_for_counts(stream: Stream, watchdog: Watchdog) -> None:
    """Work before the wait does not count, nor a wait that the device has not finished; events do not pile up."""
    assert watchdog.exposed_seconds == 0.0
    for _ in range(9):
        stream.queued.append(5.0)  # computing
        watchdog.wait(STEP, lambda: stream.queued.append(0.25))  # the message is not there yet
        assert len(watchdog._stalls) == 1
        before = watchdog.exposed_seconds
        stream.run()
    assert watchdog.exposed_seconds == pytest.approx(before + 0.25) == pytest.approx(9 * 0.25)


def test_waits_are_timed_from_the_first_reading_on(stream: Stream, watchdog: Watchdog) -> None:
    """Until seconds are read or marked, neither the wait for a message nor that for a side stream takes an event."""
    arrival = Arrival(stream.event(enable_timing=True))
    arrival.event.wait = lambda: stream.queued.append(0.5)  # type: ignore[union-attr, method-assign]

    def waited() -> int:
        before = sum(not isinstance(item, float) for item in stream.queued)
        watchdog.wait(STEP, lambda: stream.queued.append(0.25))
        watchdog.join(arrival)
        assert arrival.joined
        return sum(not isinstance(item, float) for item in stream.queued) - before

    assert waited() == 0
    read = watchdog.mark_exposed()
    assert waited() == 3  # at both ends of a wait, and before a join, which ends with the arrival
    arrival.event.record()  # type: ignore[union-attr]
    stream.run()
    assert read() == 0.0
    assert watchdog.exposed_seconds == 0.25 + 0.5


def test_a_wait_that_fails_is_not_counted(stream: Stream, watchdog: Watchdog) -> None:
    """A wait that raises has no end and is not counted; later waits are."""

    def lost() -> None:
        raise RuntimeError("lost")

    assert watchdog.exposed_seconds == 0.0
    with pytest.raises(WireError, match="could not finish"):
        watchdog.wait(STEP, lost)
    watchdog.wait(STEP, lambda: stream.queued.append(2.0))
    stream.run()
    assert watchdog.exposed_seconds == 2.0
