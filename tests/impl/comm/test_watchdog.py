"""Tests that waits of a GPU's stream are timed by events, which are read when the device has passed them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from impl.comm.watchdog import Watchdog, WireError
from impl.plan.topology import Topology
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
    for _ in range(9):
        stream.queued.append(5.0)  # computing
        watchdog.wait(STEP, lambda: stream.queued.append(0.25))  # the message is not there yet
        assert len(watchdog._stalls) == 1
        before = watchdog.exposed_seconds
        stream.run()
    assert watchdog.exposed_seconds == pytest.approx(before + 0.25) == pytest.approx(9 * 0.25)


def test_a_wait_that_fails_is_not_counted(stream: Stream, watchdog: Watchdog) -> None:
    """A wait that raises has no end and is not counted; later waits are."""

    def lost() -> None:
        raise RuntimeError("lost")

    with pytest.raises(WireError, match="could not finish"):
        watchdog.wait(STEP, lost)
    watchdog.wait(STEP, lambda: stream.queued.append(2.0))
    stream.run()
    assert watchdog.exposed_seconds == 2.0
