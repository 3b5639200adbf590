"""The memory that interpreted kernels may reach: the tensors that a test names, and nothing else."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


class Memory:
    """Ranges of addresses with their bytes."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, NDArray[np.uint8]]] = []

    def add(self, *tensors: Tensor) -> None:
        """Let kernels reach contiguous tensors in the CPU's memory."""
        for tensor in tensors:
            self.add_range(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def add_range(self, address: int, size: int) -> None:
        """Let kernels reach ``size`` bytes from ``address`` on."""
        here = (ctypes.c_uint8 * size).from_address(address)
        self._ranges.append((address, np.frombuffer(memoryview(here), np.uint8)))

    def add_shared(self, size: int) -> None:
        """Let kernels reach ``size`` zeros from address 0 on."""
        self._ranges.append((0, np.zeros(size, np.uint8)))

    def load(self, addresses: NDArray[np.uint64], size: int) -> list[NDArray[np.uint32]]:
        """Returns ``size`` bytes from each address as words of 32 bits.

        Raises IndexError: if an address is not aligned, or its bytes are not all in one range.
        """
        words = [np.zeros(len(addresses), np.uint32) for _ in range(-(-size // 4))]
        for array, at, here in self._found(addresses, size):
            for i, word in enumerate(words):
                word[here] = array[at + i]
        return words

    def store(self, addresses: NDArray[np.uint64], size: int, words: list[NDArray[np.uint32]]) -> None:
        """Write ``size`` bytes to each address; raises as :meth:`load`."""
        for array, at, here in self._found(addresses, size):
            for i, word in enumerate(words):
                array[at + i] = word[here].astype(array.dtype)

    def _found(
        self, addresses: NDArray[np.uint64], size: int
    ) -> Iterator[tuple[NDArray[np.unsignedinteger], NDArray[np.int64], NDArray[np.bool_]]]:
        """Yield a range in units of at most 4 bytes, numbers of units in it, and which addresses are in it."""
        unit = min(size, 4)
        left = np.ones(len(addresses), bool)
        for start, array in self._ranges:
            offsets = (addresses - np.uint64(start)).astype(np.int64)
            here = left & (offsets >= 0) & (offsets + size <= len(array))
            if here.any():
                left &= ~here
                if (addresses[here] % np.uint64(size)).any():
                    raise IndexError(f"an access of {size} bytes is not aligned")
                units = array[: len(array) // unit * unit].view(f"u{unit}")
                yield units, offsets[here] // unit, here
        if left.any():
            raise IndexError(
                f"an access of {size} bytes at {int(addresses[left][0]):#x}, outside of all tensors"
            )
