"""Remembers, once per process, the folder to which paths and modules in a suite are relative.  No torch.

It is the folder of the suite file.  Before a suite is read, and for commands without one, it is the working folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from impl import named_object

_folder: Path | None = None


def find_from(folder: Path) -> None:
    """From now on look in ``folder`` for the files and modules that a suite names."""
    global _folder  # noqa: PLW0603  # state of the process, like its working folder
    _folder = folder.resolve()
    named_object.see(_folder)


def current() -> Path:
    """Return the absolute path of the folder to which paths in a suite are relative."""
    return Path.cwd() if _folder is None else _folder


def path_of(path: str) -> Path:
    """Resolve a path of a suite, which is relative to the suite's folder; ``~`` is expanded."""
    return current() / os.path.expanduser(path)  # noqa: PTH111  # Path.expanduser raises for an unknown user
