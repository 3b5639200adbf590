"""Exceptions for input that cannot be used, and functions that make the texts of error messages.

Each of these exceptions ends a command with exit status 2.  No torch.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

# The control characters C0 (except tab and line feed), DEL and C1; invisible marks, such as marks of writing direction
# and separators; and surrogates.
_CONTROL: Final = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ud800-\\udfff]"
)
_LONGEST_WORD: Final = 300  # characters of a word that are printed; longer words are cut.  Paths fit.


class Refusal(Exception):  # noqa: N818  # it is about the user's input, not an error of the program
    """Raised when a user's request, such as to run a trial, cannot be met.

    The message names the setting that prevents it, and what to do instead.
    """


class LinkError(Exception):
    """Raised when a link between nodes cannot be opened or used; the message gives the reason and what to do."""


class CorpusError(ValueError):
    """Raised when a corpus cannot be read or is too small; the message names the corpus and gives the reason."""


_OURS: Final = ("impl", "harness", "report", "zeropp")
# Packages that must be installed before any command runs, since some command imports them.  The project's other
# dependencies (hjson, nvidia-ml-py, pyroute2) serve one feature each, and the feature itself reports that they are
# missing.
_NEEDED: Final = (
    "filelock", "hypothesis", "jinja2", "matplotlib", "numpy", "pandas", "psutil", "pydantic", "rich",
    "safetensors", "scipy", "seaborn", "torch", "typer",
)  # fmt: skip


def check_installed() -> None:
    """Raise a Refusal if packages of :data:`_NEEDED` are not installed; the message names these packages.

    Without this check, a command that imports a missing package late could fail after it has run for a while.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Refusal(_install(f"{', '.join(missing)} {'are' if missing[1:] else 'is'} not installed"))


def not_imported(error: ImportError) -> str | None:
    """Return a message that names the package that could not be imported, and the command that installs it.

    Returns None if the package is one of this project's own.  The error is then a bug of this project, and installing a
    package does not help.
    """
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
    """Return ``text`` with its control characters escaped as in Python; tabs and line feeds stay.

    A terminal acts on control characters: it moves the cursor, hides text, or shows text in another order.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def one_line(message: object) -> str:
    """Return ``message`` as one line that is safe to print.

    White space, line breaks included, becomes a single space.  Characters that cannot be printed are escaped as in
    Python.  A word of more than 300 characters is cut to 300, the last three of which are ``...``.
    """
    line = " ".join(str(message).split())
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)
    return re.sub(rf"\S{{{_LONGEST_WORD + 1},}}", lambda word: f"{word[0][: _LONGEST_WORD - 3]}...", escaped)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message, such as ``"; did you mean 'zeropp'?"``, for an unknown ``name``.

    Returns an empty text if none of the ``known`` names is spelt similarly.
    """
    by_lower = {known_name.lower(): known_name for known_name in known}
    close = difflib.get_close_matches(name.lower().replace("++", "pp"), by_lower, n=1)  # zero++ -> zeropp
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""
