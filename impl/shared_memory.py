"""The tier inside a node on a CPU: one memory arena that the ranks of a group share.

Not a process-group backend: a ring of slots, in each slot one row per rank.  A rank writes its
row, posts the slot's sequence number, and reads the others' rows *in place* once theirs are
posted; nothing is copied on the way.  A slot is written again only after all have marked it read.

The arena is an anonymous file (``memfd``) of the group's first rank, opened by the others through
``/proc``: it has no name to clean up, needs no space in ``/dev/shm``, and is gone with its last
user, however that ends.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from impl.mesh import Group

SLOTS: Final = 8  # exchanges that may be under way at once in one group
_LINE: Final = 64  # bytes; each flag has a cache line of its own
_SPINS: Final = 200  # yields before sleeping: about 0.1 ms


class SharedMemoryError(RuntimeError):
    """The arena cannot be made, or a rank did not arrive; the message says which."""


class Arena:
    """Slots shared by the ranks of one group on one node.

    Args:
        group: whose ranks share it; all must construct it together.
        row_bytes: largest message of one rank.
        timeout: seconds after which a missing rank is an error.

    Raises:
        SharedMemoryError: where anonymous shared files do not exist or cannot be opened.
    """

    def __init__(self, group: Group, row_bytes: int, timeout: float) -> None:
        self.group = group
        self.row_bytes = -(-row_bytes // 4096) * 4096
        self.timeout = timeout
        size, flags = group.size, 2 * SLOTS * group.size * _LINE
        total = flags + SLOTS * size * self.row_bytes
        self._map = self._open(total)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        words = whole[:flags].view(torch.int64).view(2, SLOTS, size, _LINE // 8)
        # numpy views: reading one is 50 ns, a tensor's item() over a microsecond.
        self._posted = words[0, :, :, 0].numpy()  # (slot, rank) sequence number last written
        self._read = words[1, :, :, 0].numpy()  # (slot, rank) sequence number last read
        self.rows = whole[flags:].view(SLOTS, size, self.row_bytes)  # (slot, rank, byte)
        self._next = 0

    def _open(self, total: int) -> mmap.mmap:
        if not hasattr(os, "memfd_create"):
            raise SharedMemoryError("transport 'shm' needs Linux (memfd_create); use transport 'backend'")
        group = self.group
        address = torch.zeros(2, dtype=torch.int64)
        handle = -1
        if group.index == 0:
            handle = os.memfd_create("zeropp-arena", os.MFD_CLOEXEC)
            os.ftruncate(handle, total)
            address = torch.tensor([os.getpid(), handle])
        dist.broadcast(address, src=group.ranks[0], group=group.process_group)
        if group.index != 0:
            path = f"/proc/{int(address[0])}/fd/{int(address[1])}"
            try:
                handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise SharedMemoryError(
                    f"rank {group.ranks[group.index]} cannot open the memory of rank {group.ranks[0]} "
                    f"({path}: {error.strerror}); are they on one machine, under one user? "
                    "Otherwise use transport 'backend'"
                ) from error
        mapped = mmap.mmap(handle, total)
        dist.barrier(group=group.process_group)  # the first rank's handle must outlive the opening
        os.close(handle)
        return mapped

    def claim(self) -> int:
        """Take the next slot for writing; waits until all ranks have read its last contents."""
        sequence = self._next = self._next + 1
        if sequence > SLOTS:
            self._await(self._read[sequence % SLOTS], sequence - SLOTS, "did not read")
        return sequence

    def row(self, sequence: int) -> Tensor:
        """(row_bytes,) this rank's part of a claimed slot."""
        return self.rows[sequence % SLOTS, self.group.index]

    def post(self, sequence: int) -> None:
        """Tell the others that this rank's row is written."""
        self._posted[sequence % SLOTS, self.group.index] = sequence

    def arrived(self, sequence: int) -> bool:
        """Whether all ranks have posted."""
        return bool((self._posted[sequence % SLOTS] >= sequence).all())

    def wait(self, sequence: int) -> Tensor:
        """(ranks, row_bytes) all rows of the slot, once posted; valid until :meth:`done`.

        Raises:
            SharedMemoryError: after the timeout, naming who is missing.
        """
        self._await(self._posted[sequence % SLOTS], sequence, "did not send")
        return self.rows[sequence % SLOTS]

    def done(self, sequence: int) -> None:
        """Tell the others that this rank has read the slot."""
        self._read[sequence % SLOTS, self.group.index] = sequence

    def _await(self, flags, sequence: int, what: str) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        # With more ranks than cores whoever waits must let others run: yield first, then sleep.
        for _ in range(_SPINS):
            if (flags >= sequence).all():
                return
            os.sched_yield()
        deadline = time.monotonic() + self.timeout
        pause = 20e-6
        while not (flags >= sequence).all():
            if time.monotonic() > deadline:
                late = [r for r, flag in zip(self.group.ranks, flags, strict=True) if flag < sequence]
                raise SharedMemoryError(
                    f"rank {self.group.ranks[self.group.index]} waited {self.timeout:.0f} s inside its "
                    f"node (axis {self.group.axis.name}, exchange {sequence}): rank(s) "
                    f"{', '.join(map(str, late))} {what}"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 500e-6)
