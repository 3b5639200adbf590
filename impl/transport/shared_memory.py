"""Exchanges messages between the ranks of a node in shared memory, on a CPU.

This is not a process-group backend.  The ranks of a group share one *arena*, memory that is divided into *slots*.  A
slot holds the messages of one exchange, with one row for each rank.  For an exchange, a rank writes its row of a slot,
sets a flag to the number of the exchange, and reads the other ranks' rows *in place* once their flags are set.  A slot
is written again only after all ranks have marked it as read.  Each rank chooses the slot of an exchange by itself: the
slot with the lowest index in which it has no exchange under way.  Since all ranks start and finish exchanges in the
same order, they choose the same slot.

A flag must not become visible before the row that it announces.  The C++ library of :mod:`impl.cpu` sets flags
with release and reads them with acquire order.  x86 processors keep this order by themselves; therefore, if the
library is missing, Python's plain writes and reads are used on x86, and an error is raised on other processors.

Ranks wait with Linux's futex, called through the C library.  There are two simpler ways to wait, and neither is good.
With more ranks than cores, a rank that spins takes processor time from the rank for which it waits.  A rank that sleeps
for a guessed time wakes too late.

The arena is an anonymous file (``memfd``) of the group's first rank; the other ranks open it through ``/proc``.  The
file has no name to clean up, and vanishes with its last user, however that process ends.
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
from impl.policy.topology import ranks_in_words
from impl.transport.group import Group

SLOTS: Final = 16  # exchanges that may be under way at once in one group
LINE: Final = 64  # bytes; each flag has a cache line of its own

# The number of the futex system call on each machine.  A futex has 32 bits; on these machines, which are all
# little-endian, it is the lower half of a flag.
_FUTEX: Final = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}.get(platform.machine(), 0)
_WAIT, _WAKE = 0, 1  # the futex operations for memory that processes share

_KEEPS_ORDER: Final = ("x86_64", "AMD64")  # machines whose processors keep the order of writes and of reads
_INSTEAD: Final = "use transport 'backend' (in a suite, cluster.transport = 'gloo')"

_Timespec = ctypes.c_long * 2  # seconds, nanoseconds
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class SharedMemoryError(RuntimeError):
    """Raised if the memory that ranks of a node share cannot be made, or has no room for one more exchange."""


class FlagFunctions(ctypes.PyDLL):
    """Loads the C++ library, and declares its functions ``post_flag`` (set a flag) and ``least_flag`` (read flags).

    Calls of these functions keep Python's global lock, because they never wait.
    """

    def __init__(self, library: str) -> None:
        super().__init__(library)
        self.post_flag.argtypes, self.post_flag.restype = (ctypes.c_void_p, ctypes.c_int64), None
        self.least_flag.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        self.least_flag.restype = ctypes.c_int64


@functools.cache
def flag_functions() -> FlagFunctions | None:
    """Return the C++ functions that set and read flags.

    With a flag in shared memory, a rank announces that it has written a message.  The functions make sure that a rank
    which sees a flag also sees the message that the flag announces.

    Returns None on x86 if the C++ library cannot be built or loaded, since x86 needs no such functions.

    Raises:
        SharedMemoryError: if the library cannot be built or loaded, and the machine is not x86.
    """
    try:
        return FlagFunctions(str(build.library(build.user_folder())))
    except (build.BuildError, OSError) as problem:
        if platform.machine() in _KEEPS_ORDER:
            return None
        raise SharedMemoryError(
            f"transport 'shm' on {platform.machine()}, which reorders writes, needs the C++ kernels ({problem}): "
            f"install what their build lacks, or {_INSTEAD}"
        ) from problem


def patience(backend: str, limit: timedelta) -> tuple[timedelta, ...]:
    """Return the arguments for ``Work.wait()``, with which gloo raises an error after ``limit``.

    The arguments are ``(limit,)`` for the backend ``gloo`` and ``()`` for every other backend.  Other backends get no
    limit for two reasons: with a limit, NCCL's ``wait()`` blocks the host, and the ``wait()`` of ranks that are threads
    raises an error.
    """
    return (limit,) if backend == "gloo" else ()


def shared_file(group: Group, timeout: float, total: int) -> int:
    """Open one anonymous file that all ranks of the group share, and return this process's file descriptor.

    The file has ``total`` bytes, all zero.  All ranks of the group must call this function within ``timeout`` seconds.

    Raises:
        SharedMemoryError: if the system has no memfd or futex, if a rank cannot open the first rank's file, or if the
            C++ functions that set flags are needed and missing (:func:`flag_functions`).
    """
    if _libc is None or not _FUTEX:
        raise SharedMemoryError(f"transport 'shm' needs Linux's memfd and futex: {_INSTEAD}")
    flag_functions()
    address, handle = torch.zeros(2, dtype=torch.int64), -1
    if group.index == 0:
        handle = os.memfd_create("zeropp-arena", os.MFD_CLOEXEC)
        os.ftruncate(handle, total)
        address = torch.tensor([os.getpid(), handle])
    limit = patience(group.backend("cpu"), timedelta(seconds=timeout))
    dist.broadcast(address, group_src=0, group=group.process_group, async_op=True).wait(*limit)
    if group.index != 0:
        path = f"/proc/{int(address[0])}/fd/{int(address[1])}"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SharedMemoryError(
                f"rank {group.ranks[group.index]} cannot open the memory of rank {group.ranks[0]} ({path}: "
                f"{error.strerror}): run the ranks on one machine as one user, or {_INSTEAD}"
                f"{group.counting}"
            ) from error
    # The first rank must not close its descriptor before the others have opened the file.
    dist.barrier(group=group.process_group, async_op=True).wait(*limit)
    return handle


class Arena:
    """The memory in which the ranks of one group on one node exchange messages.

    In an exchange, each rank writes one message, which all other ranks read.  The memory has :data:`SLOTS` slots, one
    for each exchange that may be under way.  A slot has one row for each rank, which holds the rank's message.  All
    ranks of the group must construct their arenas together.

    Args:
        row_bytes: the largest message in bytes; it is rounded up to a multiple of 4096.
        group: the ranks.
        timeout: seconds that a rank waits for the other ranks, here and in every exchange.

    Raises:
        SharedMemoryError: if the ranks cannot make or open the shared memory (:func:`shared_file`).
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
        self._posted = Flags(lines[0], group, timeout)  # by slot and rank, the exchange last written
        self._read = Flags(lines[1], group, timeout)  # by slot and rank, the exchange last read
        self._marks = lines[0, :, :, 1].numpy().view("uint64")  # (slot, rank) marks of posted messages
        # For each slot a view (rank, byte).  Views are made once, as making one takes longer than reading a flag.
        self._whole = list(whole[flags:].view(SLOTS, size, self.row_bytes).unbind())
        self._rows: list[Tensor] = [rows[group.index] for rows in self._whole]
        self._count, self._free = 0, list(range(SLOTS))
        self._slots: dict[int, int] = {}  # number of each exchange under way -> its slot
        self._last = [0] * SLOTS  # for each slot, the number of its last exchange

    def claim(self) -> int:
        """Take a slot for the next exchange, and return the number of this exchange, counted from 1.

        The slot may still hold messages of an earlier exchange.  The method waits until all ranks have read them.

        Raises:
            SharedMemoryError: if this rank has :data:`SLOTS` exchanges under way.
            TimeoutError: if some rank has not read the earlier messages when the timeout ends.
        """
        if not self._free:
            axis = self.group.axis.name
            raise SharedMemoryError(
                f"{SLOTS} exchanges along {axis} are under way, the most that transport 'shm' has room for: finish "
                "an exchange before starting another"
            )
        slot = min(self._free)
        self._read.wait(slot, self._last[slot], "did not read")
        self._free.remove(slot)
        number = self._count = self._count + 1
        self._slots[number] = slot
        self._last[slot] = number
        return number

    def row(self, number: int, nbytes: int) -> Tensor:
        """Return this rank's row of exchange ``number``: memory (nbytes,) uint8 into which it writes its message."""
        return self._rows[self._slots[number]][:nbytes]

    def post(self, number: int, mark: int) -> None:
        """Announce that this rank has written its row of exchange ``number``.

        ``mark`` is a 64-bit fingerprint of all exchanges that this rank has started, up to this one.  :meth:`agree`
        compares the marks of all ranks, to find ranks that have made different calls.
        """
        self._marks[self._slots[number], self.group.index] = mark
        self._posted.set(self._slots[number], self.group.index, number)

    def wait(self, number: int) -> Tensor:
        """Wait until all ranks of the group have posted, and return their rows.

        The rows are a tensor (ranks, row_bytes) uint8, which is valid until this rank calls :meth:`done`.

        Raises:
            TimeoutError: if a rank has not posted when the timeout ends.
        """
        slot = self._slots[number]
        self._posted.wait(slot, number, "did not send")
        return self._whole[slot]

    def agree(self, number: int, mark: int) -> bool:
        """Return whether every rank's mark in exchange ``number`` equals ``mark``; to be called after :meth:`wait`.

        A mark is a fingerprint of the exchanges that a rank has started (:meth:`post`).  If marks differ, the ranks
        have made different calls.
        """
        marks = self._marks[self._slots[number]].tolist()
        return bool(marks.count(mark) == len(marks))

    def done(self, number: int) -> None:
        """Announce that this rank has read the rows of exchange ``number``, and free its slot."""
        slot = self._slots.pop(number)
        self._read.set(slot, self.group.index, number)
        self._free.append(slot)


