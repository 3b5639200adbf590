"""Connects the supervisors of a run's nodes, which exchange small JSON messages through one key-value store.

Every node has one supervisor, a process that starts and watches the node's ranks and outlives them
(:mod:`harness.cluster.node_supervisors`).  The store is a ``TCPStore``.  If torchrun serves a store of its own, this
store is used; otherwise the supervisor of node 0 serves one.  All messages are encrypted and authenticated with the
run's secret token (:mod:`harness.cluster.run_token`), since every local user may connect to a store.

Each supervisor shows that it is alive by heartbeats: once a second, over a connection of its own, it increments a
counter in the store.  A supervisor whose counter has not changed for :data:`_LOST_SECONDS` seconds is lost.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from harness.cluster import run_token
from harness.cluster.run_token import Seal
from harness.errors import Refusal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL_SECONDS: Final = 0.05
_START_SECONDS: Final = 300.0  # limit for all nodes to come together; some may still have to be started
_LOST_SECONDS: Final = 20.0  # a node without a new heartbeat for so long is lost
_BEAT_SECONDS: Final = 1.0
_ANSWER: Final = timedelta(seconds=60)  # limit for one operation of the store


class ChannelError(Exception):
    """Raised when the store or a node does not answer any more, or when the store has values of another run."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place in a run: its node, and the address of the key-value store through which all nodes meet."""

    node: int
    nodes: int
    host: str  # address of the store
    port: int  # port of the store; 0 lets the process that serves the store choose a port
    serves: bool  # whether this process serves the store
    job: str = ""  # name of the run, which differs between runs that share a store
    # Whether the launcher started this process in addition to the node's supervisor; it only waits for the run's end.
    waits: bool = False

    @property
    def follows(self) -> bool:
        """Whether another process than this one leads the run.

        The leading process is the supervisor of node 0.  It decides what all ranks do.
        """
        return self.waits or self.node != 0

    def for_ranks(self, work: int) -> Place:
        """Return the place through which the ranks of all nodes find each other when they run command number ``work``.

        A command is a function that the supervisors run on their ranks.  The ranks meet in the same store as the
        supervisors.  Only ``job``, the name of the run, differs between the returned place and this one.  The name is a
        part of each key in the store, so the ranks' keys differ from all other keys.
        """
        return replace(self, job=f"{self.job}/ranks/{work}")


