"""Notes in a stamp which records a folder's report was built from, so that `zeropp run` does not draw it again.

The stamp is a hidden file beside the page.  It holds a hash of everything that decides the page, and the sentences in
the page's head.
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
    """Return a hexadecimal SHA-256 of everything that decides a folder's page.

    This is the folder's records, traces and journal, the records of the suites that its suite names in ``seconds``,
    and the program that draws the page, with the versions of its packages.
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
    """Return the sentences in the head of the folder's page; None if the page is not of the records as they are now."""
    try:
        found, *sentences = regular_file.read_text(results / _STAMP).splitlines()
    except (OSError, ValueError):  # there is no stamp, or it is damaged
        return None
    return sentences if (results / PAGE).exists() and found == digest(results) else None


def remove(results: Path) -> None:
    """Remove the stamp of a folder whose page was drawn with unusual options, so that `zeropp run` draws it again."""
    (results / _STAMP).unlink(missing_ok=True)


def write(results: Path, made_of: str, sentences: Sequence[str]) -> None:
    """Write the stamp of a report that was built from records with the digest ``made_of``."""
    write_whole(results / _STAMP, "\n".join([made_of, *sentences]))
