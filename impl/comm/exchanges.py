"""Implements exchanges, the collectives of a group of ranks, in four classes with the same interface.

The interface is the protocol :class:`Exchange`.  The classes differ in how messages reach the other ranks:

* :class:`Alone` is for a group of one rank, which sends nothing.
* :class:`InMemory` lets ranks read each other's messages in place.  Processes of one node use shared memory, and ranks
  that are threads use the memory of their process.
* :class:`Distributed` sends messages with torch.distributed.
* :class:`Staged` sends the messages of a GPU through host memory.

:mod:`impl.comm.wire` chooses the class, and books the bytes.
"""
# ruff: noqa: D102, SLF001  # Exchange documents the methods; one call may post several exchanges

from __future__ import annotations

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from impl.comm.fingerprint import Fields, Step, label
from impl.comm.hang_monitor import HangMonitor
from impl.comm.ledger import BETWEEN, INSIDE
from impl.comm.watchdog import DIFFER, Watchdog
from impl.plan.hops import Kind
from impl.plan.messages import SPARE, size_class
from impl.plan.traffic import LedgerKey
from impl.transport.group import Group
from impl.transport.side_stream import Arrival

_IDLE: Final = Arrival(joined=True)  # the last use of a buffer, if this use has ended already
_TAGS: Final = 1 << 30  # gloo's messages have tags below this number
# torch 2.13 renames this function and warns about the old name; torch 2.11 has only the old name.
_all_gather: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# The method of a group that all-gathers several messages in one call; torch 2.13 has renamed it too.
_RENAMED, _OLD = "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
_ALL_GATHER_SEVERAL: Final = _RENAMED if hasattr(dist.ProcessGroup, _RENAMED) else _OLD


class Exchange(Protocol):
    """A collective, as one rank sees it: write to ``send``, then call ``post()``, ``wait()`` and ``close()``."""

    # This rank's message, (bytes,) uint8, to be written before post().  In an all-to-all these are the messages to all
    # ranks of the group, one after the other.
    send: Tensor

    def post(self) -> None:
        """Send the message; the caller must not write to ``send`` after this call."""

    def wait(self) -> Tensor:
        """Wait for all messages, and return them as (ranks, bytes) uint8, with a row for each rank of the group.

        - In an all-gather, row i is the whole message of rank i of the group.
        - In an all-to-all, row i is the part of rank i's message that is for this rank.
        - In a step of a ring, there is only one row: the message of the previous rank.

        In an all-gather and an all-to-all, this rank's own message has a row too.  The result is valid until
        :meth:`close`.
        """

    def parts(self) -> Sequence[Tensor]:
        """Wait for all messages, and return them as a sequence of tensors (bytes,) uint8, one for each rank.

        Call this in place of :meth:`wait` if the messages may differ in length.  The tensor of a rank that sends
        nothing is empty.  The result is valid until :meth:`close`.
        """

    def close(self) -> None:
        """Give the memory of the messages back, so that later exchanges can use it."""


class Arena(Protocol):
    """Memory in which the ranks of a group read each other's messages in place.

    Processes of one node use shared memory, and thread ranks use the memory of their process.
    """

    @property
    def row_bytes(self) -> int:
        """Bytes of the largest message that a rank can send."""

    def claim(self) -> int:
        """Begin the next exchange, and return its number."""

    def row(self, number: int, nbytes: int) -> Tensor:
        """Return this rank's row of exchange ``number``: memory (nbytes,) uint8 to which it writes its message."""

    def post(self, number: int, mark: int) -> None:
        """Announce that this rank has written its row of exchange ``number``.

        ``mark`` is a 64-bit fingerprint of all exchanges that this rank has started, up to this one.  :meth:`agree`
        compares the marks of all ranks.
        """

    def wait(self, number: int) -> Tensor:
        """Wait until all ranks have posted exchange ``number``, and return their rows (ranks, bytes) uint8.

        A row may be longer than the message.  The result is valid until :meth:`done`.
        """

    def agree(self, number: int, mark: int) -> bool:
        """Return whether all ranks have posted exchange ``number`` with this ``mark``; call it after :meth:`wait`.

        If the marks (:meth:`post`) differ, the ranks have started different exchanges.
        """

    def done(self, number: int) -> None:
        """Announce that this rank has read the rows of exchange ``number``."""


