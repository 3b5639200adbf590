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
import ipaddress
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from impl.order import ranks_in_words
from impl.shared_memory import Waiting, patience

BUFFER_BYTES: Final = 32 * 2**20  # asked of the kernel, for each direction of a connection
_UNFORCED_BYTES: Final = 64 * 2**10  # that arrive unread in a buffer which the kernel sizes by itself
_HEADER: Final = struct.Struct("<QQ")  # mark, bytes
_TOKEN: Final = struct.Struct("<16sI")  # of the rank that listens, index of the rank that calls
_WORDS: Final = 110  # bytes of an address, or of a reason
_HELLO: Final = struct.Struct(f"<16sH{_WORDS}s")  # token, port, address; or port 0 and why not
_CALL_SECONDS: Final = 5.0  # for a caller to say who it is
_LINGER_SECONDS: Final = 1.0  # of a thread with nothing to hand on
_SNDBUFFORCE, _RCVBUFFORCE = 32, 33  # of Linux; the module socket lacks them


class PartedError(RuntimeError):
    """A rank sent a message of another exchange; the ranks' orders differ."""


@dataclass(slots=True)
class _Part:
    """One message on its way over one connection, in one direction.

    Attributes:
        passage: of which it is a part.
        mark: what the exchange is.
        header: of the message; on its way in, as it arrived.
        payload: where the message lies.
        left: bytes that have yet to travel, header and payload.
    """

    passage: Passage
    mark: int
    header: bytearray
    payload: memoryview
    left: int

    def buffers(self) -> list[memoryview]:
        """What has yet to travel."""
        start = len(self.header) + len(self.payload) - self.left
        inside = start - len(self.header)
        return [self.payload[inside:]] if inside >= 0 else [memoryview(self.header)[start:], self.payload]


@dataclass(slots=True)
class _Peer:
    """The connection with one rank.

    Attributes:
        rank: in the world.
        connection: non-blocking.
        room: bytes that may lie unread in its buffer.
        outgoing, incoming: parts on their way, in order.
        unread: bytes of all incoming parts.
        lost: why nothing travels any more.
        least: bytes that must have arrived before a poll returns.
    """

    rank: int
    connection: socket.socket
    room: int
    outgoing: deque[_Part] = field(default_factory=deque)
    incoming: deque[_Part] = field(default_factory=deque)
    unread: int = 0
    lost: Exception | None = None
    least: int = 1

    @property
    def behind(self) -> bool:
        """Whether the kernels need somebody's help while this rank computes."""
        return self.lost is None and (bool(self.outgoing) or self.unread > self.room)

    def advance(self) -> None:
        """Send and receive what is possible now; a failure is kept in ``lost``."""
        try:
            while self.outgoing:
                part = self.outgoing[0]
                part.left -= self.connection.sendmsg(part.buffers())
                if part.left:
                    break
                self._done(self.outgoing)
        except BlockingIOError:
            pass
        except OSError as error:
            self.lose(ConnectionError(f"rank {self.rank} is lost ({error.strerror or error})"))
        try:
            while self.incoming:
                self._receive(self.incoming[0])
        except BlockingIOError:
            pass
        except (OSError, PartedError) as error:
            self.lose(error)

    def _receive(self, part: _Part) -> None:
        try:
            got = self.connection.recvmsg_into(part.buffers())[0]
        except ConnectionError as error:
            raise ConnectionError(f"rank {self.rank} is lost ({error.strerror})") from error
        if not got:
            raise ConnectionError(f"rank {self.rank} has ended its connection")
        part.left -= got
        self.unread -= got
        if part.left <= len(part.payload):
            mark, nbytes = _HEADER.unpack(part.header)
            if (mark, nbytes) != (part.mark, len(part.payload)):
                raise PartedError(f"rank {self.rank} sent another message, of {nbytes} B")
        if part.left:
            raise BlockingIOError
        self._done(self.incoming)

    def _done(self, parts: deque[_Part]) -> None:
        passage = parts.popleft().passage
        passage.parts -= 1

    def lose(self, why: Exception) -> None:
        """Let the connection go; who waits for it is told."""
        self.lost = self.lost or why
        self.outgoing.clear()
        self.incoming.clear()
        self.unread = 0

    def expect(self) -> int:
        """What to poll for; a poll returns when the first message is there, not at each packet of it."""
        events = select.POLLOUT if self.outgoing else 0
        if self.incoming:
            events |= select.POLLIN
            least = min(self.incoming[0].left, self.room)
            if least != self.least:
                self.least = least
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
        return events


