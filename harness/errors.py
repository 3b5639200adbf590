"""Exceptions for bad input: each is one line and ends a command with status 2.  No torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final

_LONGEST_WORD: Final = 300  # characters of a message's word that are printed: enough for a path


class Refusal(Exception):  # noqa: N818 - bad input, not an error of the program
    """What is asked, mostly of a trial, cannot be done; the message names the numbers."""


class LinkError(Exception):
    """A link between nodes cannot be opened as asked; the message says why and what to do."""


class CorpusError(ValueError):
    """A corpus cannot be read or is too small; the message names it and the numbers."""


def one_line(message: object) -> str:
    """``message`` on one line that any terminal may show.

    Characters that move the cursor or cannot be printed are escaped as in Python; long words are cut.
    """
    line = " ".join(str(message).split())
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)
    return re.sub(rf"\S{{{_LONGEST_WORD + 1},}}", lambda word: f"{word[0][: _LONGEST_WORD - 3]}...", shown)


def suggestion(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'zeropp'?"`` for a word close to a known one, else nothing."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower().replace("++", "pp"), by_lower, n=1)  # zero++ is zeropp
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""
