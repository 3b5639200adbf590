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
    """Context that turns every exception of its body into a ``kind`` with a one-line message.

    The message is ``prefix``, then the exception as :func:`raised` writes it.  ``SystemExit`` is turned too, but
    ``KeyboardInterrupt`` is raised unchanged.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise kind(f"{prefix} {raised(error)}") from error


class ZeroError(RuntimeError):
    """The engine was asked for something that it does not support, or that would make training wrong.

    The message names the cause and what to do instead.
    """


class WrittenError(ZeroError):
    """Parameters were written during a forward or backward pass.

    Such a write would be lost: the optimizer steps the masters, and the next gather overwrites the parameters.
    ``names`` are the parameters' names, in the order in which the writes were found, each once.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(dict.fromkeys(names))
        rest = len(self.names) - _MOST_NAMED
        shown = ", ".join(map(repr, self.names[:_MOST_NAMED])) + (f" and {rest} more" if rest > 0 else "")
        super().__init__(
            "parameters were written in place or through .data during a forward or backward pass, in which the masters "
            f"that the optimizer steps do not get the new values: {shown}; write parameters between passes, under "
            "GatheredParameters"
        )
