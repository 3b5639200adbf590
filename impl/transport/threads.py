"""Runs ranks as threads of one process, one rank at a time, and hands their messages over in memory.

[Note: one rank at a time]
A rank runs until it has to wait for a message that another rank has not sent yet.  Then it passes the turn to a
rank that can go on.  This has four consequences:

* Ranks do not compete for processors or for Python's global lock.  So 128 ranks take 128 times as long as one rank, but
  not longer.
* Torch's random generators exist once in a process.  Their states are exchanged when the turn passes, so each rank
  has states of its own.  Dropout and initial weights are therefore the same as with ranks that are processes.
* A rank needs no lock to read what other ranks have written, because no other rank runs at that time.
* If no rank can go on, then the ranks have made different calls, or a rank has ended early.  This module sees that at
  once, and raises an error.  Therefore a wait needs no time limit, and has none.  (A rank may wait for long: with 128
  ranks, until the 127 others have computed one after the other.)

A message is not copied.  The ranks of a group that take part in an exchange share one tensor with a row for each
rank.  A rank encodes straight into its own row, and the other ranks read this row in place (:class:`Arena`).  The
tensor is used for another exchange once all ranks of the group have read it.  On a GPU all ranks share one device.  If
ranks enqueue work on different streams, the stream of a rank waits for the streams of the other ranks before it reads
their rows.

torch.distributed has no part in this: thread ranks have no process groups.  :class:`ThreadStore` takes the place of
the rendezvous' store.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from impl.policy.topology import ranks_in_words

_GRACE_SECONDS: Final = 5.0  # how long threads that are to end may take to do so
_LOOK_SECONDS: Final = 0.5  # between two looks at how long a rank has had its turn
_STACK_LINES: Final = 3  # innermost frames in the error about a rank that does not pass its turn
T = TypeVar("T")
here = threading.local()  # its attribute ``rank`` is the ThreadRank that runs in this thread


class ThreadRankError(RuntimeError):
    """Raised if ranks that are threads cannot start or go on; the message says why, and names the rank if possible."""


class TurnError(ThreadRankError):
    """Raised if a rank that is a thread has run for too long without waiting, so that no other rank could run.

    ``where`` names the functions that the rank runs, the innermost first.
    """

    def __init__(self, rank: int, seconds: float, where: str) -> None:
        self.rank, self.seconds, self.where = rank, seconds, where
        super().__init__(
            f"rank {rank} has run for {seconds:.3g} s without waiting for a message, in {where}; other ranks run only "
            "while it waits: raise timeout= if it computes that long"
        )


class Stopped(BaseException):  # no error of the rank, and not to be caught as one
    """Raised in the thread of a rank to end it, because the run has failed.

    The run fails if another rank raises an error, if a rank runs for too long (:class:`TurnError`), or if the caller is
    interrupted.
    """


def current() -> ThreadRank | None:
    """Return the rank that runs in this thread, or None if no rank runs in this thread."""
    return getattr(here, "rank", None)


class Event:
    """Something for which ranks wait, such as the last message of an exchange; it happens at most once."""

    __slots__ = ("happened", "waiting")

    def __init__(self) -> None:
        self.happened = False
        self.waiting: list[ThreadRank] = []  # ranks that may go on once the event has happened


class ThreadRank:
    """One rank that runs as a thread, and lets other ranks run while it waits; :class:`ThreadWorld` constructs it."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world, self.rank = world, rank
        self.turn = threading.Lock()  # released to give this rank the turn
        self.turn.acquire()
        self.patience = 0.0  # the argument ``patience`` of the last call of wait()
        self.generators: list[Tensor] = []  # states of torch's generators while other ranks run
        # For each group, given by its ranks: how many arenas this rank has constructed.
        self.arenas: Counter[tuple[int, ...]] = Counter()
        self.shared = 0  # how often this rank has called share()

    def wait(self, event: Event, patience: float = math.inf) -> bool:
        """Let other ranks run until ``event`` has happened, and return True; return False if it can never happen.

        The event can never happen if every rank either has ended or is waiting.  Then the waiting ranks with the
        largest ``patience`` get False and go on, and the other ranks keep waiting.  ``patience`` is a number of
        seconds, but no time is measured: the number only decides which ranks give up first.

        A rank that waits for a message has a large patience, so it gets False first, and reports an error.  A rank that
        waits for the error reports of other ranks has a small patience, so it is still waiting when the report comes.
        """
        self.world.check()
        if not event.happened:
            event.waiting.append(self)
            self.patience = patience
            self.world.pass_turn(self)
            if not event.happened:
                event.waiting.remove(self)
        return event.happened

    def share(self, value: T) -> list[T]:
        """Exchange values between all ranks: return the ``value`` of every rank, in rank order.

        All ranks must call this equally often: the n-th calls of all ranks exchange values with one another.  The
        values are handed over without a copy, so nobody may change them afterwards.

        Raises:
            ThreadRankError: if another rank never makes its call.
        """
        number = self.shared = self.shared + 1
        gathered = self.world.shares.setdefault(number, _Shared())
        gathered.values[self.rank] = value
        if len(gathered.values) == self.world.size:
            del self.world.shares[number]
            self.world.happen(gathered.event)
        if not self.wait(gathered.event):
            missing = [rank for rank in range(self.world.size) if rank not in gathered.values]
            raise ThreadRankError(
                f"rank {self.rank} waits for {ranks_in_words(missing)} in a call that all ranks must make, and no rank "
                "can go on: make the same calls on all ranks"
            )
        return [gathered.values[rank] for rank in range(self.world.size)]


