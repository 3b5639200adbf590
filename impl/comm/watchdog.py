"""The watchdog of a rank: a wait that fails becomes an error that says where every rank stands."""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from impl.comm.desync_report import DesyncReporter
from impl.comm.fingerprint import CollectiveLog, Step, told
from impl.comm.mesh import Mesh
from impl.comm.timeline import ACROSS, WAITING, WITHIN, Timeline
from impl.transport.shared_memory import SharedMemoryError


class WireError(RuntimeError):
    """A message cannot be sent as asked, or did not come; the message names the numbers and who is where."""


class Stalls:
    """How long a device's current stream waited for messages: between two events around each wait.

    The first is reached when all work before the wait is done, the second when the message is there too.
    Events are read when the device has passed them, and used again.

    Attributes:
        paused: whether the current stream is one whose waits hold back no computation.
    """

    def __init__(self) -> None:
        self.paused = False
        self._seconds = 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, the stream is made to wait; a wait that fails is not counted."""
        if self.paused:
            yield
            return
        begin = self._recorded()
        yield
        self._pending.append((begin, self._recorded()))

    def seconds(self) -> float:
        """Of the waits that the device has behind it."""
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._pending.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3
            self._free += [begin, end]
        return self._seconds

    def _recorded(self) -> torch.cuda.Event:
        if not self._free:
            self.seconds()  # nobody may ever ask: events that the device has passed are used again here
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class Watchdog:
    """Knows which exchange this rank is in, times its waits, and asks the other ranks when one fails.

    Args:
        streams: whether not the host waits for messages but the device's current stream, as with NCCL.

    Attributes:
        stalls: of that stream; None where the host waits.
        timeline: is told of waits, where there is one.
    """

    def __init__(self, mesh: Mesh, *, streams: bool = False) -> None:
        self.collective_log = CollectiveLog()
        self._waited = 0.0  # by the host
        self.stalls = Stalls() if streams else None
        self.timeline: Timeline | None = None
        self._mesh = mesh
        # None without a store: thread ranks have none.
        self._desync_reporter: DesyncReporter | None = None
        if (store := mesh.store()) is not None:
            world = mesh.topology.world
            self._desync_reporter = DesyncReporter(store, mesh.rank, world, self.collective_log)

    @property
    def exposed_seconds(self) -> float:
        """Time spent in :meth:`waiting`: by the host or, as far as the device has come, by its stream."""
        return self._waited if self.stalls is None else self.stalls.seconds()

    def exited(self, ranks: Sequence[int]) -> Sequence[int]:
        """Those of ``ranks`` that no longer run, as far as is known."""
        return () if self._desync_reporter is None else self._desync_reporter.exited(ranks)

    @contextlib.contextmanager
    def waiting(self, for_what: Step | str, *, across: bool = False) -> Iterator[None]:
        """While this rank waits in an exchange, ``across`` nodes or inside one, or for what it names.

        Raises:
            WireError: for what gloo, shared memory or the clock raises inside.
        """
        self.collective_log.waiting = for_what
        begin = time.perf_counter()
        try:
            with contextlib.nullcontext() if self.stalls is None else self.stalls.noted():
                yield
        except (RuntimeError, ConnectionError, TimeoutError) as error:
            if isinstance(error, SharedMemoryError | WireError):  # says all that there is to say
                raise
            raise self.stuck(for_what, error) from error
        self.collective_log.waiting = None
        self._waited += time.perf_counter() - begin
        if self.timeline is not None:
            self.timeline.add(WAITING, ACROSS if across else WITHIN, begin)

    def making(self, what: str) -> contextlib.AbstractContextManager[None]:
        """While the ranks of a group make ``what`` together; as :meth:`waiting`."""
        return self.waiting(f"the making of {what}")

    def stuck(self, in_what: Step | str, error: Exception) -> WireError:
        """The error of a rank that an exchange failed."""
        self.collective_log.waiting = in_what
        return self.error(f"could not finish {told(in_what)}", error)

    def parted(self, step: Step) -> WireError:
        """The error of a rank that finds another exchange in the place of its own."""
        self.collective_log.waiting = step
        return self.error("found that the ranks' exchanges differ", f"it is in {told(step)}")

    def error(self, what: str, why: object) -> WireError:
        """The error of a rank that cannot go on: what, why, and where all ranks stand."""
        # gloo puts its source line before, and advice after its first sentence.
        reason = re.sub(r"^\[[^]]*:\d+\] | This is typically.*", "", str(why).split("\n", 1)[0])
        first, log = f"rank {self._mesh.rank} {what}: {reason}", self.collective_log
        if self._desync_reporter is None:
            last = f"exchange {log.count} was the last that it opened"
            return WireError(f"{first}; {last}; the other ranks have no store to be asked by")
        try:
            self._desync_reporter.write(
                f"gave up waiting for {told(log.waiting)}"
                if log.waiting
                else f"gave up after {log.count} exchanges"
            )
            return WireError(f"{first}\n{self._desync_reporter.report()}")
        except RuntimeError as lost:
            why_lost = str(lost).split("\n", 1)[0]
            return WireError(f"{first}; the other ranks cannot be asked, their store is lost ({why_lost})")

    def close(self) -> None:
        """Tell ranks that may wait in vain that this one has closed its wire."""
        if self._desync_reporter is not None:
            with contextlib.suppress(RuntimeError):  # the store's: its host has exited, and nobody will ask
                self._desync_reporter.write(f"closed its wire after {self.collective_log.count} exchanges")