class Passage:
    """One exchange's messages over the connections of a group.

    Attributes:
        parts: that have yet to arrive, or to be handed to the kernel.
    """

    __slots__ = ("_connections", "_peers", "parts")

    def __init__(self, connections: Connections, peers: Sequence[_Peer]) -> None:
        self._connections, self._peers = connections, peers
        self.parts = 0

    def wait(self, limit: timedelta) -> None:
        """Until all has arrived, and what was sent may be overwritten.

        Raises:
            PartedError: if a rank sent something else.
            ConnectionError: if a rank is lost.
            TimeoutError: after ``limit``, naming who did not send.
        """
        self._connections.finish(self, self._peers, limit)


class Connections:
    """TCP connections of this rank with the other ranks of a group.

    Args:
        waiting: how ranks wait for each other; all of its group must construct this together.

    Raises:
        ConnectionError: where a rank cannot listen or be reached, naming rank and address.
        TimeoutError: where one does not call.
    """

    def __init__(self, waiting: Waiting) -> None:
        self._peers = _connected(waiting)  # by index in the group, without this rank
        weakref.finalize(self, _close, [peer.connection for peer in self._peers.values()])
        self._lock = threading.Condition()
        self._epoll = select.epoll()
        self._watched: dict[int, _Peer] = {}  # peers that are behind, by the handle of their connection
        self._attended = 0  # waits under way, which do what the thread would
        self._thread: threading.Thread | None = None

    def post(
        self,
        mark: int,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
    ) -> Passage:
        """Send messages to some ranks of the group, and expect others from some.

        Args:
            mark: 64 bits of what this rank believes the exchange to be.
            sends: index of a rank and (bytes,) uint8 for it, which stay until :meth:`Passage.wait`.
            receives: index of a rank and (bytes,) uint8 where its message is to arrive.
        """
        peers = [self._peers[index] for index in dict.fromkeys(i for i, _ in (*receives, *sends))]
        passage = Passage(self, peers)
        with self._lock:
            for index, message in receives:
                part = _part(passage, mark, bytearray(_HEADER.size), message)
                self._peers[index].incoming.append(part)
                self._peers[index].unread += part.left
            for index, message in sends:
                header = bytearray(_HEADER.pack(mark, message.numel()))
                self._peers[index].outgoing.append(_part(passage, mark, header, message))
            passage.parts = len(receives) + len(sends)
            for peer in peers:
                if peer.lost is None:
                    peer.advance()
            self._watch(peers)
        return passage

    def finish(self, passage: Passage, peers: Sequence[_Peer], limit: timedelta) -> None:
        """See :meth:`Passage.wait`."""
        with self._attending():
            deadline = time.monotonic() + limit.total_seconds()
            while True:
                with self._lock:
                    for peer in (*peers, *self._watched.values()):
                        if peer.lost is None:
                            peer.advance()
                    if not passage.parts:
                        return
                    poll = self._poll(passage, peers)
                left = deadline - time.monotonic()
                if left <= 0:
                    late = [peer.rank for peer in peers if any(p.passage is passage for p in peer.incoming)]
                    what = "did not send" if late else "did not receive"
                    late = late or [peer.rank for peer in peers if peer.outgoing]
                    raise TimeoutError(f"waited {limit.total_seconds():g} s: {ranks_in_words(late)} {what}")
                poll.poll(1000 * left)

    def _poll(self, passage: Passage, peers: Sequence[_Peer]) -> select.poll:
        """For whatever ``passage`` lacks, and for all that the thread would see to."""
        poll = select.poll()
        for peer in peers:
            if peer.lost is not None:
                raise peer.lost
            if any(part.passage is passage for part in (*peer.incoming, *peer.outgoing)):
                poll.register(peer.connection, peer.expect())
        for peer in self._watched.values():
            if peer.behind:
                poll.register(peer.connection, peer.expect())
        return poll

    @contextlib.contextmanager
    def _attending(self) -> Iterator[None]:
        """While somebody waits here, who does what the thread would."""
        with self._lock:
            self._attended += 1
        try:
            yield
        finally:
            with self._lock:
                self._attended -= 1
                self._watch(tuple(self._watched.values()))
                self._lock.notify()

    def _watch(self, peers: Sequence[_Peer]) -> None:
        """Leave to the thread those of ``peers`` that are behind, and no others."""
        for peer in peers:
            handle = peer.connection.fileno()
            if peer.behind and handle >= 0:
                change = self._epoll.modify if handle in self._watched else self._epoll.register
                change(handle, peer.expect())
                self._watched[handle] = peer
            elif self._watched.pop(handle, None) is not None:
                self._epoll.unregister(handle)
        if self._watched and self._thread is None:
            self._thread = threading.Thread(target=self._hand_on, name="zeropp-connections", daemon=True)
            self._thread.start()
        elif self._watched:
            self._lock.notify()

    def _hand_on(self) -> None:
        """What the thread does, until nothing has been behind for a while."""
        while True:
            with self._lock:
                while self._attended or not self._watched:
                    if not self._lock.wait(_LINGER_SECONDS) and not self._watched:
                        self._thread = None
                        return
            self._epoll.poll(_LINGER_SECONDS)
            with self._lock:
                if not self._attended:
                    watched = tuple(self._watched.values())
                    for peer in watched:
                        peer.advance()
                    self._watch(watched)

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            for peer in self._peers.values():
                peer.lose(ConnectionError("this rank has closed its connections"))
                self._watch([peer])
                peer.connection.close()


