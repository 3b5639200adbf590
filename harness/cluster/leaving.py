"""Ctrl-C while nothing has begun that would need cleaning up: one line, no traceback, whatever is imported.

A ``KeyboardInterrupt`` that is raised while torch is imported may meet code that lets no exception pass: then
it is lost, or the process aborts.  So the command line imports torch, lays out and predicts :func:`at_once`:
the signal itself ends the process.  What makes folders, processes or namespaces stands outside, or
:func:`cleaning_up`, where Ctrl-C is Python's as ever.  No torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

INTERRUPTED: Final = 130
WORDS: Final = "zeropp: interrupted\n"

_ours = False  # whether the process is the command's alone


def take_over() -> None:
    """From now on the process is the command's alone, which may end it; else :func:`at_once` does nothing."""
    global _ours  # noqa: PLW0603  # it is of the process
    _ours = True


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Let Ctrl-C end the process where it stands; for what leaves nothing behind."""
    with _on_interrupt(_leave):
        yield


@contextlib.contextmanager
def cleaning_up() -> Iterator[None]:
    """Inside :func:`at_once`: let Ctrl-C be a ``KeyboardInterrupt``, for what has to be taken apart."""
    with _on_interrupt(signal.default_int_handler):
        yield


@contextlib.contextmanager
def _on_interrupt(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    if not _ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(_: int, __: FrameType | None) -> None:
    """End the process, past all that it runs."""
    with contextlib.suppress(OSError):
        os.write(2, WORDS.encode())
    os._exit(INTERRUPTED)
