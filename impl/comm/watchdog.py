"""The watchdog of a rank: a wait that fails becomes an error that says where every rank stands.

A rank whose wait fails writes to the process group's own store what it waited for, what it finished last and
which exchanges it opened; then it collects for some seconds what the others wrote.  A rank that wrote nothing
computes, has exited or is lost.  Nothing of this happens in a step.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch
from torch.distributed.distributed_c10d import Store

from impl.comm.fingerprint import CollectiveLog, Step, parting, told
from impl.comm.ledger import ACROSS, WAITING, WITHIN, Timeline
from impl.comm.mesh import Mesh
from impl.plan.topology import ranks_in_words
from impl.transport.shared_memory import SharedMemoryError

_PATIENCE_SECONDS: Final = 5.0  # for what others write
_SHOWN: Final = 3  # exchanges of a rank
T = TypeVar("T")
DIFFER: Final = "found that the ranks' exchanges differ"


class WireError(RuntimeError):
    """A message cannot be sent as asked, or did not come; the message names the numbers and who is where."""


class Watchdog:
    """Knows which exchange this rank is in, times its waits, and asks the other ranks when one fails.

    With ``streams`` not the host waits for messages but the device's current stream, as with NCCL.
    """

    def __init__(self, mesh: Mesh, *, streams: bool = False) -> None:
        self.collective_log = log = CollectiveLog()
        self.paused = False  # whether the current stream is one whose waits hold back no computation
        self.timeline: Timeline | None = None  # is told of waits
        self._rank, self._streams, self._waited = mesh.rank, streams, 0.0
        # of the stream's waits that the device has not behind it, the events around each
        self._stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        store = mesh.store()  # thread ranks have none
        self._reporter = None if store is None else DesyncReporter(store, mesh.rank, mesh.topology.world, log)

    @property
    def exposed_seconds(self) -> float:
        """Time spent in :meth:`wait`: by the host or, as far as the device has come, by its stream."""
        while self._stalls and self._stalls[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._stalls.popleft()
            self._waited += begin.elapsed_time(end) / 1e3
        return self._waited

    @contextlib.contextmanager
    def stalling(self) -> Iterator[None]:
        """Inside, the device's stream is made to wait; a wait that fails is not counted."""
        if self.paused:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._stalls.append((begin, end))
        _ = self.exposed_seconds  # nobody may ever ask: events do not pile up

    def wait(self, for_what: Step | str, receive: Callable[[], T], *, across: bool = False) -> T:
        """What ``receive`` returns, which waits ``for_what``; what it raises becomes a WireError."""
        self.collective_log.waiting = for_what
        begin = time.perf_counter()
        try:
            if self._streams:
                with self.stalling():
                    found = receive()
            else:
                found = receive()
                self._waited += time.perf_counter() - begin
        except (SharedMemoryError, WireError):  # says all that there is to say
            raise
        except (RuntimeError, TimeoutError) as error:
            raise self.error(f"could not finish {told(for_what)}", error) from error
        self.collective_log.waiting = None
        if self.timeline is not None:
            self.timeline.add(WAITING, ACROSS if across else WITHIN, begin)
        return found

    def error(self, what: str, why: object, waiting: Step | None = None) -> WireError:
        """The error of a rank that cannot go on: what, why, in which exchange, and where all ranks stand."""
        log = self.collective_log
        log.waiting = waiting or log.waiting
        # gloo puts its source line before, and advice after its first sentence.
        reason = re.sub(r"^\[[^]]*:\d+\] | This is typically.*", "", str(why).split("\n", 1)[0])
        first = f"rank {self._rank} {what}: {reason}"
        if self._reporter is None:
            return WireError(f"{first}; the other ranks have no store to be asked by")
        gave_up = f"waiting for {told(log.waiting)}" if log.waiting else f"after {log.count} exchanges"
        try:
            self._reporter.write(f"gave up {gave_up}")
            return WireError(f"{first}\n{self._reporter.report()}")
        except RuntimeError as lost:
            return WireError(f"{first}; the other ranks cannot be asked, their store is lost ({lost})")

    def close(self) -> None:
        """Tell ranks that may wait in vain that this one has closed its wire."""
        if self._reporter is not None:
            with contextlib.suppress(RuntimeError):  # the store's: its host has exited, and nobody will ask
                self._reporter.write(f"closed its wire after {self.collective_log.count} exchanges")


class DesyncReporter:
    """Writes where this rank stands, and collects where the others do, in a ``store`` that all share.

    Wires are told apart by their number on each rank, so all ranks must make theirs in one order.  Methods
    raise RuntimeError where the store cannot be reached.
    """

    def __init__(self, store: Store, rank: int, world: int, collective_log: CollectiveLog) -> None:
        self._store, self._rank, self._world, self._log = store, rank, world, collective_log
        self._mark = f"zeropp/{store.add(f'zeropp/wires/{rank}', 1)}"

    def write(self, does: str) -> None:
        """Tell the others what this rank does, and which exchanges it opened."""
        log, steps = self._log, list(self._log.steps)
        says = [does, *(f"    opened {told(step)}" for step in steps[-_SHOWN:])]
        says += [f"    finished last: {told(log.finished)}"] if log.finished is not None else []
        self._store.set(f"{self._mark}/{self._rank}", json.dumps(("\n".join(says), steps)))

    def report(self) -> str:
        """Where ranks stand, and their orders part, as lines, once all have written, or in 5 s."""
        stands: dict[int, Any] = {}  # by rank, what it wrote
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while len(stands) < self._world and time.monotonic() < deadline:
            for rank in range(self._world):
                if rank not in stands and self._store.check([key := f"{self._mark}/{rank}"]):
                    stands[rank] = json.loads(self._store.get(key))
            time.sleep(0.02)
        patience = f"within {_PATIENCE_SECONDS:.0f} s"
        silent = f"waits for no exchange that failed {patience}: it computes, has exited, or is lost"
        alike: dict[str, list[int]] = {}  # ranks by what is said of them
        for rank in range(self._world):
            alike.setdefault(stands[rank][0] if rank in stands else silent, []).append(rank)
        parted = parting({rank: steps for rank, (_, steps) in stands.items()})
        lines = [f"{ranks_in_words(ranks)}: {said}" for said, ranks in alike.items()]
        return "\n".join(lines if parted is None else [parted, *lines])
