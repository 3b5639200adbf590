"""Divides one rank's traced step on a CPU into tasks, and finds which task waits for which other task.

A task is a piece of computation or a collective.  It begins when all the tasks that it waits for are done.  The tasks
of the host's main thread, and the tasks of each stream of a GPU, run one after the other.

A task that uses the result of a collective waits for the collective, but a trace does not say which task that is.  The
module finds this task by the first of these rules that applies:

1. ``blocking``: if the operation that issues the collective also waits for it (``asyncOp`` is false), the task is the
   one right after this operation;
2. ``copy-out``: if FSDP copies the gathered weights out of the buffer of an all-gather, the task is the one that does
   this;
3. ``backward``: if the program uses DistributedDataParallel, which waits for all its buckets after the backward pass,
   the task is the one right after this wait;
4. ``gap``: if the main thread was idle until the collective ended, the task is the one right after the idle time;
5. ``optimizer``: otherwise the task is the optimizer's step, which needs all gradients.

For steps on a GPU, :mod:`harness.whatif.device_tasks` applies the rules ``copy-out``, ``gap`` and ``optimizer`` to
kernels.

This module does not import torch.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from harness.errors import Refusal
from harness.whatif.collectives import Collective, Marks, Phase, copies_out
from harness.whatif.kineto import Step, Trace

Rule = Literal["blocking", "copy-out", "backward", "gap", "optimizer", "none"]
_GAP: Final = 150e-6  # seconds without a recorded operation after which a thread counts as waiting
# A waiting thread may continue up to this many seconds before the recorded end of the collective.
_EARLY: Final = 5e-3


@dataclass(slots=True)
class Task:
    """One piece of a rank's step: computation on a thread or stream, or a collective."""

    # Seconds that the task takes on its thread or stream.  For a collective: seconds from its issue to its beginning.
    seconds: float
    after: list[int]  # numbers of the rank's tasks that must be done before this task starts
    collective: int | None = None  # number of the collective that the task runs; None for computation
    earliest: float = -math.inf  # earliest start of the task, in seconds since the step began
    name: str = ""  # what the task computes
    phase: Phase = "forward"  # phase in which the task was issued
    stream: int | None = None  # stream of a GPU; None on the host


@dataclass(slots=True)
class RankStep:
    """One traced step of one rank, divided into tasks."""

    begin: float  # in seconds of the rank's clock
    end: float  # in seconds of the rank's clock
    marks: Marks
    tasks: list[Task] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    # How it was found which task waits for a collective: for each rule, the number of collectives that it applied to.
    rules: Counter[Rule] = field(default_factory=Counter)
    # Stretches of computation before the optimizer's step: (moment, seconds).  The moment is when the host began to
    # compute the stretch or, on a GPU, launched it; it shows to which unit of the model the stretch belongs.
    computed: list[tuple[float, float]] = field(default_factory=list)
    optimizer: float = 0.0  # seconds of the optimizer's step

    def add(self, task: Task) -> int:
        """Append a task and return its number."""
        self.tasks.append(task)
        return len(self.tasks) - 1


def on_host(trace: Trace, step: Step, marks: Marks, collectives: Sequence[Collective]) -> RankStep:
    """Divide a step that computes on the CPU into tasks, and return them as a :class:`RankStep`.

    Args:
        trace: The trace, whose path error messages name.
        step: The traced step.
        marks: When the step's phases and FSDP modules begin.
        collectives: The collectives of the step, in the order in which the host issues them.

    Raises:
        Refusal: if no rule finds the task that waits for a collective.
    """
    result = RankStep(step.begin, step.end, marks, collectives=list(collectives))
    gaps = _gaps(step)
    # Each point is (moment at which the thread issues a collective or begins to wait for it, 0 for an issue or 1 for a
    # wait, index of the collective, end of the wait).
    points = [(collective.issued[0], 0, index, 0.0) for index, collective in enumerate(collectives)]
    last_issue = max((one.issued[0] for one in collectives if one.phase == "backward"), default=-math.inf)
    for index, collective in enumerate(collectives):
        when, until, rule = _wait(trace, step, marks, collective, gaps)
        if rule == "backward":  # DDP waits once all its buckets are issued
            when, until = max(when, last_issue), max(until, last_issue)
        points.append((when, 1, index, until))
        result.rules[rule] += 1
    now, last, runs = step.begin, -1, dict[int, int]()
    waiting: list[int] = []
    for when, what, index, until in sorted(points):
        task = _computing(marks, now, when, [*([last] if last >= 0 else []), *waiting])
        _note_host(result, now, when)
        last, waiting, now = result.add(task), [], max(now, when)
        if what:
            waiting, now = [runs[index]], max(now, until)
        else:
            runs[index] = result.add(Task(collectives[index].lag, [last], index))
    result.add(_computing(marks, now, step.end, [*([last] if last >= 0 else []), *waiting]))
    _note_host(result, now, step.end)
    return result


