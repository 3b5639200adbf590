"""Host memory for offloaded states, and the copies between it and the device.

On CUDA host memory is pinned, and copies run on two streams of their own, one each way, beside the
computation; who needs what they bring waits for an :class:`Arrival`.  Where the device is the CPU there is
no second memory: the same copies run at once, so that what they would move is counted and tested
(:data:`ACCOUNTING`).
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from impl.plan.memory import STAGED
from impl.plan.offload_plan import Copied, CopyKey, Direction
from impl.transport.side_stream import Arrival, SideStream
from impl.unit.memory_pool import Meter

MEMORY: Final = torch.device("cpu")
PINNED: Final = "pinned host memory, copied on streams of its own"
ACCOUNTING: Final = "accounting only: on this device host and device are one memory"


class HostMemory:
    """The host's memory, for the units of one engine.

    Attributes:
        copied: bytes by direction, purpose and unit.
    """

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self.copied: dict[CopyKey, int] = defaultdict(int)
        self._device, self._meter = device, meter
        cuda = device.type == "cuda"
        self._up = SideStream(device) if cuda else None
        self._down = SideStream(device) if cuda else None
        self._staging: Tensor | None = None  # (STAGED, S) fp32 on the device, used in turn
        self._left = [Arrival() for _ in range(STAGED)]  # of the copies out of each row
        self._turn = 0

    @property
    def nature(self) -> str:
        """What the host's memory is here, for the record."""
        return ACCOUNTING if self._up is None else PINNED

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) of any content, in memory that copies to and from the device need not stop for.

        Pinning needs CUDA, so this is the one place that allocates what is copied.  A buffer outlives a pass
        in inference mode.
        """
        with torch.inference_mode(mode=False):
            return torch.empty(numel, dtype=dtype, device=MEMORY, pin_memory=self._up is not None)

    def bytes(self, numel: int, *, host: bool) -> Tensor:
        """(numel,) uint8 of any content, on host or device; it outlives a pass in inference mode."""
        if host:
            return self.empty(numel, torch.uint8)
        with torch.inference_mode(mode=False):
            return torch.empty(numel, dtype=torch.uint8, device=self._device)

    @contextlib.contextmanager
    def ahead(self) -> Iterator[Arrival]:
        """What the body enqueues comes after all that was enqueued before, and beside what comes later.

        Yields:
            The end of it, to be joined by who uses what it brought.
        """
        with contextlib.nullcontext(Arrival()) if self._up is None else self._up.beside() as arrival:
            yield arrival

    def copy(self, way: Direction, source: Tensor, target: Tensor, purpose: Copied, unit: str) -> None:
        """Copy between host and device, on the current stream."""
        target.copy_(source, non_blocking=True)
        self.copied[CopyKey(way, purpose, unit)] += source.nbytes

    def stage(self, numel: int) -> Tensor:
        """(numel,) fp32 on the device for what :meth:`download` takes next: the rows of staging, in turn.

        What is enqueued from here on waits for the row's last copy, so that means on their way to the host
        never hold more than these rows.
        """
        if self._staging is None or self._staging.shape[1] < numel:
            if self._staging is not None:
                self._meter.add("staging", -self._staging.nbytes)
            self._staging = torch.empty(STAGED, numel, dtype=torch.float32, device=self._device)
            self._meter.add("staging", self._staging.nbytes)
        self._turn = (self._turn + 1) % STAGED
        self._left[self._turn].join()
        return self._staging[self._turn, :numel]

    def download(self, staged: Tensor, target: Tensor, purpose: Copied, unit: str) -> Arrival:
        """Copy the row that :meth:`stage` gave last to the host, beside the computation."""
        self.copied[CopyKey("to_host", purpose, unit)] += staged.nbytes
        with contextlib.nullcontext(Arrival()) if self._down is None else self._down.beside() as arrival:
            target.copy_(staged, non_blocking=True)
            if staged.is_cuda:  # rows that larger ones replace stay until they are read
                staged.record_stream(torch.cuda.current_stream(self._device))
        self._left[self._turn] = arrival
        return arrival
