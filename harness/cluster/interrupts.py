"""Decides what Ctrl-C does: it ends the process at once or, when there is something to clean up, raises an exception.

A ``KeyboardInterrupt`` that is raised while torch is imported may be swallowed by code that catches all exceptions, or
may abort the process.  Therefore Ctrl-C at first ends the process with one line and status 130 (:func:`end_at_once`).
Before the command line starts processes, joins nodes or writes files, it calls :func:`take_over`.  From then on,
Ctrl-C raises a ``KeyboardInterrupt`` as usual.

Importing this module also installs a hook for import errors: if a package of another project cannot be imported, the
process ends with one line and status 2.  The command line imports this module before any module that takes time to
import; this module imports no torch.
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
    """From now on let Ctrl-C end this process at once; a process that ignores Ctrl-C still ignores it."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)


def take_over() -> None:
    """From now on let Ctrl-C raise a ``KeyboardInterrupt``, so that callers can clean up.

    This undoes :func:`end_at_once`.  A process that ignores Ctrl-C still ignores it.
    """
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(_: int = 0, __: FrameType | None = None) -> None:
    """End the process without running any clean-up code."""
    with contextlib.suppress(OSError):
        os.write(2, b"zeropp: interrupted\n")
    os._exit(INTERRUPTED)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an error that nothing has caught; installed as ``sys.excepthook``.

    For a Ctrl-C, or for a package of another project that cannot be imported, the process ends with one line.  All
    other errors are reported as usual.
    """
    cause: BaseException | None = error
    # C extensions may wrap a KeyboardInterrupt in other errors.
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        _leave()
    if isinstance(error, ImportError) and (line := not_imported(error)) is not None:
        with contextlib.suppress(OSError):
            os.write(2, f"zeropp: {one_line(line)}\n".encode("ascii", "backslashreplace"))
        os._exit(REFUSED)
    _excepthook(kind, error, trace)


sys.excepthook = _report