class Pacer(Protocol):
    """Models a slow link between nodes: says when a message has left the node, so that the wire can delay it."""

    def book(self, nbytes: int) -> float:
        """Add a message of ``nbytes`` bytes to the queue of the modelled link, behind all earlier messages.

        Returns the time at which the message's last byte will have left the node, in seconds of ``time.monotonic()``.
        """


class Splits(NamedTuple):
    """The lengths of one rank's messages in an all-to-all whose messages differ in length.

    Each list has an entry for each rank of the group.
    """

    come: list[int]  # bytes that this rank receives from each rank
    go: list[int]  # bytes that this rank sends to each rank
    # for each rank, the byte of that rank's ``send`` at which its message for this rank begins
    starts: list[int]


def point_to_point(
    group: Group, kind: Kind, received: Tensor, sent: Tensor, tag: int, *, splits: Splits | None = None
) -> list[dist.Work]:
    """Post an exchange over gloo: one send to each other rank of the group, and one receive from each.

    In a shift, one step of a ring, there is one send to the next rank and one receive from the previous rank.
    ``splits`` has the lengths of the messages if the lengths differ; messages of 0 bytes are neither sent nor received.
    ``sent`` has this rank's messages, and ``received`` is the memory for the messages that this rank receives.  gloo
    matches only messages of the same ``tag``.

    Returns torch's ``Work`` of each receive and each send.

    gloo's own all-to-all announces a receive only when the receive's turn comes.  On a slow link the announcement then
    queues behind the data that the rank sends, and the link idles: a link of 50 Mbit/s carries 24 to 30 Mbit/s.  This
    function announces all receives before any send, and the same link carries 48 Mbit/s.
    """
    size, me, handle = len(group.ranks), group.index, group.handle() or group.process_group
    # Each rank starts with the rank after it, so that not all ranks send to the same rank first.
    after, before = group.others, group.others[::-1]
    if kind == "shift":
        after, before = after[:1], before[:1]
    come: Sequence[Tensor]
    go: Sequence[Tensor]
    if splits is not None:
        come, go = torch.split(received, splits.come), torch.split(sent, splits.go)
        before = [i for i in before if splits.come[i]]
        after = [i for i in after if splits.go[i]]
    else:
        come = [received] * size if kind == "shift" else received.view(size, -1).unbind()
        go = sent.view(size, -1).unbind() if kind == "all_to_all" else [sent] * size
    # recv() and send() of the group do what irecv() and isend() do, but without their checks.  Six calls of irecv()
    # and isend() take 60 us for each unit and hop.
    works = [handle.recv([come[i]], i, tag) for i in before]
    works += [handle.send([go[i]], i, tag) for i in after]
    if kind == "all_to_all":
        come[me].copy_(go[me])
    return works


