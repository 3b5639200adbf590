"""Reads the trace that the fake libraries write of a process: launches, copies, events, waits and NCCL calls."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.fake_gpu import build


class Kind(enum.IntEnum):
    """What an entry is; the numbers are those of ``libraries/fake.hpp``."""

    KERNEL = 0
    COPY = 1
    SET = 2
    RECORD = 3  # of an event
    WAIT = 4  # of a stream for an event
    SYNC_STREAM = 5  # the host waits
    SYNC_EVENT = 6
    SYNC_DEVICE = 7
    QUERY = 8
    ALLOCATE = 9
    FREE = 10
    PIN = 11
    EVENT = 12  # one is created
    NCCL = 13
    PRODUCT = 14  # of matrices
    CODEC = 15  # a launch of this project's kernels
    ACCESS = 16


class Option(enum.IntEnum):
    """Options of the fake libraries; see ``libraries/fake.hpp``."""

    COPIES = 0
    PEERS = 1
    QUERIES = 2


HOST = -1  # the stream of what the host itself reads and writes


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the trace."""

    kind: Kind
    stream: int
    event: int = 0  # number of the event; of an NCCL call, the number of ranks
    nbytes: int = 0
    name: str = ""
    address: int = 0  # of an access
    writes: bool = False


class _Entry(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_long) for name in ("kind", "thread", "stream", "event", "nbytes")),
        ("name", ctypes.c_char_p),
        *((name, ctypes.c_long) for name in ("address", "writes")),
    )


@functools.cache
def _runtime() -> ctypes.CDLL:
    (path,) = build.libraries().glob("libcudart.*")
    library = ctypes.CDLL(str(path))
    library.fake_note.argtypes = [*[ctypes.c_long] * 4, ctypes.c_char_p]
    library.fake_access.argtypes = [*[ctypes.c_long] * 3, ctypes.c_bool, ctypes.c_char_p]
    library.fake_set_option.argtypes = [ctypes.c_int, ctypes.c_long]
    library.fake_stop.argtypes = [ctypes.POINTER(ctypes.POINTER(_Entry))]
    library.fake_stop.restype = library.fake_count.restype = ctypes.c_long
    return library


@functools.cache
def _kept(name: str) -> ctypes.c_char_p:
    """The name as C's text, which lives as long as the process."""
    return ctypes.c_char_p(name.encode())


def note(kind: Kind, stream: int, name: str) -> None:
    """Count a call, and append it to the trace while one is recorded."""
    _runtime().fake_note(kind, stream, 0, 0, _kept(name))


def access(stream: int, address: int, nbytes: int, name: str, *, writes: bool) -> None:
    """Append an access to the trace while one is recorded, if the memory is a device's or pinned."""
    _runtime().fake_access(stream, address, nbytes, writes, _kept(name))


def set_option(option: Option, value: int) -> None:
    """Set an option of this process."""
    _runtime().fake_set_option(option, value)


def counts() -> dict[Kind, int]:
    """Returns the number of calls of each kind since the last :func:`reset_counts`."""
    return {kind: _runtime().fake_count(kind) for kind in Kind if kind is not Kind.ACCESS}


def reset_counts() -> None:
    """Count from here on."""
    _runtime().fake_reset_counts()


@dataclass(slots=True)
class Recording:
    """The entries of a recording, once it has ended."""

    entries: Sequence[Entry] = field(default_factory=list)


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    """Record the calls of the body."""
    recording = Recording()
    _runtime().fake_record()
    try:
        yield recording
    finally:
        first = ctypes.POINTER(_Entry)()
        count = _runtime().fake_stop(ctypes.byref(first))
        recording.entries = [
            Entry(
                Kind(one.kind),
                one.stream,
                one.event,
                one.nbytes,
                one.name.decode(),
                one.address,
                bool(one.writes),
            )
            for one in (first[i] for i in range(count))
        ]
