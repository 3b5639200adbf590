"""The units' context in one engine: wire, policy, counters, memory and host memory, and the pass under way.

On CUDA host memory is pinned, and copies run on two streams of their own, one each way.  On a CPU the same
copies run at once, so that their bytes are counted and tested (:data:`ACCOUNTING`).
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from impl.codecs.rounding_noise import Clock
from impl.comm.wire import Wire
from impl.plan.memory import STAGED
from impl.plan.policy import Policy
from impl.plan.prefetch_schedule import Schedule
from impl.plan.traffic import Copied, CopyKey, Direction
from impl.transport.side_stream import Arrival, SideStream

MEMORY: Final = torch.device("cpu")
PINNED: Final = "pinned host memory, copied on streams of its own"
ACCOUNTING: Final = "accounting only: on this device host and device are one memory"


@dataclass(slots=True, eq=False)
class Meter:
    """Bytes of the engine now and at most, by part (keys of :func:`impl.plan.memory.memory`)."""

    now: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)

    def add(self, part: str, nbytes: int, *, host: bool = False) -> None:
        """Count an allocation on the ``host`` or the device, or a release if negative."""
        part = f"host_{part}" if host else part
        self.now[part] = self.now.get(part, 0) + nbytes
        self.peak[part] = max(self.peak.get(part, 0), self.now[part])


class Reserve:
    """Flat buffers of one type, by exact size, counted as ``part``: no more than were in use at once."""

    def __init__(self, dtype: torch.dtype, device: torch.device, meter: Meter, part: str) -> None:
        self._dtype, self._device, self._meter, self._part = dtype, device, meter, part
        self._free: dict[int, list[Tensor]] = {}  # by elements
        self._held = self._used = 0  # elements: free and in use, in use
        self._most = self._lately = 0  # in use at most: the limit of those held, and since the last trim()

    def take(self, numel: int) -> Tensor:
        """(numel,) of any content."""
        self._used += numel
        self._lately, self._most = max(self._lately, self._used), max(self._most, self._used)
        if self._free.get(numel):
            return self._free[numel].pop()
        self._shrink(self._most - numel)
        self._count(numel)
        with torch.inference_mode(mode=False):  # it outlives a pass in inference mode
            return torch.empty(numel, dtype=self._dtype, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        """Free a buffer from :meth:`take`; nothing may use it any more."""
        self._used -= buffer.numel()
        self._free.setdefault(buffer.numel(), []).append(buffer)

    def trim(self) -> None:
        """After a pass, drop buffers that it did not need; the first one may use more."""
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


class HostMemory:
    """The host's memory, for the units of one engine."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self.copied: dict[CopyKey, int] = defaultdict(int)  # bytes by direction, purpose and unit
        self._device, self._meter = device, meter
        cuda = device.type == "cuda"
        self.nature = PINNED if cuda else ACCOUNTING  # for the record
        self._up = SideStream(device) if cuda else None
        self._down = SideStream(device) if cuda else None
        self._staging: Tensor | None = None  # (STAGED, S) fp32 on the device, used in turn
        self._left = [Arrival() for _ in range(STAGED)]  # of the copies out of each row
        self._turn = 0

    def empty(self, part: str, numel: int, dtype: torch.dtype = torch.uint8, *, host: bool = True) -> Tensor:
        """(numel,) of any content, counted as ``part``, on the host, pinned for a GPU, or on the device."""
        device, pinned = (MEMORY, self._up is not None) if host else (self._device, False)
        with torch.inference_mode(mode=False):  # it outlives a pass in inference mode
            memory = torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned)
        self._meter.add(part, memory.nbytes, host=host)
        return memory

    def ahead(self) -> contextlib.AbstractContextManager[Arrival]:
        """The body's work comes after all that was enqueued before, and beside what is enqueued later."""
        return contextlib.nullcontext(Arrival()) if self._up is None else self._up.beside()

    def copy(self, way: Direction, source: Tensor, target: Tensor, purpose: Copied, unit: str) -> None:
        """Copy between host and device, on the current stream."""
        target.copy_(source, non_blocking=True)
        self.copied[CopyKey(way, purpose, unit)] += source.nbytes

    def stage(self, numel: int) -> Tensor:
        """(numel,) fp32 on the device for the next :meth:`download`: a row whose last copy is done."""
        if self._staging is None or self._staging.shape[1] < numel:
            if self._staging is not None:
                self._meter.add("staging", -self._staging.nbytes)
            self._staging = torch.empty(STAGED, numel, dtype=torch.float32, device=self._device)
            self._meter.add("staging", self._staging.nbytes)
        self._turn = (self._turn + 1) % STAGED
        self._left[self._turn].join()
        return self._staging[self._turn, :numel]

    def download(self, staged: Tensor, target: Tensor, purpose: Copied, unit: str) -> Arrival:
        """Copy the row of the last :meth:`stage` to the host, beside the computation."""
        self.copied[CopyKey("to_host", purpose, unit)] += staged.nbytes
        with contextlib.nullcontext(Arrival()) if self._down is None else self._down.beside() as arrival:
            target.copy_(staged, non_blocking=True)
            if staged.is_cuda:  # replaced rows stay until they are read
                staged.record_stream(torch.cuda.current_stream(self._device))
        self._left[self._turn] = arrival
        return arrival


@dataclass(slots=True, eq=False)
class Passes:
    """The progress of one model's passes on this rank; units are known by index."""

    schedule: Schedule
    running: int = 0  # forward calls of hooked modules under way
    in_forward: bool = False  # whether the model's forward pass is under way, and all checks passed
    in_backward: bool = False  # whether a backward pass is under way, or failed and was not finished
    accumulating: bool = False  # whether backward passes add to local gradients, and reduce nothing
    gathering: set[int] = field(default_factory=set)  # units with an all-gather under way
    escaped: set[int] = field(default_factory=set)  # units used outside of their modules, in this forward
    # by address of memory, the unit whose weights were last gathered there
    weights_at: dict[int, int] = field(default_factory=dict)
    # parameters that were written before their unit was resharded, and not refused yet
    written: list[str] = field(default_factory=list)


def recomputing() -> bool:
    """Whether this runs inside a backward pass: a block is computed again."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001  # there is no public one


@dataclass(frozen=True, slots=True)
class UnitContext:
    """The objects that the units of one engine share."""

    wire: Wire
    policy: Policy  # the model's; in the parts of a unit, the unit's own
    meter: Meter
    clock: Clock  # of stochastic codecs and feedback
    gradients: Reserve  # of local gradients
    weights: Reserve  # of gathered weights
    host: HostMemory
    passes: Passes
