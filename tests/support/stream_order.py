"""A race detector for streams: CUDA's streams and events on CPU tensors, and every access of memory in order.

Nothing runs late here.  Every operation runs at once, and is noted with the stream on which a GPU would find
it; two accesses of one memory, one of which writes, must be of one stream, or one behind the other by events
and waits, else a GPU could do them in either order: :class:`RaceError`.  A collective is a stream of its own
behind the one that posts it, and before who waits for it, as NCCL's are.  Clocks of streams are vectors, as
of processes that send messages.

Not shown: memory that an allocator hands out again, to another stream, before all have read it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Self

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from impl import ops
from impl.codecs.reference import REFERENCE
from impl.comm import exchanges, wire

COMPUTATION: Final = 0  # the number of its stream
Clock = dict[int, int]  # by stream, how many of its accesses come before


class RaceError(AssertionError):
    """Two accesses of one memory are in no order."""


@dataclass(frozen=True, slots=True)
class Access:
    """Of bytes [low, high) of a storage, as number ``time`` of its stream."""

    low: int
    high: int
    writes: bool
    stream: int
    time: int
    what: str


class Detector(TorchDispatchMode):
    """The streams of one rank, and what they have accessed; its operations are noted inside it, and two of
    one memory that are in no order raise a :class:`RaceError` that names both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = COMPUTATION
        self.clocks: defaultdict[int, Clock] = defaultdict(dict)
        self.accesses: defaultdict[int, list[Access]] = defaultdict(list)  # by address of the storage
        self._kept: dict[int, torch.UntypedStorage] = {}  # so that no address is given out twice

    def __enter__(self) -> Self:
        _here.detector = self
        super().__enter__()
        return self

    def __exit__(self, *said: object) -> None:
        super().__exit__(*said)
        del _here.detector

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what an operation reads and writes."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func.is_view:
            return found
        schema, name = func._schema.arguments, str(func)
        given = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
        writes = {
            argument.name for argument in schema if argument.alias_info and argument.alias_info.is_write
        }
        for value in tree_leaves(found):  # from here on nothing else gets their memory
            if isinstance(value, Tensor) and value.device.type == "cpu":
                self._keep(value)
        for argument, value in given.items():
            self.note(tree_leaves(value), name, writes=argument in writes)
        return found

    def note(self, values: Iterable[object], what: str, *, writes: bool, stream: int | None = None) -> None:
        """Note accesses of the tensors among ``values``, by the current stream unless another is named."""
        stream = self.current if stream is None else stream
        clock = self.clocks[stream]
        for tensor in values:
            if not isinstance(tensor, Tensor) or tensor.device.type != "cpu" or not tensor.numel():
                continue
            clock[stream] = clock.get(stream, 0) + 1
            low, kept = tensor.data_ptr(), []
            extent = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            new = Access(low, low + (1 + extent) * tensor.itemsize, writes, stream, clock[stream], what)
            address = self._keep(tensor)
            for old in self.accesses[address]:
                ordered = clock.get(old.stream, 0) >= old.time
                if not ordered and (old.writes or writes) and old.low < new.high and new.low < old.high:
                    raise RaceError(
                        f"{what} on stream {stream} is in no order with {old.what} on stream {old.stream}"
                    )
                if not (ordered and writes and new.low <= old.low and old.high <= new.high):
                    kept.append(old)
            self.accesses[address] = [*kept, new]

    def _keep(self, tensor: Tensor) -> int:
        """The address of a tensor's storage, which is not freed before the detector is."""
        storage = tensor.untyped_storage()
        return self._kept.setdefault(storage.data_ptr(), storage).data_ptr()

    def join(self, stream: int, clock: Clock) -> None:
        """Let what comes on a stream come after all that a clock counts."""
        own = self.clocks[stream]
        for other, time in clock.items():
            own[other] = max(own.get(other, 0), time)


_here = threading.local()  # ``detector`` of the rank that this thread is
_numbers = itertools.count(COMPUTATION + 1)


@dataclass(slots=True)
class Event:
    enable_timing: bool = False
    stream: int | None = None
    clock: Clock = field(default_factory=dict)

    def record(self, stream: Stream | None = None) -> None:
        self.stream = _here.detector.current if stream is None else stream.number
        self.clock = dict(_here.detector.clocks[self.stream])

    def wait(self, stream: Stream | None = None) -> None:
        _here.detector.join(_here.detector.current if stream is None else stream.number, self.clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 0.0


@dataclass(slots=True)
class Stream:
    device: object = None
    number: int = field(default_factory=lambda: next(_numbers))

    def wait_stream(self, other: Stream) -> None:
        _here.detector.join(self.number, _here.detector.clocks[other.number])

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


@contextlib.contextmanager
def _as_current(stream: Stream) -> Iterator[None]:
    detector = _here.detector
    before, detector.current = detector.current, stream.number
    try:
        yield
    finally:
        detector.current = before


def on_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines on CPU tensors do as on a GPU with NCCL, whose streams and events are those of this file.

    Each rank runs inside a :class:`Detector`, with backend ``nccl_rules`` of
    :func:`tests.support.ranks.on_threads`.
    """
    carried = exchanges.Distributed
    post, wait = carried.post, carried.wait
    collectives: dict[Any, int] = {}  # the stream of each exchange that was not waited for

    def posting(self: Any) -> None:
        """Its message and rows are accessed on a stream of its own."""
        post(self)
        detector, number = _here.detector, next(_numbers)
        detector.join(number, detector.clocks[detector.current])
        detector.note([self.send], "a collective", writes=False, stream=number)
        detector.note([self._received], "a collective", writes=True, stream=number)
        collectives[self] = number

    def waiting(self: Any) -> Tensor:
        """The current stream comes after the collective."""
        if (number := collectives.pop(self, None)) is not None:
            _here.detector.join(_here.detector.current, _here.detector.clocks[number])
        return wait(self)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", _as_current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: Stream(number=_here.detector.current))
    monkeypatch.setattr(wire, "waits_on_streams", lambda *_: True)
    monkeypatch.setattr(ops, "_choose", lambda _: (REFERENCE, None))  # whose operations are torch's
    monkeypatch.setattr(carried, "post", posting)
    monkeypatch.setattr(carried, "wait", waiting)
