"""Makes folders whose paths are short enough for Unix-domain sockets: the kernel allows a socket's path 107 bytes.

The usual folder of temporary files may have too long a path, for instance in a job of a cluster.  No torch.
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
    """Return a writable folder with a short path, for folders with sockets: if possible the folder of temporary files.

    Raises:
        Refusal: If each folder that is tried has too long a path, or cannot be written.
    """
    usual = tempfile.gettempdir()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    for folder in (usual, runtime, *_OTHERS):
        if folder and len(os.fsencode(folder)) <= _LONGEST and os.access(folder, os.W_OK | os.X_OK):
            return folder
    others = f"none of {', '.join(_OTHERS)} can be written"
    raise Refusal(
        f"TMPDIR = {usual!r}: the path of a folder for sockets may have at most {_LONGEST} bytes, and {others}: "
        "set TMPDIR to a shorter path"
    )


@contextlib.contextmanager
def new() -> Iterator[Path]:
    """Yield a new folder for sockets, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="zeropp-", dir=parent(), ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def give_to_multiprocessing() -> None:
    """Make ``multiprocessing`` create its folder for sockets now, inside the short folder :func:`parent`.

    ``multiprocessing`` creates one such folder in a process, and uses it from then on.
    """
    with mock.patch.object(tempfile, "tempdir", parent()):
        util.get_temp_dir()
