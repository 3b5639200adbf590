"""Holds what all units (groups of parameters) of one engine share: wire, policy, memory, and the state of a pass.

:class:`UnitContext` bundles these objects.  :class:`Reserve` hands out flat buffers, :class:`Meter` counts the bytes
of memory in use, :class:`HostMemory` allocates memory of the host and copies to and from the host, and
:class:`Passes` records which forward or backward pass is running.

With a GPU, host memory is pinned.  Copies to the host run on one side stream, and copies from the host on another.
On a CPU, host and device are the same memory.  The copies are still made, without a stream, so that tests on a CPU can
count their bytes (:data:`ACCOUNTING`).
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
from impl.plan.prefetch_schedule import Schedule
from impl.plan.traffic import Copied, CopyKey, Direction
from impl.policy.policy import Policy
from impl.transport.side_stream import Arrival, SideStream

MEMORY: Final = torch.device("cpu")
PINNED: Final = "pinned host memory, copied on streams of its own"
ACCOUNTING: Final = "accounting only: on this device host and device are one memory"


@dataclass(slots=True, eq=False)
class Meter:
    """Counts the bytes of memory that one rank's engine holds, for each part of that memory.

    A part has a name, such as ``masters``.  The names are those of the dict that :func:`impl.plan.memory.memory`
    returns.  If a part is in host memory, its name begins with ``host_``.
    """

    now: dict[str, int] = field(default_factory=dict)  # for each part, the bytes that are held now
    peak: dict[str, int] = field(default_factory=dict)  # for each part, the most bytes held at one time

    def add(self, part: str, nbytes: int, *, host: bool = False) -> None:
        """Count that ``nbytes`` were allocated for ``part``.

        The memory is on the device, or in host memory with ``host``.  Negative ``nbytes`` count a release.
        """
        part = f"host_{part}" if host else part
        self.now[part] = self.now.get(part, 0) + nbytes
        self.peak[part] = max(self.peak.get(part, 0), self.now[part])


class Reserve:
    """A pool of flat buffers whose elements have one type; the meter counts their bytes as ``part``.

    A flat buffer holds the gathered weights or the local gradients of one unit (a group of parameters).  A buffer is
    reused only for a request of exactly its size.

    The pool has a limit for the elements of all its buffers, free or in use.  The limit is the most elements that were
    in use at one time in the last pass, or in the present pass so far if that is more.  To stay within the limit, the
    pool drops free buffers, the largest first.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, meter: Meter, part: str) -> None:
        self._dtype, self._device, self._meter, self._part = dtype, device, meter, part
        self._free: dict[int, list[Tensor]] = {}  # free buffers by their number of elements
        self._held = self._used = 0  # elements of all buffers, and of those in use
        # ``_most`` is the limit for the elements of all buffers.  ``_lately`` is the most elements that were in use at
        # one time since the last trim(), which makes this number the limit.
        self._most = self._lately = 0

    def take(self, numel: int) -> Tensor:
        """Return a buffer (numel,) with arbitrary content.

        The buffer is new if the pool has no free buffer of this size.
        """
        self._used += numel
        self._lately, self._most = max(self._lately, self._used), max(self._most, self._used)
        if self._free.get(numel):
            return self._free[numel].pop()
        self._shrink(self._most - numel)
        self._count(numel)
        with torch.inference_mode(mode=False):  # the buffer will outlive a pass in inference mode
            return torch.empty(numel, dtype=self._dtype, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        """Put ``buffer``, which :meth:`take` returned, back into the pool; the caller must not use it any more."""
        self._used -= buffer.numel()
        self._free.setdefault(buffer.numel(), []).append(buffer)

    def trim(self) -> None:
        """Set the pool's limit to the most elements that were in use at one time since the last call of this method.

        To be called after each pass, since the first pass may need more elements than later passes.  The method drops
        free buffers, the largest first, until the pool is within the limit.
        """
        self._most, self._lately = self._lately, self._used
        self._shrink(self._most)

    def _shrink(self, most: int) -> None:
        """Drop free buffers, the largest first, until all buffers together have at most ``most`` elements.

        Buffers in use are never dropped.  If they alone have more than ``most`` elements, the pool keeps more than
        ``most`` elements.
        """
        while self._held > most and any(self._free.values()):
            largest = max(size for size, free in self._free.items() if free)
            self._free[largest].pop()
            self._count(-largest)

    def _count(self, numel: int) -> None:
        self._held += numel
        self._meter.add(self._part, numel * self._dtype.itemsize)


class HostMemory:
    """Allocates host memory for the offloaded states of one engine, and copies tensors between host and device."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self.copied: dict[CopyKey, int] = defaultdict(int)  # bytes by direction, purpose and unit
        self._device, self._meter = device, meter
        cuda = device.type == "cuda"
        self.nature = PINNED if cuda else ACCOUNTING  # what records say about this memory
        self._up = SideStream(device) if cuda else None
        self._down = SideStream(device) if cuda else None
        self._staging: Tensor | None = None  # (STAGED, S) fp32 on the device, whose rows are used in turn
        self._left = [Arrival() for _ in range(STAGED)]  # for each row, the end of the last copy out of it
        self._turn = 0

    def empty(self, part: str, numel: int, dtype: torch.dtype = torch.uint8, *, host: bool = True) -> Tensor:
        """Return a new tensor (numel,) of type ``dtype`` with arbitrary content.

        The tensor is in host memory, or on the device with ``host=False``.  Host memory is pinned if the device is a
        GPU.  The meter counts the bytes of the tensor as ``part``.
        """
        device, pinned = (MEMORY, self._up is not None) if host else (self._device, False)
        with torch.inference_mode(mode=False):  # the memory will outlive a pass in inference mode
            memory = torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned)
        self._meter.add(part, memory.nbytes, host=host)
        return memory

    def ahead(self) -> contextlib.AbstractContextManager[Arrival]:
        """Return a context for ``with`` whose body runs on the side stream that copies from the host.

        The GPU work of the body starts after everything that the current stream has enqueued so far, and overlaps with
        what the current stream enqueues later.  The context yields an :class:`Arrival`, with which later work can wait
        for the end of the body's work.  On a CPU there is no side stream, and the body's work is done at once.
        """
        return contextlib.nullcontext(Arrival()) if self._up is None else self._up.beside()

    def copy(self, way: Direction, source: Tensor, target: Tensor, purpose: Copied, unit: str) -> None:
        """Copy ``source`` to ``target`` on the current stream; one of the two tensors is in host memory.

        The attribute ``copied`` counts the bytes, by the direction ``way``, the ``purpose`` and the name of the
        ``unit``.
        """
        target.copy_(source, non_blocking=True)
        self.copied[CopyKey(way, purpose, unit)] += source.nbytes

    def stage(self, numel: int) -> Tensor:
        """Return a buffer (numel,) fp32 on the device, which the caller fills and then passes to :meth:`download`.

        There are :data:`STAGED` such buffers, which successive calls return in turn.  The returned buffer may still be
        being copied to the host from an earlier use.  If so, the current stream waits for the end of this copy.
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
        """Start to copy ``staged``, the buffer that the last :meth:`stage` returned, to ``target`` in host memory.

        The copy runs on a side stream, so that it overlaps with computation.  Returns an :class:`Arrival`, with which
        the caller can wait for the end of the copy.
        """
        self.copied[CopyKey("to_host", purpose, unit)] += staged.nbytes
        with contextlib.nullcontext(Arrival()) if self._down is None else self._down.beside() as arrival:
            target.copy_(staged, non_blocking=True)
            if staged.is_cuda:  # the staging memory may be replaced, but must stay until it has been read
                staged.record_stream(torch.cuda.current_stream(self._device))
        self._left[self._turn] = arrival
        return arrival


@dataclass(slots=True, eq=False)
class Passes:
    """Records which pass of one model (forward or backward) is running on this rank, and the state of its units.

    A unit is a part of the model whose parameters are gathered together.  Here it is represented by its index, which
    counts the model's units in model order from 0.
    """

    schedule: Schedule
    running: int = 0  # how many forward calls of hooked modules are running, one inside the other
    in_forward: bool = False  # whether the model's forward pass is running and all checks have passed
    in_backward: bool = False  # whether a backward pass is running, or has failed and was not finished
    accumulating: bool = False  # whether backward passes only add to local gradients and reduce nothing
    gathering: set[int] = field(default_factory=set)  # units whose all-gather is under way
    # whether a gather by a user's own class has failed; then no weights are taken from such gathers until one starts
    failed: bool = False
    # units whose weights were used outside of their own module, and stay gathered to the end of the forward pass
    escaped: set[int] = field(default_factory=set)
    # maps the address of a flat buffer to the unit whose weights were last gathered there
    weights_at: dict[int, int] = field(default_factory=dict)
    # names of parameters that were written while gathered, and that no error has named yet
    written: list[str] = field(default_factory=list)


def recomputing() -> bool:
    """Return whether autograd is running a backward pass in this thread.

    If so, a module that is called is being recomputed by activation checkpointing.
    """
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001  # there is no public function for it


@dataclass(frozen=True, slots=True)
class UnitContext:
    """The objects that all units (groups of parameters that are gathered together) of one engine share."""

    wire: Wire
    policy: Policy  # the model's policy; the parts of a unit get a context with the unit's own policy
    meter: Meter
    clock: Clock  # the step and micro-batch, for stochastic codecs and error feedback
    gradients: Reserve  # buffers of local gradients
    weights: Reserve  # buffers of gathered weights
    host: HostMemory
    passes: Passes
