"""A call of a user's reduction that does not come back is reported, and one that waits for messages is not."""

from __future__ import annotations

import threading
import time
import traceback
from typing import Any

import pytest

from impl.comm import method_wire
from impl.errors import ZeroError
from impl.unit import method_calls


def _in_a_call(seconds: float) -> list[ZeroError]:
    """Return what is reported of a call that takes so many seconds."""
    found, ended = list[ZeroError](), threading.Event()

    def report(error: ZeroError) -> None:
        found.append(error)
        ended.set()

    with method_calls.inside("method mine:Half on rank 1, unit 'blocks.0': finish()"):
        method_calls.watch(0.2, report)
        ended.wait(seconds)
    return found


def test_a_call_that_computes_too_long_is_reported_with_its_line() -> None:
    """The report names method, rank, unit, and the line that runs."""
    (error,) = _in_a_call(30)
    assert str(error).startswith(
        "method mine:Half on rank 1, unit 'blocks.0': finish() has run for 0 s without"
    )
    assert ", in wait (" in str(error)
    assert str(error).endswith(": make the function return, or wait for a message, within 0.2 s")


def test_waiting_for_messages_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call inside the wire has a time-out of its own."""
    monkeypatch.setattr(method_wire, "__file__", __file__)
    assert _in_a_call(1.5) == []


def test_a_stack_that_cannot_be_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python 3.11 a frame that ends while another thread reads it may give another object, a dict for example."""
    extract, failures = traceback.extract_stack, iter((AttributeError(), AttributeError()))

    def extract_stack(frame: Any = None) -> traceback.StackSummary:
        for failure in failures:
            raise failure
        return extract(frame)

    monkeypatch.setattr(traceback, "extract_stack", extract_stack)
    (error,) = _in_a_call(30)
    assert "finish() has run for 0 s without" in str(error)


def test_short_calls_are_not_added_up() -> None:
    """Many short calls are not one long call."""
    found = list[ZeroError]()
    method_calls.watch(0.4, found.append)
    for _ in range(40):
        with method_calls.inside("a call"):
            time.sleep(0.02)
    assert found == []
