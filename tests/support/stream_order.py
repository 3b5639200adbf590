"""A race detector for streams: CUDA's streams and events on CPU tensors, and every access of memory in order.

Every operation runs at once, and is noted with the stream on which a GPU would run it.  Two accesses of one
memory, one of which writes, must be on one stream, or ordered by events and waits; otherwise a GPU could do
them in either order, which is a :class:`RaceError`.  As with NCCL, a collective is a stream of its own, after
the stream that posts it and before the one that waits for it.  Clocks of streams are vector clocks.

Not shown: memory that an allocator reuses on another stream before all have read it.
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
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from impl import ops
from impl.codecs.reference import REFERENCE
from impl.comm import exchanges, wire

COMPUTATION: Final = 0  # the number of its stream
# The arguments that operations write without saying so.
_WRITTEN: Final = {"fsdp::all_gather_copy_in": {"all_gather_output"}}
Clock = dict[int, int]  # by stream, the number of its accesses that come before


class RaceError(AssertionError):
    """Two accesses of one memory are unordered."""


@dataclass(frozen=True, slots=True)
class Access:
    """An access of bytes [low, high) of a storage, the stream's ``time``-th."""

    low: int
    high: int
    writes: bool
    stream: int
    time: int
    call: str


class Detector(TorchDispatchMode):
    """The streams of one rank and their accesses; a :class:`RaceError` names two unordered ones."""

    def __init__(self) -> None:
        super().__init__()
        self.current = COMPUTATION
        self.clocks: defaultdict[int, Clock] = defaultdict(dict)
        self.accesses: defaultdict[int, list[Access]] = defaultdict(list)  # by address of the storage
        self._kept: dict[int, torch.UntypedStorage] = {}  # so that no address is reused

    def __enter__(self) -> Self:
        _thread.detector = self
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        del _thread.detector

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the tensors that an operation reads and writes."""
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass, tree_leaves((args, kwargs)))):
            return NotImplemented  # the subclass calls again, with its plain tensors
        outputs = func(*args, **kwargs)
        if func.is_view:
            return outputs
        schema, name = func._schema.arguments, str(func)
        arguments = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
        writes = {
            argument.name for argument in schema if argument.alias_info and argument.alias_info.is_write
        } | _WRITTEN.get(func._schema.name, set())
        for value in tree_leaves(outputs):  # their memory is not reused from here on
            if isinstance(value, Tensor) and value.device.type == "cpu":
                self._keep(value)
        for argument, value in arguments.items():
            self.note(tree_leaves(value), name, writes=argument in writes)
        return outputs

    def note(self, values: Iterable[object], call: str, *, writes: bool, stream: int | None = None) -> None:
        """Note accesses of the tensors among ``values``, by the current stream unless another is named."""
        stream = self.current if stream is None else stream
        clock = self.clocks[stream]
        for tensor in values:
            if not isinstance(tensor, Tensor) or tensor.device.type != "cpu" or not tensor.numel():
                continue
            clock[stream] = clock.get(stream, 0) + 1
            low, remaining = tensor.data_ptr(), []
            extent = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            new = Access(low, low + (1 + extent) * tensor.itemsize, writes, stream, clock[stream], call)
            address = self._keep(tensor)
            for old in self.accesses[address]:
                ordered = clock.get(old.stream, 0) >= old.time
                if not ordered and (old.writes or writes) and old.low < new.high and new.low < old.high:
                    raise RaceError(
                        f"{call} on stream {stream} is in no order with {old.call} on stream {old.stream}"
                    )
                if not (ordered and writes and new.low <= old.low and old.high <= new.high):
                    remaining.append(old)
            self.accesses[address] = [*remaining, new]

    def _keep(self, tensor: Tensor) -> int:
        """The address of a tensor's storage, which lives as long as the detector."""
        storage = tensor.untyped_storage()
        return self._kept.setdefault(storage.data_ptr(), storage).data_ptr()

    def join(self, stream: int, clock: Clock) -> None:
        """Order the next accesses of a stream after those that a clock counts."""
        times = self.clocks[stream]
        for other, time in clock.items():
            times[other] = max(times.get(other, 0), time)


_thread = threading.local()  # ``detector``: that of this thread's rank
_numbers = itertools.count(COMPUTATION + 1)


@dataclass(slots=True)
class Event:
    enable_timing: bool = False
    stream: int | None = None
    clock: Clock = field(default_factory=dict)

    def record(self, stream: Stream | None = None) -> None:
        self.stream = _thread.detector.current if stream is None else stream.number
        self.clock = dict(_thread.detector.clocks[self.stream])

    def wait(self, stream: Stream | None = None) -> None:
        _thread.detector.join(_thread.detector.current if stream is None else stream.number, self.clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 0.0


@dataclass(slots=True, eq=False)
class Stream:
    device: object = None
    priority: int = 0
    number: int = field(default_factory=lambda: next(_numbers))

    def wait_stream(self, other: Stream) -> None:
        _thread.detector.join(self.number, _thread.detector.clocks[other.number])

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


@contextlib.contextmanager
def _as_current(stream: Stream) -> Iterator[None]:
    detector = _thread.detector
    before, detector.current = detector.current, stream.number
    try:
        yield
    finally:
        detector.current = before


def on_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run engines on CPU tensors as on a GPU with NCCL, with this file's streams and events.

    Each rank runs inside a :class:`Detector`, with backend ``nccl_rules`` of
    :func:`tests.support.ranks.on_threads`.
    """
    carried = exchanges.Distributed
    post, wait, post_joined = carried.post, carried.wait, carried.post_joined
    collectives: dict[Any, int] = {}  # the stream of each exchange without a wait

    def posting(self: Any) -> None:
        """Post on a new stream, which accesses the message and rows."""
        post(self)
        note([self])

    def posting_joined(several: Any) -> None:
        """Post all on one new stream, which accesses their messages and rows."""
        post_joined(several)
        note(several)

    def note(several: Any) -> None:
        detector, number = _thread.detector, next(_numbers)
        detector.join(number, detector.clocks[detector.current])
        for each in several:
            detector.note([each.send], "a collective", writes=False, stream=number)
            detector.note([each._received], "a collective", writes=True, stream=number)
            collectives[each] = number

    def waiting(self: Any) -> Tensor:
        """Order the current stream after the collective."""
        if (number := collectives.pop(self, None)) is not None:
            _thread.detector.join(_thread.detector.current, _thread.detector.clocks[number])
        return wait(self)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", _as_current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: Stream(number=_thread.detector.current))
    monkeypatch.setattr(wire, "waits_on_streams", lambda *_: True)
    monkeypatch.setattr(ops, "_choose", lambda _: (REFERENCE, None))  # it calls torch
    monkeypatch.setattr(carried, "post", posting)
    monkeypatch.setattr(carried, "post_joined", staticmethod(posting_joined))
    monkeypatch.setattr(carried, "wait", waiting)


def in_fsdp2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FSDP2 on CPU tensors use this file's streams too, after :func:`on_streams`.

    FSDP2 takes the streams of a CPU from ``torch.cpu``, where they do nothing.
    """
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cpu, name, getattr(torch.cuda, name))
    # It frees gathered weights by their storage, whose address could then be another tensor's.
    monkeypatch.setattr(_fsdp_param, "free_storage", lambda _: None)