def collective(
    group: Group,
    kind: Kind,
    received: Tensor,
    sent: Tensor,
    _: int,
    *,
    in_line: bool = False,
    splits: Splits | None = None,
) -> list[dist.Work]:
    """Post an exchange as one collective of the backend, and return the list of torch's ``Work`` to wait for.

    ``sent`` has this rank's messages, and ``received`` is the memory for the messages that this rank receives.
    ``splits`` has the lengths of the messages in an all-to-all if the lengths differ.

    If ``in_line`` is True, NCCL runs the collective on the current stream, and the returned list is empty.  Otherwise
    NCCL runs the collective on the group's own stream, and torch orders the two streams by two events: one before the
    collective, and one after it.
    """
    handle, apart = group.process_group, not in_line
    if splits is not None:
        work = dist.all_to_all_single(received, sent, splits.come, splits.go, group=handle, async_op=apart)
        return [work] if apart else []
    if kind == "all_gather":
        work = _all_gather(received, sent, group=handle, async_op=apart)
        return [work] if apart else []
    come = go = None  # bytes by rank; None for equal parts
    if kind == "shift":
        before, after = ((group.index + step) % group.size for step in (-1, 1))
        come, go = ([sent.numel() if i == end else 0 for i in range(group.size)] for end in (before, after))
    work = dist.all_to_all_single(received, sent, come, go, group=handle, async_op=apart)
    return [work] if apart else []


@dataclass(frozen=True, slots=True)
class Route:
    """Says how exchanges of one kind, size and purpose along an axis are sent, and how the ledger books them.

    A wire (the class that sends all messages) computes a route once, and uses it for all exchanges that are alike.
    """

    operation: Fields  # the entry in the log of collectives
    group: Group  # the ranks along the axis
    kind: Kind
    nbytes: (
        int  # bytes that a rank receives from each other rank; in an uneven all-to-all, bytes of all messages
    )
    sent_bytes: int  # bytes of this rank's message
    rows: int  # number of messages received, this rank's own included
    parts: int  # equal parts of this rank's message, one for each rank; 1 if every receiver gets the whole message
    receivers: int  # other ranks that receive a part of this rank's message
    shared: bool  # whether ranks read each other's messages in shared memory
    # if not shared: whether messages go from rank to rank over gloo, instead of through a collective of the backend
    direct: bool
    in_place: bool  # whether this rank writes its message into its own row of the received messages
    limit: tuple[timedelta, ...]  # the arguments of ``Work.wait()``: a timeout, or nothing
    # For each key of the ledger: (key, bytes, messages) that one exchange adds to its entry.
    booked: tuple[tuple[LedgerKey, int, int], ...]
    inter_bytes: int  # bytes of one exchange that go to other nodes
    payload: int  # bytes of one exchange that this rank sends to other ranks
    shape: tuple[
        int, ...
    ]  # shape of the received messages: (rows, bytes), or (bytes,) if they differ in length
    splits: Splits | None = (
        None  # the messages of an uneven all-to-all; None if all messages have ``nbytes`` bytes
    )


class Buffers:
    """Keeps the buffers of finished messages for later messages, since new memory costs a page fault every 4 KiB.

    If ``streams`` is True, several streams of a GPU may use the same buffer one after the other.  A stream that takes a
    buffer then waits until the buffer's last use has ended.  The sizes of buffers are then also rounded up, so that
    messages of similar sizes can use the same buffer (:mod:`impl.plan.messages`).

    If ``keep`` is False, no buffers are kept, and every message gets new memory.
    """

    def __init__(self, device: torch.device, *, streams: bool = False, keep: bool = True) -> None:
        self._device, self._streams, self._keep = device, streams and keep, keep
        # For each size in bytes, the free buffers, each with the end of its last use.
        self._free: dict[int, deque[tuple[Tensor, Arrival]]] = defaultdict(deque)
        self.held = 0  # bytes of all buffers, in use and free
        # Inside a context that enqueues work on a side stream: the end of this work.  A buffer that is given back
        # inside the context counts as in use until this end.
        self.arrival: Arrival | None = None

    def take(self, nbytes: int) -> Tensor:
        """Return a uint8 buffer of at least ``nbytes`` bytes with arbitrary content.

        The caller uses its first ``nbytes`` bytes.
        """
        size, spare = (size_class(nbytes), SPARE) if self._streams else (nbytes, 0)
        free = self._free[size]
        if len(free) > spare:
            # With streams, take the buffer used longest ago; otherwise the last one, which caches may still hold.
            buffer, last = free.popleft() if self._streams else free.pop()
            # If the last use is joined, the stream of the computation, which will use the buffer, waits for it already.
            if self.arrival is not None or not last.joined:
                last.join()
        else:
            self.held += size
            with torch.inference_mode(mode=False):  # the buffer will outlive a pass in inference mode
                buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        return buffer

    def give_back(self, *buffers: Tensor) -> None:
        """Take back buffers that :meth:`take` returned, so that later messages can use them."""
        if not self._keep:
            self.held -= sum(buffer.numel() for buffer in buffers)
            return
        last = self.arrival or _IDLE
        if self._streams and self.arrival is None:
            last = Arrival(torch.cuda.current_stream(self._device).record_event())
        for buffer in buffers:
            self._free[buffer.numel()].append((buffer, last))

    def clear(self) -> None:
        """Drop all free buffers."""
        self.held -= sum(size * len(free) for size, free in self._free.items())
        self._free.clear()


