"""Heartbeats of supervisors: each counts up in the store once a second; a node whose count stands is lost."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from harness.errors import Refusal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LOST_SECONDS: Final = 20.0  # without a heartbeat a node is lost
START_SECONDS: Final = 300.0  # until the first one: the node may have to be started yet
_BEAT_SECONDS: Final = 1.0


def key_of(node: int) -> str:
    """Under which a node counts."""
    return f"beat/{node}"


class Heartbeat:
    """This node's heart, and when it saw others' beat."""

    def __init__(self, node: int, connect: Callable[[], Store]) -> None:
        self._node, self._connect = node, connect
        self._seen: dict[int, tuple[object, float]] = {}  # a node's count, and when it was new
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Beat no more."""
        self._ended.set()
        self._thread.join()

    def lost(self, node: int, count: object) -> bool:
        """Whether ``node`` is lost, whose ``count`` was read just now; None before its first beat."""
        now = time.monotonic()
        if node not in self._seen or count != self._seen[node][0]:
            self._seen[node] = (count, now)
        patience = LOST_SECONDS if count is not None else START_SECONDS
        return node != self._node and now - self._seen[node][1] > patience

    def _beat(self) -> None:
        """Count up, over a connection of its own."""
        with contextlib.suppress(RuntimeError, Refusal):  # whoever waits for the store notices
            store = self._connect()
            while not self._ended.wait(_BEAT_SECONDS):
                store.add(key_of(self._node), 1)
