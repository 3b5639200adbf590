"""Exceptions for bad input: each is one line and ends a command with status 2.  No torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final

_LONGEST_WORD: Final = 300  # characters of a message's word that are printed: enough for a path


class Refusal(Exception):  # noqa: N818 - bad input, not an error of the program
    """A request, mostly for a trial, cannot be met; the message names the numbers."""


class LinkError(Exception):
    """A link between nodes cannot be opened; the message says why and what to do."""


class CorpusError(ValueError):
    """A corpus cannot be read or is too small; the message names it and the numbers."""


def one_line(message: object) -> str:
    """``message`` on one line: what cannot be printed is escaped as in Python, long words are cut."""
    line = " ".join(str(message).split())
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)
    return re.sub(rf"\S{{{_LONGEST_WORD + 1},}}", lambda word: f"{word[0][: _LONGEST_WORD - 3]}...", escaped)


def suggestion(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'zeropp'?"`` for a name close to a known one, else nothing."""
    by_lower = {known_name.lower(): known_name for known_name in known}
    close = difflib.get_close_matches(name.lower().replace("++", "pp"), by_lower, n=1)  # zero++ is zeropp
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""
