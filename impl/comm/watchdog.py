"""The watchdog of a rank: a wait that fails becomes an error that says where every rank stands.

A rank whose wait fails writes its wait and its exchanges to the group's store, and gives the others some
seconds to do so.  A rank that wrote nothing computes, has exited or is lost.
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

from impl.comm.fingerprint import CollectiveLog, Step, label, parting
from impl.comm.ledger import ACROSS, WAITING, WITHIN, Timeline
from impl.comm.mesh import Mesh
from impl.plan.topology import ranks_in_words
from impl.transport.shared_memory import SharedMemoryError

_PATIENCE_SECONDS: Final = 5.0  # for what other ranks write
T = TypeVar("T")
DIFFER: Final = "found that the ranks' exchanges differ"


class WireError(RuntimeError):
    """A message cannot be sent, or did not arrive; the error names the numbers and where ranks stand."""


class Watchdog:
    """Logs this rank's exchanges, times its waits, and asks the other ranks when one fails.

    With ``streams`` the device's current stream waits for messages, not the host, as with NCCL.  All ranks
    must make their wires in one order, since their number identifies them.
    """

    def __init__(self, mesh: Mesh, *, streams: bool = False) -> None:
        self.collective_log, self._waited = CollectiveLog(), 0.0
        self.paused = False  # whether waits of the current stream delay no computation
        self.timeline: Timeline | None = None  # of waits
        self._rank, self._ranks, self._streams = mesh.rank, range(mesh.topology.world), streams
        self._counting = mesh.counting
        self._stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # around unfinished waits
        self._store: Store | None = None  # where each rank stands; thread ranks have none
        self._met: dict[str, int] = defaultdict(int)  # how often this rank came to meet, by purpose
        if (store := mesh.store()) is not None:
            self._store = PrefixStore(f"zeropp/{store.add(f'zeropp/wires/{mesh.rank}', 1)}", store)

    @property
    def exposed_seconds(self) -> float:
        """Seconds in :meth:`wait`: of the host or, for finished work, of the device's stream."""
        while self._stalls and self._stalls[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._stalls.popleft()
            self._waited += begin.elapsed_time(end) / 1e3
        return self._waited

    @contextlib.contextmanager
    def stalling(self) -> Iterator[None]:
        """Time the waits of the device's stream inside; a wait that fails is not counted."""
        if self.paused:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._stalls.append((begin, end))
        _ = self.exposed_seconds  # drops finished events

    def wait(self, step: Step, receive: Callable[[], T], *, across: bool = False) -> T:
        """The messages of ``receive``, which waits for ``step``; its errors become WireErrors."""
        begin = time.perf_counter()
        try:
            if self._streams:
                with self.stalling():
                    messages = receive()
            else:
                messages = receive()
                self._waited += time.perf_counter() - begin
        except SharedMemoryError:  # its message is complete
            raise
        except (RuntimeError, TimeoutError) as error:
            raise self.error(f"could not finish {label(step)}", error, step) from error
        if self.timeline is not None:
            self.timeline.add(WAITING, ACROSS if across else WITHIN, begin)
        return messages

    def meet(self, purpose: str, timeout: float) -> None:
        """Wait until all ranks have come for ``purpose``; a WireError after ``timeout`` seconds."""
        if (store := self._store) is None:
            return
        number = self._met[purpose] = self._met[purpose] + 1
        keys = [f"meet/{purpose}/{number}/{rank}" for rank in self._ranks]
        try:
            store.set(keys[self._rank], "")
            store.wait(keys, timedelta(seconds=timeout))
        except RuntimeError as error:
            try:
                store.delete_key(keys[self._rank])  # a rank that comes later must not go on alone
                missing = [
                    rank for rank in self._ranks if rank != self._rank and not store.check([keys[rank]])
                ]
            except RuntimeError as lost:  # its host has exited
                raise self.error(f"could not finish {purpose}", lost, purpose) from error
            cause = f"waited {timeout:g} s for {ranks_in_words(missing)}"
            raise self.error(f"could not finish {purpose}", cause, purpose) from error

    def error(self, failure: str, cause: object, waiting: Step | str | None = None) -> WireError:
        """The error of a rank that cannot go on: its failure, the cause, and where all ranks stand."""
        log, in_exchange = self.collective_log, isinstance(waiting, tuple)
        waits_for = label(waiting) if isinstance(waiting, tuple) else waiting
        number, call = (waiting[0], waiting[3]) if isinstance(waiting, tuple) else (log.count + 1, log.call)
        # gloo puts its source line before, and advice after its first sentence.
        reason = re.sub(r"^\[[^]]*:\d+\] | This is typically.*", "", str(cause).split("\n", 1)[0])
        if call and not in_exchange:  # whose label names it
            failure += f" in {call}"
        if number > log.before_call + 1:
            call = ""  # its first exchange arrived, so all ranks made it
        lines = [f"rank {self._rank} {failure}: {reason}"]
        if self._store is not None:
            try:
                self._write(f"gave up waiting for {waits_for}" if waiting else "gave up", call)
                lines += self._report(self._store)
            except RuntimeError as lost:  # its host has exited
                lines.append(f"the other ranks cannot be asked, their store is lost ({lost})")
        lines += [self._counting.strip()] if self._counting else []
        return WireError("\n".join(lines))

    def close(self) -> None:
        """Report to ranks that may wait in vain that this one has closed its wire."""
        with contextlib.suppress(RuntimeError):  # the store's host has exited
            self._write(f"closed its wire after {self.collective_log.count} exchanges")

    def _write(self, status: str, call: str = "") -> None:
        """Write this rank's ``status``, the ``call`` that others may not have made, and its exchanges."""
        if self._store is not None:
            self._store.set(str(self._rank), json.dumps((status, call, [*self.collective_log.steps])))

    def _report(self, store: Store) -> Iterator[str]:
        """Lines on calls, where orders part and ranks stand, once all have written, or after some seconds."""
        with contextlib.suppress(RuntimeError):  # a rank is silent
            store.wait([*map(str, self._ranks)], timedelta(seconds=_PATIENCE_SECONDS))
        reports = {rank: json.loads(store.get(str(rank))) for rank in self._ranks if store.check([str(rank)])}
        called = defaultdict[str, list[int]](list)  # ranks by the call that they are in
        for rank, (_, call, _) in reports.items():
            called[call].append(rank)
        for call, ranks in called.items():
            if call and (others := [rank for rank in self._ranks if rank not in ranks]):
                yield (
                    f"all ranks must call {call}: {ranks_in_words(ranks)} did, no call came from "
                    f"{ranks_in_words(others)}"
                )
        if difference := parting({rank: steps for rank, (_, _, steps) in reports.items()}):
            yield difference
        silent = f"said nothing for {_PATIENCE_SECONDS:.0f} s: it computes, has exited, or is lost"
        alike = defaultdict[str, list[int]](list)  # ranks by status
        for rank in self._ranks:
            alike[reports[rank][0] if rank in reports else silent].append(rank)
        yield from (f"{ranks_in_words(ranks)}: {status}" for status, ranks in alike.items())
