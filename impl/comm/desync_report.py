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
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from impl.comm.fingerprint import CollectiveLog, Operation, Step, parting, told
from impl.plan.topology import ranks_in_words

_LOOK_SECONDS: Final = 1.0  # between two looks for a question, of 0.3 to 0.6 ms on a busy machine
_PATIENCE_SECONDS: Final = 5.0  # for answers
_FRAMES: Final = 6  # of a stack, the innermost
_SHOWN: Final = 3  # exchanges of a rank
_OWN: Final = frozenset(Path(__file__).parents[1] / room for room in ("comm", "transport"))
_log = logging.getLogger("zeropp")


class Answer(NamedTuple):
    """What one rank says about itself, or what is known of it.

    Attributes:
        says: lines, of which the first tells what it does.
        stack: lines, of the thread that made the wire, and of that which used it last if it is another.
        steps: its last exchanges, oldest first.
        gone: ranks of its machine that have exited.
        computes: whether it waits for nobody, and may have an exchange still to open.
    """

    says: Sequence[str]
    stack: Sequence[str] = ()
    steps: Sequence[Step] = ()
    gone: Sequence[int] = ()
    computes: bool = False


class DesyncReporter:
    """Answers for this rank, and asks the others.

    Wires are told apart by their number on each rank, so all ranks must make theirs in one order.

    Args:
        store: shared by all ranks; used from a thread of its own.
        timeout: seconds after which an exchange that was handed over with :meth:`follow` is overdue.
    """

    def __init__(
        self, store: Store, rank: int, world: int, collective_log: CollectiveLog, timeout: float
    ) -> None:
        self._store, self._rank, self._collective_log = store, rank, collective_log
        self._others = set(range(world)) - {rank}
        self._timeout = timeout
        self._mark = f"zeropp/{store.add(f'zeropp/wires/{rank}', 1)}"
        self._made_by = threading.get_ident()
        self._last: Answer | None = None  # when this rank gave up
        self._who: dict[int, tuple[str, int]] = {}  # machine and process of each rank, as far as known
        self._followed: deque[tuple[float, Step, Sequence[dist.Work]]] = deque()
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()  # may be put to while collecting garbage
        store.set(f"{self._mark}/who/{rank}", json.dumps((_machine(), psutil.Process().pid)))
        self._thread = threading.Thread(target=self._answer_questions, daemon=True, name="desync report")
        self._thread.start()
        _running.add(self)

    def follow(self, step: Step, works: Sequence[dist.Work]) -> None:
        """Say so in the log, once, if ``works`` are not complete in time.

        For a device: the host does not wait there, and so nothing can be raised.
        """
        self._followed.append((time.monotonic() + self._timeout, step, works))

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
        self._last = self._answer(gave_up=True)

    def ask(self) -> dict[int, Answer]:
        """Where every rank stands.

        Takes up to 5 s; ends at once when all have answered or exited.

        Raises:
            RuntimeError: where the store cannot be reached.
        """
        number = self._store.add(f"{self._mark}/asks", 1)
        self._store.set(f"{self._mark}/ask/{number}", str(self._rank))
        found, missing = {self._rank: self._answer()}, set(self._others)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                for key in (f"{self._mark}/say/{number}/{rank}", f"{self._mark}/last/{rank}"):
                    if rank not in found and self._store.check([key]):
                        found[rank] = _answer_in(self._store.get(key))
            found |= dict.fromkeys(self.exited(missing - set(found)), Answer(["has exited"]))
            missing -= set(found)
            time.sleep(0.02)
        gone = {rank for answer in found.values() for rank in answer.gone}
        for rank in missing:
            silent = f"did not answer within {_PATIENCE_SECONDS:.0f} s"
            found[rank] = Answer(["has exited" if rank in gone else silent])
        return dict(sorted(found.items()))

    def end(self, *, join: bool = True) -> None:
        """Stop answering; what this rank did last stays to be read."""
        self._end.put(None)
        if join and threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE_SECONDS)

    def _answer(self, *, gave_up: bool = False, closed: bool = False) -> Answer:
        """Where this rank stands now, or stood when it gave up."""
        if self._last is not None:
            return self._last
        log = self._collective_log
        finished, steps, after = log.finished, log.steps(), f"after {log.count} exchanges"
        now = log.waiting  # read once: the rank goes on meanwhile
        waiting = f"exchange {told(now)}" if isinstance(now, tuple) else now
        if closed:
            does = f"closed its wire {after}"
        elif waiting is not None:
            does = f"{'gave up waiting' if gave_up else 'waits'} for {waiting}"
        else:
            does = f"{'gave up' if gave_up else 'in code outside the wire,'} {after}"
        says = [does, *(f"    opened {told(step)}" for step in steps[-_SHOWN:])]
        if finished is not None:
            says.append(f"    finished last: {told(finished)}")
        stack: list[str] = []
        frames = sys._current_frames()  # noqa: SLF001  # documented in spite of its name
        for thread in dict.fromkeys((self._made_by, log.thread)):
            if thread in frames and not closed:
                stack += ["    its stack, innermost last:", *_stack(frames[thread])]
        return Answer(says, stack, steps, self.exited(self._others), waiting is None)

    def _answer_questions(self) -> None:
        """What the thread does, until the wire is closed or the store is gone."""
        answered = 0
        with contextlib.suppress(RuntimeError):  # the store's: its host has exited, and this rank will
            while not self._ended():
                self._report_overdue()
                while self._store.check([f"{self._mark}/ask/{answered + 1}"]):
                    answered += 1
                    self._store.set(f"{self._mark}/say/{answered}/{self._rank}", json.dumps(self._answer()))
            self._store.set(f"{self._mark}/last/{self._rank}", json.dumps(self._answer(closed=True)))

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
            _, step, _ = self._followed[0]
            self._followed.clear()  # the later ones wait for it
            _log.error(
                "rank %d: exchange %s is not complete after %g s\n%s",
                *(self._rank, told(step), self._timeout, report(self.ask())),
            )


