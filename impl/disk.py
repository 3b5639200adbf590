"""What a checkpoint does to a disk, operation by operation, so that a test can stop it at any of them.

Pure: no torch.  A file or folder counts once it, and the folder that names it, have been synced
(POSIX ``fsync``): only then does a rename put something whole in a name's place.
"""

from __future__ import annotations

import os
import shutil
from io import FileIO
from pathlib import Path
from typing import Final

Bytes = bytes | bytearray | memoryview

_CHUNK: Final = 1 << 24  # bytes of one system call; Linux writes at most 2 GiB - 4 KiB


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or read, as asked; one line that names what."""


def create(path: Path) -> FileIO:
    """A new file to be written.

    Raises:
        OSError: if it is there already, or its folder is not.
    """
    return FileIO(path, "xb")


def write(file: FileIO, data: Bytes) -> None:
    """Write all bytes of ``data``.

    Raises:
        OSError: if the disk is full, among others.
    """
    rest = memoryview(data).cast("B")
    while rest:
        done = file.write(rest[:_CHUNK])
        rest = rest[done:]


def sync(file: FileIO) -> None:
    """Wait until the disk has what was written."""
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it.

    Raises:
        OSError: if it is there already.
    """
    path.mkdir(parents=True)


def rename(old: Path, new: Path) -> None:
    """Give a file or folder another name, at once."""
    old.replace(new)


def remove_folder(path: Path) -> None:
    """Remove a folder with all that is in it."""
    shutil.rmtree(path)
