"""Control channel between the supervisors of a run's nodes: small JSON messages through one key-value store.

Every host runs one supervisor, which starts and watches that node's ranks and outlives them.  The first
node's supervisor leads.  Under torchrun the store is the job's own; else the first node serves it.  Messages
are JSON and nothing else.  Each supervisor counts up in the store once a second, over a connection of its
own; a supervisor whose count stands still is lost.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Self

from harness.errors import Refusal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL_SECONDS: Final = 0.05
_START_SECONDS: Final = 300.0  # for all nodes to come together: some may have to be started yet
_LOST_SECONDS: Final = 20.0  # without a heartbeat a node is lost
_BEAT_SECONDS: Final = 1.0
_ANSWER: Final = timedelta(seconds=60)  # of the store, for one operation


class ChannelError(Exception):
    """The store does not answer any more: the process that served it has ended."""


@dataclass(frozen=True, slots=True)
class Place:
    """The node of a run that this supervisor is, and where the store of all nodes is served."""

    node: int
    nodes: int
    host: str
    port: int  # of the store; 0 lets the process that serves it choose one
    serves: bool  # whether this process serves the store
    job: str = ""  # differs between runs that share a store
    waits: bool = False  # whether it is no supervisor, but a further process that was started on its node

    @property
    def follows(self) -> bool:
        """Whether this is not the process that says what is run."""
        return self.waits or self.node != 0

    def for_ranks(self, work: int) -> Place:
        """Where the ranks of all hosts meet for the piece of work of this number."""
        return replace(self, job=f"{self.job}/ranks/{work}")


class Channel:
    """One supervisor's end of the control channel; a context manager, in which its heart beats."""

    def __init__(self, place: Place) -> None:
        """Connect to the store, or serve it; a Refusal if nobody answers there, or the port is taken."""
        self.place = place
        self._store = self._connect(serve=place.serves)
        self._seen: dict[int, tuple[object, float]] = {}  # a node's count, and when it was new
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True, name="heartbeat")

    def __enter__(self) -> Self:
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._heart.join()

    def post(self, key: str, value: Any) -> None:
        """Store ``value`` as JSON; a ChannelError if the store is gone."""
        try:
            self._store.set(key, json.dumps(value))
        except RuntimeError as error:
            raise ChannelError(_line(error)) from error

    def read(self, key: str) -> Any:
        """The value posted under ``key``, None if there is none yet; a ChannelError if the store is gone."""
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except (RuntimeError, ValueError) as error:
            raise ChannelError(_line(error)) from error

    def wait(self, key: str, *, node: int = 0, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """Wait for what ``node`` posts, calling ``meanwhile``; a ChannelError if that node is lost."""
        while (value := self.read(key)) is None:
            if self.lost(node):
                raise ChannelError(f"node {node} of {self.place.nodes} does not answer any more")
            meanwhile()
            time.sleep(POLL_SECONDS)
        return value

    def lost(self, node: int) -> bool:
        """Whether a node's heart has not beaten for a while."""
        count, now = self.read(f"beat/{node}"), time.monotonic()
        if node not in self._seen or count != self._seen[node][0]:
            self._seen[node] = (count, now)
        patience = _START_SECONDS if count is None else _LOST_SECONDS
        return node != self.place.node and now - self._seen[node][1] > patience

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError, Refusal):  # the main thread notices that the store is gone
            store = self._connect(serve=False)
            while not self._ended.wait(_BEAT_SECONDS):
                store.add(f"beat/{self.place.node}", 1)

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
                f"nodes meet: {_line(error)}"
            ) from error
        store.set_timeout(_ANSWER)
        return dist.PrefixStore(f"zeropp/{place.job}", store)  # type: ignore[attr-defined]


def _with_port(place: Place) -> str:
    """``host:port``, and an IPv6 address in brackets."""
    return f"[{place.host}]:{place.port}" if ":" in place.host else f"{place.host}:{place.port}"


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
