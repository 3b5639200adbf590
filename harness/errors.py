"""Why something that was asked cannot be done: each one line, ending a command with status 2.  No torch."""

from __future__ import annotations


class Refusal(Exception):  # noqa: N818 - not an error of the program: what was asked cannot be done
    """A trial cannot be carried out as asked; the message names the numbers."""


class CorpusError(ValueError):
    """A corpus cannot be read or is too small; the message names it and the numbers."""
