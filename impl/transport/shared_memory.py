"""Shared-memory transport inside a node on a CPU: one arena that the ranks of a group read and write.

Not a process-group backend: slots, with one row per rank in each.  A rank writes its row, posts the
exchange's number, and reads the others' rows *in place* once theirs are posted.  A slot is written again only
after all have marked it read.  Each rank alone chooses an exchange's slot: the first that it has finished
with.  Ranks open and finish exchanges in the same order, so they choose alike.

A flag must not be seen before the row that it announces.  The C++ library of :mod:`impl.cpu` sets flags with
release and reads them with acquire.  x86 alone keeps this order by itself, so without that library Python's
plain writes and reads serve there, and other processors are refused.

Waits are Linux's futex through the C library: with more ranks than cores, a rank that spins, or sleeps for a
guessed time, takes processor time from the rank that it waits for.

The arena is an anonymous file (``memfd``) of the group's first rank, opened by the others through ``/proc``:
it has no name to clean up, and vanishes with its last user, however that ends.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import sys
import time
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from impl.cpu import build
from impl.plan.topology import ranks_in_words
from impl.transport.group import Group

SLOTS: Final = 16  # exchanges that may be under way at once in one group
LINE: Final = 64  # bytes; each flag has a cache line of its own

# Number of the system call, by machine; all are little-endian: a futex is 32 bits, the lower half of a flag.
_FUTEX: Final = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}.get(platform.machine(), 0)
_WAIT, _WAKE = 0, 1  # operations on memory that processes share

_KEEPS_ORDER: Final = ("x86_64", "AMD64")  # machines whose processors keep the order of writes, and of reads

_Timespec = ctypes.c_long * 2  # seconds, nanoseconds
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class SharedMemoryError(RuntimeError):
    """The arena cannot be made, or has no room; the message says why."""


class FlagFunctions(ctypes.PyDLL):
    """``post_flag`` and ``least_flag`` of the C++ library; calls keep Python's lock, as they never wait."""

    def __init__(self, library: str) -> None:
        super().__init__(library)
        self.post_flag.argtypes, self.post_flag.restype = (ctypes.c_void_p, ctypes.c_int64), None
        self.least_flag.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        self.least_flag.restype = ctypes.c_int64


@functools.cache
def flag_functions() -> FlagFunctions | None:
    """The functions that order flags and messages; None on x86, where there is no library and no need.

    Raises SharedMemoryError: without a library on another machine.
    """
    try:
        return FlagFunctions(str(build.library(build.user_folder())))
    except (build.BuildError, OSError) as problem:
        if platform.machine() in _KEEPS_ORDER:
            return None
        raise SharedMemoryError(
            f"transport 'shm' on {platform.machine()}, which reorders writes, needs our C++ library: make it "
            f"buildable, or use transport 'backend' ({problem})"
        ) from problem


def patience(backend: str, limit: timedelta) -> tuple[timedelta, ...]:
    """Arguments of ``Work.wait``: gloo takes a limit, NCCL would block the host, thread ranks raise."""
    return (limit,) if backend == "gloo" else ()


def shared_file(group: Group, timeout: float, total: int) -> int:
    """This rank's handle of an anonymous file of ``total`` zeros, which all ranks of a group must open."""
    if _libc is None or not _FUTEX:
        raise SharedMemoryError("transport 'shm' needs Linux's memfd and futex; use transport 'backend'")
    flag_functions()
    address, handle = torch.zeros(2, dtype=torch.int64), -1
    if group.index == 0:
        handle = os.memfd_create("zeropp-arena", os.MFD_CLOEXEC)
        os.ftruncate(handle, total)
        address = torch.tensor([os.getpid(), handle])
    limit = patience(dist.get_backend(group.process_group), timedelta(seconds=timeout))
    dist.broadcast(address, group_src=0, group=group.process_group, async_op=True).wait(*limit)
    if group.index != 0:
        path = f"/proc/{int(address[0])}/fd/{int(address[1])}"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SharedMemoryError(
                f"rank {group.ranks[group.index]} cannot open the memory of rank {group.ranks[0]} ({path}: "
                f"{error.strerror}): unless on one machine, under one user, use transport 'backend'"
                f"{group.counting}"
            ) from error
    # The first rank's handle must outlive the opening.
    dist.barrier(group=group.process_group, async_op=True).wait(*limit)
    return handle


