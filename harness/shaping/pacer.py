"""Imitates a link with a rate inside the process: computes when a message would have arrived over such a link.

Our engine (:mod:`impl.comm.exchanges`) holds each message back until that time.
"""

from __future__ import annotations

import fcntl
import mmap
import struct
import time
from pathlib import Path


class Pacer:
    """Rate limiter that the ranks of a node share.

    All ranks map one small file.  It holds one float64 for each node: the time at which the node's link will be free
    again.  A rank that sends a message locks its node's number, and moves the number on by the time that the message
    takes.  So the messages of a node's ranks follow one another.  The kernel releases the lock if the rank dies.
    """

    def __init__(self, path: Path, node: int, rate_mbit: float, latency_ms: float = 0.0) -> None:
        """Open the shared file.

        Args:
            path: The file that :meth:`create` made.
            node: This rank's node.
            rate_mbit: Rate of each node's link in Mbit/s.
            latency_ms: Latency in one direction, in milliseconds.
        """
        self._file = path.open("r+b", buffering=0)
        self._memory = mmap.mmap(self._file.fileno(), 0)
        self._offset = 8 * node
        self._seconds_per_byte = 8 / (rate_mbit * 1e6)
        self._latency = latency_ms / 1e3
        self.open = False  # whether this process's messages pass without a rate

    @staticmethod
    def create(path: Path, nodes: int) -> Path:
        """Make the shared file for ``nodes`` nodes, whose links are all free, and return its path."""
        path.write_bytes(bytes(8 * nodes))
        return path

    def book(self, nbytes: int) -> float:
        """Reserve this node's link for a message of ``nbytes`` to other nodes, and return when its last byte arrives.

        The time is on the clock ``time.monotonic()``.  While :attr:`open` is set, messages take only the latency, and
        nothing is reserved.
        """
        if self.open:
            return time.monotonic() + self._latency
        fcntl.lockf(self._file, fcntl.LOCK_EX, 8, self._offset)
        try:
            (free_at,) = struct.unpack_from("d", self._memory, self._offset)
            end: float = max(time.monotonic(), free_at) + nbytes * self._seconds_per_byte
            struct.pack_into("d", self._memory, self._offset, end)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 8, self._offset)
        return end + self._latency

    def close(self) -> None:
        """Unmap and close the shared file."""
        self._memory.close()
        self._file.close()
