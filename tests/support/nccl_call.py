"""A call of the process group with NCCL's rules, and the stream that carries calls out in order."""

from __future__ import annotations

import json
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

_GUIDE: Final = "NCCL user guide"
# Where each rule is written down.
RULES: Final = {
    "order": f"{_GUIDE}, Collective Operations: every rank calls with the same count and datatype, in order",
    "grouping": f"{_GUIDE}, Point-to-point communication and Group Calls: a send or receive blocks until "
    "matched; those that must progress together stand between ncclGroupStart and ncclGroupEnd",
    "communicators": f"{_GUIDE}, Using multiple NCCL communicators concurrently: operations of several "
    "communicators are issued in one order on all ranks",
    "creation": "torch.distributed.batch_isend_irecv: as a group's first call, all its ranks take part",
    "datatype": f"{_GUIDE}, Types: ncclDataType_t and ncclRedOp_t",
    "tags": f"{_GUIDE}, ncclSend: there is no tag, messages of two ranks match in order",
    "contiguous": f"{_GUIDE}, Data Pointers: a buffer is a pointer and a count",
    "in place": f"{_GUIDE}, In-place Operations: a rank's own part of the other buffer, or apart from it",
    "buffer": f"{_GUIDE}, CUDA Stream Semantics: a buffer belongs to the call until the stream has passed it",
    "backend": "torch.distributed, Backends: what NCCL offers",
}

TOLD_BYTES: Final = 256  # of what ranks tell each other before a call
_POISON: Final = 0xA5


class NcclRuleError(RuntimeError):
    """A call that NCCL would not carry out as meant; the message begins with the rule of :data:`RULES`."""

    def __init__(self, rule: str, why: str) -> None:
        super().__init__(f"{rule}: {why} [{RULES[rule]}]")
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank tells another of a call: both must agree."""

    position: int  # of the call among all that these two ranks take part in, over all communicators
    kind: str  # name of the collective, or ``send`` or ``receive``
    sent: int  # bytes to that rank
    received: int  # bytes from it
    detail: str  # element type, root and operation

    def packed(self) -> Tensor:
        text = json.dumps([self.position, self.kind, self.sent, self.received, self.detail]).encode()
        return torch.frombuffer(bytearray(text.ljust(TOLD_BYTES)), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, message: Tensor) -> Told:
        return cls(*json.loads(bytes(message.tolist())))

    def __str__(self) -> str:
        sizes = f"{self.sent} bytes out, {self.received} in"
        return f"{self.kind} ({sizes}, {self.detail}; call {self.position} of these ranks)"


@dataclass(slots=True, eq=False)
class Call(dist.Work):
    """A call under way, which is also what its caller waits with."""

    kind: str  # its name
    peers: dict[int, Told]  # what this rank tells each other rank of it
    sources: list[Tensor]  # that it reads
    destinations: list[Tensor]  # that it writes, at :meth:`wait`
    # moves the data, from what ``sources`` held to copies of ``destinations``
    carry: Callable[[list[Tensor], list[Tensor]], None]
    ended: Callable[[Call], None]  # is told once it was waited for
    # of point to point: what it sends and receives, and with whom; one unless grouped
    messages: list[tuple[int, Told]] = field(default_factory=list)
    _read: list[Tensor] = field(default_factory=list)  # sources as they were posted
    _brought: list[Tensor] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _error: BaseException | None = None
    _delivered: bool = False

    def __post_init__(self) -> None:
        dist.Work.__init__(self)
        self._read = [source.clone() for source in self.sources]
        self._brought = [target.clone() for target in self.destinations]  # keeps what is not written
        for target in self.destinations:
            if not any(overlap(target, source) for source in self.sources):
                target.view(torch.uint8).fill_(_POISON) if target.dim() else target.fill_(-1)

    def run(self, agree: Callable[[Call], None]) -> None:
        """On the stream: agree with the other ranks, then move the data."""
        try:
            agree(self)
            self.carry(self._read, self._brought)
        except BaseException as error:  # raised where it is waited for
            self._error = error
        self._over.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._over.set()

    @property
    def error(self) -> BaseException | None:
        return self._error

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:  # the group's holds
        """Wait for the stream to pass it, and give out what it brought, or raise what went wrong."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        if not self._delivered:
            self._delivered = True
            for source, then in zip(self.sources, self._read, strict=True):
                apart = not any(overlap(source, target) for target in self.destinations)
                if apart and not torch.equal(as_bytes(source), as_bytes(then)):
                    raise NcclRuleError("buffer", f"what {self.kind} sends was written before its wait()")
            for target, brought in zip(self.destinations, self._brought, strict=True):
                target.copy_(brought)
            self.ended(self)
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self.wait()
        future.set_result(self.destinations)
        return future


def as_bytes(tensor: Tensor) -> Tensor:
    """(bytes,) uint8 view of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def _span(tensor: Tensor) -> tuple[int, int]:
    first = tensor.data_ptr()
    return first, first + tensor.numel() * tensor.element_size()


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share memory, strides apart."""
    (first, end), (begin, last) = _span(one), _span(other)
    return first < last and begin < end


def carry_out(calls: queue.SimpleQueue[Call | None], agree: weakref.WeakMethod[Any]) -> None:
    """A communicator's stream: calls in order, none after one that failed."""
    failed: BaseException | None = None
    while (call := calls.get()) is not None:
        agreed = agree()
        if failed is not None or agreed is None:
            call.fail(failed or RuntimeError("the communicator was destroyed"))
            continue
        call.run(agreed)
        failed = call.error
        del call, agreed
