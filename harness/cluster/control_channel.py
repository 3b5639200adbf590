"""Control channel between the supervisors of a run's nodes: small JSON messages through one key-value store.

Every host runs one supervisor, which starts and watches that node's ranks and outlives them.  The first
node's leads: it says what is run.  Under torchrun the store is the job's own; else the first node serves it.
What others send is parsed as JSON and nothing else.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from harness.cluster.heartbeat import START_SECONDS, Heartbeat, key_of
from harness.errors import Refusal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL_SECONDS: Final = 0.05
_JOIN: Final = timedelta(seconds=START_SECONDS)  # for all nodes to come together
_ANSWER: Final = timedelta(seconds=60)  # of the store, for one operation


class ChannelError(Exception):
    """The store does not answer any more: whoever served it has ended."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which node of a run this supervisor is, and where the store of all is served."""

    node: int
    nodes: int
    host: str
    port: int  # of the store; 0 lets the process that serves it choose one
    serves: bool  # whether this process serves the store
    job: str = ""  # differs between runs that share a store
    waits: bool = False  # whether it is no supervisor, but another process that was started on its node

    @property
    def follows(self) -> bool:
        """Whether this is not the process that says what is run."""
        return self.waits or self.node != 0

    def ranks_of(self, work: int) -> Place:
        """Where the ranks of all hosts meet for a piece of work, by its number."""
        return replace(self, job=f"{self.job}/ranks/{work}")


class Channel:
    """One supervisor's end of the control channel; a context manager, in which its heart beats."""

    def __init__(self, place: Place) -> None:
        """Connect to the store, or serve it; a Refusal if nobody answers there, or the port is taken."""
        self.place = place
        self._store = self._connect(serve=place.serves)
        self._heartbeat = Heartbeat(place.node, partial(self._connect, serve=False))

    def __enter__(self) -> Self:
        self._heartbeat.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._heartbeat.stop()

    def post(self, key: str, value: Any) -> None:
        """Store ``value`` as JSON; a ChannelError if the store is gone."""
        try:
            self._store.set(key, json.dumps(value))
        except RuntimeError as error:
            raise ChannelError(_line(error)) from error

    def read(self, key: str) -> Any:
        """What was posted under ``key``; None if nothing was yet. A ChannelError if the store is gone."""
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except (RuntimeError, ValueError) as error:
            raise ChannelError(_line(error)) from error

    def wait(self, key: str, *, of: int = 0, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """Wait for what node ``of`` posts, calling ``meanwhile``; a ChannelError if that node is lost."""
        while (found := self.read(key)) is None:
            if self.lost(of):
                raise ChannelError(f"node {of} of {self.place.nodes} does not answer any more")
            meanwhile()
            time.sleep(POLL_SECONDS)
        return found

    def lost(self, node: int) -> bool:
        """Whether a node's heart has not beaten for a while."""
        return self._heartbeat.lost(node, self.read(key_of(node)))

    def _connect(self, *, serve: bool) -> Store:
        import torch.distributed as dist

        place = self.place
        options: dict[str, Any] = {"is_master": serve, "timeout": _JOIN, "wait_for_workers": False}
        try:
            if serve:
                family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
                listening = socket.create_server((place.host, place.port), family=family, backlog=1024)
                self.place = place = replace(place, port=listening.getsockname()[1])
                options["master_listen_fd"] = listening.detach()
            store = dist.TCPStore(place.host, place.port, **options)  # type: ignore[attr-defined]
        except (OSError, RuntimeError) as error:
            done = "serve" if serve else "reach"
            raise Refusal(
                f"node {place.node} of {place.nodes} cannot {done} {place.host}:{place.port}, where the "
                f"nodes meet: {_line(error)}"
            ) from error
        store.set_timeout(_ANSWER)
        return dist.PrefixStore(f"zeropp/{place.job}", store)  # type: ignore[attr-defined]


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