class Alone:
    """The exchange of a group of one rank: the rank receives what it sends, and sends nothing to other ranks."""

    def __init__(self, buffers: Buffers, nbytes: int) -> None:
        self._buffers, self._buffer = buffers, buffers.take(nbytes)
        self.send = self._buffer if self._buffer.numel() == nbytes else self._buffer[:nbytes]

    def post(self) -> None:
        pass

    def wait(self) -> Tensor:
        return self.send.view(1, -1)

    def parts(self) -> Sequence[Tensor]:
        return (self.send,)

    def close(self) -> None:
        self._buffers.give_back(self._buffer)


class InMemory:
    """An exchange in an arena, memory that ranks share: each rank writes its own row, and reads all rows in place."""

    def __init__(self, watchdog: Watchdog, step: Step, route: Route, arena: Arena) -> None:
        self._watchdog, self._step, self._route, self._arena = watchdog, step, route, arena
        index = route.group.index
        start = index * route.nbytes if route.kind == "all_to_all" else 0
        # The part of each rank's message that is for this rank.
        self._part = slice(start, start + route.nbytes)
        # The ranks from which this rank receives.  In a step of a ring, this is the previous rank only.
        before = (index - 1) % route.group.size
        self._sources = slice(before, before + 1) if route.kind == "shift" else slice(None)
        self._rows: Tensor | None = None  # the messages of all ranks, once all have been posted
        self._begin = 0.0
        self._number = watchdog.wait(step, arena.claim)
        self.send = arena.row(self._number, route.sent_bytes)

    def post(self) -> None:
        self._watchdog.carried += self._route.payload
        self._begin = time.perf_counter()
        self._arena.post(self._number, self._step[2])

    def wait(self) -> Tensor:
        return self.messages()[self._sources, self._part]

    def parts(self) -> Sequence[Tensor]:
        if (splits := self._route.splits) is None:
            return self.wait().unbind()
        rows = zip(self.messages(), splits.starts, splits.come, strict=True)
        return [row[start : start + size] for row, start, size in rows]

    def messages(self) -> Tensor:
        """Wait for all messages, and return the whole message of each rank as a row of (ranks, bytes) uint8.

        In an all-to-all, a row has the parts for all ranks.  :meth:`wait` returns only the parts for this rank.
        """
        if self._rows is None:
            rows = self._watchdog.wait(self._step, partial(self._arena.wait, self._number))
            if not self._arena.agree(self._number, self._step[2]):
                raise self._watchdog.error(DIFFER, f"it is in {label(self._step)}", self._step)
            _arrived(self._watchdog, self._route, self._begin)
            self._rows = rows
        return self._rows

    def close(self) -> None:
        self._arena.done(self._number)


