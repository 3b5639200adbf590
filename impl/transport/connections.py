"""The tier between nodes on a CPU: a TCP connection of this rank's own with every other rank of a group.

A message is handed to the kernel whole when it is posted, and read where it belongs when it is waited for;
in between the two kernels carry it, and no thread of a rank has to run for that.  Where processors are
shared by more ranks than there are, this matters: a backend's own threads wait for their turn between every
two steps of a message, and the link with them.

What the kernel does not take at once, because the message is larger than a connection's buffer, a thread
hands on while the rank computes.  It starts when it is needed and ends when it is not.

A message begins with 16 bytes: what its sender believes it to be (the fingerprint of its order of
exchanges), and its length.  Messages of one connection arrive in the order in which they were posted, which
is one for all ranks; the first that is another than expected ends the connection.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from operator import itemgetter
from typing import Final

from torch import Tensor

from impl.plan.topology import ranks_in_words
from impl.transport import calling
from impl.transport.shared_memory import Waiting

_UNFORCED_BYTES: Final = 64 * 2**10  # that arrive unread in a buffer which the kernel sizes by itself
_HEADER: Final = struct.Struct("<QQ")  # mark, bytes
_LINGER_SECONDS: Final = 1.0  # of a thread with nothing to hand on
_LOOK_SECONDS: Final = 1.0  # between two looks at what there is to wait for
_STEPS: Final = 64  # of one message that are kept apart
_FIRST: Final = itemgetter(0)


class PartedError(RuntimeError):
    """A rank sent a message of another exchange; the ranks' orders differ."""


@dataclass(slots=True, eq=False)
class _Part:
    """One message on its way over one connection, in one direction.

    Attributes:
        mark: what the exchange is.
        header: of the message; on its way in, as it arrived.
        payload: where the message lies.
        moved: bytes of each step so far, header and payload.  Steps are entered by one call of C with the
            system call that took them: an interrupt (Ctrl-C) comes before both or after both, and what
            travelled is never taken for what did not.
    """

    mark: int
    header: bytearray
    payload: memoryview
    moved: list[int] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Bytes that have yet to travel, header and payload."""
        return len(self.header) + len(self.payload) - sum(self.moved)

    def buffers(self) -> list[memoryview]:
        """What has yet to travel."""
        start = sum(self.moved)
        if len(self.moved) >= _STEPS:
            self.moved[:] = [start]
        inside = start - len(self.header)
        return [self.payload[inside:]] if inside >= 0 else [memoryview(self.header)[start:], self.payload]

    @property
    def foreign(self) -> bool:
        """Whether its header is here and tells of another message."""
        return self.left <= len(self.payload) and _HEADER.unpack(self.header) != (
            self.mark,
            len(self.payload),
        )

    @property
    def complete(self) -> bool:
        """Whether it has travelled whole, and is what was expected."""
        return not self.left and not self.foreign


@dataclass(slots=True, eq=False)
class _Peer:
    """The connection with one rank.

    What is on its way follows from the parts alone, and so is true wherever an interrupt came.

    Attributes:
        rank: in the world.
        connection: non-blocking.
        room: bytes that may lie unread in its buffer.
        outgoing, incoming: parts on their way, in order.
        lost: why nothing travels any more.
        least: bytes that must have arrived before a poll returns.
    """

    rank: int
    connection: socket.socket
    room: int
    outgoing: deque[_Part] = field(default_factory=deque)
    incoming: deque[_Part] = field(default_factory=deque)
    lost: Exception | None = None
    least: int = 1

    @property
    def behind(self) -> bool:
        """Whether the kernels need somebody's help while this rank computes."""
        unread = sum(part.left for part in self.incoming)
        return self.lost is None and (bool(self.outgoing) or unread > self.room)

    def advance(self) -> None:
        """Send and receive what is possible now; a failure is kept in ``lost``."""
        for step in (self._send, self._receive):
            if self.lost is None:
                try:
                    step()
                except BlockingIOError:
                    pass
                except OSError as error:  # also that there is no way to it any more
                    self.lose(ConnectionError(f"rank {self.rank} is lost ({error.strerror or error})"))

    def _send(self) -> None:
        while self.outgoing:
            part = self.outgoing[0]
            if part.left:
                part.moved.extend(map(self.connection.sendmsg, (part.buffers(),)))
            if part.left:
                return
            self.outgoing.popleft()

    def _receive(self) -> None:
        while self.incoming:
            part = self.incoming[0]
            if part.left:
                part.moved.extend(map(_FIRST, map(self.connection.recvmsg_into, (part.buffers(),))))
                if not part.moved[-1]:
                    self.lose(ConnectionError(f"rank {self.rank} has ended its connection"))
                    return
            if part.foreign:
                nbytes = _HEADER.unpack(part.header)[1]
                self.lose(PartedError(f"rank {self.rank} sent another message, of {nbytes} B"))
                return
            if part.left:
                return
            self.incoming.popleft()

    def lose(self, why: Exception) -> None:
        """Let the connection go; who waits for it is told."""
        self.lost = self.lost or why
        self.outgoing.clear()
        self.incoming.clear()

    def refuse(self) -> None:
        """Raise why nothing travels any more, if so: an error of its own for each who asks."""
        if self.lost is not None:
            raise type(self.lost)(*self.lost.args)

    def expect(self) -> int:
        """What to poll for; a poll returns when the first message is there, not at each packet of it."""
        events = select.POLLOUT if self.outgoing else 0
        if self.incoming:
            events |= select.POLLIN
            least = max(1, min(self.incoming[0].left, self.room))
            if least != self.least:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
                self.least = least
        return events


