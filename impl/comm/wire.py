"""The only place where bytes leave a rank.  Every message is booked in a ledger.

Two primitives on contiguous byte messages, an all-gather and an all-to-all along one axis of the
topology, each an :class:`Exchange` in three steps: write to ``send``, :meth:`~Exchange.post`,
:meth:`~Exchange.wait`.  Between the last two the caller computes.

Transports: ``backend`` hands messages to torch.distributed (gloo, NCCL, thread ranks); ``shm``
lets the ranks of a node read each other's memory (:mod:`impl.transport.shared_memory`) and uses the backend
between nodes; ``tcp`` uses connections of our own there (:mod:`impl.transport.connections`).  A group of one
rank sends nothing, whatever the transport, and a flat gather is always the backend's own ring.

No wait is for ever: an exchange that a rank does not join ends in a :class:`WireError`, which says
where every rank stands (:mod:`impl.comm.desync_report`), and :meth:`Wire.check_order` finds ranks that part
before they wait for each other.
"""

from __future__ import annotations

import contextlib
import re
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from impl.comm.desync_report import DesyncReporter, report
from impl.comm.fingerprint import CollectiveLog, Entry, Step, unpacked
from impl.comm.mesh import Mesh
from impl.plan.topology import Axis, ranks_in_words
from impl.plan.traffic import ORDER_BYTES, LedgerKey, Link, Phase, Purpose, Sent, destinations
from impl.transport.connections import Connections, PartedError, PendingExchange
from impl.transport.group import Group
from impl.transport.shared_memory import Arena, SharedMemoryError, Waiting, patience
from impl.transport.zero_copy import Lease, SharedRegions

TIMEOUT_SECONDS: Final = 120.0
_TAGS: Final = 1 << 30  # of gloo's messages
_IMPOSSIBLE: Final = 1 << 40  # exchanges that a rank opened: what came was not a count
Transport = Literal["backend", "shm", "tcp"]

# torch 2.13 renames it and warns about the old name; 2.11 has only the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class WireError(RuntimeError):
    """A message cannot be sent as asked, or did not come; the message names the numbers and who is where."""


class Pacer(Protocol):
    """A link that is modelled: says when bytes sent to other nodes have left."""

    def book(self, nbytes: int) -> float:
        """``time.monotonic()`` at which the last of ``nbytes`` has left this node."""


@dataclass(frozen=True, slots=True)
class Tag:
    """What a message is for; the ledger adds axis and link."""

    phase: Phase
    purpose: Purpose
    unit: str = ""