def _computing(marks: Marks, begin: float, end: float, after: list[int]) -> Task:
    """Return the task in which the host computes from ``begin`` to ``end``.

    The task's name consists of its phases and the FSDP module that computes, such as ``forward layers.0``.  ``after``
    are the numbers of the tasks that it waits for.
    """
    first, last = marks.phase(begin), marks.phase(max(begin, math.nextafter(end, begin)))
    phases = first if first == last else f"{first} to {last}"
    return Task(max(0.0, end - begin), after, name=f"{phases} {marks.computing(begin)}".strip(), phase=first)


def _note_host(result: RankStep, begin: float, end: float) -> None:
    """Add the time from ``begin`` to ``end``, in which the host computed, to ``result``.

    The time is divided where another FSDP module or another phase (forward, backward, optimizer) begins.
    """
    if end <= begin:  # two waits follow each other, and the host computes nothing between them
        return
    marks = result.marks
    changes = [moment for moment, _ in marks.windows if begin < moment < end]
    changes += [moment for moment in (marks.backward, marks.optimizer) if begin < moment < end]
    for start, stop in itertools.pairwise(sorted([begin, *changes, end])):
        if start < stop:
            note_computing(result, start, stop - start)


def note_computing(result: RankStep, moment: float, seconds: float) -> None:
    """Add ``seconds`` of computation that the host began or launched at ``moment`` to ``result``.

    If ``moment`` is before the optimizer's step, the computation belongs to the forward or backward pass, and
    ``(moment, seconds)`` is appended to ``result.computed``.  Otherwise ``seconds`` is added to ``result.optimizer``.
    """
    if moment < result.marks.optimizer:
        result.computed.append((moment, seconds))
    else:
        result.optimizer += seconds


def _wait(
    trace: Trace, step: Step, marks: Marks, collective: Collective, gaps: _Gaps
) -> tuple[float, float, Rule]:
    """Find when the main thread waits for a collective, by the first of the module's rules that applies.

    Returns:
        When the wait begins, when it ends, and the name of the rule, such as ``copy-out``.

    Raises:
        Refusal: If no rule applies.
    """
    issue, done = collective.issued[0], collective.ran[1]
    if collective.blocking:
        return issue, max(issue, done), "blocking"
    if collective.kind == "all_gather" and (copied := copies_out(marks, collective.unit, issue)) is not None:
        # The thread waits in FSDP's copy-out.  If it was idle right before the copy-out, the wait began with this idle
        # time.
        place = bisect.bisect_left(gaps.ends, copied) - 1
        slept = gaps.begins[place] if place >= 0 and copied - gaps.ends[place] < _GAP else copied
        begin = max(issue, slept)
        return begin, max(begin, done), "copy-out"
    if marks.in_ddp and collective.phase == "backward" and math.isfinite(marks.backward_end):
        when = max(issue, marks.backward_end)
        return when, max(when, done), "backward"
    place = bisect.bisect_right(gaps.ends, done - _EARLY)
    if place < len(gaps.ends) and gaps.begins[place] < done:
        begin = max(gaps.begins[place], issue)
        return begin, max(begin, done), "gap"
    if math.isfinite(marks.optimizer) and marks.optimizer > issue:
        return marks.optimizer, max(marks.optimizer, min(done, marks.optimizer)), "optimizer"
    raise Refusal(
        f"{trace.path}: step {step.number}: the trace does not show when the program waits for the {collective.kind} "
        f"of {collective.elements} elements: trace a program with FSDP2, DDP, or a torch.optim optimizer"
    )


class _Gaps(NamedTuple):
    """Stretches of time in which a thread ran no operation, in order of time."""

    begins: list[float]
    ends: list[float]


def _gaps(step: Step) -> _Gaps:
    """Return the stretches of more than 150 us in which the thread that called ``profiler.step()`` ran no operation.

    The last stretch, up to the end of the step, may be shorter.
    """
    events = sorted(
        (
            (event.begin, event.end)
            for event in step.host
            if event.thread == step.thread and event.category == "cpu_op"
        ),
        key=lambda span: (span[0], -span[1]),
    )
    leaves = [
        event for event, after in itertools.pairwise([*events, (step.end, step.end)]) if after[0] >= event[1]
    ]
    gaps, last = list[tuple[float, float]](), step.begin
    for begin, end in leaves:
        if begin - last > _GAP:
            gaps.append((last, begin))
        last = max(last, end)
    gaps.append((last, step.end))
    return _Gaps([begin for begin, _ in gaps], [end for _, end in gaps])
