"""Exchanges: of one rank, in a node's memory, by torch.distributed, or through host memory."""
# ruff: noqa: D102  # Exchange documents the methods

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from impl.comm.fingerprint import Fields, Step, label
from impl.comm.ledger import BETWEEN, INSIDE
from impl.comm.watchdog import DIFFER, Watchdog
from impl.plan.traffic import LedgerKey
from impl.transport.group import Group
from impl.transport.shared_memory import Arena

Kind = Literal["all_gather", "all_to_all", "shift"]

_TAGS: Final = 1 << 30  # of gloo's messages
# torch 2.13 renames it and warns about the old name; 2.11 has only the old one.
_all_gather: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Exchange(Protocol):
    """One collective under way: write to ``send``, ``post()``, ``wait()``."""

    send: Tensor  # (bytes,) this rank's message, to be written before post(); all-to-all: a row per rank

    def post(self) -> None:
        """Send the message; ``send`` belongs to the wire from here on."""

    def wait(self) -> Tensor:
        """(ranks, bytes) received, a row per source; valid until :meth:`close`."""

    def close(self) -> None:
        """Give the buffers back."""


class Pacer(Protocol):
    """Models a link: says when bytes sent to other nodes have left."""

    def book(self, nbytes: int) -> float:
        """``time.monotonic()`` at which the last of ``nbytes`` has left this node."""


def point_to_point(group: Group, kind: Kind, received: Tensor, sent: Tensor, tag: int) -> list[dist.Work]:
    """Post an exchange over gloo as one message to and from each rank of the group.

    gloo's own all-to-all announces each receive late: behind a slow link the announcement queues after our
    data and the link idles (24 to 30 of 50 Mbit/s; 48 with all receives announced before any send).
    """
    size, me, handle = len(group.ranks), group.index, group.handle() or group.process_group
    # Start with the next rank, so that not all ranks send to the first one first.
    after, before = group.others, group.others[::-1]
    if kind == "shift":
        after, before = after[:1], before[:1]
    come = [received] * size if kind == "shift" else received.view(size, -1).unbind()
    go = sent.view(size, -1).unbind() if kind == "all_to_all" else [sent] * size
    # isend() and irecv() without their checks: six calls are 60 us a unit and hop.
    works = [handle.recv([come[i]], i, tag) for i in before]
    works += [handle.send([go[i]], i, tag) for i in after]
    if kind == "all_to_all":
        come[me].copy_(go[me])
    return works


def collective(group: Group, kind: Kind, received: Tensor, sent: Tensor, _: int) -> list[dist.Work]:
    """Post an exchange as one collective of the backend."""
    handle = group.process_group
    if kind == "all_gather":
        return [_all_gather(received, sent, group=handle, async_op=True)]
    come = go = None  # bytes by rank: equal parts
    if kind == "shift":
        before, after = ((group.index + step) % group.size for step in (-1, 1))
        come, go = ([sent.numel() if i == end else 0 for i in range(group.size)] for end in (before, after))
    return [dist.all_to_all_single(received, sent, come, go, group=handle, async_op=True)]


@dataclass(frozen=True, slots=True)
class Route:
    """The path of exchanges of one kind, size and purpose along an axis."""

    operation: Fields  # for the log of collectives
    group: Group  # the axis's
    kind: Kind  # of exchange
    nbytes: int  # of a row that a rank receives from another
    sent_bytes: int  # this rank's message
    rows: int  # received
    shared: bool  # whether ranks read each other's memory
    direct: bool  # else whether messages go from rank to rank, or by the backend's collectives
    limit: tuple[timedelta, ...]  # arguments of works' ``wait``
    # keys of the ledger with the bytes and messages of an exchange
    booked: tuple[tuple[LedgerKey, int, int], ...]
    inter_bytes: int  # of these to other nodes