@dataclass(slots=True, eq=False)
class _Shared:
    """The values that ranks have passed to one call of :meth:`ThreadRank.share`."""

    values: dict[int, Any] = field(default_factory=dict)  # by rank
    event: Event = field(default_factory=Event)  # happens when all ranks have passed a value


class ThreadWorld:
    """All ranks that run as threads of one process; each object can be used for only one call of :meth:`run`.

    Args:
        size: number of ranks.
        device: the device of all ranks: the CPU or one GPU.
        timeout: seconds for which a rank may run without waiting for a message.  After this time the run fails with a
            :class:`TurnError`.  The waits themselves have no limit.
    """

    def __init__(self, size: int, device: torch.device, timeout: float) -> None:
        self.size, self.device, self._timeout = size, device, timeout
        self.ranks = [ThreadRank(self, rank) for rank in range(size)]
        self.store = ThreadStore(self)
        # The calls of share() that some ranks have not made yet, by number of the call.
        self.shares: dict[int, _Shared] = {}
        self.arenas: dict[tuple[tuple[int, ...], int], _Rounds] = {}  # by ranks and number of the arena
        # Finished exchanges, whose tensors later exchanges use again, by bytes of the tensor.
        self.free: dict[int, list[_Round]] = defaultdict(list)
        self._ready = deque(self.ranks)  # ranks that can go on, in the order in which they get the turn
        # Ranks that cannot go on, in the order in which they stopped.
        self._waiting: dict[ThreadRank, None] = {}
        self._running: ThreadRank | None = None
        self._since = 0.0  # time.monotonic() when the running rank got its turn
        self._left = size  # number of ranks that have not ended
        self._ended = threading.Event()  # set when all ranks have ended, or when the run has failed
        self._failure: BaseException | None = None
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index])

    def run(self, body: Callable[[ThreadRank], T]) -> list[T]:
        """Run ``body(rank)`` on every rank, and return the results in rank order.

        Every rank begins with the state that torch's random generators have when this method is called.

        Raises:
            ThreadRankError: if a rank runs for longer than the timeout without waiting for a message.
            BaseException: the first error that a rank raises, with a note that names the rank.
        """
        results: list[Any] = [None] * self.size
        before = self._states()

        def main(rank: ThreadRank) -> None:
            here.rank = rank
            rank.turn.acquire()
            try:
                self.check()
                self._restore(rank.generators)
                results[rank.rank] = body(rank)
            except Stopped:
                pass
            except BaseException as error:  # raised again by the thread that called run()
                if self._failure is None:
                    error.add_note(f"raised on rank {rank.rank} of {self.size} ranks that are threads")
                self.stop(error)
            finally:
                self._end()

        threads = [
            threading.Thread(target=main, args=(rank,), name=f"rank {rank.rank}", daemon=True)
            for rank in self.ranks
        ]
        for rank, thread in zip(self.ranks, threads, strict=True):
            rank.generators = before
            thread.start()
        self._give_turn()
        try:
            while not self._ended.wait(_LOOK_SECONDS):
                self._look(threads)
        except BaseException as error:  # Ctrl-C
            self.stop(error)
        deadline = time.monotonic() + _GRACE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._restore(before)
        if self._failure is not None:
            raise self._failure
        return results

    def check(self) -> None:
        """Raise :class:`Stopped` if the run has failed, so that this rank ends."""
        if self._failure is not None:
            raise Stopped

    def stop(self, error: BaseException) -> None:
        """Make the run fail with ``error``.

        Waiting ranks end at once.  The running rank ends when it next waits or sends.
        """
        if self._failure is None:
            self._failure = error
        self._ended.set()
        for rank in self.ranks:
            with suppress(RuntimeError):  # raised if the rank has its turn already
                rank.turn.release()

    def happen(self, event: Event) -> None:
        """Mark ``event`` as happened; the ranks that wait for it go on, each when its turn comes."""
        event.happened = True
        for rank in event.waiting:
            if rank in self._waiting:  # otherwise the rank has given up, and its turn has still to come
                del self._waiting[rank]
                self._ready.append(rank)
        event.waiting.clear()

    def pass_turn(self, rank: ThreadRank) -> None:
        """Let other ranks run, and return when ``rank`` gets its turn again.

        ``rank`` gets its turn after the event for which it waits has happened.  ``rank`` also gets its turn if no rank
        can go on, and :meth:`_give_turn` makes ``rank`` give up its wait.

        Raises :class:`Stopped` if the run has failed meanwhile.
        """
        rank.generators = self._states()
        self._waiting[rank] = None
        self._give_turn()
        rank.turn.acquire()
        self.check()
        self._restore(rank.generators)

    def _give_turn(self) -> None:
        """Give the turn to the next rank that can go on.

        If no rank can go on, the waiting ranks with the largest patience (an argument of :meth:`ThreadRank.wait`) give
        up their wait, and get the turn one after the other.
        """
        if not self._ready:
            most = max(rank.patience for rank in self._waiting)
            self._ready.extend(rank for rank in self._waiting if rank.patience == most)
            for rank in self._ready:
                del self._waiting[rank]
        self._running, self._since = self._ready.popleft(), time.monotonic()
        with suppress(RuntimeError):  # raised if all ranks were stopped meanwhile
            self._running.turn.release()

    def _end(self) -> None:
        """Record that the running rank has ended, and give the turn to another rank if there is one."""
        self._left -= 1
        self._running = None
        if self._failure is None and self._left:
            self._give_turn()
        else:
            self._ended.set()

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _restore(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _look(self, threads: Sequence[threading.Thread]) -> None:
        """End all ranks if the running rank has had its turn for longer than the timeout.

        ``threads`` are the threads of all ranks, in rank order.
        """
        rank, seconds = self._running, time.monotonic() - self._since
        if rank is None or seconds < self._timeout:
            return
        frame = sys._current_frames().get(threads[rank.rank].ident or 0)  # noqa: SLF001  # as faulthandler shows
        frames = traceback.extract_stack(frame)[-_STACK_LINES:] if frame is not None else []
        where = ", called from ".join(f"{each.name} ({each.filename}:{each.lineno})" for each in frames[::-1])
        self.stop(TurnError(rank.rank, seconds, where or "?"))


@dataclass(slots=True, eq=False)
class ThreadStore:
    """A key-value store for ranks that are threads, with the methods of torch's ``Store`` that the project uses.

    While a rank waits for a key, other ranks run.
    """

    world: ThreadWorld
    prefix: str = ""  # put before each key that a method is given
    _values: dict[str, bytes] = field(default_factory=dict)
    _awaited: dict[str, list[_Awaited]] = field(default_factory=lambda: defaultdict(list))

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of ``key``."""
        self.world.check()
        self._set(self.prefix + key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Wait until ``key`` is set, and return its value.

        Raises a RuntimeError if no rank can go on, so that the key is never set (:meth:`wait`).
        """
        self.wait([key])
        return self._values[self.prefix + key]

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number under ``key``, and return the sum; a missing key counts as 0."""
        total = int(self._values.get(self.prefix + key, b"0")) + amount
        self._set(self.prefix + key, str(total).encode())
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set ``key`` to ``desired`` if its value is ``expected``; return the value that the key has afterwards.

        A missing key counts as an empty value.
        """
        found = self._values.get(self.prefix + key, b"")
        if found == expected.encode():
            self._set(self.prefix + key, found := desired.encode())
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all ``keys`` are set."""
        return all(self.prefix + key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete ``key``, and return whether it was set."""
        return self._values.pop(self.prefix + key, None) is not None

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta.max) -> None:
        """Wait until all ``keys`` are set.

        Raises a RuntimeError if every rank either has ended or is waiting, because a missing key is then never set.
        The waiting ranks with the longest ``timeout`` get the error first; ``timeout`` has no other effect.  In a
        thread in which no rank runs, a missing key raises the error at once.
        """
        missing = {self.prefix + key for key in keys} - self._values.keys()
        if not missing:
            return
        awaited, rank = _Awaited(missing), current()
        for key in missing:
            self._awaited[key].append(awaited)
        if rank is None or not rank.wait(awaited.event, timeout.total_seconds()):
            raise RuntimeError(
                f"no rank has set {', '.join(sorted(missing))} in the store: make the same calls on all ranks"
            )

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for awaited in self._awaited.pop(key, ()):
            awaited.missing.discard(key)
            if not awaited.missing:
                self.world.happen(awaited.event)


