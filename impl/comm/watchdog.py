"""Turns a wait that fails into an error that says what every rank was waiting for.

An exchange is one collective.  A rank whose wait for an exchange fails writes a report to the group's key-value store:
what it waited for, and which exchanges it has started.  It then gives the other ranks some seconds to do the same, and
builds its error from all reports.  A rank that reports nothing is computing, has exited, or is lost.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar

import torch
from torch.distributed.distributed_c10d import Store

from impl.comm.fingerprint import CollectiveLog, Step, label, parting
from impl.comm.ledger import ACROSS, WAITING, WITHIN, Timeline
from impl.comm.mesh import Mesh
from impl.policy.topology import ranks_in_words
from impl.transport.shared_memory import SharedMemoryError
from impl.transport.side_stream import Arrival
from impl.transport.threads import ThreadStore, under

ORDER_CHECK: Final = "check_order()"  # the name of :meth:`impl.comm.wire.Wire.check_order` in errors
_PATIENCE_SECONDS: Final = 5.0  # how long a rank waits for the other ranks' reports
T = TypeVar("T")
DIFFER: Final = "found that the ranks' exchanges differ"


class WireError(RuntimeError):
    """Raised if a wire cannot be made, or if messages cannot be sent or did not arrive.

    After a failed wait, the text of the error says what each rank was waiting for.
    """


@dataclass(slots=True, eq=False)
class _Mark:
    """Marks a call of :meth:`Watchdog.mark_exposed` in the queue of the device's waits for messages.

    The queue has the waits that the device has not finished.  The waits before the mark count towards the result of
    ``mark_exposed()``, since they were queued before the call.  The waits after the mark do not count.
    """

    # the exposed seconds before this moment; None until the device has finished all waits before it
    seconds: float | None = None


class Watchdog:
    """Logs this rank's exchanges, times its waits, and collects the other ranks' reports when a wait fails.

    Each rank numbers its watchdogs in the order in which it constructs them.  A watchdog reads the reports of the other
    ranks' watchdogs with the same number, so all ranks must construct their watchdogs in the same order.

    Args:
        mesh: the ranks.
        streams: True if the device's current stream waits for messages, as with NCCL; False if the host waits.
    """

    def __init__(self, mesh: Mesh, *, streams: bool = False) -> None:
        self.collective_log, self._waited = CollectiveLog(), 0.0
        self.carried = 0  # bytes that the transports have sent to other ranks
        self.paused = False  # whether the current stream is a side stream, whose waits delay no computation
        self.timeline: Timeline | None = None  # records messages and waits, if it is set
        self._rank, self._ranks, self._streams = mesh.rank, range(mesh.topology.world), streams
        self._counting = mesh.counting
        # Whether waits of the device's stream are timed, for which the host records an event before each wait.  Waits
        # are timed only after exposed seconds were first asked for, so that other loops do not pay for it.
        self._timed = False
        # The waits of the device's stream that have not been added to ``_waited`` yet, each as the events at its
        # beginning and its end, with marks between the waits.
        self._stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event] | _Mark] = deque()
        self._store: Store | ThreadStore | None = None  # holds the ranks' reports
        self._met: dict[str, int] = defaultdict(int)  # how often this rank has called meet(), by purpose
        if (store := mesh.store()) is not None:
            self._store = under(store, f"zeropp/{store.add(f'zeropp/wires/{mesh.rank}', 1)}")

    @property
    def exposed_seconds(self) -> float:
        """Seconds that this rank has waited for messages.

        If the host waits for messages, this is the time that the host has spent in :meth:`wait`.  If a stream of the
        device waits for messages, as with NCCL, this is the total time of the stream's waits that have ended.  Timing
        costs the host time, so waits of the stream are timed only after this property was first read, or
        :meth:`mark_exposed` was first called.
        """
        self._timed = True
        return self._finished_waits()

    def mark_exposed(self) -> Callable[[], float]:
        """Return a function that returns the exposed seconds up to this call of ``mark_exposed()``.

        Exposed seconds are those in which this rank has waited for messages (:attr:`exposed_seconds`).

        If a stream of the device waits for messages, some waits may not have ended yet.  The returned function raises a
        RuntimeError as long as the device has not finished all waits that were queued before this call.
        """
        self._timed = True
        mark = _Mark()
        self._stalls.append(mark)

        def read() -> float:
            self._finished_waits()
            if mark.seconds is None:
                raise RuntimeError(
                    "the exposed seconds are not known yet, because the device has not passed the point at which "
                    "mark_exposed() was called: call torch.cuda.synchronize() first"
                )
            return mark.seconds

        self._finished_waits()  # on a CPU the waits are known at once
        return read

    def _finished_waits(self) -> float:
        """Add the waits that the device has finished to the exposed seconds, and return the exposed seconds."""
        while self._stalls:
            first = self._stalls[0]
            if isinstance(first, _Mark):
                first.seconds = self._waited
            elif first[0].query() and first[1].query():  # type: ignore[no-untyped-call]
                # An arrival that came before the wait began has delayed nothing.
                self._waited += max(0.0, first[0].elapsed_time(first[1]) / 1e3)
            else:
                break
            self._stalls.popleft()
        return self._waited

    @contextlib.contextmanager
    def stalling(self) -> Iterator[None]:
        """Context that times the waits for messages that its body enqueues on the device's current stream.

        Nothing is timed in three cases:

        - the current stream is a side stream;
        - the body raises an exception;
        - nobody has asked for exposed seconds yet, by :attr:`exposed_seconds` or :meth:`mark_exposed`.
        """
        if self.paused or not self._timed:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._stalls.append((begin, end))
        self._finished_waits()

    def join(self, arrival: Arrival) -> None:
        """Make the current stream wait for ``arrival``, the end of work on a side stream.

        The wait counts as exposed, if waits are timed (:attr:`exposed_seconds`).
        """
        if self._timed and arrival.event is not None:
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            self._stalls.append((begin, arrival.event))
            self._finished_waits()
        arrival.join()
        arrival.joined = True

    def wait(self, step: Step, receive: Callable[[], T], *, across: bool = False) -> T:
        """Call ``receive``, which waits for the messages of the exchange ``step``, and return its result.

        Args:
            step: the exchange's entry in the log.
            receive: waits for the exchange's messages.
            across: whether messages come from other nodes.

        Raises:
            WireError: if ``receive`` raises a RuntimeError or a TimeoutError.
            SharedMemoryError: if ``receive`` raises it; it is raised unchanged.
        """
        begin = time.perf_counter()
        try:
            if self._streams:
                with self.stalling():
                    messages = receive()
            else:
                messages = receive()
                self._waited += time.perf_counter() - begin
        except SharedMemoryError:  # this error says everything already
            raise
        except (RuntimeError, TimeoutError) as error:
            raise self.error(f"could not finish {label(step)}", error, step) from error
        if self.timeline is not None:
            self.timeline.add(WAITING, ACROSS if across else WITHIN, begin)
        return messages

    def meet(self, purpose: str, timeout: float) -> None:
        """Wait until all ranks have called this method with the same ``purpose``.

        If ranks call it several times with the same purpose, the first call of a rank waits for the first calls of the
        others, the second call for the second calls, and so on.

        Raises:
            WireError: if a rank has not called it after ``timeout`` seconds.  Thread ranks have no timeout: they raise
                the error when no rank can go on.
        """
        if (store := self._store) is None:
            return
        number = self._met[purpose] = self._met[purpose] + 1
        keys = [f"meet/{purpose}/{number}/{rank}" for rank in self._ranks]
        try:
            store.set(keys[self._rank], "")
            store.wait(keys, timedelta(seconds=timeout))
        except RuntimeError as error:
            try:
                store.delete_key(keys[self._rank])  # so that a rank that comes later does not go on alone
                missing = [
                    rank for rank in self._ranks if rank != self._rank and not store.check([keys[rank]])
                ]
            except RuntimeError as lost:  # the process that hosts the store has exited
                raise self.error(f"could not finish {purpose}", lost, purpose) from error
            cause = f"waited {timeout:g} s for {ranks_in_words(missing)}"
            if isinstance(store, ThreadStore):  # whose waits have no time limit
                cause = f"waits for {ranks_in_words(missing)}, and no rank can go on"
            raise self.error(f"could not finish {purpose}", cause, purpose) from error

    def error(self, failure: str, cause: object, waiting: Step | str | None = None) -> WireError:
        """Collect the other ranks' reports, and return the error of a rank that cannot go on.

        Args:
            failure: what this rank could not do, such as ``could not finish exchange 3, ...``.
            cause: the error or text that says why.
            waiting: what this rank waits for: the log's entry of an exchange, or the purpose of a call of :meth:`meet`.
                None if the rank does not wait.
        """
        log, in_exchange = self.collective_log, isinstance(waiting, tuple)
        waits_for = label(waiting) if isinstance(waiting, tuple) else waiting
        number, call = (waiting[0], waiting[3]) if isinstance(waiting, tuple) else (log.count + 1, log.call)
        # gloo writes its source line before its first sentence, and advice after it.
        reason = re.sub(r"^\[[^]]*:\d+\] | This is typically.*", "", str(cause).split("\n", 1)[0])
        if call and not in_exchange:  # the label of an exchange names the call already
            failure += f" in {call}"
        if number > log.before_call + 1:
            call = ""  # the first exchange of the call has arrived, so all ranks have made the call
        lines = [f"rank {self._rank} {failure}: {reason}"]
        if self._store is not None:
            try:
                self._write(f"gave up waiting for {waits_for}" if waiting else "gave up", call)
                lines += self._report(self._store)
            except RuntimeError as lost:  # the process that hosts the store has exited
                lines.append(f"the other ranks' reports are missing, because their store is lost ({lost})")
        lines += [self._counting.strip()] if self._counting else []
        return WireError("\n".join(lines))

    def close(self) -> None:
        """Report in the store that this rank has closed its wire, for ranks that may still wait for its messages."""
        with contextlib.suppress(RuntimeError):  # the process that hosts the store may have exited
            self._write(f"closed its wire after {self.collective_log.count} exchanges")

    def _write(self, status: str, call: str = "") -> None:
        """Write this rank's report to the store, where other ranks read it for their errors.

        The report has three parts: ``status`` in words, ``call``, and this rank's last exchanges.  ``call`` is the call
        of the public interface, such as ``save()``, that this rank has made and other ranks may have left out.  It is
        empty if there is no such call.
        """
        if self._store is not None:
            self._store.set(str(self._rank), json.dumps((status, call, [*self.collective_log.steps])))

    def _report(self, store: Store | ThreadStore) -> Iterator[str]:
        """Wait for the other ranks' reports, at most :data:`_PATIENCE_SECONDS`, and yield the lines of an error.

        The lines say which calls only some ranks have made, at which exchange the ranks first differ, and what each
        rank was waiting for.
        """
        with contextlib.suppress(RuntimeError):  # raised if a rank does not report
            store.wait([*map(str, self._ranks)], timedelta(seconds=_PATIENCE_SECONDS))
        reports = {rank: json.loads(store.get(str(rank))) for rank in self._ranks if store.check([str(rank)])}
        called = defaultdict[str, list[int]](list)  # call -> the ranks that are in it
        for rank, (_, call, _) in reports.items():
            called[call].append(rank)
        lines = {
            call: f"all ranks must call {call}: {ranks_in_words(ranks)} did, {ranks_in_words(others)} did not"
            for call, ranks in called.items()
            if call and (others := [rank for rank in self._ranks if rank not in ranks])
        }
        # The engine calls check_order() by itself.  If the ranks' exchanges differ, some ranks may not reach that call.
        # The difference is then the cause, so it is reported before a missing check_order().
        check = lines.pop(ORDER_CHECK, "")
        yield from lines.values()
        if difference := parting({rank: steps for rank, (_, _, steps) in reports.items()}):
            yield difference
        if check:
            yield check
        silent = f"did not report within {_PATIENCE_SECONDS:.0f} s: computing, exited, or lost"
        if isinstance(store, ThreadStore):
            silent = "did not report: it has ended, or waits for something else"
        alike = defaultdict[str, list[int]](list)  # status -> the ranks that report it
        for rank in self._ranks:
            alike[reports[rank][0] if rank in reports else silent].append(rank)
        yield from (f"{ranks_in_words(ranks)}: {status}" for status, ranks in alike.items())
