"""Leases on shared memory in which all-gathered weights stay as they arrived, and are computed with.

[Note: lease]
Where the frame of a shard is its elements, the rows (ranks, S) that the ranks of a node wrote side by side
*are* the gathered unit (P,): nothing is decoded or copied, and the flat buffer is a view of them.  The
price is that the memory is in use until the unit is resharded, and that moment may differ between ranks. So
each unit has a *region* of the node's shared memory, fixed at construction and equal on all ranks; units
that do not run around each other share regions in turn.

Each gather takes a :class:`Lease` on its unit's region.  It begins once all ranks have ended the one
before.  A rank that has not, because somebody still looks at those weights, *leaves*: what it sees becomes
a private copy at the same addresses, and the region is mapped anew elsewhere.  All ranks begin leases in
one order, so whoever has not ended one comes to the same point and leaves: nobody waits for a rank that
reshards late.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from impl.plan.prefetch_schedule import MOST_AHEAD
from impl.transport.shared_memory import LINE, Flags, SharedMemoryError, Waiting, shared_file

INNER_REGIONS: Final = 2 * MOST_AHEAD + 2  # of units that run one after the other: those under way, twice
_MAYMOVE, _FIXED = 1, 2  # of mremap(2)


def regions_of(alone: Sequence[bool]) -> list[int]:
    """The number of each unit's region: its own for units gathered while others run, in turn for the rest.

    Args:
        alone: of each unit, in model order, whether it is in use around the others, or kept for backward.
    """
    own = sum(alone)
    first, inner = iter(range(own)), iter(range(len(alone) - own))
    return [next(first) if one else own + next(inner) % INNER_REGIONS for one in alone]


class SharedRegions:
    """All regions of one engine on one node, in one anonymous file.

    A region's pages cost memory once, on the node, whatever the number of ranks: in all the largest unit
    of each region.

    All ranks of ``waiting``'s group must construct it together, for regions of ``lengths`` bytes.

    Raises:
        SharedMemoryError: as :func:`impl.transport.shared_memory.shared_file`.
    """

    def __init__(self, lengths: Sequence[int], waiting: Waiting) -> None:
        self.index, self.ranks = waiting.group.index, waiting.group.size
        self._lengths = [_pages(length) for length in lengths]
        flags = _pages(len(lengths) * self.ranks * LINE)
        self._offsets = [flags + sum(self._lengths[:region]) for region in range(len(lengths))]
        self._handle = shared_file(waiting, flags + sum(self._lengths))
        weakref.finalize(self, os.close, self._handle)
        words = torch.frombuffer(mmap.mmap(self._handle, flags), dtype=torch.int64).view(-1, LINE // 8)
        each = words[: len(lengths) * self.ranks].view(len(lengths), self.ranks, -1)
        self._ended = Flags(each, waiting)  # how many leases each rank has ended
        self._begun = [0] * len(lengths)  # leases
        self._maps: list[Tensor | None] = [None] * len(lengths)  # (bytes,) where this rank sees each region
        self._leases: list[Lease | None] = [None] * len(lengths)  # that this rank has not ended
        self._rows: list[Hashable] = [None] * len(lengths)  # what this rank last wrote there
        self._tenants: list[list[Callable[[], Callable[[], None] | None]]] = [[] for _ in lengths]

    def settle(self, region: int, gone: Callable[[], None]) -> None:
        """Let ``gone``, a bound method of a unit's buffer at ``region``, be told when what is seen there
        goes.

        Then it is a copy for the lease that left; others must look at it no more, or it would be kept alive.
        """
        self._tenants[region].append(weakref.WeakMethod(gone))

    def vacate(self, region: int) -> None:
        """Let this rank leave the lease that it still has at ``region``."""
        lease = self._leases[region]
        if lease is not None:
            lease.leave()

    def begin(self, region: int, lease: Lease) -> Tensor:
        """(bytes,) the region's memory, once all ranks have ended the lease before; vacated by this one.

        Raises:
            TimeoutError, ConnectionError: as :meth:`impl.transport.shared_memory.Flags.wait`.
        """
        self._ended.wait(region, self._begun[region], "did not read")
        self._begun[region] += 1
        self._leases[region] = lease
        mapped = self._maps[region]
        if mapped is None:
            # A storage of its own, which the memory lives as long as: whoever is left with a copy keeps it.
            length, offset = self._lengths[region], self._offsets[region]
            with torch.inference_mode(mode=False):  # it outlives a pass in inference mode
                mapped = torch.frombuffer(mmap.mmap(self._handle, length, offset=offset), dtype=torch.uint8)
            self._maps[region] = mapped
        return mapped

    def write(self, region: int, row: Hashable, write: Callable[[], None], *, anew: bool) -> None:
        """Let this rank's row at ``region`` be ``row``: ``write`` is called unless it is already.

        Args:
            region: at which it has begun a lease.
            row: name of what ``write`` writes, which tells apart whatever may be written there.
            write: writes it.
            anew: whether to call it in any case.
        """
        if anew or self._rows[region] != row:
            self._rows[region] = None  # until it is whole
            write()
            self._rows[region] = row

    def end(self, region: int) -> None:
        """Tell the others that this rank is done with the lease at ``region``."""
        self._leases[region] = None
        self._ended.set(region, self.index, self._begun[region])

    def part(self, region: int, nbytes: int) -> None:
        """Keep the first ``nbytes`` at ``region`` for whoever looks at them, and see the region elsewhere.

        Raises:
            SharedMemoryError: if there is no memory for it.
        """
        mapped = self._maps[region]
        assert mapped is not None  # noqa: S101  # somebody is there
        _make_private(mapped, nbytes)
        self._maps[region] = None
        for tenant in self._tenants[region]:
            if (gone := tenant()) is not None:
                gone()


@dataclass(frozen=True, slots=True)
class Passing:
    """Rows of a region that come from other nodes: the ranks of a node fill them together.

    Attributes:
        rows: of the region, in all.
        through: numbers of those that this rank fills, its own among them, by the node they come from.
        finish: carries the gather on to its end.
    """

    rows: int
    through: slice
    finish: Callable[[], None]


class Lease:
    """Lease on the shared-memory region that holds one all-gathered unit, until this rank ends it.

    Args:
        nbytes: of a row.
        passing: if there are more rows than ranks here.

    Attributes:
        left: whether what was there is a copy of this rank's alone.
    """

    def __init__(
        self, regions: SharedRegions, region: int, nbytes: int, passing: Passing | None = None
    ) -> None:
        self._regions, self._region, self._nbytes, self._passing = regions, region, nbytes, passing
        self._memory: Tensor | None = None  # (bytes,) of the region
        self._rows: Tensor | None = None  # (rows, nbytes) of it
        self._arrive: Callable[[], object] | None = None  # until what is under way is there
        self._lasts = self.left = False

    @property
    def begun(self) -> bool:
        """Whether it has begun."""
        return self._memory is not None

    def vacate(self) -> None:
        """End this rank's last lease there, before :meth:`begin`."""
        self._regions.vacate(self._region)

    def begin(self) -> Tensor:
        """(rows, nbytes) uint8, maybe strided: the rows that this rank fills.

        Raises:
            TimeoutError, ConnectionError: as :meth:`SharedRegions.begin`.
        """
        regions, passing = self._regions, self._passing
        self._memory = regions.begin(self._region, self)
        self._lasts = True
        rows = regions.ranks if passing is None else passing.rows
        self._rows = self._memory[: rows * self._nbytes].view(rows, self._nbytes)
        return self._rows[slice(regions.index, regions.index + 1) if passing is None else passing.through]

    def arriving(self, arrive: Callable[[], object]) -> None:
        """A message under way is written here, until ``arrive`` returns."""
        self._arrive = arrive

    def write(self, row: Hashable, write: Callable[[], None], *, anew: bool) -> None:
        """Let this rank's row be ``row``; see :meth:`SharedRegions.write`."""
        self._regions.write(self._region, row, write, anew=anew)

    def arrived(self) -> None:
        """All rows are there, and whoever brought them is not needed any more."""
        self._arrive = None

    @property
    def memory(self) -> Tensor:
        """(bytes,) uint8 in which the rows lie: one tensor for all leases there, until one is left."""
        assert self._memory is not None  # noqa: S101  # it has begun
        return self._memory

    @property
    def rows(self) -> Tensor:
        """(rows, nbytes) uint8: all rows, packed."""
        assert self._rows is not None  # noqa: S101  # it has begun
        return self._rows

    def end(self) -> None:
        """Let the region go; nobody may look at what was there."""
        if self._lasts:
            self._lasts = False
            self._regions.end(self._region)

    def leave(self) -> None:
        """Let the region go, and keep what was there where it was, for this rank alone.

        Raises:
            SharedMemoryError: if there is no memory for it.
        """
        if self._lasts:
            if self._arrive is not None and self._passing is not None:
                self._passing.finish()
            if self._arrive is not None:  # also of a gather that was interrupted: nobody may write here later
                self._arrive()
            self._regions.part(self._region, self.rows.numel())
            self.left = True
            self.end()


def _pages(nbytes: int) -> int:
    """``nbytes`` rounded up to what can be mapped by itself."""
    return -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _make_private(shared: Tensor, nbytes: int) -> None:
    """Put a private copy in the place of a mapping of shared memory: same addresses, same content.

    The copy is made elsewhere and moved there in one step of the kernel, so that who reads meanwhile sees no
    difference.

    Args:
        shared: (bytes,) uint8, all of the mapping.
        nbytes: of them that matter.

    Raises:
        SharedMemoryError: if the kernel refuses.
    """
    library = ctypes.CDLL(None, use_errno=True)
    length, address = shared.numel(), shared.data_ptr()
    library.mmap.restype = library.mremap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
    library.mremap.argtypes = [ctypes.c_void_p, *2 * [ctypes.c_size_t], ctypes.c_int, ctypes.c_void_p]
    failed = ctypes.c_void_p(-1).value
    copy = library.mmap(
        None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    if copy != failed:
        ctypes.memmove(copy, address, nbytes)
        if library.mremap(copy, length, length, _MAYMOVE | _FIXED, address) == address:
            return
    reason = os.strerror(ctypes.get_errno())
    raise SharedMemoryError(f"no private copy of {length} bytes of weights that somebody keeps: {reason}")