class Distributed:
    """An exchange whose messages are sent by torch.distributed, with gloo or NCCL.

    ``pacer`` delays the messages, to model a slow link between nodes; None does not delay them.  The memory of messages
    comes from ``buffers``.  An all-gather may receive its messages in ``into`` instead.  ``step`` is the exchange's
    entry in the log of exchanges.  ``monitor`` watches the exchange if a stream of the GPU waits for messages, and not
    the host; otherwise it is None.

    ``in_line`` has an effect only if the exchange is posted inside the context :meth:`Wire.beside` or
    :meth:`Wire.on_current_stream`.  If it is True, NCCL then runs the exchange on the current stream.  If it is False,
    NCCL runs the exchange on the group's own stream, as it does outside of these contexts.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        step: Step,
        route: Route,
        buffers: Buffers,
        *,
        into: Tensor | None,
        pacer: Pacer | None,
        monitor: HangMonitor | None = None,
        in_line: bool = False,
    ) -> None:
        self._watchdog, self._step, self._route, self._in_line = watchdog, step, route, in_line
        self._buffers, self._pacer, self._arrival = buffers, pacer, 0.0
        self._works: Sequence[dist.Work] = ()
        self._monitor = monitor  # watches the exchange, if the host does not wait for it
        self._under_way, self._begin = False, 0.0
        self._taken: list[Tensor] = []
        if into is None:
            nbytes = route.nbytes * route.rows if route.splits is None else sum(route.splits.come)
            whole = buffers.take(nbytes)
            self._taken.append(whole)
            into = whole if whole.numel() == nbytes else whole[:nbytes]
        self._received = into
        if route.in_place:
            # The message is written straight to this rank's own row of what is received.
            self.send = self._received.view(route.rows, -1)[route.group.index]
        else:
            whole = buffers.take(route.sent_bytes)
            self._taken.append(whole)
            self.send = whole if whole.numel() == route.sent_bytes else whole[: route.sent_bytes]

    def post(self) -> None:
        route = self._route
        self._watchdog.carried += route.payload
        self._under_way, self._begin = True, time.perf_counter()
        if self._pacer is not None and route.inter_bytes:
            self._arrival = self._pacer.book(route.inter_bytes)
        start = point_to_point if route.direct else collective
        # The end of the work that the surrounding context enqueues on a side stream, if this exchange is part of it.
        arrival = self._buffers.arrival if self._in_line else None
        if arrival is not None:
            start = partial(collective, in_line=True)
        # The tag is derived from the fingerprint of all exchanges so far.  Thus gloo does not match messages of ranks
        # that have started different exchanges.
        mark = self._step[2] % _TAGS
        try:
            message = route.group, route.kind, self._received, self.send, mark
            options: dict[str, Any] = {} if route.splits is None else {"splits": route.splits}
            self._works = start(*message, **options)
        except RuntimeError as error:  # gloo may find here already that a rank is lost
            raise self._watchdog.error(f"could not finish {label(self._step)}", error, self._step) from error
        if self._monitor is not None:
            self._monitor.posted(self._step, self._works if arrival is None else (arrival,))

    @property
    def joins(self) -> tuple[Group, Arrival | None] | None:
        """The key that says which exchanges one call of NCCL can post together; None if the exchange is posted alone.

        Exchanges with equal keys can be posted together.  The key is a pair (group, arrival).  The group has the ranks
        that take part.  The arrival depends on the stream on which NCCL runs the exchange:

        - On the current stream (``in_line``): the arrival is the :class:`Arrival` that marks the end of the work that
          the surrounding context enqueues on this stream.
        - On the group's own stream: the arrival is None.
        """
        route = self._route
        if route.kind != "all_gather" or route.direct or self._monitor is None or self._pacer is not None:
            return None
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL, groups of torch 2.11 and 2.12 lack the method.
        if _ALL_GATHER_SEVERAL == _OLD and get_debug_level() == DebugLevel.DETAIL:
            return None
        return route.group, self._buffers.arrival if self._in_line else None

    @staticmethod
    def post_joined(exchanges: Sequence[Distributed]) -> None:
        """Post several all-gathers in one call of NCCL.

        All ``exchanges`` must have the same key :attr:`joins`, which must not be None.
        """
        first = exchanges[0]
        arrival = first._buffers.arrival if first._in_line else None
        options = AllgatherOptions()
        options.asyncOp = arrival is None
        received, sent = [each._received for each in exchanges], [each.send for each in exchanges]
        try:
            work = getattr(first._route.group.process_group, _ALL_GATHER_SEVERAL)(received, sent, options)
            if arrival is not None and work is not None:
                work.wait()  # as torch's own collectives do without async_op
        except RuntimeError as error:
            raise first._watchdog.error(
                f"could not finish {label(first._step)}", error, first._step
            ) from error
        for each in exchanges:
            each._watchdog.carried += each._route.payload
            each._under_way, each._begin = True, time.perf_counter()
            each._works = (work,) if arrival is None else ()
            if each._monitor is not None:
                each._monitor.posted(each._step, each._works if arrival is None else (arrival,))

    def wait(self) -> Tensor:
        if self._under_way:
            self._watchdog.wait(self._step, self._receive, across=self._route.inter_bytes > 0)
            self._works, self._under_way = (), False
            _arrived(self._watchdog, self._route, self._begin)
        return self._received.view(self._route.shape)

    def parts(self) -> Sequence[Tensor]:
        received, splits = self.wait(), self._route.splits
        return received.unbind() if splits is None else torch.split(received, splits.come)

    def _receive(self) -> None:
        for work in self._works:
            work.wait(*self._route.limit)
        if self._pacer is not None and (left := self._arrival - time.monotonic()) > 0:
            time.sleep(left)

    def close(self) -> None:
        # While the exchange is under way, a message may still be read from or written to the buffers.
        if self._taken and not self._under_way:
            self._buffers.give_back(*self._taken)


class Staged:
    """An exchange of a GPU's tensors through host memory.

    The message is copied to host memory, where ``host``, an exchange of CPU tensors, sends it.  What ``host`` receives
    is copied to the GPU.  In this way several ranks can share a GPU, which NCCL refuses.  Copies to and from host
    memory block the thread.
    """

    def __init__(self, host: Distributed, route: Route, buffers: Buffers) -> None:
        self._host, self._buffers, self._buffer = host, buffers, buffers.take(route.sent_bytes)
        self.send = self._buffer[: route.sent_bytes]

    def post(self) -> None:
        self._host.send.copy_(self.send)
        self._host.post()

    def wait(self) -> Tensor:
        return self._host.wait().to(self.send.device)

    def parts(self) -> Sequence[Tensor]:
        return [part.to(self.send.device) for part in self._host.parts()]

    def close(self) -> None:
        self._host.close()
        self._buffers.give_back(self._buffer)


def post_together(exchanges: Sequence[Exchange]) -> None:
    """Post ``exchanges`` in order; with NCCL, one call posts consecutive all-gathers along the same axis."""
    for joins, those in itertools.groupby(exchanges, lambda each: getattr(each, "joins", None)):
        alike = list(those)
        joined = [each for each in alike if isinstance(each, Distributed)]
        if joins is not None and len(joined) > 1:
            Distributed.post_joined(joined)
        else:
            for exchange in alike:
                exchange.post()


def _arrived(watchdog: Watchdog, route: Route, begin: float) -> None:
    """Record in the watchdog's timeline that an exchange was under way from ``begin`` until now.

    A timeline has the times of this rank's messages.  ``begin`` is the time of the post, in seconds of
    ``time.perf_counter()``.  If the watchdog has no timeline, the function does nothing.
    """
    if watchdog.timeline is not None:
        purpose, unit = route.operation[6:8]
        lane = BETWEEN if route.inter_bytes else INSIDE
        watchdog.timeline.add(lane, f"{purpose} {unit}".strip(), begin, route.sent_bytes)
