"""Desync report: where every rank stands, collected when a wait times out.

A thread of each rank looks once a second whether somebody asks (a key in the process group's
own store), and then says what its rank waits for, what it finished last, which exchanges it opened
and the stack of its Python threads.  Nothing of this happens in the step itself.  Told apart are
ranks that wait in an exchange, that are in code outside the wire, that gave up before, that closed
their wire, that exited, and that do not answer: the interpreter of such a rank is held by foreign
code, or its machine is lost.

What a rank of another machine does when no rank is left there cannot be known: it does not answer.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import platform
import queue
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import psutil

from impl.comm.fingerprint import CollectiveLog, Entry, Operation, Parting, Step, parting
from impl.plan.topology import ranks_in_words

_LOOK_SECONDS: Final = 1.0  # between two looks for a question, of 0.3 to 0.6 ms on a busy machine
_PATIENCE_SECONDS: Final = 5.0  # for answers
_FRAMES: Final = 6  # of a stack, the innermost
# Whose inner frames say nothing more.
_OWN: Final = frozenset(
    Path(__file__).parents[1] / name
    for name in (
        "comm/wire.py",
        "comm/exchanges.py",
        "comm/watchdog.py",
        "comm/desync_report.py",
        "transport/shared_memory.py",
    )
)
_SHOWN: Final = 3  # exchanges of a rank
_log = logging.getLogger("zeropp")


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str, /) -> None:
        """Publish a value."""

    def get(self, key: str, /) -> bytes:
        """A published value."""

    def add(self, key: str, value: int, /) -> int:
        """Count up and return the count."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are published."""


class Work(Protocol):
    """What is used of a collective under way."""

    def is_completed(self) -> bool:
        """Whether it has ended."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one rank says about itself.

    Attributes:
        waiting: the exchange, or in words what else, that it waits for; None in code outside the wire.
        finished: the exchange received last.
        steps: its last exchanges, oldest first.
        stacks: of the thread that made the wire, and of that which used it last if it is another;
            innermost frame last.
        gave_up: whether it has raised; then all else is of that moment.
        closed: whether its wire was closed.
        gone: ranks of its machine that have exited.
    """

    waiting: Step | str | None
    finished: Step | None
    steps: Sequence[Step]
    stacks: Sequence[Sequence[str]]
    gave_up: bool = False
    closed: bool = False
    gone: Sequence[int] = ()

    def to_json(self) -> str:
        """For the store: every operation once, and the steps by number."""
        operations = list(dict.fromkeys(step.operation for step in self.steps))
        place = {operation: index for index, operation in enumerate(operations)}
        return json.dumps(
            {
                "waiting": self.waiting,
                "finished": self.finished,
                "operations": operations,
                "steps": [(step.number, place[step.operation], step.fingerprint) for step in self.steps],
                "stacks": self.stacks,
                "gave_up": self.gave_up,
                "closed": self.closed,
                "gone": self.gone,
            }
        )

    @classmethod
    def from_json(cls, text: bytes) -> Answer:
        """What :meth:`to_json` wrote on another rank."""
        told: dict[str, Any] = json.loads(text)
        operations = [Operation(*fields) for fields in told["operations"]]
        waiting = told["waiting"]
        return cls(
            waiting if waiting is None or isinstance(waiting, str) else _step(waiting),
            None if told["finished"] is None else _step(told["finished"]),
            [Step(number, operations[index], mark) for number, index, mark in told["steps"]],
            told["stacks"],
            told["gave_up"],
            told["closed"],
            told["gone"],
        )


def _step(told: Sequence[Any]) -> Step:
    number, fields, fingerprint = told
    return Step(number, Operation(*fields), fingerprint)