class PendingExchange:
    """One exchange's messages over the connections of a group.

    Attributes:
        outgoing, incoming: messages on their way, each with its connection; none once all have arrived.
    """

    __slots__ = ("_connections", "incoming", "outgoing")

    def __init__(
        self,
        connections: Connections,
        outgoing: Sequence[tuple[_Peer, _Part]],
        incoming: Sequence[tuple[_Peer, _Part]],
    ) -> None:
        self._connections, self.outgoing, self.incoming = connections, outgoing, incoming

    @property
    def unfinished(self) -> list[_Peer]:
        """The connections over which some of it has yet to arrive, or to be handed to the kernel."""
        return list(
            dict.fromkeys(peer for peer, part in (*self.incoming, *self.outgoing) if not part.complete)
        )

    def post(self) -> None:
        """Let the messages go; once more only what an interrupt kept from going."""
        self._connections.start(self)

    def wait(self, limit: timedelta) -> None:
        """Until all has arrived, and what was sent may be overwritten.

        Raises:
            PartedError: if a rank sent something else.
            ConnectionError: if a rank is lost.
            TimeoutError: after ``limit``, naming who did not send.
        """
        self._connections.finish(self, limit)


class Connections:
    """TCP connections of this rank with the other ranks of a group.

    Args:
        waiting: how ranks wait for each other; all of its group must construct this together.

    Raises:
        ConnectionError: where a rank cannot listen or be reached, naming rank and address.
        TimeoutError: where one does not call.
    """

    def __init__(self, waiting: Waiting) -> None:
        if not hasattr(select, "epoll"):
            raise ConnectionError("transport 'tcp' needs Linux (epoll); use transport 'backend'")
        self._peers = {
            index: _peer(waiting.group.ranks[index], connection)
            for index, connection in calling.connected(waiting).items()
        }  # by index in the group, without this rank
        _alive.add(self)
        weakref.finalize(self, calling.close, [peer.connection for peer in self._peers.values()])
        self._lock = threading.RLock()  # by itself it is taken in one call of C, unlike a condition
        self._wake = threading.Condition(self._lock)
        self._epoll = select.epoll()
        self._watched: dict[int, _Peer] = {}  # peers that are behind, by the handle of their connection
        self._attending: set[int] = set()  # threads that wait here, and do what the helper would
        self._helper: threading.Thread | None = None

    @property
    def told(self) -> str:
        """What carries messages, for the record: also that the kernel refused the room for whole ones."""
        roomy = all(peer.room > _UNFORCED_BYTES for peer in self._peers.values())
        return "tcp" if roomy else "tcp in small buffers"

    def prepare(
        self,
        mark: int,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
    ) -> PendingExchange:
        """Messages to some ranks of the group, and others expected from some, before
        :meth:`PendingExchange.post`.

        Args:
            mark: 64 bits of what this rank believes the exchange to be.
            sends: index of a rank and (bytes,) uint8 for it, which stay until :meth:`PendingExchange.wait`.
            receives: index of a rank and (bytes,) uint8 where its message is to arrive.
        """
        outgoing = [
            (self._peers[index], _part(mark, bytearray(_HEADER.pack(mark, message.numel())), message))
            for index, message in sends
        ]
        incoming = [
            (self._peers[index], _part(mark, bytearray(_HEADER.size), message)) for index, message in receives
        ]
        return PendingExchange(self, outgoing, incoming)

    def start(self, passage: PendingExchange) -> None:
        """See :meth:`PendingExchange.post`."""
        with self._lock:
            for peer, part in passage.incoming:
                if peer.lost is None and part.left and part not in peer.incoming:
                    peer.incoming.append(part)
            for peer, part in passage.outgoing:
                if peer.lost is None and part.left and part not in peer.outgoing:
                    peer.outgoing.append(part)
            peers = passage.unfinished
            for peer in peers:
                peer.advance()
            self._watch(peers)

    def finish(self, passage: PendingExchange, limit: timedelta) -> None:
        """See :meth:`PendingExchange.wait`."""
        deadline = time.monotonic() + limit.total_seconds()
        try:
            with self._lock:
                self._attending.add(threading.get_ident())
            self.start(passage)
            while True:
                with self._lock:
                    for peer in dict.fromkeys((*passage.unfinished, *self._watched.values())):
                        peer.advance()
                    peers = passage.unfinished
                    if not peers:
                        passage.incoming = passage.outgoing = ()  # whose memory is free again
                        return
                    for peer in peers:
                        peer.refuse()
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise _late(passage, limit)
                    # For what it lacks, and for all that the helper would see to.
                    poll = select.poll()
                    for peer in (*peers, *(peer for peer in self._watched.values() if peer.behind)):
                        poll.register(peer.connection, peer.expect())
                # Another thread may change meanwhile what there is to wait for.
                poll.poll(1000 * min(left, _LOOK_SECONDS))
        finally:
            with self._lock:
                self._attending.discard(threading.get_ident())
                self._watch(tuple(self._watched.values()))
                self._wake.notify()

    def _watch(self, peers: Sequence[_Peer]) -> None:
        """Leave to the helper those of ``peers`` that are behind, and no others."""
        for peer in peers:
            handle = peer.connection.fileno()
            if peer.behind and handle >= 0:
                events = peer.expect()
                try:
                    self._epoll.register(handle, events)
                except FileExistsError:
                    self._epoll.modify(handle, events)
                self._watched[handle] = peer
            elif handle in self._watched:
                with contextlib.suppress(FileNotFoundError):
                    self._epoll.unregister(handle)
                del self._watched[handle]
        if self._watched and self._helper is None:
            arguments = weakref.ref(self), self._wake, self._epoll
            helper = threading.Thread(target=_help, args=arguments, name="zeropp-connections", daemon=True)
            helper.start()
            self._helper = helper
        elif self._watched:
            self._wake.notify()

    @property
    def resting(self) -> bool:
        """Whether the helper has nothing to do now."""
        return bool(self._attending) or not self._watched

    def dismiss(self) -> bool:
        """Let the helper end, if nothing is behind."""
        if not self._watched:
            self._helper = None
        return not self._watched

    def help(self) -> None:
        """What the helper does when a connection that is behind has become ready."""
        if not self._attending:
            watched = tuple(self._watched.values())
            for peer in watched:
                peer.advance()
            self._watch(watched)

    def disown(self) -> None:
        """Let go of the connections in a process that this rank has forked; they stay the rank's."""
        calling.close(peer.connection for peer in self._peers.values())

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            for peer in self._peers.values():
                peer.lose(ConnectionError("this rank has closed its connections"))
                self._watch([peer])
                peer.connection.close()


