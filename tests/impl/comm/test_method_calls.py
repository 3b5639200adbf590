"""A call of a user's reduction that does not come back is reported, and one that waits for messages is not."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import torch

from impl.comm import method_calls
from impl.comm.mesh import Mesh
from impl.comm.method_wire import MethodWire
from impl.comm.wire import Wire
from impl.errors import ZeroError
from impl.plan.traffic import Tag
from impl.simulate import simulate

CALL = "method mine:Half on rank 1, unit 'blocks.0': finish()"


def _in_a_call(use: Callable[[], object] = lambda: None) -> ZeroError:
    """Return what is reported of a call that calls ``use()``, and then computes until it is reported."""
    found, reported = list[ZeroError](), threading.Event()

    def report(error: ZeroError) -> None:
        found.append(error)
        reported.set()

    with method_calls.inside(CALL):
        method_calls.watch(0.4, report)
        use()
        assert found == []
        assert reported.wait(30)
    return found[0]


def test_a_call_that_computes_too_long_is_reported_with_its_line() -> None:
    """The report names method, rank, unit, and the line that runs."""
    error = str(_in_a_call())
    assert re.match(re.escape(CALL) + r" has run for \d s without", error)
    assert ", in wait (" in error
    assert error.endswith(": make the function return, or wait for a message, within 0.4 s")


def test_waiting_for_messages_is_not_reported() -> None:
    """A call that waits in the wire has a time-out of its own; what it computes afterwards counts from there."""

    def body(mesh: Mesh) -> str:
        wire = MethodWire(Wire(mesh), Tag("backward", "gradients", "blocks.0"))
        if mesh.rank == 0:
            return str(_in_a_call(lambda: wire.all_gather(torch.ones(1)).wait()))
        time.sleep(1.5)  # rank 0 waits meanwhile
        wire.all_gather(torch.ones(1)).wait()
        return ""

    error, _ = simulate(1, 2)(body)
    assert re.match(re.escape(CALL) + r" has run for \d s without", error)


def test_short_calls_are_not_added_up() -> None:
    """Many short calls are not one long call."""
    found = list[ZeroError]()
    method_calls.watch(0.4, found.append)
    for _ in range(40):
        with method_calls.inside("a call"):
            time.sleep(0.02)
    assert found == []
