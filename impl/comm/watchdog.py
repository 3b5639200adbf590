"""The watchdog of a rank: a wait that fails becomes an error that says where every rank stands."""

from __future__ import annotations

import contextlib
import re
import time
import weakref
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from impl.comm.desync_report import DesyncReporter, report
from impl.comm.fingerprint import CollectiveLog, Step, told
from impl.comm.mesh import Mesh
from impl.comm.timeline import ACROSS, WAITING, WITHIN, Timeline
from impl.transport.shared_memory import SharedMemoryError


class WireError(RuntimeError):
    """A message cannot be sent as asked, or did not come; the message names the numbers and who is where."""


class Watchdog:
    """Knows which exchange this rank is in, times its waits, and asks the other ranks when one fails.

    Args:
        timeout: seconds after which a missing rank is an error.

    Attributes:
        exposed_seconds: time spent in :meth:`waiting`, accumulated.
        timeline: is told of waits, where there is one.
    """

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        self.collective_log = CollectiveLog()
        self.exposed_seconds = 0.0
        self.timeline: Timeline | None = None
        self._mesh = mesh
        # This rank's part in desync reports; None without other ranks, or a store: thread ranks have none.
        self._desync_reporter: DesyncReporter | None = None
        store = mesh.store()
        if store is not None:
            # A clone, so that a thread that stands in one does not hold up the other.
            own = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
            listed = DesyncReporter(own, mesh.rank, mesh.topology.world, self.collective_log, timeout)
            weakref.finalize(self, listed.end, join=False).atexit = False
            self._desync_reporter = listed

    def exited(self, ranks: Sequence[int]) -> Sequence[int]:
        """Those of ``ranks`` that no longer run, as far as is known."""
        return () if self._desync_reporter is None else self._desync_reporter.exited(ranks)

    @contextlib.contextmanager
    def waiting(self, step: Step, *, across: bool = False) -> Iterator[None]:
        """While this rank waits in an exchange, ``across`` nodes or inside one.

        Raises:
            WireError: for what gloo, shared memory or the clock raises inside.
        """
        self.collective_log.waiting = step
        begin = time.perf_counter()
        try:
            yield
        except (RuntimeError, ConnectionError, TimeoutError) as error:
            if isinstance(error, SharedMemoryError | WireError):  # says all that there is to say
                raise
            raise self.stuck(step, error) from error
        self.collective_log.waiting = None
        self.exposed_seconds += time.perf_counter() - begin
        if self.timeline is not None:
            self.timeline.add(WAITING, ACROSS if across else WITHIN, begin)

    @contextlib.contextmanager
    def making(self, what: str) -> Iterator[None]:
        """While the ranks of a group make ``what`` together.

        Raises:
            WireError: if another rank did not come.
        """
        self.collective_log.waiting = f"{what} to be made"
        try:
            yield
        except SharedMemoryError:
            raise
        except RuntimeError as error:
            raise self.error(f"could not make {what}", error) from error
        finally:
            self.collective_log.waiting = None

    def stuck(self, step: Step, error: Exception) -> WireError:
        """The error of a rank that an exchange failed."""
        self.collective_log.waiting = step
        return self.error(f"could not finish exchange {told(step)}", error)

    def parted(self, step: Step) -> WireError:
        """The error of a rank that finds another exchange in the place of its own."""
        self.collective_log.waiting = step
        return self.error("found that the ranks' exchanges differ", f"it is in exchange {told(step)}")

    def error(self, what: str, why: object) -> WireError:
        """The error of a rank that cannot go on: what, why, and where all ranks stand."""
        # gloo puts its source line before, and advice after its first sentence.
        reason = re.sub(r"^\[[^]]*:\d+\] | This is typically.*", "", str(why).split("\n", 1)[0])
        first = f"rank {self._mesh.rank} {what}: {reason}"
        if self._desync_reporter is None:
            last = f"exchange {self.collective_log.count} was the last that it opened"
            return WireError(f"{first}; {last}; the other ranks have no store to be asked by")
        try:
            self._desync_reporter.give_up()
            found = self._desync_reporter.ask()
        except RuntimeError as error:
            lost = str(error).split("\n", 1)[0]
            return WireError(f"{first}; the other ranks cannot be asked, their store is lost ({lost})")
        return WireError(f"{first}\n{report(found)}")

    def follow(self, step: Step, works: Sequence[dist.Work]) -> None:
        """On a device the stream waits, not the host: what is overdue there can only be told in the log."""
        if self._mesh.device.type != "cpu" and self._desync_reporter is not None:
            self._desync_reporter.follow(step, list(works))

    def close(self) -> None:
        """Answer no more desync reports."""
        if self._desync_reporter is not None:
            self._desync_reporter.end()
