"""Reads files that somebody else may have written: regular files only, and only up to a maximum size.

If the path of such a file leads to a FIFO, a device or a socket, reading it could block for ever, or fill the memory.
This module imports no torch.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

MOST: Final = 64 << 20  # the default maximum of a file's size, in bytes


def status(path: Path) -> os.stat_result:
    """Return the ``os.stat`` result of the regular file at ``path``; ``path`` may be a symbolic link.

    Raises:
        OSError: If there is no file at ``path``, or if the file is not a regular file.
    """
    return _regular(path, path.stat())


def _regular(path: Path, result: os.stat_result) -> os.stat_result:
    if stat.S_ISDIR(result.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(result.st_mode):
        raise OSError(errno.EINVAL, "a FIFO, a device or a socket; expected a regular file", str(path))
    return result


def read_bytes(path: Path, most: int = MOST) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes; a FIFO raises an error instead of blocking.

    Raises:
        OSError: If the file is missing, is not a regular file, has more than ``most`` bytes, or cannot be read.
    """
    status(path)  # before the file is opened, because opening some devices has effects
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
        size = _regular(path, os.fstat(file.fileno())).st_size
        content = file.read(most + 1) if size <= most else b""
    if max(size, len(content)) > most:
        raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", str(path))
    return content


def read_text(path: Path, encoding: str = "utf-8", most: int = MOST) -> str:
    """Return the text of a regular file of at most ``most`` bytes; each end of line is converted to a line feed.

    Raises:
        OSError: For the same reasons as :func:`read_bytes`.
        UnicodeDecodeError: If the file is not in this encoding.
    """
    return read_bytes(path, most).decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
