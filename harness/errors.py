"""Exceptions for bad input: each is one line and ends a command with status 2.  No torch."""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

# C0 but tab and line feed, DEL, C1; marks of writing direction, separators and other invisible marks; surrogates.
_CONTROL: Final = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ud800-\\udfff]"
)
_LONGEST_WORD: Final = 300  # characters of a message's word that are printed: enough for a path


class Refusal(Exception):  # noqa: N818 - bad input, not an error of the program
    """A request, mostly for a trial, cannot be met; the message names the numbers."""


class LinkError(Exception):
    """A link between nodes cannot be opened; the message says why and what to do."""


class CorpusError(ValueError):
    """A corpus cannot be read or is too small; the message names it and the numbers."""


_OURS: Final = ("impl", "harness", "report")
# What commands import; without the others a machine lacks a link or facts about GPUs, which is said there.
_NEEDED: Final = (
    "filelock", "hypothesis", "jinja2", "matplotlib", "numpy", "pandas", "psutil", "pydantic", "rich",
    "safetensors", "scipy", "seaborn", "torch", "typer",
)  # fmt: skip


def check_installed() -> None:
    """Refuse to begin without a package that some command imports later."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Refusal(_install(f"{', '.join(missing)} {'are' if missing[1:] else 'is'} not installed"))


def not_imported(error: ImportError) -> str | None:
    """The line that says which package cannot be imported, and how to install it; None for a part of ours."""
    if (name := (error.name or "").partition(".")[0]) in _OURS:
        return None
    missing = isinstance(error, ModuleNotFoundError)
    return _install(
        f"{name} is not installed" if missing else f"cannot import {name or 'a package'} ({error})"
    )


def _install(what: str) -> str:
    folder = Path(__file__).resolve().parents[1]
    return (
        f"{what} for {sys.executable}: cd {folder} && {sys.executable} -m pip install -c constraints.txt -e ."
    )


def visible(text: str) -> str:
    """Return ``text`` with control characters, but tabs and ends of lines, escaped as in Python.

    A terminal would act on them: move the cursor, hide text, or show it in another order.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


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
