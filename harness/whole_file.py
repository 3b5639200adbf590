"""Writes files whole or not at all: into temporary files of the same folder, which are then renamed.  No torch."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def written_whole(targets: Sequence[Path], *, new: bool = False) -> Iterator[list[Path]]:
    """Yield a temporary path for each target file; when the ``with`` block ends, rename these files to the targets.

    The block writes the temporary files.  If the block raises, all targets stay as they were.  If the process is killed
    inside the block, the targets stay as they were, and a hidden temporary folder may be left in their folder.  If a
    target is not a regular file but, for example, a pipe, its own path is yielded, and nothing is renamed.

    Args:
        targets: The files to write, in folders that exist.
        new: Whether the targets must not exist yet.

    Raises:
        FileExistsError: If ``new`` is true and a target exists when the block ends.  Then no target is written.
        OSError: If a file cannot be written.
    """
    with contextlib.ExitStack() as stack:
        folders: dict[Path, Path] = {}  # temporary folder by the target's folder
        paths: dict[Path, Path] = {}  # temporary file by the file that it becomes
        yielded = []
        for target in targets:
            if target.exists() and not target.is_file():
                yielded.append(target)
                continue
            real = Path(os.path.realpath(target))  # a link stays one
            if real.parent not in folders:
                made = tempfile.TemporaryDirectory(dir=real.parent, prefix=".")
                folders[real.parent] = Path(stack.enter_context(made))
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
