"""Writes and checks the stamp of a report, which tells `zeropp run` whether the report must be drawn again.

The stamp is a hidden file in the results folder.  It holds a hash of everything from which the page was made, and the
sentences in the page's head.  If the hash is still the same, the page need not be drawn again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from harness.measure.machine import source_digest
from harness.records.chained_journal import JOURNAL
from harness.records.trial_record import write_whole
from impl import regular_file
from report import seconds_key

PAGE: Final = "report.html"
_STAMP: Final = ".report"
_PACKAGES: Final = ("jinja2", "matplotlib", "numpy", "pandas", "scipy")
_HERE: Final = Path(__file__).parent


def digest(results: Path) -> str:
    """Return a SHA-256, as hexadecimal text, of everything from which a folder's page is made.

    These are hashed:

    * the folder's records, traces and journal;
    * the records of other suites that the folder's suite names with its key ``seconds``;
    * the source files of this program, and the versions of the packages that draw the page.
    """
    whole = hashlib.sha256(f"{source_digest()} {[version(name) for name in _PACKAGES]}".encode())
    for path in sorted(path for path in _HERE.rglob("*") if path.is_file() and path.suffix != ".pyc"):
        _add(whole, path, _HERE)
    for pattern in ("*.json", "traces/*.json", JOURNAL):
        for path in sorted(results.glob(pattern)):
            _add(whole, path, results)
    for path in seconds_key.files(results):
        _add(whole, path, path.parent.parent)
    return whole.hexdigest()


def _add(whole: Any, path: Path, folder: Path) -> None:
    content = regular_file.read_bytes(path)
    whole.update(f"\0{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)


def sentences_of(results: Path) -> list[str] | None:
    """Return the sentences in the head of a folder's page, from its stamp.

    Returns None if there is no page or no stamp, or if records or the program changed after the page was built.
    """
    try:
        found, *sentences = regular_file.read_text(results / _STAMP).splitlines()
    except (OSError, ValueError):  # there is no stamp, or it is damaged
        return None
    return sentences if (results / PAGE).exists() and found == digest(results) else None


def remove(results: Path) -> None:
    """Remove the stamp of a folder, so that `zeropp run` draws the page again.

    Call this function for a page that was drawn with other options than `zeropp run` uses.
    """
    (results / _STAMP).unlink(missing_ok=True)


def write(results: Path, made_of: str, sentences: Sequence[str]) -> None:
    """Write the stamp of a report; ``made_of`` is what :func:`digest` returned before the report was built."""
    write_whole(results / _STAMP, "\n".join([made_of, *sentences]))