@dataclass(slots=True, eq=False)
class _Awaited:
    """One wait of a rank for keys of the store."""

    missing: set[str]  # the keys that are not set yet
    event: Event = field(default_factory=Event)  # happens when all keys are set


def under(store: Store | ThreadStore, prefix: str) -> Store | ThreadStore:
    """Return a view of ``store`` in which every key is preceded by ``prefix`` and a slash."""
    if isinstance(store, ThreadStore):
        return replace(store, prefix=f"{store.prefix}{prefix}/")
    return PrefixStore(prefix, store)


@dataclass(slots=True, eq=False)
class _Round:
    """One exchange of a group: a tensor with the messages of all ranks, and a record of who has written and read it.

    On a GPU, a rank that has written to the tensor, or read it, records an event on its stream.  Other ranks' streams
    wait for these events before they read the tensor, or write to it again.
    """

    whole: Tensor  # (ranks, bytes) uint8
    size: int  # number of ranks
    # The mark of each rank that has posted its message, by the rank's index in the group.
    marks: dict[int, int] = field(default_factory=dict)
    event: Event = field(default_factory=Event)  # happens when all ranks have posted
    done: int = 0  # number of ranks that have read all messages
    # The events that ranks recorded after they had read this tensor in the exchange that used it before.
    before: list[torch.cuda.Event] = field(default_factory=list)
    written: list[torch.cuda.Event] = field(default_factory=list)  # after each rank's write of its row
    read: list[torch.cuda.Event] = field(default_factory=list)  # after each rank's reads