def _part(passage: Passage, mark: int, header: bytearray, message: Tensor) -> _Part:
    payload = memoryview(message.numpy())  # type: ignore[arg-type]  # numpy tells from Python 3.12 on
    return _Part(passage, mark, header, payload, len(header) + len(payload))


def _connected(waiting: Waiting) -> dict[int, _Peer]:
    """A connection with every other rank, by index in the group.

    Every rank listens, tells the others where by the group's backend, calls those before it and is called by
    those behind it.  A call begins with 16 random bytes that only a rank of the group knows.
    """
    if not hasattr(select, "epoll"):
        raise ConnectionError("transport 'tcp' needs Linux (epoll); use transport 'backend'")
    group, token = waiting.group, secrets.token_bytes(16)
    limit = timedelta(seconds=waiting.timeout)
    listener, told = None, ("", 0)
    try:
        listener = _listener(_own_address(), group.size)
        told = listener.getsockname()[:2]
    except (OSError, UnicodeError) as error:  # a name that is none is a UnicodeError
        told = (str(error), 0)
    mine = _HELLO.pack(token, told[1], told[0].encode()[:_WORDS])
    hellos = [_HELLO.unpack(hello) for hello in _exchanged(mine, waiting, limit)]
    for rank, (_, port, why) in zip(group.ranks, hellos, strict=True):
        if not port:
            reason = why.rstrip(b"\0").decode(errors="replace")
            raise ConnectionError(f"rank {rank} cannot listen for other ranks ({reason})")
    assert listener is not None  # noqa: S101  # else this rank's port is 0
    found: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as failed, listener:
        failed.callback(_close, found.values())
        for index in range(group.index):
            other, port, address = hellos[index]
            where = address.rstrip(b"\0").decode(), port
            try:
                connection = _called(where, waiting.timeout)
                connection.sendall(_TOKEN.pack(other, group.index))
            except OSError as error:
                raise ConnectionError(
                    f"rank {group.ranks[group.index]} cannot reach rank {group.ranks[index]} at "
                    f"{where[0]} port {port} ({error.strerror or error})"
                ) from error
            found[index] = connection
        deadline = time.monotonic() + waiting.timeout
        while len(found) < group.size - 1:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError as error:
                late = [rank for i, rank in enumerate(group.ranks) if i > group.index and i not in found]
                words = ranks_in_words(late)
                raise TimeoutError(f"waited {waiting.timeout:g} s: {words} did not call") from error
            index = _caller(connection, token)
            if index in range(group.index + 1, group.size) and index not in found:
                found[index] = connection
            else:  # nobody of this group
                connection.close()
        failed.pop_all()
    return {index: _peer(group.ranks[index], connection) for index, connection in found.items()}


