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
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

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
    """How long a device's current stream waited for messages: between two events around each wait."""

    def __init__(self) -> None:
        self.paused = False  # whether the current stream is one whose waits hold back no computation
        self._seconds = 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, the stream is made to wait; a wait that fails is not counted."""
        if self.paused:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._pending.append((begin, end))
        self.seconds()  # nobody may ever ask: events do not pile up

    def seconds(self) -> float:
        """Of the waits that the device has behind it."""
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._pending.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3
        return self._seconds


class Watchdog:
    """Knows which exchange this rank is in, times its waits, and asks the other ranks when one fails.

    With ``streams`` not the host waits for messages but the device's current stream, as with NCCL.
    """

    def __init__(self, mesh: Mesh, *, streams: bool = False) -> None:
        self.collective_log = log = CollectiveLog()
        self.stalls = Stalls() if streams else None
        self.timeline: Timeline | None = None  # is told of waits
        self._rank, self._waited = mesh.rank, 0.0  # by the host
        store = mesh.store()  # thread ranks have none
        self._reporter = None if store is None else DesyncReporter(store, mesh.rank, mesh.topology.world, log)

    @property
    def exposed_seconds(self) -> float:
        """Time spent in :meth:`wait`: by the host or, as far as the device has come, by its stream."""
        return self._waited if self.stalls is None else self.stalls.seconds()

    def exited(self, ranks: Sequence[int]) -> Sequence[int]:
        """Those of ``ranks`` that no longer run, as far as is known."""
        return () if self._reporter is None else self._reporter.exited(ranks)

    def wait(self, for_what: Step | str, receive: Callable[[], T], *, across: bool = False) -> T:
        """What ``receive`` returns, which waits ``for_what``; what it raises becomes a WireError."""
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
            why_lost = str(lost).split("\n", 1)[0]
            return WireError(f"{first}; the other ranks cannot be asked, their store is lost ({why_lost})")

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
        self._who: dict[int, tuple[str, int]] = {}  # machine and process of each rank, as far as known
        self._set("who", (_machine(), psutil.Process().pid))

    def _set(self, what: str, value: object) -> None:
        self._store.set(f"{self._mark}/{what}/{self._rank}", json.dumps(value))

    def _get(self, what: str, rank: int) -> Any:
        """What ``rank`` wrote; None if nothing."""
        key = f"{self._mark}/{what}/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def exited(self, ranks: Collection[int]) -> list[int]:
        """Those of ``ranks`` that ran on this machine and no longer do, as far as the store says."""
        for rank in ranks:
            with contextlib.suppress(RuntimeError):  # the store's
                if rank not in self._who and (who := self._get("who", rank)) is not None:
                    self._who[rank] = tuple(who)
        here, found = _machine(), [(rank, *self._who[rank]) for rank in ranks if rank in self._who]
        return [rank for rank, machine, process in found if machine == here and not _runs(process)]

    def write(self, does: str) -> None:
        """Tell the others what this rank does, and which exchanges it opened."""
        log, steps = self._log, list(self._log.steps)
        says = [does, *(f"    opened {told(step)}" for step in steps[-_SHOWN:])]
        says += [f"    finished last: {told(log.finished)}"] if log.finished is not None else []
        self._set("stands", ("\n".join(says), steps, self.exited(range(self._world))))

    def report(self) -> str:
        """Where ranks stand, and their orders part, as lines, once all have written or exited, or in 5 s."""
        says: dict[int, str] = {}
        histories: dict[int, Sequence[Step]] = {}
        gone: set[int] = set()
        missing = set(range(self._world))
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                if (standing := self._get("stands", rank)) is not None:
                    says[rank], histories[rank], theirs = standing
                    gone.update(theirs)
            missing -= says.keys()
            gone.update(self.exited(missing))
            missing -= gone
            time.sleep(0.02)
        patience = f"within {_PATIENCE_SECONDS:.0f} s"
        silent = f"waits for no exchange that failed {patience}: it computes, or is lost"
        alike: dict[str, list[int]] = {}  # ranks by what is said of them
        for rank in range(self._world):
            alike.setdefault(says.get(rank, "has exited" if rank in gone else silent), []).append(rank)
        lines = [f"{ranks_in_words(ranks)}: {said}" for said, ranks in alike.items()]
        parted = parting(histories)
        return "\n".join(lines if parted is None else [parted, *lines])


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
