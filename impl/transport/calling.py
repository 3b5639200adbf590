"""How the ranks of a group come to their TCP connections: who listens where, and who calls whom.

Every rank listens, tells the others where by the group's backend, calls those before it and is called by
those behind it.  A call begins with 16 random bytes that only a rank of the group knows.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Final

import psutil
import torch
import torch.distributed as dist

from impl.plan.topology import ranks_in_words
from impl.transport.shared_memory import Waiting, patience

BUFFER_BYTES: Final = 32 * 2**20  # asked of the kernel, for each direction of a connection
_TOKEN: Final = struct.Struct("<16sI")  # of the rank that listens, index of the rank that calls
_WORDS: Final = 110  # bytes of an address, or of a reason
_HELLO: Final = struct.Struct(f"<16sH{_WORDS}s")  # token, port, address; or port 0 and why not
_CALL_SECONDS: Final = 5.0  # for a caller to say who it is
_SNDBUFFORCE, _RCVBUFFORCE = 32, 33  # of Linux; the module socket lacks them


def connected(waiting: Waiting) -> dict[int, socket.socket]:
    """A connection with every other rank of the group, by index in it; all its ranks must call this together.

    Args:
        waiting: how they wait for each other.

    Raises:
        ConnectionError: where a rank cannot listen or be reached, naming rank and address.
        TimeoutError: where one does not call.
    """
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
        failed.callback(close, found.values())
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
    return found


def close(found: Iterable[socket.socket]) -> None:
    """End them."""
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
