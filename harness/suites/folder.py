"""Stores the folder in which this process looks for the files and modules that a suite names.

After a suite file is read, this is the folder of the suite file.  Before a suite file is read, and in commands without
a suite, it is the working folder.  This module does not import torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from impl import named_object

_folder: Path | None = None


def find_from(folder: Path) -> None:
    """Make this process look in ``folder`` for the files and modules that a suite names."""
    global _folder  # noqa: PLW0603  # state of the process, like its working folder
    _folder = folder.resolve()
    named_object.see(_folder)


def current() -> Path:
    """Return the absolute path of the folder to which paths in a suite are relative."""
    return Path.cwd() if _folder is None else _folder


def path_of(path: str) -> Path:
    """Return the absolute path for a path in a suite.

    A relative path begins at the suite's folder (:func:`current`).  ``~`` at the beginning stands for the user's home.
    """
    return current() / os.path.expanduser(path)  # noqa: PTH111  # Path.expanduser raises for an unknown user