_running: weakref.WeakSet[DesyncReporter] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that is inside the store when the interpreter ends would abort the process."""
    for desync_reporter in list(_running):
        desync_reporter.end()


def report(answers: Mapping[int, Answer]) -> str:
    """Where the ranks stand, and where their orders part, as lines of text.

    Args:
        answers: what :meth:`DesyncReporter.ask` found.
    """
    parted = parting({rank: answer.steps for rank, answer in answers.items()})
    alike: dict[tuple[str, ...], list[int]] = {}  # ranks by what is said of them
    for rank, answer in answers.items():
        lines = list(answer.says)
        if answer.computes and parted is None:  # what it has still to open, as those ahead of it opened it
            number = answer.steps[-1][0] + 1 if answer.steps else 1
            ahead = {r: step for r, other in answers.items() for step in other.steps if step[0] == number}
            if ahead:
                step = next(iter(ahead.values()))
                lines.append(f"    next: {told(step)}, as {ranks_in_words(list(ahead))} opened it")
        alike.setdefault((*lines, *answer.stack), []).append(rank)
    said = [] if parted is None else [parted]
    for (first, *rest), ranks in alike.items():
        said += [f"{ranks_in_words(ranks)}: {first}", *rest]
    return "\n".join(said)


def _answer_in(text: bytes) -> Answer:
    """What another rank wrote to the store."""
    answer = Answer(*json.loads(text))
    return answer._replace(
        steps=[(number, Operation(*fields), mark) for number, fields, mark in answer.steps]
    )


def _stack(frame: FrameType) -> list[str]:
    """Lines of text; of the inner frames that say nothing more, one."""
    frames = traceback.extract_stack(frame)
    while [Path(f.filename).parent in _OWN for f in frames[-2:]] == [True, True]:
        frames.pop()
    return [f"        {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames[-_FRAMES:]]


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