@dataclass(slots=True)
class Ledger:
    """Bytes and messages that this rank has sent."""

    _rows: dict[LedgerKey, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def book(self, key: LedgerKey, nbytes: int, messages: int) -> None:
        """Add messages of ``nbytes`` in total."""
        row = self._rows[key]
        row[0] += nbytes
        row[1] += messages

    def rows(self) -> dict[LedgerKey, Sent]:
        """A copy of everything booked."""
        return {key: Sent(*row) for key, row in self._rows.items()}

    def total(self, link: Link) -> int:
        """Bytes over one kind of link."""
        return sum(row[0] for key, row in self._rows.items() if key.link == link)

    def clear(self) -> None:
        """Forget everything."""
        self._rows.clear()


class Exchange(Protocol):
    """One collective under way.

    Attributes:
        send: where this rank's message is written before :meth:`post`: (bytes,) of an
            all-gather; (ranks, bytes) of an all-to-all, a row per destination.
    """

    send: Tensor

    def post(self) -> None:
        """Let the message go; ``send`` belongs to the wire from here on."""

    def wait(self) -> Tensor:
        """(ranks, bytes) received, a row per source; valid until :meth:`close`."""

    def whole(self) -> Tensor:
        """(ranks, bytes) the whole messages of all ranks, where the axis shares memory; as :meth:`wait`."""

    def close(self) -> None:
        """Give the buffers back."""


@dataclass(frozen=True, slots=True)
class _Route:
    """How messages of one size and purpose travel along an axis.

    Attributes:
        group: the axis's.
        shared: whether its ranks read each other's memory.
        direct: whether each rank sends to each by itself.
        connections: of our own that carry them, if any.
        limit: what works' ``wait`` is given.
        booked: rows of the ledger with what an exchange adds to each: bytes, messages.
        inter_bytes: of them to other nodes.
    """

    group: Group
    shared: bool
    direct: bool
    connections: Connections | None
    limit: tuple[timedelta, ...]
    booked: tuple[tuple[LedgerKey, int, int], ...]
    inter_bytes: int


class Wire:
    """Sends messages along the axes of a mesh and keeps the ledger.

    Args:
        mesh: this rank's groups.
        transport: what carries messages, inside a node and between nodes.
        pacer: models the link between nodes, where none is shaped.
        timeout: seconds after which a missing rank is an error.

    Attributes:
        ledger: what was sent.
        exposed_seconds: time spent waiting in :meth:`Exchange.wait`, accumulated; on a CUDA device
            waiting happens on the stream, and this stays near 0.
        buffer_bytes: of the messages' buffers, arenas not counted.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        transport: Transport = "backend",
        pacer: Pacer | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        if transport != "backend" and mesh.device.type != "cpu":
            raise WireError(f"transport {transport!r} exchanges CPU memory, the mesh is on {mesh.device}")
        self.mesh = mesh
        self.transport = transport
        self.ledger = Ledger()
        self.exposed_seconds = 0.0
        self.buffer_bytes = 0
        self._pacer = pacer
        self._timeout, self._limit = timeout, timedelta(seconds=timeout)
        self._arenas: dict[Axis, Arena] = {}
        self._connected: dict[Axis, Connections] = {}
        self._buffers: dict[int, list[Tensor]] = defaultdict(list)
        self._used: dict[str, set[str]] = {}
        self._routes: dict[tuple[Axis, int, Tag, bool], _Route] = {}  # by axis, bytes, tag and whether a ring
        self._collective_log = CollectiveLog()
        self._desync_reporter = self._listed()

    def reserve(self, axis: Axis, nbytes: int) -> None:
        """Make room for messages of up to ``nbytes`` a rank; all ranks of the axis must call it."""
        group = self.mesh.group(axis)
        if not self._shares_memory(group):
            self._connections(axis)
            return
        if axis not in self._arenas or self._arenas[axis].row_bytes < nbytes:
            with self._making(axis):
                self._arenas[axis] = Arena(nbytes, self._waiting(group))

    def _connections(self, axis: Axis) -> Connections | None:
        """This rank's own along ``axis``, if the transport has them; all ranks of the axis must call it."""
        if self.transport != "tcp":
            return None
        if axis not in self._connected:
            with self._making(axis, "connections"):
                self._connected[axis] = Connections(self._waiting(self.mesh.group(axis)))
        return self._connected[axis]

    def regions(self, axis: Axis, lengths: Sequence[int]) -> SharedRegions:
        """Memory in which gathers along ``axis`` may stay; all ranks of it must call this.

        Args:
            axis: whose ranks share memory.
            lengths: bytes of each home.

        Raises:
            WireError: if they do not.
        """
        if not self.shares_memory(axis):
            raise WireError(f"the ranks of axis {axis.name} share no memory in which gathers could stay")
        with self._making(axis):
            return SharedRegions(lengths, self._waiting(self.mesh.group(axis)))

    def _waiting(self, group: Group) -> Waiting:
        exited = self._desync_reporter.exited if self._desync_reporter is not None else _nobody
        return Waiting(group, self._timeout, exited)

    @contextlib.contextmanager
    def _making(self, axis: Axis, made: str = "shared memory") -> Iterator[None]:
        """While what carries messages along ``axis`` is made, outside inference mode: it outlives a pass."""
        before, self._collective_log.waiting = (
            self._collective_log.waiting,
            f"{made} along {axis.name} to be made",
        )
        try:
            with torch.inference_mode(mode=False):
                yield
        except SharedMemoryError:
            raise
        except (RuntimeError, ConnectionError, TimeoutError) as error:
            what = f"could not make {made} along {axis.name}"
            raise self._explained(what, error) from error
        except BaseException:  # an interrupt: what comes next waits for other things
            self._collective_log.waiting = before
            raise
        self._collective_log.waiting = before

    def all_gather(
        self,
        axis: Axis,
        nbytes: int,
        tag: Tag,
        *,
        ring: bool = False,
        into: Tensor | None = None,
        lease: Lease | None = None,
    ) -> Exchange:
        """Every rank of the axis receives every rank's message of ``nbytes``.

        Args:
            axis: along which.
            nbytes: size of this rank's message; the same on all ranks.
            tag: for the ledger.
            ring: book a ring's messages (the library's algorithm over the whole world).
            into: (ranks * nbytes,) uint8 where the messages may arrive, if the transport can do that:
                then it is what :meth:`Exchange.wait` returns.
            lease: where the messages stay after :meth:`Exchange.close`, in memory that :meth:`regions` made
                for this axis; or for the axis of the next hop, to which what arrives here need not be copied
                then (:class:`impl.transport.zero_copy.Passing`; where :meth:`lets_go` says so).
        """
        return self._exchange("all_gather", axis, nbytes, nbytes, tag, ring=ring, place=into, lease=lease)

    def all_to_all(self, axis: Axis, nbytes: int, tag: Tag, *, source: Tensor | None = None) -> Exchange:
        """Every rank of the axis receives from every rank the row of ``nbytes`` meant for it.

        Args:
            axis: along which.
            nbytes: of a row.
            tag: for the ledger.
            source: (ranks * nbytes,) uint8, this rank's message where it lies, if the transport can send
                from there: then it is the exchange's ``send``, and must stay until it was received.
        """
        return self._exchange("all_to_all", axis, nbytes, nbytes * axis.size, tag, place=source)

    def shift(self, axis: Axis, nbytes: int, tag: Tag) -> Exchange:
        """Every rank sends ``nbytes`` to the next rank of the axis, cyclically.

        ``send`` is (nbytes,), and what is received is (1, nbytes).  One step of a ring.
        """
        if axis.size == 1:
            return _Alone(self._buffer(nbytes), self)
        entry = self._open("shift", axis, nbytes, tag, ring=False)
        group = self.mesh.group(axis)
        before, after = (group.index - 1) % group.size, (group.index + 1) % group.size
        backend = dist.get_backend(group.process_group)
        mark = entry[2] % _TAGS  # of ranks that part no message fits another
        connections = self._connections(axis)

        def start(received: Tensor, send: Tensor, works: _Works) -> None:
            if connections is not None:
                _go(connections.prepare(entry[2], [(after, send)], [(before, received)]), works)
                return
            if backend == "gloo":  # as in _post_direct: its own all-to-all lets a slow link idle
                ends, handle = group.ranks, group.process_group
                both = [dist.irecv(received, src=ends[before], group=handle, tag=mark)]
                both.append(dist.isend(send, dst=ends[after], group=handle, tag=mark))
                works.extend(work for work in both if work is not None)
                return
            come, go = ([nbytes if i == end else 0 for i in range(group.size)] for end in (before, after))
            handle = group.process_group
            works.append(dist.all_to_all_single(received, send, come, go, group=handle, async_op=True))

        inter = self._book_step(axis, nbytes, tag)
        carrier = f"{backend} point to point" if backend == "gloo" else backend
        self._note(axis, tag, carrier if connections is None else connections.told)
        self._collective_log.waiting = None
        limit = patience(backend, self._limit) if connections is None else (self._limit,)
        buffers = _Buffers(self, None, nbytes, None, nbytes)
        return _Backend(self, start, buffers, entry, limit, rows=1, inter_bytes=inter)

    def check_order(self) -> None:
        """Make sure that all ranks opened the same exchanges in the same order; all must call it.

        One all-gather of :data:`impl.plan.traffic.ORDER_BYTES` a rank, which is booked like every message.

        Raises:
            WireError: if they did not, naming the first exchange that differs and where every rank
                stands.
        """
        exchange = self.all_gather(self.mesh.topology.world_axis, ORDER_BYTES, Tag("step", "control"))
        mine = bytearray(self._collective_log.packed())
        exchange.send.copy_(torch.frombuffer(mine, dtype=torch.uint8))
        exchange.post()
        rows = exchange.wait().cpu().numpy()  # (ranks, ORDER_BYTES)
        told = [unpacked(row.tobytes()) for row in rows]  # (count, fingerprint) by rank
        exchange.close()
        if len(set(told)) > 1:
            raise self._explained("found that the ranks' exchanges differ", _counted(told))

    def describe(self) -> dict[str, str]:
        """All that carried messages along each axis, for the record; norms and flags apart."""
        return {name: ", ".join(sorted(used)) for name, used in self._used.items()}

    def _note(self, axis: Axis, tag: Tag, transport: str) -> None:
        control = " (control)" if tag.purpose == "control" else ""
        self._used.setdefault(axis.name + control, set()).add(transport)

    def close(self) -> None:
        """Let go of shared memory and buffers, and answer no more desync reports."""
        if self._desync_reporter is not None:
            self._desync_reporter.end()
        for connections in self._connected.values():
            connections.close()
        self._connected.clear()
        self._routes.clear()
        self._arenas.clear()
        self._buffers.clear()

    def shares_memory(self, axis: Axis) -> bool:
        """Whether ranks along ``axis`` read each other's messages in place: then they see whole ones."""
        return self._shares_memory(self.mesh.group(axis))

    def lets_go(self, axis: Axis) -> bool:
        """Whether nobody but the caller holds memory that messages along ``axis`` arrived in, once received.

        gloo's works go when they were waited for; NCCL's and those of thread ranks may outlive that.
        """
        group = self.mesh.group(axis)
        lets_go = self.transport == "tcp" or dist.get_backend(group.process_group) == "gloo"
        return lets_go and not self._shares_memory(group)

    def _shares_memory(self, group: Group) -> bool:
        return self.transport in ("shm", "tcp") and group.same_node and group.size > 1

    def _exchange(
        self,
        kind: _Collective,
        axis: Axis,
        nbytes: int,
        row: int,
        tag: Tag,
        *,
        ring: bool = False,
        place: Tensor | None = None,
        lease: Lease | None = None,
    ) -> Exchange:
        if axis.size == 1:
            return _Alone(self._buffer(row), self)
        entry = self._open(kind, axis, nbytes, tag, ring=ring)
        route = self._routes.get((axis, nbytes, tag, ring)) or self._route(axis, nbytes, tag, ring=ring)
        for key, sent, messages in route.booked:
            self.ledger.book(key, sent, messages)
        if route.shared:
            arena = self._arenas.get(axis)
            if arena is None or (lease is None and arena.row_bytes < row):
                self.reserve(axis, row if lease is None else 0)
                arena = self._arenas[axis]
            return _InMemory(self, arena, entry, kind, nbytes=nbytes, row=row, lease=lease)

        group, direct, connections = route.group, route.direct, route.connections
        mark = entry[2] % _TAGS  # of ranks that part no message fits another

        def start(received: Tensor, send: Tensor, works: _Works) -> None:
            if direct:
                messages = _to_each(group, kind, received, send)
                if connections is not None:
                    _go(connections.prepare(entry[2], *messages), works)
                else:
                    works.extend(_post_direct(group, *messages, mark))
                if kind == "all_to_all":
                    received.view(group.size, -1)[group.index].copy_(send.view(group.size, -1)[group.index])
                return
            collective = _all_gather if kind == "all_gather" else dist.all_to_all_single
            works.append(collective(received, send, group=group.process_group, async_op=True))

        if lease is not None:
            place = self._begin(lease, entry)
        into, source = (place, None) if kind == "all_gather" else (None, place)
        buffers = _Buffers(self, into, nbytes * group.size, source, row)
        if direct and kind == "all_gather":
            # What is sent to all is written where this rank itself receives it.
            buffers.send = buffers.received.view(group.size, -1)[group.index]
        self._collective_log.waiting = None
        exchange = _Backend(
            self, start, buffers, entry, route.limit, rows=group.size, inter_bytes=route.inter_bytes
        )
        if lease is not None:
            lease.arriving(exchange.wait)
        return exchange

    def _begin(self, lease: Lease, entry: Entry) -> Tensor:
        """(rows, bytes) that this rank fills at a home, once all have ended the stay before."""
        lease.vacate()
        self._collective_log.waiting = entry  # not the last one's there, if it had yet to arrive
        begin = time.perf_counter()
        try:
            rows = lease.begin()
        except (TimeoutError, ConnectionError) as error:
            raise self._stuck(entry, error) from error
        self.exposed_seconds += time.perf_counter() - begin
        return rows

    def _route(self, axis: Axis, nbytes: int, tag: Tag, *, ring: bool) -> _Route:
        """Work out, and note, how such messages travel; remembered."""
        group = self.mesh.group(axis)
        backend, shared = dist.get_backend(group.process_group), self._shares_memory(group)
        connections = None if shared or ring else self._connections(axis)
        direct = connections is not None or (backend == "gloo" and not ring)
        carrier = f"{backend} point to point" if direct else backend
        carrier = carrier if connections is None else connections.told
        self._note(axis, tag, "shm" if shared else carrier)
        counts = destinations(self.mesh.topology, axis, self.mesh.rank, ring=ring)
        self._routes[axis, nbytes, tag, ring] = route = _Route(
            group=group,
            shared=shared,
            direct=direct,
            connections=connections,
            limit=patience(backend, self._limit) if connections is None else (self._limit,),
            booked=tuple(
                (LedgerKey(tag.phase, tag.purpose, tag.unit, axis.name, link), count * nbytes, count)
                for link, count in counts.items()
            ),
            inter_bytes=counts.get("inter", 0) * nbytes,
        )
        return route

    def _listed(self) -> DesyncReporter | None:
        """This rank's part in desync reports; None without other ranks, or a store: thread ranks have
        none.
        """
        world = dist.group.WORLD if dist.is_initialized() else None
        store = None if world is None or world.size() == 1 else world.get_group_store()
        if store is None:
            return None
        # A clone, so that a thread that stands in one does not hold up the other.
        own = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        listed = DesyncReporter(
            own, self.mesh.rank, self.mesh.topology.world, self._collective_log, self._timeout
        )
        weakref.finalize(self, listed.end, join=False).atexit = False
        return listed

    def _follow(self, entry: Entry, works: Sequence[dist.Work | PendingExchange]) -> None:
        """On a device the stream waits, not the host: what is overdue there can only be told in the log."""
        if self.mesh.device.type != "cpu" and self._desync_reporter is not None:
            self._desync_reporter.follow(entry, [work for work in works if isinstance(work, dist.Work)])

    def _open(self, kind: str, axis: Axis, nbytes: int, tag: Tag, *, ring: bool) -> Entry:
        """Enter the next exchange in the trail; the rank waits in it until it is ready to be written."""
        phase, purpose, unit = tag.phase, tag.purpose, tag.unit
        fields = (kind, axis.name, axis.size, axis.stride, nbytes, phase, purpose, unit, ring)
        entry = self._collective_log.waiting = self._collective_log.open(fields)
        return entry

    def _explained(self, what: str, why: object) -> WireError:
        """The error of a rank that cannot go on: what, why, and where all ranks stand."""
        # gloo puts its source line before, and advice after its first sentence.
        reason = re.sub(r"^\[[^]]*:\d+\] | This is typically.*", "", str(why).split("\n", 1)[0])
        first = f"rank {self.mesh.rank} {what}: {reason}"
        if self._desync_reporter is None:
            last = f"exchange {self._collective_log.count} was the last that it opened"
            return WireError(f"{first}; {last}; the other ranks have no store to be asked by")
        try:
            self._desync_reporter.give_up()
            found = self._desync_reporter.ask()
        except RuntimeError as error:
            lost = str(error).split("\n", 1)[0]
            return WireError(f"{first}; the other ranks cannot be asked, their store is lost ({lost})")
        return WireError(f"{first}\n{report(found)}")

    def _parted(self, entry: Entry, error: Exception | None = None) -> WireError:
        """The error of a rank that finds another exchange in the place of its own."""
        self._collective_log.waiting = entry
        why = f"it is in exchange {Step(*entry)}" + (f", and {error}" if error is not None else "")
        return self._explained("found that the ranks' exchanges differ", why)

    def _stuck(self, entry: Entry, error: Exception) -> WireError:
        self._collective_log.waiting = entry
        return self._explained(f"could not finish exchange {Step(*entry)}", error)

    def _book_step(self, axis: Axis, nbytes: int, tag: Tag) -> int:
        """Enter one step of a ring in the ledger; returns its bytes to other nodes."""
        counts = destinations(self.mesh.topology, axis, self.mesh.rank, ring=True)
        for link, count in counts.items():
            key = LedgerKey(tag.phase, tag.purpose, tag.unit, axis.name, link)
            self.ledger.book(key, min(count, 1) * nbytes, min(count, 1))
        return min(counts.get("inter", 0), 1) * nbytes

    def _buffer(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8, reused: a fresh one costs a page fault every 4 KiB."""
        free = self._buffers[nbytes]
        if free:
            return free.pop()
        with torch.inference_mode(mode=False):  # it outlives a pass in inference mode
            self.buffer_bytes += nbytes
            return torch.empty(nbytes, dtype=torch.uint8, device=self.mesh.device)

    def _give_back(self, buffer: Tensor) -> None:
        self._buffers[buffer.numel()].append(buffer)


def _counted(told: Sequence[tuple[int, int]]) -> str:
    """Which ranks opened how many exchanges, and their fingerprint, from (count, fingerprint) by rank."""
    alike: dict[tuple[int, int], list[int]] = {}
    for rank, opened in enumerate(told):
        alike.setdefault(opened, []).append(rank)
    return ", ".join(
        f"{ranks_in_words(ranks)} "
        + (f"opened {count} ({mark:016x})" if count < _IMPOSSIBLE else "sent another message")
        for (count, mark), ranks in alike.items()
    )


def _nobody(_: Sequence[int]) -> Sequence[int]:
    return ()


_Collective = Literal["all_gather", "all_to_all"]
_Works = list[dist.Work | PendingExchange]
_Messages = Sequence[tuple[int, Tensor]]  # by index of a rank in the group
_Start = Callable[[Tensor, Tensor, _Works], None]


def _go(passage: PendingExchange, works: _Works) -> None:
    """Post it, as one of ``works`` from before the first byte: an interrupt leaves what can be waited for."""
    works.append(passage)
    passage.post()


def _to_each(group: Group, kind: _Collective, received: Tensor, send: Tensor) -> tuple[_Messages, _Messages]:
    """What this rank sends to each other rank of the group, and receives from it."""
    rows = received.view(group.size, -1).unbind()
    mine = send.view(group.size, -1).unbind() if kind == "all_to_all" else [send] * group.size
    # Start with the next rank, so that not all ranks send to the first one first.
    others = [(group.index + step) % group.size for step in range(1, group.size)]
    return [(i, mine[i]) for i in others], [(i, rows[i]) for i in reversed(others)]


def _post_direct(group: Group, sends: _Messages, receives: _Messages, tag: int) -> list[dist.Work]:
    """Send to and receive from each rank of the group by itself.

    gloo's own all-to-all announces a receive only when it gets to it; behind a slow link the
    announcement queues after our data and the link idles (24 to 30 of 50 Mbit/s measured between
    two nodes, 48 this way).  So all receives are announced before anything is sent.
    """
    # What isend() and irecv() call, without their checks: six calls are 60 us a unit and hop.
    handle = group.process_group
    works = [handle.recv([row], i, tag) for i, row in receives]
    return works + [handle.send([row], i, tag) for i, row in sends]


class _Alone:
    """A group of one rank: what it sends is what it receives."""

    def __init__(self, buffer: Tensor, wire: Wire) -> None:
        self.send = buffer
        self._wire = wire

    def post(self) -> None:
        pass

    def wait(self) -> Tensor:
        return self.send.view(1, -1)

    def whole(self) -> Tensor:
        return self.wait()

    def close(self) -> None:
        self._wire._give_back(self.send)  # noqa: SLF001  # the wire's own part


class _InMemory:
    """Ranks of one node read each other's rows in place: in a slot of the arena, or where they stay.

    Rows that stay are announced in a slot too, so that ranks that part find each other there.
    """

    def __init__(
        self,
        wire: Wire,
        arena: Arena,
        entry: Entry,
        kind: _Collective,
        *,
        nbytes: int,
        row: int,
        lease: Lease | None,
    ) -> None:
        self._wire, self._arena, self._entry = wire, arena, entry
        self._kind, self._nbytes, self._lease = kind, nbytes, lease
        self._rows: Tensor | None = None  # once all have posted theirs
        if lease is None:
            rows = None
        elif lease.begun:  # the hop before wrote there
            rows = lease.rows[:0]
        else:
            rows = wire._begin(lease, entry)  # noqa: SLF001  # the wire's own part
        begin = time.perf_counter()
        try:
            self._number = arena.claim()
        except (TimeoutError, ConnectionError) as error:
            raise wire._stuck(entry, error) from error  # noqa: SLF001
        wire._collective_log.waiting = None  # noqa: SLF001
        wire.exposed_seconds += time.perf_counter() - begin
        self.send = arena.row(self._number)[:row] if rows is None else rows.view(-1)
        if lease is not None:
            lease.arriving(self.whole)

    def post(self) -> None:
        self._arena.post(self._number, self._entry[2])

    def wait(self) -> Tensor:
        rows = self.whole()
        start = self._arena.group.index * self._nbytes if self._kind == "all_to_all" else 0
        return rows[:, start : start + self._nbytes]

    def whole(self) -> Tensor:
        if self._rows is not None:
            return self._rows
        begin = time.perf_counter()
        collective_log = self._wire._collective_log  # noqa: SLF001
        collective_log.waiting = self._entry
        try:
            rows = self._arena.wait(self._number)
        except (TimeoutError, ConnectionError) as error:
            raise self._wire._stuck(self._entry, error) from error  # noqa: SLF001
        if not self._arena.agree(self._number, self._entry[2]):
            raise self._wire._parted(self._entry)  # noqa: SLF001
        collective_log.waiting, collective_log.finished = None, self._entry
        self._wire.exposed_seconds += time.perf_counter() - begin
        self._rows = rows if self._lease is None else self._lease.rows
        return self._rows

    def close(self) -> None:
        self._arena.done(self._number)
        if self._lease is not None:
            self._lease.arrived()


class _Buffers:
    """Where an exchange's messages lie: the wire's buffers, taken when asked for, or the caller's memory.

    Args:
        wire: whose buffers.
        received: the caller's, or None.
        received_bytes: of what arrives.
        send: the caller's, or None.
        send_bytes: of this rank's message.
    """

    def __init__(
        self, wire: Wire, received: Tensor | None, received_bytes: int, send: Tensor | None, send_bytes: int
    ) -> None:
        self._wire, self._send, self._send_bytes = wire, send, send_bytes
        self._taken: list[Tensor] = []
        self.received = self._take(received_bytes) if received is None else received

    @property
    def send(self) -> Tensor:
        """(bytes,) this rank's message."""
        if self._send is None:
            self._send = self._take(self._send_bytes)
        return self._send

    @send.setter
    def send(self, part: Tensor) -> None:
        self._send = part

    def _take(self, nbytes: int) -> Tensor:
        self._taken.append(self._wire._buffer(nbytes))  # noqa: SLF001  # the wire's own part
        return self._taken[-1]

    def give_back(self) -> None:
        """Return what was taken."""
        for buffer in self._taken:
            self._wire._give_back(buffer)  # noqa: SLF001
        self._taken.clear()

    def abandon(self) -> None:
        """Let go of what was taken for good: a message may yet be written there, or be read."""
        self._wire.buffer_bytes -= sum(buffer.numel() for buffer in self._taken)
        self._taken.clear()


class _Backend:
    """A collective of torch.distributed.

    Args:
        wire: that sends.
        start: posts the collective.
        buffers: of its messages.
        entry: its place in the order.
        limit: what its works' ``wait`` is given.
        rows: of what is received.
        inter_bytes: what a modelled link must carry before the exchange may complete.
    """

    def __init__(
        self,
        wire: Wire,
        start: _Start,
        buffers: _Buffers,
        entry: Entry,
        limit: tuple[timedelta, ...],
        *,
        rows: int,
        inter_bytes: int,
    ) -> None:
        self._entry, self._limit = entry, limit
        self._wire, self._start, self._rows, self._inter_bytes = wire, start, rows, inter_bytes
        self._buffers = buffers
        self.send = buffers.send
        self._works: _Works = []
        self._posted = self._under_way = False
        self._carried = 0.0

    def post(self) -> None:
        if self._posted or self._works:  # by a pass that was interrupted; the wait sees to what is left
            return
        self._under_way = True
        pacer = self._wire._pacer  # noqa: SLF001
        if pacer is not None and self._inter_bytes:
            self._carried = pacer.book(self._inter_bytes)
        try:
            self._start(self._buffers.received, self.send, self._works)
        except (RuntimeError, ConnectionError) as error:  # gloo says here already that a rank is lost
            raise self._wire._stuck(self._entry, error) from error  # noqa: SLF001
        self._posted = True
        self._wire._follow(self._entry, self._works)  # noqa: SLF001

    def wait(self) -> Tensor:
        begin = time.perf_counter()
        if self._works:
            collective_log = self._wire._collective_log  # noqa: SLF001
            collective_log.waiting = self._entry
            try:
                for work in self._works:
                    work.wait(*self._limit)
            except PartedError as error:
                raise self._wire._parted(self._entry, error) from error  # noqa: SLF001
            except (RuntimeError, ConnectionError, TimeoutError) as error:
                raise self._wire._stuck(self._entry, error) from error  # noqa: SLF001
            self._works.clear()
            collective_log.waiting, collective_log.finished = None, self._entry
        self._under_way = False
        if (left := self._carried - time.monotonic()) > 0:
            time.sleep(left)
        self._wire.exposed_seconds += time.perf_counter() - begin
        return self._buffers.received.view(self._rows, -1)

    def whole(self) -> Tensor:
        raise WireError("whole messages are seen only along an axis that shares memory")

    def close(self) -> None:
        if self._under_way:  # it was not waited for, or in vain
            self._buffers.abandon()
        else:
            self._buffers.give_back()
