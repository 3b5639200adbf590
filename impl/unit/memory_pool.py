"""Counts the bytes that the engine holds, and reuses its flat buffers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class Meter:
    """Bytes that the engine holds now and held at most, by part (keys of :func:`impl.plan.memory.memory`)."""

    now: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)

    def add(self, part: str, nbytes: int) -> None:
        """Count an allocation, or a release when negative."""
        self.now[part] = self.now.get(part, 0) + nbytes
        self.peak[part] = max(self.peak.get(part, 0), self.now[part])


class Pool:
    """Flat buffers of one type, taken and given back: a fresh one costs a page fault every 4 KiB.

    All are counted as ``part``, free ones too.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, meter: Meter, part: str) -> None:
        self._dtype, self._device, self._meter, self._part = dtype, device, meter, part
        self._free: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}  # by address: the whole of what was handed out

    def take(self, numel: int) -> Tensor:
        """(numel,) of any content: of the smallest free buffer that is large enough.

        If none is, the largest free one goes before a fresh one comes.
        """
        fits = [buffer for buffer in self._free if buffer.numel() >= numel]
        if fits:
            chosen = min(fits, key=Tensor.numel)
            self._free = [buffer for buffer in self._free if buffer is not chosen]
        else:
            if self._free:
                self._free.sort(key=Tensor.numel)
                self._meter.add(self._part, -self._free.pop().nbytes)
            chosen = torch.empty(numel, dtype=self._dtype, device=self._device)
            self._meter.add(self._part, chosen.nbytes)
        self._taken[chosen.data_ptr()] = chosen
        return chosen[:numel]

    def give_back(self, buffer: Tensor) -> None:
        """What :meth:`take` handed out is free again."""
        self._free.append(self._taken.pop(buffer.data_ptr()))


class Reserve:
    """Flat buffers of one type, by exact size; free ones never raise the most that was in use at once.

    So what is held is at its peak what was in use at once, and a sequence of takes that comes again is served
    without touching the allocator.  All are counted as ``part``, free ones too.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, meter: Meter, part: str) -> None:
        self._dtype, self._device, self._meter, self._part = dtype, device, meter, part
        self._free: dict[int, list[Tensor]] = {}  # by elements
        self._held = self._used = 0  # elements: free and in use, in use
        self._most = self._lately = 0  # in use: to which free ones may fill up, and since the last trim()

    def take(self, numel: int) -> Tensor:
        """(numel,) of any content."""
        self._used += numel
        self._lately = max(self._lately, self._used)
        self._most = max(self._most, self._used)
        if self._free.get(numel):
            return self._free[numel].pop()
        self._shrink(self._most - numel)
        self._count(numel)
        with torch.inference_mode(mode=False):  # it outlives a pass in inference mode
            return torch.empty(numel, dtype=self._dtype, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        """What :meth:`take` handed out is free again; nothing else may look at it."""
        self._used -= buffer.numel()
        self._free.setdefault(buffer.numel(), []).append(buffer)

    def trim(self) -> None:
        """A pass is over: let go of what it did not need, as after a first one that used more."""
        self._most, self._lately = self._lately, self._used
        self._shrink(self._most)

    def _shrink(self, most: int) -> None:
        """Drop free buffers, the largest first, until at most ``most`` elements are held, or none is free."""
        while self._held > most and any(self._free.values()):
            largest = max(size for size, free in self._free.items() if free)
            self._free[largest].pop()
            self._count(-largest)

    def _count(self, numel: int) -> None:
        self._held += numel
        self._meter.add(self._part, numel * self._dtype.itemsize)