_alive: weakref.WeakSet[Connections] = weakref.WeakSet()


def _forked() -> None:
    """A fork has its parent's connections open: a rank that ends would not look as if it had."""
    for connections in list(_alive):
        connections.disown()


os.register_at_fork(after_in_child=_forked)


def _help(whose: weakref.ref[Connections], wake: threading.Condition, epoll: select.epoll) -> None:
    """What the helper's thread does, until nothing has been behind for a while, or they are forgotten."""
    while True:
        with wake:
            while (made := whose()) is not None and made.resting:
                del made
                told = wake.wait(_LINGER_SECONDS)
                made = whose()
                if made is None or (not told and made.dismiss()):
                    return
            if made is None:
                return
        del made
        epoll.poll(_LINGER_SECONDS)
        with wake:
            made = whose()
            if made is not None:
                made.help()
            del made


def _late(passage: PendingExchange, limit: timedelta) -> TimeoutError:
    """Who keeps ``passage`` from its end."""
    receiving = [(peer, part) for peer, part in passage.incoming if part.left]
    here = sum(sum(part.moved) for _, part in receiving)
    what = f"did not send all ({here} of {here + sum(part.left for _, part in receiving)} B arrived)"
    what = (what if here else "did not send") if receiving else "did not receive"
    late = receiving or [(peer, part) for peer, part in passage.outgoing if part.left]
    who = ranks_in_words(sorted(peer.rank for peer, _ in late))
    return TimeoutError(f"waited {limit.total_seconds():g} s: {who} {what}")


def _part(mark: int, header: bytearray, message: Tensor) -> _Part:
    payload = memoryview(message.numpy())  # type: ignore[arg-type]  # numpy tells from Python 3.12 on
    return _Part(mark, header, payload)


def _peer(rank: int, connection: socket.socket) -> _Peer:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)
    # The kernel tells twice what was asked for, and counts its own records in it.
    room = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 4
    return _Peer(rank, connection, room if room >= calling.BUFFER_BYTES // 2 else _UNFORCED_BYTES)
