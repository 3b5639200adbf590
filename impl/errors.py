"""Errors of the engine, and those of other code as errors of one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Final

_MOST_NAMED: Final = 4  # parameters of one message


def raised(error: BaseException) -> str:
    """An exception in one line: its type, and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextlib.contextmanager
def raising(kind: type[Exception], prefix: str) -> Iterator[None]:
    """Raise whatever the body raises, ``SystemExit`` too, as a ``kind`` of one line."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise kind(f"{prefix} {raised(error)}") from error


class ZeroError(RuntimeError):
    """The engine is used in a way that would train something else; the message says how."""


class WrittenError(ZeroError):
    """Parameters were given other values during a pass."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(dict.fromkeys(names))  # in order, each once
        rest = len(self.names) - _MOST_NAMED
        shown = ", ".join(map(repr, self.names[:_MOST_NAMED])) + (f" and {rest} more" if rest > 0 else "")
        super().__init__(
            f"written in place or through .data during a pass, which reaches no master: {shown}; write "
            "parameters between passes, under GatheredParameters"
        )