class DesyncReporter:
    """Answers for this rank, and asks the others.

    Wires are told apart by their number on each rank, so all ranks must make theirs in one order.

    Args:
        store: shared by all ranks; used from a thread of its own.
        rank: this one.
        world: how many there are.
        trail: of this rank.
        timeout: seconds after which an exchange that was handed over with :meth:`follow` is overdue.
    """

    def __init__(
        self, store: Store, rank: int, world: int, collective_log: CollectiveLog, timeout: float
    ) -> None:
        self._store, self._rank, self._world, self._collective_log = store, rank, world, collective_log
        self._timeout = timeout
        self._mark = f"zeropp/{store.add(f'zeropp/wires/{rank}', 1)}"
        self._made_by = threading.get_ident()
        self._last: Answer | None = None  # when this rank gave up
        self._who: dict[int, tuple[str, int]] = {}  # machine and process of each rank, as far as known
        self._followed: deque[tuple[float, Entry, Sequence[Work]]] = deque()
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()  # may be put to while collecting garbage
        store.set(f"{self._mark}/who/{rank}", json.dumps((_machine(), psutil.Process().pid)))
        self._thread = threading.Thread(target=self._answer_questions, daemon=True, name="desync report")
        self._thread.start()
        _running.add(self)

    def follow(self, entry: Entry, works: Sequence[Work]) -> None:
        """Say so in the log, once, if ``works`` are not complete in time.

        For a device: the host does not wait there, and so nothing can be raised.
        """
        self._followed.append((time.monotonic() + self._timeout, entry, works))

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

    def give_up(self) -> None:
        """From now on this rank answers that it gave up here; also after its wire is closed."""
        self._last = replace(self._answer(), gave_up=True)

    def ask(self) -> dict[int, Answer | str]:
        """Where every rank stands: what it answers, or in words why it does not.

        Takes up to 5 s; ends at once when all have answered or exited.

        Raises:
            RuntimeError: where the store cannot be reached.
        """
        number = self._store.add(f"{self._mark}/asks", 1)
        self._store.set(f"{self._mark}/ask/{number}", str(self._rank))
        found: dict[int, Answer | str] = {self._rank: self._answer()}
        missing = set(range(self._world)) - set(found)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                told = self._read(f"say/{number}/{rank}") or self._read(f"last/{rank}")
                if told is not None:
                    found[rank] = told
            for rank in self.exited(missing - set(found)):
                found[rank] = "has exited"
            missing -= set(found)
            time.sleep(0.02)
        gone = {rank for told in found.values() if isinstance(told, Answer) for rank in told.gone}
        for rank in missing:
            silent = f"did not answer within {_PATIENCE_SECONDS:.0f} s"
            found[rank] = "has exited" if rank in gone else silent
        return dict(sorted(found.items()))

    def end(self, *, join: bool = True) -> None:
        """Stop answering; what this rank did last stays to be read."""
        self._end.put(None)
        if join and threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE_SECONDS)

    def _read(self, key: str) -> Answer | None:
        key = f"{self._mark}/{key}"
        return Answer.from_json(self._store.get(key)) if self._store.check([key]) else None

    def _answer(self) -> Answer:
        if self._last is not None:
            return self._last
        collective_log = self._collective_log
        waiting, finished = collective_log.waiting, collective_log.finished
        frames = sys._current_frames()  # noqa: SLF001  # documented in spite of its name
        threads = dict.fromkeys((self._made_by, collective_log.thread))
        return Answer(
            Step(*waiting) if isinstance(waiting, tuple) else waiting,
            None if finished is None else Step(*finished),
            collective_log.steps(),
            [_stack(frames[thread]) for thread in threads if thread in frames],
            gone=self.exited(set(range(self._world)) - {self._rank}),
        )

    def _answer_questions(self) -> None:
        """What the thread does, until the wire is closed or the store is gone."""
        answered = 0
        with contextlib.suppress(RuntimeError):  # the store's: its host has exited, and this rank will
            while not self._ended():
                self._report_overdue()
                while self._store.check([f"{self._mark}/ask/{answered + 1}"]):
                    answered += 1
                    self._store.set(f"{self._mark}/say/{answered}/{self._rank}", self._answer().to_json())
            last = replace(self._answer(), closed=True)
            self._store.set(f"{self._mark}/last/{self._rank}", last.to_json())

    def _ended(self) -> bool:
        try:
            self._end.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            return False
        return True

    def _report_overdue(self) -> None:
        while self._followed and all(work.is_completed() for work in self._followed[0][2]):
            self._followed.popleft()
        if self._followed and time.monotonic() > self._followed[0][0]:
            _, entry, _ = self._followed[0]
            self._followed.clear()  # the later ones wait for it
            _log.error(
                "rank %d: exchange %s is not complete after %g s\n%s",
                *(self._rank, Step(*entry), self._timeout, report(self.ask())),
            )


_running: weakref.WeakSet[DesyncReporter] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that is inside the store when the interpreter ends would abort the process."""
    for desync_reporter in list(_running):
        desync_reporter.end()


def report(answers: Mapping[int, Answer | str]) -> str:
    """Where the ranks stand, and where their orders part, as lines of text.

    Args:
        answers: what :meth:`DesyncReporter.ask` found.
    """
    known = {rank: told for rank, told in answers.items() if isinstance(told, Answer)}
    parted = parted_at(answers)
    alike: dict[tuple[str, ...], list[int]] = {}  # ranks by what is said of them
    for rank, told in answers.items():
        if isinstance(told, str):
            lines = [told]
        else:
            lines = [_doing(told), *(f"    opened {step}" for step in told.steps[-_SHOWN:])]
            if told.finished is not None:
                lines.append(f"    finished last: {told.finished}")
            if told.waiting is None and not parted and (ahead := _next(rank, known)):
                lines.append(f"    next: {ahead}")
            for stack in told.stacks if told.gave_up or not told.closed else ():
                lines += ["    its stack, innermost last:", *(f"        {frame}" for frame in stack)]
        alike.setdefault(tuple(lines), []).append(rank)
    lines = [str(parted)] if parted else []
    for (first, *rest), ranks in alike.items():
        lines += [f"{ranks_in_words(ranks)}: {first}", *rest]
    return "\n".join(lines)


def parted_at(answers: Mapping[int, Answer | str]) -> Parting | None:
    """Where the orders of the ranks part, if they do."""
    return parting({rank: told.steps for rank, told in answers.items() if isinstance(told, Answer)})


def _doing(told: Answer) -> str:
    count = told.steps[-1].number if told.steps else 0
    what = f"exchange {told.waiting}" if isinstance(told.waiting, Step) else told.waiting
    if told.gave_up:
        return f"gave up waiting for {what}" if what else f"gave up after {count} exchanges"
    if told.closed:
        return f"closed its wire after {count} exchanges"
    return f"waits for {what}" if what else f"in code outside the wire, after {count} exchanges"


def _next(rank: int, known: Mapping[int, Answer]) -> str | None:
    """What ``rank`` has still to open, as those who are ahead of it opened it."""
    steps = known[rank].steps
    number = steps[-1].number + 1 if steps else 1
    for told in known.values():
        for step in told.steps:
            if step.number == number:
                ahead = [r for r, told in known.items() if step in told.steps]
                return f"{step}, as {ranks_in_words(ahead)} opened it"
    return None


def _stack(frame: Any) -> list[str]:
    frames = traceback.extract_stack(frame)
    own = [Path(f.filename) in _OWN for f in frames]
    while own[-2:] == [True, True]:
        own.pop()
        frames.pop()
    return [f"{f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames[-_FRAMES:]]


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