class Arena:
    """Slots shared by the ranks of one group on one node, for messages of up to ``row_bytes`` a rank.

    All ranks must construct it together, within ``timeout`` seconds.  Raises SharedMemoryError.
    """

    def __init__(self, row_bytes: int, group: Group, timeout: float) -> None:
        self.group = group
        self.row_bytes = -(-row_bytes // 4096) * 4096
        size, flags = group.size, 2 * SLOTS * group.size * LINE
        total = flags + SLOTS * size * self.row_bytes
        handle = shared_file(group, timeout, total)
        whole = torch.frombuffer(mmap.mmap(handle, total), dtype=torch.uint8)
        os.close(handle)
        lines = whole[:flags].view(torch.int64).view(2, SLOTS, size, LINE // 8)
        self._posted = Flags(lines[0], group, timeout)  # numbers of the exchanges last written
        self._read = Flags(lines[1], group, timeout)  # numbers of the exchanges last read
        self._marks = lines[0, :, :, 1].numpy().view("uint64")  # (slot, rank) marks of posted messages
        # Views made once, (rank, byte) by slot: making one takes longer than reading a flag.
        self._whole = list(whole[flags:].view(SLOTS, size, self.row_bytes).unbind())
        self._rows: list[Tensor] = [rows[group.index] for rows in self._whole]
        self._count, self._free = 0, list(range(SLOTS))
        self._slots: dict[int, int] = {}  # of the exchanges under way, by number
        self._last = [0] * SLOTS  # by slot, number of its last exchange

    def claim(self) -> int:
        """Take a slot for the next exchange, once all have read its last; returns the exchange's number."""
        if not self._free:
            axis = self.group.axis.name
            raise SharedMemoryError(f"{SLOTS} exchanges along {axis} are under way: no room for another")
        slot = min(self._free)
        self._read.wait(slot, self._last[slot], "did not read")
        self._free.remove(slot)
        number = self._count = self._count + 1
        self._slots[number] = slot
        self._last[slot] = number
        return number

    def row(self, number: int) -> Tensor:
        """(row_bytes,) this rank's part of an exchange's slot."""
        return self._rows[self._slots[number]]

    def post(self, number: int, mark: int) -> None:
        """Tell the others that this rank's row is written, with a 64-bit ``mark`` of the exchange."""
        self._marks[self._slots[number], self.group.index] = mark
        self._posted.set(self._slots[number], self.group.index, number)

    def wait(self, number: int) -> Tensor:
        """(ranks, row_bytes) all rows of the exchange, once posted; valid until :meth:`done`."""
        slot = self._slots[number]
        self._posted.wait(slot, number, "did not send")
        return self._whole[slot]

    def agree(self, number: int, mark: int) -> bool:
        """Whether all ranks posted ``mark``; after :meth:`wait`."""
        marks = self._marks[self._slots[number]].tolist()
        return bool(marks.count(mark) == len(marks))

    def done(self, number: int) -> None:
        """Tell the others that this rank has read the slot."""
        slot = self._slots.pop(number)
        self._read.set(slot, self.group.index, number)
        self._free.append(slot)


class Flags:
    """A growing number for each slot and rank, in ``lines`` (slot, rank, cache line) int64."""

    def __init__(self, lines: Tensor, group: Group, timeout: float) -> None:
        self._size, first = group.size, lines.data_ptr()
        self._ranks, self._timeout = group.ranks, timeout
        # By slot and rank, since making one takes as long as reading a flag.
        self._addresses = [
            [first + (slot * self._size + rank) * LINE for rank in range(self._size)]
            for slot in range(len(lines))
        ]
        self._functions = flag_functions()
        # A numpy view: reading one is 50 ns, a tensor's item() over a microsecond.
        self._numbers = lines[:, :, 0].numpy()

    def set(self, slot: int, rank: int, number: int) -> None:
        """Set a flag, and wake the processes that wait for it."""
        if self._functions is not None:
            self._functions.post_flag(self._addresses[slot][rank], number)
            return
        self._numbers[slot, rank] = number
        _futex(self._addresses[slot][rank], _WAKE, 2**31 - 1, None)  # all sleepers

    def wait(self, slot: int, number: int, failure: str) -> None:
        """Wait until all ranks' flags of ``slot`` reach ``number``; TimeoutError: with ranks' ``failure``."""
        if self._least(slot) >= number:
            return
        deadline = time.monotonic() + self._timeout
        for rank in range(self._size):
            while (seen := int(self._numbers[slot, rank])) < number:
                if (left := deadline - time.monotonic()) < 0:
                    numbers = zip(self._ranks, self._numbers[slot].tolist(), strict=True)
                    late = ranks_in_words([rank for rank, reached in numbers if reached < number])
                    raise TimeoutError(f"waited {self._timeout:g} s: {late} {failure}")
                nap = min(left, 1.0)
                span = _Timespec(int(nap), int(nap % 1 * 1e9))
                _futex(self._addresses[slot][rank], _WAIT, seen, span)
        self._least(slot)  # with acquire, unlike the loop's reads

    def _least(self, slot: int) -> int:
        """The least number of all ranks' flags of ``slot``; what they announced can be read."""
        if self._functions is not None:
            return self._functions.least_flag(self._addresses[slot][0], self._size, LINE)  # type: ignore[no-any-return]
        return int(min(self._numbers[slot].tolist()))


def _futex(address: int, operation: int, value: int, span: ctypes.Array[ctypes.c_long] | None) -> None:
    """Sleep while the shared 32 bits at ``address`` are ``value``, or wake ``value`` sleepers."""
    assert _libc is not None  # noqa: S101  # checked by shared_file()
    word, limit = ctypes.c_uint32(value & 0xFFFFFFFF), None if span is None else ctypes.byref(span)
    _libc.syscall(_FUTEX, ctypes.c_void_p(address), operation, word, limit, None, 0)
