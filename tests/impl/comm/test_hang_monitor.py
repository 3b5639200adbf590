"""Tests that ranks whose messages never arrive are found where no host waits for messages, as with NCCL."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from impl.comm import exchanges
from impl.comm.hang_monitor import HangMonitor
from impl.comm.mesh import Mesh, limit_nccl
from impl.comm.watchdog import WireError
from impl.comm.wire import NCCL_TIMES, Wire
from impl.plan.traffic import Tag
from impl.policy.topology import Topology
from impl.transport.side_stream import Arrival
from tests.support.never import Never
from tests.support.ranks import on_threads

LONG = 60.0  # seconds; a test that waits so long has failed


def _hang(mesh: Mesh) -> str:
    """Posts two exchanges that never complete, and returns the error that the monitor finds."""
    errors: list[WireError] = []
    found = threading.Event()
    wire = Wire(mesh, timeout=0.2)
    wire._monitor = HangMonitor(wire._watchdog, 0.2, lambda error: (errors.append(error), found.set()))
    with wire.calling("save()"):
        for unit in ("blocks.3", "blocks.4"):
            exchange = wire.all_gather(mesh.topology.world_axis, 32, Tag("forward", "weights", unit))
            exchange.post()
            exchange.wait()  # returns at once, as NCCL's does
        assert found.wait(LONG)
    wire.close()
    (error,) = errors
    return str(error)


def test_a_message_that_never_arrives_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of each rank says which exchange is the oldest that has not completed, in which call."""
    monkeypatch.setattr(exchanges, "collective", lambda *_: [Never()])
    for rank, error in enumerate(on_threads(Topology(1, 2), _hang, backend="threaded")):
        assert f"rank {rank} could not finish exchange 1, all_gather of 32 B" in error
        assert "forward weights blocks.3 in save(): no exchange has completed for" in error


def _monitor(timeout: float) -> tuple[HangMonitor, list[Any]]:
    """Returns a monitor that looks only when the test does, and the errors that it has found."""
    errors: list[Any] = []
    watchdog: Any = SimpleNamespace(error=lambda *told: told)
    monitor = HangMonitor(watchdog, timeout, errors.append)
    monitor._started = True  # no thread
    return monitor, errors


STEP: Any = (7, ("all_gather", "world", 4, 1, 16, "forward", "weights", "u", False), 0, "")


def test_work_in_line_is_watched_until_its_stream_has_passed_it() -> None:
    """An exchange on a side stream ends with the side stream's work, whose end is known once it is enqueued."""
    monitor, errors = _monitor(0.0)
    arrival = Arrival()
    monitor.posted(STEP, [arrival])
    assert monitor.look()
    passed = [False]
    arrival.event = cast("Any", SimpleNamespace(query=lambda: passed[0]))
    assert monitor.look()
    passed[0] = True
    assert not monitor.look()
    assert len(errors) == 2


def test_slow_ranks_do_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time counts from the last exchange that completed, not from when a message was enqueued."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monitor, errors = _monitor(10.0)
    works = [Never() for _ in range(5)]
    for work in works:  # a whole step is enqueued at once
        monitor.posted(STEP, [work])
    for work in works:
        now[0] += 9.0
        assert not monitor.look()
        work.done = True
        assert not monitor.look()
    now[0] += 1e4
    assert not monitor.look()  # nothing is under way
    monitor.posted(STEP, [Never()])
    now[0] += 9.0
    assert not monitor.look()
    now[0] += 1.0
    assert monitor.look()
    assert len(errors) == 1


def test_a_closed_or_forgotten_monitor_watches_nothing() -> None:
    """Its thread keeps no monitor alive, and a closed one calls nobody."""
    monitor, errors = _monitor(0.0)
    monitor.posted(STEP, [Never()])
    monitor.close()
    assert not monitor.look()
    assert not errors
    watched = HangMonitor(monitor._watchdog, LONG, errors.append)
    watched.posted(STEP, [Never()])
    forgotten = weakref.ref(watched)
    del watched
    gc.collect()
    assert forgotten() is None


def test_a_wire_on_a_gpu_watches_and_limits_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's own time-out is a multiple of the wire's, which is the one setting of both; on a CPU gloo's waits end."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
    on_gpu = Wire(Mesh(Topology(1, 1), 0, torch.device("cuda", 0)), timeout=3.0)
    assert on_gpu._monitor is not None
    asked: list[Any] = []
    monkeypatch.setattr(Mesh, "has_group", lambda *_: True)
    monkeypatch.setattr(Mesh, "group", lambda *told: asked.append(told[-1]))
    on_gpu.group(on_gpu.mesh.topology.world_axis)
    assert asked[0].total_seconds() == NCCL_TIMES * 3.0
    assert Wire(Mesh(Topology(1, 1), 0, torch.device("cpu")))._monitor is None


def test_only_nccls_time_out_of_the_default_group_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control messages over gloo keep the launch's long one."""
    asked: dict[str, Any] = {}
    backends = {
        device: SimpleNamespace(
            name=lambda name=name: name,
            _set_default_timeout=lambda limit, name=name: asked.update({name: limit}),
        )
        for device, name in (("cpu", "gloo"), ("cuda", "nccl"))
    }
    group = SimpleNamespace(_device_types=["cpu", "cuda"], _get_backend=backends.__getitem__)
    monkeypatch.setattr("impl.comm.mesh.c10d._get_default_group", lambda: group)
    limit: Any = "600 s"
    limit_nccl(limit)
    assert asked == {"nccl": "600 s"}
