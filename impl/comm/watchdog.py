"""The watchdog of a rank: a wait that fails becomes an error that says where every rank stands.

A rank whose wait fails writes to the process group's own store what it waited for, what it finished last and
which exchanges it opened; then it collects for some seconds what the others wrote.  A rank that wrote nothing
computes, has exited, as far as its machine can be looked at from here, or is lost.  Nothing of this happens
in a step.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import psutil
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

    def wait(self, for_what: Step | str, receive: Callable[[], T], *, across: bool = False) -> T:
        """What ``receive`` returns, which waits in an exchange, across nodes or inside one, or otherwise.

        Raises:
            WireError: for what gloo, shared memory or the clock raises inside.
        """
        self.collective_log.waiting = for_what
        begin = time.perf_counter()
        try:
            if self.stalls is None:
                found = receive()
            else:
                with self.stalls.noted():
                    found = receive()
        except (RuntimeError, ConnectionError, TimeoutError) as error:
            if isinstance(error, SharedMemoryError | WireError):  # says all that there is to say
                raise
            raise self.error(f"could not finish {told(for_what)}", error) from error
        self.collective_log.waiting = None
        self._waited += time.perf_counter() - begin
        if self.timeline is not None:
            self.timeline.add(WAITING, ACROSS if across else WITHIN, begin)
        return found

    def error(self, what: str, why: object, waiting: Step | None = None) -> WireError:
        """The error of a rank that cannot go on: what, why, in which exchange, and where all ranks stand."""
        self.collective_log.waiting = waiting or self.collective_log.waiting
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


class DesyncReporter:
    """Writes where this rank stands, and collects where the others do.

    Wires are told apart by their number on each rank, so all ranks must make theirs in one order.

    Args:
        store: shared by all ranks.
    """

    def __init__(self, store: Store, rank: int, world: int, collective_log: CollectiveLog) -> None:
        self._store, self._rank, self._world, self._log = store, rank, world, collective_log
        self._mark = f"zeropp/{store.add(f'zeropp/wires/{rank}', 1)}"
        self._who: dict[int, tuple[str, int]] = {}  # machine and process of each rank, as far as known
        store.set(f"{self._mark}/who/{rank}", json.dumps((_machine(), psutil.Process().pid)))

    def exited(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` that ran on this machine and no longer do, as far as the store says."""
        found = []
        for rank in ranks:
            with contextlib.suppress(RuntimeError):  # the store's
                if rank not in self._who and self._store.check([f"{self._mark}/who/{rank}"]):
                    machine, process = json.loads(self._store.get(f"{self._mark}/who/{rank}"))
                    self._who[rank] = machine, process
            machine, process = self._who.get(rank, ("", 0))
            if machine == _machine() and not _runs(process):
                found.append(rank)
        return found

    def write(self, does: str) -> None:
        """Tell the others what this rank does, and which exchanges it opened.

        Raises:
            RuntimeError: where the store cannot be reached.
        """
        log, steps = self._log, self._log.steps()
        says = [does, *(f"    opened {told(step)}" for step in steps[-_SHOWN:])]
        if log.finished is not None:
            says.append(f"    finished last: {told(log.finished)}")
        standing = says, steps, self.exited(range(self._world))
        self._store.set(f"{self._mark}/stands/{self._rank}", json.dumps(standing))

    def report(self) -> str:
        """Where the ranks stand, and where their orders part, as lines of text.

        Takes up to 5 s; ends at once when all have written or exited.

        Raises:
            RuntimeError: where the store cannot be reached.
        """
        says: dict[int, str] = {}
        histories: dict[int, Sequence[Step]] = {}
        gone: set[int] = set()
        missing = set(range(self._world))
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                if self._store.check([f"{self._mark}/stands/{rank}"]):
                    lines, histories[rank], theirs = json.loads(
                        self._store.get(f"{self._mark}/stands/{rank}")
                    )
                    says[rank] = "\n".join(lines)
                    gone.update(theirs)
            missing -= says.keys()
            gone.update(self.exited(missing))
            missing -= gone
            time.sleep(0.02)
        silent = (
            f"waits for no exchange that failed within {_PATIENCE_SECONDS:.0f} s: it computes, or is lost"
        )
        alike: dict[str, list[int]] = {}  # ranks by what is said of them
        for rank in range(self._world):
            alike.setdefault(says.get(rank, "has exited" if rank in gone else silent), []).append(rank)
        parted = parting(histories)
        lines = [] if parted is None else [parted]
        return "\n".join([*lines, *(f"{ranks_in_words(ranks)}: {said}" for said, ranks in alike.items())])


def _runs(process: int) -> bool:
    try:
        return psutil.Process(process).status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _machine() -> str:
    """Equal for two processes only if each can see whether the other runs."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):  # Linux alone has them
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)