class Flags:
    """Flags in shared memory with which ranks announce what they have done: one flag for each rank and slot.

    A slot is memory for the messages of one exchange at a time, and exchanges are numbered.  With a flag, a rank
    announces that it has done its part of an exchange: the flag's value is the exchange's number.  Values only grow.
    An :class:`Arena` has two objects of this class: with one, ranks announce that they have written their message; with
    the other, that they have read all messages.

    Args:
        lines: (slot, rank, 8) int64, the memory of the flags, one cache line for each flag.
        group: the ranks.
        timeout: seconds that :meth:`wait` waits at most.
    """

    def __init__(self, lines: Tensor, group: Group, timeout: float) -> None:
        self._size, first = group.size, lines.data_ptr()
        self._ranks, self._timeout = group.ranks, timeout
        # Addresses by slot and rank, computed once, as computing one takes as long as reading a flag.
        self._addresses = [
            [first + (slot * self._size + rank) * LINE for rank in range(self._size)]
            for slot in range(len(lines))
        ]
        self._functions = flag_functions()
        # A NumPy view, from which a read takes 50 ns; item() of a tensor takes more than a microsecond.
        self._numbers = lines[:, :, 0].numpy()

    def set(self, slot: int, rank: int, number: int) -> None:
        """Set the flag of ``slot`` and ``rank`` to ``number``, and wake the processes that wait for it."""
        if self._functions is not None:
            self._functions.post_flag(self._addresses[slot][rank], number)
            return
        self._numbers[slot, rank] = number
        _futex(self._addresses[slot][rank], _WAKE, 2**31 - 1, None)  # wakes all waiting processes

    def wait(self, slot: int, number: int, failure: str) -> None:
        """Wait until the flag of every rank for ``slot`` is at least ``number``, the number of an exchange.

        ``failure`` says in the error message what a late rank did not do, such as ``did not send``.

        Raises:
            TimeoutError: after the timeout; the message names the late ranks.
        """
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
        self._least(slot)  # reads with acquire order, which the reads in the loop do not have

    def _least(self, slot: int) -> int:
        """Return the smallest of all ranks' flags for ``slot``.

        If the result is at least the number of an exchange, all ranks have announced that they have done their part of
        this exchange.
        """
        if self._functions is not None:
            return self._functions.least_flag(self._addresses[slot][0], self._size, LINE)  # type: ignore[no-any-return]
        return int(min(self._numbers[slot].tolist()))


def _futex(address: int, operation: int, value: int, span: ctypes.Array[ctypes.c_long] | None) -> None:
    """Call Linux's futex, with which processes wait for a change of shared memory.

    With ``operation`` ``_WAIT``, sleep while the 32 bits at ``address`` are ``value``, for the time ``span`` at most.
    With ``_WAKE``, wake at most ``value`` processes that sleep at ``address``.
    """
    assert _libc is not None  # noqa: S101  # checked by shared_file()
    word, limit = ctypes.c_uint32(value & 0xFFFFFFFF), None if span is None else ctypes.byref(span)
    _libc.syscall(_FUTEX, ctypes.c_void_p(address), operation, word, limit, None, 0)
