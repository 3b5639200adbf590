"""Defines the engine's errors, and turns exceptions of other code into errors with a one-line message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Final

_MOST_NAMED: Final = 4  # a message names at most this many parameters and counts the rest


def raised(error: BaseException) -> str:
    """Return an exception as one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextlib.contextmanager
def raising(kind: type[Exception], prefix: str) -> Iterator[None]:
    """Context that re-raises every exception of its body as an exception of class ``kind`` with a one-line message.

    The message is ``prefix``, then the exception as :func:`raised` writes it.  ``SystemExit`` is converted in the same
    way; ``KeyboardInterrupt`` is raised unchanged.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise kind(f"{prefix} {raised(error)}") from error


class ZeroError(RuntimeError):
    """Raised when the engine is asked for something that it does not support, or that would make training wrong.

    The message names the cause and what to do instead.
    """


class WrittenError(ZeroError):
    """Raised when parameters were written during a forward or backward pass.

    Such a write would be lost: the optimizer steps the masters, which are separate fp32 tensors, and the next
    all-gather overwrites the parameters with the masters' values.  ``names`` has the name of each written parameter
    once, in the order in which the writes were found.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(dict.fromkeys(names))
        rest = len(self.names) - _MOST_NAMED
        shown = ", ".join(map(repr, self.names[:_MOST_NAMED])) + (f" and {rest} more" if rest > 0 else "")
        super().__init__(
            f"parameters were written in place or through .data during a forward or backward pass: {shown}; the write "
            "would be lost, since the optimizer steps the fp32 masters, which do not get the new values: write "
            "parameters between passes, under GatheredParameters"
        )
