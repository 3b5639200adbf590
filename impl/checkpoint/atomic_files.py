"""Atomic writes, renames, locks and syncs of checkpoint files; a test can stop them at any operation.

Pure: no torch.  A file or folder counts once it, and the folder that names it, have been synced
(POSIX ``fsync``): only then does a rename put something whole in a name's place.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import weakref
from io import BufferedWriter
from pathlib import Path
from typing import Final

Bytes = bytes | bytearray | memoryview

_NO_LOCKS: Final = {errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # of a file system without


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or read, as asked; one line that names what."""


def create(path: Path) -> BufferedWriter:
    """A new file to be written.

    Raises:
        OSError: if it is there already, or its folder is not.
    """
    return path.open("xb")


def write(file: BufferedWriter, data: Bytes) -> None:
    """Write all bytes of ``data``."""
    file.write(data)


def sync(file: BufferedWriter) -> None:
    """Wait until the disk has what was written."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, each synced into the one above.

    Raises:
        OSError: if it is there already.
    """
    missing = [path, *(above for above in path.parents if not above.exists())]
    for one in reversed(missing):
        one.mkdir(exist_ok=one != path)  # another run may make those above at the same time
        sync_folder(one.parent)


def rename(old: Path, new: Path) -> None:
    """Give a file or folder another name, at once."""
    old.replace(new)


def remove_folder(path: Path) -> None:
    """Remove a folder with all that is in it; of a link, or a file, the name alone."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, onerror=_unless_gone)


def _unless_gone(_function: object, _path: object, raised: tuple[type, BaseException, object]) -> None:
    if not isinstance(raised[1], FileNotFoundError):  # somebody else removes it too
        raise raised[1]


class Lock:
    """A folder of which nobody else has the lock (``flock``), until :meth:`release` or this process's end.

    Attributes:
        real: whether there is one: not all file systems lock folders.

    Raises:
        BlockingIOError: if somebody has it, and it is not to ``wait``.
        OSError: if there is no such folder.
    """

    def __init__(self, path: Path, *, wait: bool) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self.release = weakref.finalize(self, os.close, handle)  # also of one that is forgotten
        self.real = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self.release()
                raise
            self.real = False
