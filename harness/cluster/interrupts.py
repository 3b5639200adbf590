"""Ctrl-C: ends the process at once until there is something to clean up; then it is a ``KeyboardInterrupt``.

A ``KeyboardInterrupt`` that is raised while torch is imported may meet code that lets no exception pass: then
it is lost, or the process aborts.  So the signal itself ends the command line, with one line and status 130,
until it starts processes, joins nodes or writes files.  A package that is not installed ends it too, with
status 2.  Imported before anything that takes time.  No torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Final

from harness.errors import not_imported, one_line

INTERRUPTED: Final = 130
REFUSED: Final = 2

_excepthook = sys.excepthook


def end_at_once() -> None:
    """Let Ctrl-C end this process, which is the command's alone, unless it ignores Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)


def take_over() -> None:
    """From now on let Ctrl-C be a ``KeyboardInterrupt``, for whoever cleans up."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(_: int = 0, __: FrameType | None = None) -> None:
    """End the process, past all that it runs."""
    with contextlib.suppress(OSError):
        os.write(2, b"zeropp: interrupted\n")
    os._exit(INTERRUPTED)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What Python calls for an error that nobody caught, as while the command line itself is imported."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):  # as extensions in C wrap it
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        _leave()
    if isinstance(error, ImportError) and (line := not_imported(error)) is not None:
        with contextlib.suppress(OSError):
            os.write(2, f"zeropp: {one_line(line)}\n".encode("ascii", "backslashreplace"))
        os._exit(REFUSED)
    _excepthook(kind, error, trace)


sys.excepthook = _report
