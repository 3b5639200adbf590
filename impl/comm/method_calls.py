"""Notes when the code of a user's reduction or gather class runs, and reports a call that does not return.

If one rank never leaves the user's code, the other ranks wait for its messages until their time-out, and only they
raise an error.  The report of this module names the rank that hangs, and the call.

The engine notes the beginning and the end of each call (:func:`inside`).  The wire through which the class sends its
messages notes the times in which the class sends a message or waits for one (:func:`communicating`).
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from impl.errors import ZeroError

_LOOK_SECONDS: Final = 1.0  # most seconds between two looks at the present call


@dataclass(slots=True, eq=False)
class _Call:
    """A call of a user's class that has not returned yet."""

    what: str  # the user's class, the rank, the unit and the function, for errors
    thread: int
    since: float  # time.monotonic() when the user's code last began to run; infinite while the wire runs


_present: _Call | None = None  # one for the process: its engine calls one method at a time


@contextlib.contextmanager
def inside(what: str) -> Iterator[None]:
    """Context in which a user's reduction or gather class is called; :func:`watch` reports the call if it hangs.

    ``what`` describes the call in errors: the class, the rank, the unit, and the function.
    """
    global _present  # noqa: PLW0603  # state of the process, which another thread reads
    _present = _Call(what, threading.get_ident(), time.monotonic())
    try:
        yield
    finally:
        _present = None


@contextlib.contextmanager
def communicating() -> Iterator[None]:
    """Context in which a user's class sends a message or waits for one; :func:`watch` does not count this time.

    When the context is left, :func:`watch` begins to count again from 0.
    """
    call = _present
    if call is None or call.thread != threading.get_ident():
        yield
        return
    call.since = math.inf
    try:
        yield
    finally:
        call.since = time.monotonic()


def watch(seconds: float, report: Callable[[ZeroError], object]) -> None:
    """Start a thread that reports a call of a user's reduction or gather class that does not return.

    The thread looks at the present call once a second, or more often if ``seconds`` is less than 4.  If the user's code
    has run for ``seconds`` without sending a message or waiting for one, the thread calls ``report`` with an error that
    names the call, and ends.

    This function is for ranks that are processes.  Ranks that are threads (:func:`impl.simulate.simulate`) do not need
    it: :mod:`impl.transport.threads` itself ends a rank that keeps its turn for too long.
    """
    threading.Thread(target=_watch, args=(seconds, report), name="method calls", daemon=True).start()


def _watch(seconds: float, report: Callable[[ZeroError], object]) -> None:
    while True:
        time.sleep(min(_LOOK_SECONDS, seconds / 4))
        call = _present
        if call is not None and (passed := time.monotonic() - call.since) >= seconds:
            report(
                ZeroError(
                    f"{call.what} has run for {passed:.0f} s without waiting for a message, in {_place(call.thread)}: "
                    f"make the function return, or wait for a message, within {seconds:g} s"
                )
            )
            return


def _place(thread: int) -> str:
    """Return the function that a thread runs now, with file and line; ``?`` if the thread has ended.

    ``thread`` is the thread's identifier.

    The function's callers are not returned, since it is not safe to read them from another thread.  In Python 3.11, if
    a frame ends meanwhile, its ``f_back`` may give an object that is no frame.
    """
    if (frame := sys._current_frames().get(thread)) is None:  # noqa: SLF001  # documented in spite of its name
        return "?"
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
