"""How a checkpoint becomes complete: begun in a folder of its own, committed by one rename, or given up.

Pure: no torch.  What has no manifest is no checkpoint; here is also how torn ones are found and removed, old
ones thinned out, and files compared with what the manifest says of them.
"""

from __future__ import annotations

import logging
import re
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from impl.checkpoint import atomic_files as disk
from impl.checkpoint.atomic_files import CheckpointError
from impl.checkpoint.manifest import MANIFEST, Manifest, SavedFile
from impl.checkpoint.safetensors_file import digest_of

_log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"checkpoint-([0-9]{6,})")
_LEFT: Final = re.compile(r"\.checkpoint-([0-9]{6,})\.[0-9a-f]+\.(partial|removed)")


# Folders


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, oldest first; none if it is not there."""
    return [path for path in named(folder) if (path / MANIFEST).is_file()]


def named(folder: Path) -> list[Path]:
    """What has a checkpoint's name in ``folder``, oldest first: broken, if it is not complete.

    A save gives that name last, and removing one takes it first.
    """
    found = {int(match[1]): path for path in _inside(folder) if (match := _NAME.fullmatch(path.name))}
    return [found[number] for number in sorted(found)]


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def latest(folder: Path | str) -> Path | None:
    """The newest complete checkpoint in ``folder``; None if there is none."""
    return next(reversed(checkpoints(Path(folder))), None)


def resolve(folder: Path) -> Path:
    """The checkpoint that ``folder`` is, or the newest that it holds.

    Raises:
        CheckpointError: if it is none and holds none.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(
            f"{folder}: is a file; expected a folder of checkpoints, or a checkpoint: "
            f"a folder with a {MANIFEST}"
        )
    if (folder / MANIFEST).exists() or _NAME.fullmatch(folder.name):
        return folder
    newest = latest(folder)
    if newest is None:
        raise CheckpointError(f"{folder}: {'no checkpoint in it' if folder.is_dir() else 'no such folder'}")
    return newest


# Saving


class Begun(NamedTuple):
    """A checkpoint under way: its folder for now, and on rank 0 the lock that says so, for its life."""

    partial: Path
    lock: disk.Lock | None

    def release(self) -> None:
        """It is complete, or given up."""
        if self.lock is not None:
            self.lock.release()


def begin(folder: Path) -> Begun:
    """Make room for the next checkpoint, and remove what broken saves have left; rank 0 calls it.

    What others are saving here now, in this process or another, is left alone, and has another number.

    Raises:
        OSError: if that cannot be done.
    """
    with suppress(FileExistsError):
        disk.make_folder(folder)
    turn = disk.Lock(folder, wait=True)  # nobody else begins, or clears, meanwhile
    try:
        taken = [
            int(match[1])
            for path in _inside(folder)
            if (match := _NAME.fullmatch(path.name))
            or ((match := _LEFT.fullmatch(path.name)) and not _cleared(path))
        ]
        partial = folder / f".checkpoint-{max(taken, default=0) + 1:06d}.{secrets.token_hex(4)}.partial"
        disk.make_folder(partial)
        return Begun(partial, disk.Lock(partial, wait=False))
    finally:
        turn.release()


def _cleared(path: Path) -> bool:
    """Whether what a save has left is gone; not if the save goes on, or it cannot be removed."""
    try:
        if path.is_dir() and not path.is_symlink():
            lock = disk.Lock(path, wait=False)
            lock.release()
            if not lock.real:
                _log.warning("%s: may be of a save under way, as locks are missing here: left alone", path)
                return False
        disk.remove_folder(path)
    except BlockingIOError:
        return False
    except OSError as error:
        _log.warning("%s: left by a save, and cannot be removed: %s", path, error.strerror)
        return False
    return True


def complete_name(partial: Path) -> Path:
    """What the checkpoint that is written at ``partial`` will be called."""
    return partial.with_name(partial.name.split(".")[1])


def commit(partial: Path, manifest: Manifest) -> Path:
    """Complete a checkpoint whose other files are all on disk, by one rename; returns its folder.

    Raises:
        OSError: if that cannot be done; then it is not complete.
        CheckpointError: if the files are not those that were written, or its name is taken.
    """
    path = complete_name(partial)
    for written in manifest.files:
        check_size(partial, written)
    if path.exists():
        raise CheckpointError(f"{path}: is there already: another run saves into this folder")
    with disk.create(partial / MANIFEST) as file:
        disk.write(file, manifest.text().encode())
        disk.sync(file)
    disk.sync_folder(partial)
    disk.rename(partial, path)
    disk.sync_folder(path.parent)
    return path


def give_up(partial: Path) -> None:
    """Remove what there is of a checkpoint that will not be completed, as far as that can be done."""
    with suppress(OSError):  # the error that led here matters more; the next save tries again
        disk.remove_folder(partial)


def thin(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the ``keep`` newest; each leaves its name first, whole.

    Of a link the name goes alone.  What cannot be removed is logged: the new checkpoint is there.
    """
    for path in checkpoints(folder)[:-keep]:
        try:
            gone = path.with_name(f".{path.name}.{secrets.token_hex(4)}.removed")
            disk.rename(path, gone)
            disk.sync_folder(folder)
            disk.remove_folder(gone)
        except FileNotFoundError:  # another save removes it
            continue
        except OSError as error:
            _log.warning("%s: older than the %d to be kept, and stays: %s", path, keep, error.strerror)


# Reading


def verify(path: Path, files: Iterable[SavedFile]) -> None:
    """Make sure that files are those that the manifest speaks of.

    Raises:
        CheckpointError: naming the first that is missing, cut short or altered.
    """
    for file in files:
        check_size(path, file)
        found = digest_of(path / file.name)
        if found.sha256 != file.sha256:
            raise CheckpointError(f"{path / file.name}: altered since it was written: its digest is another")


def check_size(path: Path, file: SavedFile) -> None:
    """Refuse a file that is not one, or of another size than the manifest says.

    Raises:
        CheckpointError: naming it.
    """
    try:
        found = (path / file.name).lstat()
    except OSError as error:
        raise CheckpointError(f"{path / file.name}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path / file.name}: not a regular file")
    if found.st_size != file.nbytes:
        raise CheckpointError(f"{path / file.name}: {found.st_size} bytes, the manifest says {file.nbytes}")
