"""Imitates a slow link in software: computes when a message would arrive over a link of a given rate.

Our engine (:mod:`impl.comm.exchanges`) sends messages at full speed.  In an exchange, each rank of a group sends one
message to every other rank.  A rank that later waits for the exchange to end sleeps until its own messages would have
arrived over the slow link.
"""

from __future__ import annotations

import fcntl
import mmap
import struct
import time
from pathlib import Path


class Pacer:
    """Rate limiter that the ranks of a node share, so that their messages use the node's link one after the other.

    All ranks map the same small file.  For each node, the file holds one float64: the time at which the node's link
    will be free again.  To send a message, a rank locks the float64 of its node, and sets it to the time at which the
    link will have sent this message too.  If a rank dies, the kernel releases its lock.
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

        The returned time is in seconds of ``time.monotonic()``.  If the attribute ``open`` is True, there is no rate
        limit: nothing is reserved, and the message arrives after the latency.
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
