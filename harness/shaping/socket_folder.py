"""Makes folders whose paths are short enough for Unix-domain sockets: the kernel allows a socket's path 107 bytes.

The usual folder of temporary files may have too long a path, for instance in a job of a cluster.  This module does not
import torch.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path
from typing import Final
from unittest import mock

from harness.errors import Refusal

# Bytes that a folder's path may have: the kernel's limit less the longest name inside.
_LONGEST: Final = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
_OTHERS: Final = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  # a fresh folder of our own is made inside


def parent() -> str:
    """Return a writable folder whose path is short enough for Unix-domain sockets inside.

    The folders are tried in this order: the usual folder of temporary files (TMPDIR), the folder that the environment
    variable XDG_RUNTIME_DIR names, /tmp, /var/tmp and /dev/shm.

    Raises:
        Refusal: If none of these folders is writable and has a short enough path.
    """
    usual = tempfile.gettempdir()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    others = [folder for folder in (runtime, *_OTHERS) if folder]
    for folder in (usual, *others):
        if len(os.fsencode(folder)) <= _LONGEST and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise Refusal(
        f"TMPDIR = {usual!r}: a folder for Unix-domain sockets must be writable, and its path may have at most "
        f"{_LONGEST} bytes; the other folders that were tried do not fit either ({', '.join(others)}): set TMPDIR to a "
        "writable folder with a shorter path"
    )


@contextlib.contextmanager
def new() -> Iterator[Path]:
    """Yield a new folder for sockets, which is removed when the ``with`` block ends."""
    with tempfile.TemporaryDirectory(prefix="zeropp-", dir=parent(), ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def give_to_multiprocessing() -> None:
    """Make ``multiprocessing`` put its sockets into a folder with a short path (inside :func:`parent`).

    ``multiprocessing`` creates its folder for sockets once in each process, when it first needs the folder.  This
    function makes ``multiprocessing`` create the folder now, while temporary files go to a short path.
    """
    with mock.patch.object(tempfile, "tempdir", parent()):
        util.get_temp_dir()
