"""A folder whose path is short enough for the names of Unix-domain sockets.  No torch."""

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

_LONGEST: Final = 107 - len(
    "/pymp-xxxxxxxx/listener-xxxxxxxx"
)  # bytes: the kernel's limit, without names in it
_OTHERS: Final = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  # where folders of our own are made


def parent() -> str:
    """The folder of temporary files, or another one where its path is too long; a Refusal if none will do."""
    usual = tempfile.gettempdir()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    for folder in (usual, runtime, *_OTHERS):
        if folder and len(os.fsencode(folder)) <= _LONGEST and os.access(folder, os.W_OK | os.X_OK):
            return folder
    others = f"none of {', '.join(_OTHERS)} can be written"
    raise Refusal(
        f"TMPDIR = {usual!r}: has more than the {_LONGEST} bytes that a socket's folder may have; {others}: "
        "set it to a shorter path"
    )


@contextlib.contextmanager
def new() -> Iterator[Path]:
    """A new folder for sockets, which is removed in the end."""
    with tempfile.TemporaryDirectory(prefix="zeropp-", dir=parent(), ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def give_to_multiprocessing() -> None:
    """Let the sockets of ``multiprocessing`` lie there; it makes one folder for them, when it first asks."""
    with mock.patch.object(tempfile, "tempdir", parent()):
        util.get_temp_dir()
