"""Creates and removes the folders of checkpoints, so that a checkpoint is on disk completely or not at all.

A checkpoint is written into a folder with a temporary name.  When all files are written, the folder is renamed, which
makes it a checkpoint.  The files and the folder are synced to disk before the rename, and the parent folder after it,
so that a checkpoint is complete even after a crash of the machine.  This module does not import torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)

MANIFEST: Final = "manifest.json"
_NAME: Final = re.compile(r"checkpoint-([0-9]{6,})")
_LEFT: Final = re.compile(r"\.checkpoint-[0-9]{6,}\.[0-9a-f]+\.partial")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved, read or loaded; one line gives the reason, and the file if there is one."""


def checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in ``folder``, oldest first; an empty list if ``folder`` does not exist."""
    return [path for path in named(folder) if (path / MANIFEST).is_file()]


def named(folder: Path) -> list[Path]:
    """Returns all checkpoints in ``folder``, complete or not, oldest first.

    A path counts as a checkpoint if its name has the form ``checkpoint-NNNNNN``.
    """
    inside = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in inside if _NAME.fullmatch(path.name)), key=_number)


def _number(path: Path) -> int:
    return int(path.name.partition("-")[2])


def latest(folder: Path | str) -> Path | None:
    """Returns the newest complete checkpoint in ``folder``; None if there is none."""
    complete = checkpoints(Path(folder))
    return complete[-1] if complete else None


def resolve(folder: Path) -> Path:
    """Returns ``folder`` if it is a checkpoint, else the newest complete checkpoint in ``folder``.

    A folder counts as a checkpoint if it contains a manifest, or is called ``checkpoint-NNNNNN``.

    Raises CheckpointError: if ``folder`` is not a checkpoint and contains no complete checkpoint.
    """
    path = folder if (folder / MANIFEST).exists() or _NAME.fullmatch(folder.name) else latest(folder)
    if path is None:
        raise CheckpointError(
            f"{folder}: {'no checkpoint in it' if folder.is_dir() else 'no such folder'}; name a checkpoint, or a "
            "folder of checkpoints"
        )
    return path


def begin(folder: Path) -> Path:
    """Create a folder with a temporary name in ``folder``, for the files of the next checkpoint, and return its path.

    Before that, remove the folders that interrupted saves and removals have left in ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if _LEFT.fullmatch(path.name):
            remove(path)
    number = max(map(_number, named(folder)), default=0) + 1
    partial = folder / f".checkpoint-{number:06d}.{secrets.token_hex(4)}.partial"
    partial.mkdir()
    return partial


def commit(partial: Path, manifest: str) -> Path:
    """Complete a checkpoint: write its manifest (the file that lists its contents), and rename its folder.

    ``partial`` is the folder with a temporary name that :func:`begin` returned.  It must contain all other files of the
    checkpoint already, synced to disk.  ``manifest`` is the text of the manifest's file.

    Returns the checkpoint's folder, ``checkpoint-NNNNNN``.

    Raises CheckpointError: if the manifest cannot be written.
    """
    path = partial.with_name(partial.name.split(".")[1])
    try:
        (partial / MANIFEST).write_text(manifest, encoding="utf-8")
    except OSError as error:  # if the disk is full, the error does not name the file
        raise CheckpointError(f"{partial / MANIFEST}: cannot be written: {error.strerror}") from None
    sync(partial / MANIFEST)
    sync(partial)
    partial.rename(path)
    sync(path.parent)
    sync(path.parent.parent)
    return path


def sync(path: Path) -> None:
    """Sync a file, or the names of the files in a folder, to disk.

    Raises OSError: if the disk fails or is full; the error names ``path``, which the error of ``fsync`` does not.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(handle)


def thin(folder: Path, keep: int) -> None:
    """Remove all complete checkpoints in ``folder`` except the ``keep`` newest; ``keep`` is at least 1.

    Each checkpoint is renamed to a temporary name before its files are removed, so that an interrupted removal leaves
    no incomplete checkpoint.  If a checkpoint cannot be renamed, a warning is logged, and the checkpoint stays.  If the
    renamed folder cannot be removed, a warning is logged, and the next :func:`begin` tries again.
    """
    for path in checkpoints(folder)[:-keep]:
        try:
            gone = path.rename(path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial"))
            sync(folder)
            remove(gone)
        except OSError as error:
            _log.warning(
                "%s: should be removed, since keep=%d, but cannot be removed: %s",
                path,
                keep,
                error.strerror,
            )


def remove(path: Path) -> None:
    """Remove the folder ``path`` of a checkpoint that is incomplete or no longer wanted.

    The folder must have its temporary name, so that an interrupted removal leaves no incomplete checkpoint.

    If ``path`` is a link, only the link is removed.  If ``path`` cannot be removed, a warning is logged.
    """
    try:
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    except OSError as error:
        _log.warning(
            "%s: is not a complete checkpoint, and cannot be removed: %s; remove it by hand",
            path,
            error.strerror,
        )


def digest_of(path: Path) -> tuple[int, str]:
    """Returns the size in bytes of a file, and its SHA-256 in hexadecimal digits."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
