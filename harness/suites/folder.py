"""The folder of a process's suite, from which its inputs are found; else the working folder.  No torch."""

from __future__ import annotations

import os
from pathlib import Path

from impl import named_object

_folder: Path | None = None


def find_from(folder: Path) -> None:
    """Find what suites name from ``folder`` on."""
    global _folder  # noqa: PLW0603  # of the process, as its working folder is
    _folder = folder.resolve()
    named_object.see(_folder)


def current() -> Path:
    """The folder from which inputs are found, absolute."""
    return Path.cwd() if _folder is None else _folder


def path_of(path: str) -> Path:
    """A path that a suite names; relative ones are of its folder."""
    return current() / os.path.expanduser(path)  # noqa: PTH111  # which leaves "~nobody" as it is
