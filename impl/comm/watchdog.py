"""The watchdog of a rank: a wait that fails becomes an error that says where every rank stands.

A rank whose wait fails writes to the group's own store what it waited for and which exchanges it opened, and
gives the others some seconds to do so.  One that wrote nothing computes, has exited or is lost.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final, TypeVar

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from impl.comm.fingerprint import CollectiveLog, Step, parting, told
from impl.comm.ledger import ACROSS, WAITING, WITHIN, Timeline
from impl.comm.mesh import Mesh
from impl.plan.topology import ranks_in_words
from impl.transport.shared_memory import SharedMemoryError

_PATIENCE_SECONDS: Final = 5.0  # for what others write
T = TypeVar("T")
DIFFER: Final = "found that the ranks' exchanges differ"


class WireError(RuntimeError):
    """A message cannot be sent as asked, or did not come; the message names the numbers and who is where."""


class Watchdog:
    """Knows which exchanges this rank opened, times its waits, and asks the other ranks when one fails.

    With ``streams`` the device's current stream waits for messages, not the host, as with NCCL.  All ranks
    must make their wires in one order, whose number tells them apart.
    """

    def __init__(self, mesh: Mesh, *, streams: bool = False) -> None:
        self.collective_log, self._waited = CollectiveLog(), 0.0
        self.paused = False  # whether the current stream is one whose waits hold back no computation
        self.timeline: Timeline | None = None  # is told of waits
        self._rank, self._ranks, self._streams = mesh.rank, range(mesh.topology.world), streams
        self._stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # around waits not yet over
        self._store: Store | None = None  # by rank, where it stands; thread ranks have none
        if (store := mesh.store()) is not None:
            self._store = PrefixStore(f"zeropp/{store.add(f'zeropp/wires/{mesh.rank}', 1)}", store)

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

    def wait(self, for_what: Step, receive: Callable[[], T], *, across: bool = False) -> T:
        """What ``receive`` returns, which waits ``for_what``; what it raises becomes a WireError."""
        begin = time.perf_counter()
        try:
            if self._streams:
                with self.stalling():
                    found = receive()
            else:
                found = receive()
                self._waited += time.perf_counter() - begin
        except SharedMemoryError:  # says all that there is to say
            raise
        except (RuntimeError, TimeoutError) as error:
            raise self.error(f"could not finish {told(for_what)}", error, for_what) from error
        if self.timeline is not None:
            self.timeline.add(WAITING, ACROSS if across else WITHIN, begin)
        return found

    def error(self, what: str, why: object, waiting: Step | None = None) -> WireError:
        """The error of a rank that cannot go on: what, why, and where all ranks stand."""
        # gloo puts its source line before, and advice after its first sentence.
        reason = re.sub(r"^\[[^]]*:\d+\] | This is typically.*", "", str(why).split("\n", 1)[0])
        lines = [f"rank {self._rank} {what}: {reason}"]
        if self._store is not None:
            try:
                self._write(f"gave up waiting for {told(waiting)}" if waiting else "gave up")
                lines += self._report(self._store)
            except RuntimeError as lost:  # its host has exited
                lines.append(f"the other ranks cannot be asked, their store is lost ({lost})")
        return WireError("\n".join(lines))

    def close(self) -> None:
        """Tell ranks that may wait in vain that this one has closed its wire."""
        with contextlib.suppress(RuntimeError):  # the store's: its host has exited, and nobody will ask
            self._write(f"closed its wire after {self.collective_log.count} exchanges")

    def _write(self, does: str) -> None:
        """Tell the others what this rank does, and which exchanges it opened."""
        if self._store is not None:
            self._store.set(str(self._rank), json.dumps((does, [*self.collective_log.steps])))

    def _report(self, store: Store) -> Iterator[str]:
        """Where orders part, and ranks stand, as lines, once all have written, or in some seconds."""
        with contextlib.suppress(RuntimeError):  # one is silent
            store.wait([*map(str, self._ranks)], timedelta(seconds=_PATIENCE_SECONDS))
        stands = {rank: json.loads(store.get(str(rank))) for rank in self._ranks if store.check([str(rank)])}
        if parted := parting({rank: steps for rank, (_, steps) in stands.items()}):
            yield parted
        silent = f"said nothing for {_PATIENCE_SECONDS:.0f} s: it computes, has exited, or is lost"
        alike = defaultdict[str, list[int]](list)  # ranks by what is said of them
        for rank in self._ranks:
            alike[stands[rank][0] if rank in stands else silent].append(rank)
        yield from (f"{ranks_in_words(ranks)}: {said}" for said, ranks in alike.items())
