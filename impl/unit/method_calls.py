"""Notes which function of a user's reduction or gather class is running, and reports a call that does not return.

If one rank never leaves the user's code, the other ranks wait for its messages until their time-out, and only they
raise an error.  The report of this module names the rank that hangs, and the call.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from impl.comm import method_wire
from impl.errors import ZeroError

_LOOK_SECONDS: Final = 1.0  # most seconds between two looks at the present call


class _Call(NamedTuple):
    what: str  # the user's class, the rank, the unit and the function, for errors
    thread: int


_present: _Call | None = None  # one for the process: its engine calls one method at a time


@contextlib.contextmanager
def inside(what: str) -> Iterator[None]:
    """Context to put around a call of a user's reduction or gather class, so that :func:`watch` watches the call.

    ``what`` describes the call in errors: the class, the rank, the unit, and the function.
    """
    global _present  # noqa: PLW0603  # state of the process, which another thread reads
    _present = _Call(what, threading.get_ident())
    try:
        yield
    finally:
        _present = None


def watch(seconds: float, report: Callable[[ZeroError], object]) -> None:
    """Start a thread that reports a call of a user's reduction or gather class that does not return.

    The thread looks at the present call once a second, or more often if ``seconds`` is less than 4.  If it sees the
    same call for ``seconds``, and never sees it post a message or wait for one, it calls ``report`` with an error that
    names the call.  The thread then ends.

    This function is for ranks that are processes.  Ranks that are threads (:func:`impl.simulate.simulate`) do not need
    it: :mod:`impl.transport.threads` itself ends a rank that keeps its turn for too long.
    """
    threading.Thread(target=_watch, args=(seconds, report), name="method calls", daemon=True).start()


def _watch(seconds: float, report: Callable[[ZeroError], object]) -> None:
    seen: _Call | None = None
    since = time.monotonic()
    while True:
        time.sleep(min(_LOOK_SECONDS, seconds / 4))
        call = _present
        try:
            frames = [] if call is None else traceback.extract_stack(sys._current_frames().get(call.thread))  # noqa: SLF001
        except (
            AttributeError
        ):  # in Python 3.11 a frame that ends while it is read may give another object; look again
            continue
        if call is not seen or any(frame.filename == method_wire.__file__ for frame in frames):
            seen, since = call, time.monotonic()
        elif call is not None and (passed := time.monotonic() - since) >= seconds:
            where = f"{frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else "?"
            report(
                ZeroError(
                    f"{call.what} has run for {passed:.0f} s without waiting for a message, in {where}: make the "
                    f"function return, or wait for a message, within {seconds:g} s"
                )
            )
            return