class Buffers:
    """Memory of messages, reused: a fresh buffer costs a page fault every 4 KiB.

    With several ``streams`` of a GPU, a buffer's next user waits, on its stream, for its last one.
    """

    def __init__(self, device: torch.device, *, streams: bool = False) -> None:
        self._device, self._streams = device, streams
        self._spare = 2 if streams else 0  # free buffers of a size to keep: a message and what it receives
        self._free: dict[int, deque[tuple[Tensor, torch.cuda.Event | None]]] = defaultdict(deque)

    def take(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8."""
        free = self._free[nbytes]
        if len(free) > self._spare:
            # On streams the one used longest ago, else the last one, which caches may hold.
            buffer, event = free.popleft() if self._streams else free.pop()
            if event is not None:
                event.wait()
            return buffer
        with torch.inference_mode(mode=False):  # it outlives a pass in inference mode
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        """Let it be used again."""
        event = torch.cuda.current_stream(self._device).record_event() if self._streams else None
        self._free[buffer.numel()].append((buffer, event))

    def clear(self) -> None:
        """Drop free buffers."""
        self._free.clear()


class Alone:
    """A group of one rank: what it sends is what it receives."""

    def __init__(self, buffers: Buffers, nbytes: int) -> None:
        self.send, self._buffers = buffers.take(nbytes), buffers

    def post(self) -> None:
        pass

    def wait(self) -> Tensor:
        return self.send.view(1, -1)

    def close(self) -> None:
        self._buffers.give_back(self.send)


class InMemory:
    """Ranks of one node read each other's rows in place, in a slot of the arena."""

    def __init__(self, watchdog: Watchdog, step: Step, route: Route, arena: Arena) -> None:
        self._watchdog, self._step, self._route, self._arena = watchdog, step, route, arena
        start = route.group.index * route.nbytes if route.kind == "all_to_all" else 0
        self._part = slice(start, start + route.nbytes)  # of each rank's message
        self._rows: Tensor | None = None  # once all have posted theirs
        self._begin = 0.0
        self._number = watchdog.wait(step, arena.claim)
        self.send = arena.row(self._number)[: route.sent_bytes]

    def post(self) -> None:
        self._begin = time.perf_counter()
        self._arena.post(self._number, self._step[2])

    def wait(self) -> Tensor:
        return self.messages()[:, self._part]

    def messages(self) -> Tensor:
        """(ranks, bytes) the whole messages of all ranks; waits like :meth:`wait`."""
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
    """An exchange by torch.distributed, over a modelled link if there is a ``pacer``.

    Its messages lie in ``buffers``, or those that a gather receives in ``into``.
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
    ) -> None:
        self._watchdog, self._step, self._route = watchdog, step, route
        self._buffers, self._pacer, self._arrival = buffers, pacer, 0.0
        self._works: Sequence[dist.Work] = ()
        self._under_way, self._begin = False, 0.0
        self._received = buffers.take(route.nbytes * route.rows) if into is None else into
        self._taken = [self._received] if into is None else []
        if route.kind == "all_gather" and route.direct:
            # The message is written where this rank receives its own.
            self.send = self._received.view(route.rows, -1)[route.group.index]
        else:
            self.send = buffers.take(route.sent_bytes)
            self._taken.append(self.send)

    def post(self) -> None:
        route = self._route
        self._under_way, self._begin = True, time.perf_counter()
        if self._pacer is not None and route.inter_bytes:
            self._arrival = self._pacer.book(route.inter_bytes)
        start = point_to_point if route.direct else collective
        mark = self._step[2] % _TAGS  # messages of ranks with other orders do not match
        try:
            self._works = start(route.group, route.kind, self._received, self.send, mark)
        except RuntimeError as error:  # gloo may report a lost rank here already
            raise self._watchdog.error(f"could not finish {label(self._step)}", error, self._step) from error

    def wait(self) -> Tensor:
        if self._under_way:
            self._watchdog.wait(self._step, self._receive, across=self._route.inter_bytes > 0)
            self._works, self._under_way = (), False
            _arrived(self._watchdog, self._route, self._begin)
        return self._received.view(self._route.rows, -1)

    def _receive(self) -> None:
        for work in self._works:
            work.wait(*self._route.limit)
        if self._pacer is not None and (left := self._arrival - time.monotonic()) > 0:
            time.sleep(left)

    def close(self) -> None:
        if not self._under_way:  # else a message may still be written or read there
            for buffer in self._taken:
                self._buffers.give_back(buffer)


class Staged:
    """An exchange of tensors on a device, in ``buffers``, by ``host`` through host memory.

    So several ranks can share a GPU, which NCCL refuses.  Copies block the thread.
    """

    def __init__(self, host: Distributed, route: Route, buffers: Buffers) -> None:
        self._host, self._buffers, self.send = host, buffers, buffers.take(route.sent_bytes)

    def post(self) -> None:
        self._host.send.copy_(self.send)
        self._host.post()

    def wait(self) -> Tensor:
        return self._host.wait().to(self.send.device)

    def close(self) -> None:
        self._host.close()
        self._buffers.give_back(self.send)


def _arrived(watchdog: Watchdog, route: Route, begin: float) -> None:
    """Note that an exchange posted at ``begin`` has been received."""
    if watchdog.timeline is not None:
        purpose, unit = route.operation[6:8]
        lane = BETWEEN if route.inter_bytes else INSIDE
        watchdog.timeline.add(lane, f"{purpose} {unit}".strip(), begin, route.sent_bytes)
