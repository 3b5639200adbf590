"""The lock of a results folder: one run writes there."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from harness.records.record import RecordError

LOCK: Final = ".lock"


@contextlib.contextmanager
def alone(results: Path) -> Iterator[None]:
    """Hold the folder's lock; a RecordError if another run does, between hosts on NFS and Lustre, too."""
    try:
        results.mkdir(parents=True, exist_ok=True)
        lock = (results / LOCK).open("w")
    except OSError as error:
        raise RecordError(f"{results}: cannot write there: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordError(
                f"{results}: another zeropp run is writing there; wait for it, or choose other --results"
            ) from None
        except OSError as error:
            raise RecordError(f"{results}: cannot be locked: {error.strerror or error}") from error
        yield