class Channel:
    """One supervisor's connection to the run's key-value store, through which supervisors exchange messages.

    A supervisor is the process that starts and watches the ranks of a node.  As a context manager, the connection sends
    heartbeats until the ``with`` block ends.
    """

    def __init__(self, place: Place) -> None:
        """Connect to the store, which this process first starts if ``place.serves`` is true, and find the run's token.

        Raises:
            Refusal: If nothing answers at the store's address, if the store's port is taken, or if this process has no
                token.
        """
        self.place = place
        self._files: list[Path] = []  # files that hold the token; removed at the end
        self._store = self._connect(serve=place.serves)
        self.token = self._shared_token()
        self._sealed = self._meeting = Seal(self.token.encode())
        self.nonce = secrets.token_hex(16)
        # By node, the last heartbeat's count, and when this process first saw it.
        self._seen: dict[int, tuple[int, float]] = {}
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True, name="heartbeat")

    def __enter__(self) -> Self:
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._heart.join()
        for file in self._files:
            file.unlink(missing_ok=True)

    def begin(self, nonces: list[str]) -> None:
        """Start a session: from now on, encrypt messages with a secret that depends on the token and on ``nonces``.

        Messages of earlier runs with the same token can then no longer be read.

        Args:
            nonces: Random texts, one from the supervisor of each node, in order of nodes.
        """
        self._sealed = run_token.of_session(self.token, nonces)

    def post(self, key: str, value: Any) -> None:
        """Encrypt ``value`` as JSON, and store it under ``key``; raises a ChannelError if the store is gone."""
        try:
            self._store.set(key, self._sealed.close(self._full(key), value))
        except RuntimeError as error:
            raise ChannelError(_line(error)) from error

    def read(self, key: str) -> Any:
        """Return the value posted under ``key``, or None if nothing has been posted yet.

        Raises:
            ChannelError: If the store is gone, or the value does not come from a process of this run.
        """
        return self._read(key, self._sealed)

    def _read(self, key: str, seal: Seal) -> Any:
        try:
            return seal.open(self._full(key), self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError as error:
            raise ChannelError(_line(error)) from error
        except ValueError as error:
            where = _with_port(self.place)
            raise ChannelError(
                f"the value of {key!r} in the store at {where} comes from no process of this run: another run may use "
                "this port; give each run a port of its own"
            ) from error

    def _full(self, key: str) -> str:
        """Return the full key, with the run's name in front.

        A value is stored under its full key, and encrypted so that it can be read only under this key.
        """
        return f"{self.place.job}/{key}"

    def _shared_token(self) -> str:
        """Return the run's secret token, which all processes of the run share.

        The leading process takes the token from its environment or, if there is none, makes a new token.  It announces
        the token's digest in the store.  All other processes look for the token with this digest in their environment,
        or in a file that the leading process has written.
        """
        try:
            if self.place.follows:
                self._store.wait(["token"], timedelta(seconds=_START_SECONDS))
                return run_token.find(self._store.get("token").decode(), node=self.place.node)
            if (token := run_token.from_environment()) is None:
                token = run_token.new()
                self._files.append(run_token.write(token))
            self._store.set("token", run_token.digest_of(token))
        except RuntimeError as error:
            raise Refusal(
                f"node {self.place.node}: node 0 has not begun the run: {_line(error)}; start the same command on all "
                "nodes"
            ) from error
        return token

    def wait(self, key: str, *, node: int = 0, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """Wait until ``node`` posts a value under ``key``, and return the value.

        Args:
            key: The key that the node passes to :meth:`post`.
            node: Number of the node that will post the value.
            meanwhile: Called every :data:`POLL_SECONDS` seconds while waiting.

        Raises:
            ChannelError: If the node is lost, or the store is gone.
        """
        while (value := self.read(key)) is None:
            if self.lost(node):
                raise ChannelError(f"node {node} of {self.place.nodes} does not answer any more")
            meanwhile()
            time.sleep(POLL_SECONDS)
        return value

    def lost(self, node: int) -> bool:
        """Return whether ``node`` is lost: whether it has sent no new heartbeat for :data:`_LOST_SECONDS` seconds.

        A node that has not sent any heartbeat yet gets more time: it is lost :data:`_START_SECONDS` seconds after this
        method was first called for this node.  The node of this process is never lost.
        """
        count, now = self._read(f"beat/{node}", self._meeting) or 0, time.monotonic()
        if node not in self._seen or count > self._seen[node][0]:
            self._seen[node] = (count, now)
        patience = _LOST_SECONDS if count else _START_SECONDS
        return node != self.place.node and now - self._seen[node][1] > patience

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError, Refusal):  # the main thread reports that the store is gone
            store, key = self._connect(serve=False), f"beat/{self.place.node}"
            # The first heartbeat is sent at once.  If this node ends early, other nodes then notice it after
            # _LOST_SECONDS.  Without any heartbeat, they would take it for a node that has yet to start.
            for count in itertools.count(1):
                store.set(key, self._meeting.close(self._full(key), count))
                if self._ended.wait(_BEAT_SECONDS):
                    break

    def _connect(self, *, serve: bool) -> Store:
        import torch.distributed as dist

        place = self.place
        options: dict[str, Any] = {"timeout": timedelta(seconds=_START_SECONDS), "wait_for_workers": False}
        try:
            if serve:
                family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
                listening = socket.create_server((place.host, place.port), family=family, backlog=1024)
                self.place = place = replace(place, port=listening.getsockname()[1])
                options["master_listen_fd"] = listening.detach()
            store = dist.TCPStore(place.host, place.port, is_master=serve, **options)  # type: ignore[attr-defined]
        except (OSError, RuntimeError) as error:
            verb = "serve" if serve else "reach"
            raise Refusal(
                f"node {place.node} of {place.nodes} cannot {verb} {_with_port(place)}, where the "
                f"nodes meet: {_line(error)}; check the address, and that its port is free and open"
            ) from error
        store.set_timeout(_ANSWER)
        return dist.PrefixStore(f"zeropp/{place.job}", store)  # type: ignore[attr-defined]


def _with_port(place: Place) -> str:
    """Return a place's address as ``host:port``, with brackets around an IPv6 address."""
    return f"[{place.host}]:{place.port}" if ":" in place.host else f"{place.host}:{place.port}"


def _line(error: BaseException) -> str:
    """Return the first line of an error's message; torch appends a stack trace."""
    return str(error).partition("\n")[0]
