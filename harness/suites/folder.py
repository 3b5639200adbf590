"""The folder in which a process finds its suite's inputs; the working folder by default.  No torch."""

from __future__ import annotations

import os
from pathlib import Path

from impl import named_object

_folder: Path | None = None


def find_from(folder: Path) -> None:
    """Find the files and modules that suites name in ``folder``."""
    global _folder  # noqa: PLW0603  # of the process, as its working folder is
    _folder = folder.resolve()
    named_object.see(_folder)


def current() -> Path:
    """The absolute folder of inputs."""
    return Path.cwd() if _folder is None else _folder


def path_of(path: str) -> Path:
    """The path that a suite names, relative to its folder."""
    return current() / os.path.expanduser(path)  # noqa: PTH111  # which leaves "~nobody" as it is
