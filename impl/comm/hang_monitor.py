"""Ends a process whose GPU waits for messages that never arrive, as can happen with NCCL.

With NCCL it is a stream of the GPU, not the host, that waits for messages.  If another rank does not take part in an
exchange, this rank's host notices nothing until it synchronises with the GPU, and this wait has no time limit.  NCCL's
own watchdog counts from the moment at which an exchange was enqueued, and ends the process without saying which
exchange it was.

The :class:`HangMonitor` of a rank has a thread that watches the exchanges (collectives) that the rank has posted.  If
no exchange has completed for as long as the wire's timeout, the thread calls a function, by default
:func:`end_process`, with an error that names the oldest exchange.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, Protocol

from impl.comm.fingerprint import Step, label
from impl.comm.watchdog import Watchdog, WireError

_LOOK_SECONDS: Final = 1.0  # between two looks at what is under way
OnHang = Callable[[WireError], object]


class Work(Protocol):
    """Something that completes when messages of an exchange have arrived, such as torch's ``dist.Work``."""

    def is_completed(self) -> bool:
        """Return whether the messages have arrived."""


def end_process(error: WireError) -> NoReturn:
    """Print ``error`` and end the process with status 1.

    Raising the error would not help: the thread that computes is blocked in a wait for the GPU.
    """
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


class HangMonitor:
    """Watches the exchanges (collectives) that this rank has posted, in a thread that starts with the first exchange.

    Args:
        watchdog: builds the error from the reports of all ranks.
        timeout: seconds.  If exchanges are under way, and none has completed for this time, ranks count as hanging.
        on_hang: a function that is called with the error when ranks hang, once, in the monitor's thread.
    """

    def __init__(self, watchdog: Watchdog, timeout: float, on_hang: OnHang) -> None:
        self._watchdog, self._timeout, self._on_hang = watchdog, timeout, on_hang
        self._under_way: deque[tuple[Step, Sequence[Work]]] = deque()
        self._lock = threading.Lock()
        # time.monotonic() when an exchange was last seen to complete, or was posted while no other was under way.
        self._progress = 0.0
        self._closed = threading.Event()
        self._started = False

    def posted(self, step: Step, works: Sequence[Work]) -> None:
        """Begin to watch an exchange; it is complete when all ``works`` have completed.

        ``step`` is the exchange's entry in the log of exchanges.  Earlier exchanges that have completed by now are no
        longer watched.
        """
        with self._lock:
            self._drop_completed()
            if not self._under_way:
                self._progress = time.monotonic()
            self._under_way.append((step, works))
        if not self._started:
            self._started = True
            watch = (weakref.ref(self), self._closed, min(_LOOK_SECONDS, self._timeout / 4))
            threading.Thread(target=_watch, args=watch, daemon=True, name="hang monitor").start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        with self._lock:
            self._under_way.clear()

    def look(self) -> bool:
        """Return whether ranks hang; if they do, call ``on_hang`` first.

        Ranks hang if exchanges are under way, and none has completed for as long as the timeout.
        """
        with self._lock:
            self._drop_completed()
            waited = time.monotonic() - self._progress
            if not self._under_way or waited < self._timeout:
                return False
            step = self._under_way[0][0]
        cause = f"no exchange has completed for {waited:.3g} s, and this is the oldest one"
        self._on_hang(self._watchdog.error(f"could not finish {label(step)}", cause, step))
        return True

    def _drop_completed(self) -> None:
        while self._under_way and all(work.is_completed() for work in self._under_way[0][1]):
            self._under_way.popleft()
            self._progress = time.monotonic()


def _watch(monitor: weakref.ref[HangMonitor], closed: threading.Event, seconds: float) -> None:
    """Call the monitor's :meth:`~HangMonitor.look` every ``seconds`` seconds.

    Returns when the monitor is closed, when nobody refers to it any more, or when ranks hang.
    """
    while not closed.wait(seconds):
        watched = monitor()
        if watched is None or watched.look():
            return
        del watched
