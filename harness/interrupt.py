"""Ctrl-C while the command line is still importing: one line, no traceback.

Imported before anything that takes time.  No torch.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Final

INTERRUPTED: Final = 130
WORDS: Final = "zeropp: interrupted\n"

_before = sys.excepthook


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What Python calls for an error that nobody caught."""
    if not issubclass(kind, KeyboardInterrupt):
        _before(kind, error, trace)
        return
    sys.stderr.write(WORDS)
    sys.stderr.flush()
    os._exit(INTERRUPTED)  # without what atexit would still print


sys.excepthook = _report
