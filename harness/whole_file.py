"""Writes files completely or not at all, by writing temporary files first and then renaming them.

The temporary files are in a hidden folder, which is in the same folder as the files to write
(:func:`temporary_folder`).  A process that is killed leaves its hidden folder behind, and the next process that writes
a file into the same folder removes this hidden folder.  This module does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_OF_DISKS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_PREFIX: Final = ".zeropp-unfinished-"  # long, so that no folder of a user has this name


@contextlib.contextmanager
def written_whole(targets: Sequence[Path], *, new: bool = False) -> Iterator[list[Path]]:
    """Yield a temporary path for each target file; when the ``with`` block ends, rename these files to the targets.

    The caller's block writes to the yielded paths.  If the block raises, or if the process is killed inside the block,
    all targets stay as they were.  For a target that exists and is not a regular file, such as a pipe, the target's own
    path is yielded, so that the block writes to it directly.

    Args:
        targets: The files to write, in folders that exist.
        new: Whether the targets must not exist yet.

    Raises:
        FileExistsError: If ``new`` is true and a target exists when the block ends.  Then no target is written.
        OSError: If a file cannot be written.
    """
    with _naming(targets), contextlib.ExitStack() as stack:
        folders: dict[Path, Path] = {}  # temporary folder by the target's folder
        paths: dict[Path, Path] = {}  # temporary file by the file that it becomes
        yielded = []
        for target in targets:
            if target.exists() and not target.is_file():
                yielded.append(target)
                continue
            real = Path(os.path.realpath(target))  # a link stays one
            if real.parent not in folders:
                folders[real.parent] = stack.enter_context(temporary_folder(real.parent))
            paths[real] = folders[real.parent] / real.name
            yielded.append(paths[real])
        yield yielded
        for path in paths.values():
            with path.open("rb") as file:  # on the disk before it is renamed
                os.fsync(file.fileno())
        if new and (there := [target for target in paths if target.exists()]):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(there[0]))
        for target, path in paths.items():
            path.replace(target)


@contextlib.contextmanager
def _naming(targets: Sequence[Path]) -> Iterator[None]:
    """Return a context that adds the paths of ``targets`` to an error of a full or broken disk.

    For such an error, the system often names no file.  Errors that name a file, and all other errors, stay as they are.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_DISKS:
            raise
        raise OSError(error.errno, error.strerror, ", ".join(map(str, targets))) from error


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Yield a new hidden folder in the folder ``parent``, and remove it when the ``with`` block ends.

    A process that is killed inside the block leaves its folder behind, so this function first removes such folders from
    ``parent``.  A folder is removed if no process holds a lock on it: each process locks its folder, and the system
    releases the lock when the process ends.  On a file system without locks, folders that were left behind stay.

    Raises:
        OSError: If the folder cannot be made or removed.
    """
    for left in parent.glob(f"{_PREFIX}*"):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            _lock(left, stack)
            shutil.rmtree(left, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        while True:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent, prefix=_PREFIX)))
            try:
                _lock(folder, stack)
            except (BlockingIOError, FileNotFoundError):  # another process removes it: it was not locked yet
                continue
            except OSError:  # a file system without locks, on which no process removes the folder
                pass
            if folder.exists():
                break
        yield folder


def _lock(folder: Path, stack: contextlib.ExitStack) -> None:
    """Lock a folder until ``stack`` is closed; raise an OSError if it is locked already, or cannot be locked."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    stack.callback(os.close, handle)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_hidden(path: Path) -> bool:
    """Return whether the name of a file or folder begins with a dot, as the names of temporary folders do."""
    return path.name.startswith(".")