_Rounds = dict[int, _Round]  # by number of the exchange in its arena


class Arena:
    """Lets one rank that is a thread exchange messages with a group of ranks, in memory that all of them share.

    Each rank of the group constructs an arena of its own, and the ranks exchange messages through these arenas.  If the
    ranks construct several arenas for the same group, all ranks must construct them in the same order.

    Args:
        rank: this rank.
        ranks: the ranks of the group, ascending.
        index: the index of this rank in ``ranks``.
    """

    row_bytes: Final = sys.maxsize  # a message may have any size

    def __init__(self, rank: ThreadRank, ranks: tuple[int, ...], index: int) -> None:
        rank.arenas[ranks] += 1
        self._rank, self._world, self._ranks, self._index = rank, rank.world, ranks, index
        self._rounds = rank.world.arenas.setdefault((ranks, rank.arenas[ranks]), {})
        self._count = 0
        self._cuda = rank.world.device.type == "cuda"

    def claim(self) -> int:
        """Begin the next exchange, and return its number, counted from 1."""
        self._world.check()
        self._count += 1
        return self._count

    def row(self, number: int, nbytes: int) -> Tensor:
        """Return this rank's row of exchange ``number``: memory (nbytes,) uint8 into which it writes its message.

        If another rank has begun this exchange with messages of another size, the ranks have made different calls.  The
        result is then memory that no other rank reads, and :meth:`agree` returns False.
        """
        if (found := self._rounds.get(number)) is None:
            found = self._rounds[number] = self._fresh(nbytes)
        if found.whole.shape[1] != nbytes:  # the ranks' exchanges differ, which agree() finds
            return torch.empty(nbytes, dtype=torch.uint8, device=self._world.device)
        for event in found.before:
            event.wait()
        return found.whole[self._index]

    def post(self, number: int, mark: int) -> None:
        """Announce that this rank has written its row of exchange ``number``.

        ``mark`` is a 64-bit fingerprint of all exchanges that this rank has started, up to this one.  :meth:`agree`
        compares the marks of all ranks, to find ranks that have made different calls.
        """
        self._world.check()
        found = self._rounds[number]
        found.marks[self._index] = mark
        if self._cuda:
            found.written.append(torch.cuda.current_stream(self._world.device).record_event())
        if len(found.marks) == found.size:
            self._world.happen(found.event)

    def wait(self, number: int) -> Tensor:
        """Wait until all ranks of the group have posted, and return their rows.

        The rows are a tensor (ranks, bytes) uint8, which is valid until this rank calls :meth:`done`.

        Raises:
            TimeoutError: if a rank never posts, because no rank can go on.
        """
        found = self._rounds[number]
        if not self._rank.wait(found.event):
            late = [rank for index, rank in enumerate(self._ranks) if index not in found.marks]
            raise TimeoutError(f"no rank can go on: {ranks_in_words(late)} did not send")
        for event in found.written:
            event.wait()
        return found.whole

    def agree(self, number: int, mark: int) -> bool:
        """Return whether every rank's mark in exchange ``number`` equals ``mark``; to be called after :meth:`wait`.

        A mark is a fingerprint of the exchanges that a rank has started (:meth:`post`).  If marks differ, the ranks
        have made different calls.
        """
        marks = list(self._rounds[number].marks.values())
        return marks.count(mark) == len(marks)

    def done(self, number: int) -> None:
        """Announce that this rank has read the rows of exchange ``number`` and will not read them again."""
        found = self._rounds[number]
        found.done += 1
        if self._cuda:
            found.read.append(torch.cuda.current_stream(self._world.device).record_event())
        if found.done == found.size:
            del self._rounds[number]
            self._world.free[found.whole.numel()].append(found)

    def _fresh(self, nbytes: int) -> _Round:
        """Return a new exchange whose messages have ``nbytes`` bytes each.

        The exchange takes over the tensor of a finished exchange of the same size.  If there is none, it gets a new
        tensor.
        """
        size = len(self._ranks)
        if free := self._world.free[size * nbytes]:
            last = free.pop()
            return _Round(last.whole.view(size, nbytes), size, before=last.read)
        with torch.inference_mode(mode=False):  # the tensor will outlive a pass in inference mode
            whole = torch.empty(size, nbytes, dtype=torch.uint8, device=self._world.device)
        return _Round(whole, size)