def _close(found: Iterable[socket.socket]) -> None:
    for connection in found:
        connection.close()


def _exchanged(mine: bytes, waiting: Waiting, limit: timedelta) -> list[bytes]:
    """All ranks' ``mine``, by index in the group."""
    group = waiting.group
    message = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    rows = [torch.empty_like(message) for _ in group.ranks]
    work = dist.all_gather(rows, message, group=group.process_group, async_op=True)
    work.wait(*patience(dist.get_backend(group.process_group), limit))
    return [row.numpy().tobytes() for row in rows]


def _own_address() -> str:
    """Where other ranks reach this one: on gloo's interface, else where packets to the first rank leave.

    Raises:
        OSError: if there is no such interface, or no way to the first rank, naming it.
        UnicodeError: if the first rank's name cannot be one.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",", maxsplit=1)[0]
    if named:
        return _of_interface(named)
    first = os.environ.get("MASTER_ADDR")
    try:
        found = socket.getaddrinfo(first or socket.gethostname(), 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        if not first:  # this machine's own name leads nowhere: then gloo, too, stays inside it
            return "127.0.0.1"
        raise OSError(f"MASTER_ADDR {first}: {error.strerror or error}") from error
    family, kind, _, _, where = found[0]
    with socket.socket(family, kind) as asked:
        try:
            asked.connect(where)  # sends nothing
        except OSError as error:
            raise OSError(f"no way to {where[0]}: {error.strerror or error}") from error
        return str(asked.getsockname()[0])


def _of_interface(name: str) -> str:
    """Its IPv4 address, else its IPv6 one, as gloo takes it."""
    addresses = psutil.net_if_addrs().get(name, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in addresses:
            if address.family == family:
                return str(address.address)
    what = "has no address" if addresses else "is no interface here"
    raise OSError(f"GLOO_SOCKET_IFNAME {name} {what}")


def _listener(address: str, most: int) -> socket.socket:
    version = ipaddress.ip_address(address.partition("%")[0]).version
    listener = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        _enlarge(listener)  # before it listens: what a connection may have in flight is settled as it is made
        listener.bind((address, 0))
        listener.listen(2 * most)
    except OSError as error:
        listener.close()
        raise OSError(f"{address}: {error.strerror or error}") from error
    return listener


def _called(where: tuple[str, int], timeout: float) -> socket.socket:
    version = ipaddress.ip_address(where[0].partition("%")[0]).version
    connection = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        _enlarge(connection)
        connection.settimeout(timeout)
        connection.connect(where)
    except OSError:
        connection.close()
        raise
    return connection


def _caller(connection: socket.socket, token: bytes) -> int:
    """Index of the rank that calls, or -1 for somebody else."""
    connection.settimeout(_CALL_SECONDS)
    try:
        told, index = _TOKEN.unpack(connection.recv(_TOKEN.size, socket.MSG_WAITALL))
    except (OSError, struct.error):
        return -1
    return int(index) if secrets.compare_digest(told, token) else -1


def _enlarge(connection: socket.socket) -> None:
    """Give it room for whole messages, where this process may ask for that."""
    for option in (_SNDBUFFORCE, _RCVBUFFORCE):
        # Else the kernel sizes buffers as it sees fit, which is more than an ordinary process may ask for.
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)


def _peer(rank: int, connection: socket.socket) -> _Peer:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(False)
    # The kernel tells twice what was asked for, and counts its own records in it.
    room = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 4
    return _Peer(rank, connection, room if room >= BUFFER_BYTES // 2 else _UNFORCED_BYTES)
