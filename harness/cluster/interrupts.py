"""Ctrl-C while the command line is still importing: one line, no traceback.

Imported before anything that takes time.  No torch.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from harness.cluster.leaving import INTERRUPTED, WORDS

_before = sys.excepthook


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What Python calls for an error that nobody caught."""
    if not _from_interrupt(error):
        _before(kind, error, trace)
        return
    sys.stderr.write(WORDS)
    sys.stderr.flush()
    os._exit(INTERRUPTED)  # without what atexit would still print


def _from_interrupt(error: BaseException | None) -> bool:
    """Whether it is a Ctrl-C, or what the import of an extension in C makes of one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


sys.excepthook = _report
