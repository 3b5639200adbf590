"""Turns one rank's step into tasks: what is computed, which collectives run, and which task waits for which.

A task runs when all the tasks it names are done.  The host's main thread, or each stream of a GPU, is a chain of tasks.
A trace shows no dependency between a collective and what uses its result, so it is found by rules, the first that
applies:

1. ``blocking``: the operation itself waits (``asyncOp`` is false);
2. ``copy-out``: FSDP copies the gathered weights out;
3. ``backward``: a DistributedDataParallel waits for all its buckets after the backward pass;
4. ``gap``: the main thread, or the stream, was idle until the collective ended;
5. ``optimizer``: the optimizer needs every gradient.

No torch.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from harness.errors import Refusal
from harness.whatif.collectives import Collective, Marks, copies_out
from harness.whatif.kineto import DEVICE, Event, Step, Trace

Rule = Literal["blocking", "copy-out", "backward", "gap", "optimizer"]
_GAP: Final = 150e-6  # seconds in which a thread does nothing that is recorded, at least, to be waiting
_EARLY: Final = 5e-3  # most seconds before a collective's recorded end at which a waiting thread goes on
_SOON: Final = 20e-6  # most seconds from the end of what a stream waited for to its next kernel
_SYNCHRONISED: Final = 20e-6  # shortest synchronisation of the host with a device that counts as waiting
_BEFORE: Final = 256  # kernels before a collective among which the one that it waits for is sought
_UNEXPLAINED: Final = 0.1  # largest share of a step in which a stream may be idle for no known reason


@dataclass(slots=True)
class Task:
    """One piece of a rank's step."""

    seconds: float  # on its thread or stream; for a collective, from its issue to its beginning
    after: list[int]  # the rank's tasks that must be done
    collective: int | None = None  # the collective that it runs, by its number in the step
    earliest: float = -math.inf  # seconds since the step began, before which it does not start


@dataclass(slots=True)
class RankStep:
    """One step of one rank."""

    begin: float  # in seconds of the rank's clock
    end: float
    tasks: list[Task] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    rules: Counter[Rule] = field(default_factory=Counter)  # how many collectives' waits each rule has found
    # (moment of the host, seconds) of all computation before the optimizer; a moment tells whose computation it is
    computed: list[tuple[float, float]] = field(default_factory=list)
    optimizer: float = 0.0  # seconds of the optimizer's step
    marks: Marks | None = None

    def add(self, task: Task) -> int:
        """Append a task and return its number."""
        self.tasks.append(task)
        return len(self.tasks) - 1


def on_host(trace: Trace, step: Step, marks: Marks, collectives: Sequence[Collective]) -> RankStep:
    """Return the tasks of a step that computes on the processor.

    Raises:
        Refusal: if a collective's wait cannot be attributed.
    """
    result = RankStep(step.begin, step.end, collectives=list(collectives), marks=marks)
    gaps = _gaps(step)
    gap_ends = [end for _, end in gaps]
    # (when the thread gets there, 0 for an issue and 1 for a wait, collective, until when it waits)
    points = [(collective.issued[0], 0, index, 0.0) for index, collective in enumerate(collectives)]
    for index, collective in enumerate(collectives):
        when, until, rule = _wait(trace, step, marks, collective, gaps, gap_ends)
        points.append((when, 1, index, until))
        result.rules[rule] += 1
    now, last, runs = step.begin, -1, dict[int, int]()
    waiting: list[int] = []
    for when, what, index, until in sorted(points):
        task = Task(max(0.0, when - now), [*([last] if last >= 0 else []), *waiting])
        _note_computing(result, marks, now, when)
        last, waiting, now = result.add(task), [], max(now, when)
        if what:
            waiting, now = [runs[index]], max(now, until)
        else:
            runs[index] = result.add(Task(collectives[index].lag, [last], index))
    result.add(Task(max(0.0, step.end - now), [*([last] if last >= 0 else []), *waiting]))
    _note_computing(result, marks, now, step.end)
    return result


def _note_computing(result: RankStep, marks: Marks, begin: float, end: float) -> None:
    """Note that the host computed from ``begin`` to ``end``, divided where another unit's computation begins."""
    changes = [moment for moment, _ in marks.windows if begin < moment < end]
    changes += [moment for moment in (marks.backward, marks.optimizer) if begin < moment < end]
    for start, stop in itertools.pairwise(sorted([begin, *changes, end])):
        if start < stop:
            _note(result, marks, start, stop - start)


def _note(result: RankStep, marks: Marks, moment: float, seconds: float) -> None:
    if moment < marks.optimizer:
        result.computed.append((moment, seconds))
    else:
        result.optimizer += seconds


def _wait(
    trace: Trace,
    step: Step,
    marks: Marks,
    collective: Collective,
    gaps: Sequence[tuple[float, float]],
    gap_ends: Sequence[float],
) -> tuple[float, float, Rule]:
    """Return when the main thread begins to wait for a collective, until when, and the rule that says so."""
    issue, done = collective.issued[0], collective.ran[1]
    if collective.blocking:
        return issue, max(issue, done), "blocking"
    if collective.kind == "all_gather" and (copied := copies_out(marks, collective.unit, issue)) is not None:
        # The thread may have slept before it copies: then the wait began where the sleep began.
        place = bisect.bisect_left(gap_ends, copied) - 1
        slept = gaps[place] if 0 <= place and copied - gaps[place][1] < _GAP else (copied, copied)
        begin = max(issue, slept[0])
        return begin, max(begin, min(done, copied)), "copy-out"
    if marks.in_ddp and collective.phase == "backward" and math.isfinite(marks.backward_end):
        when = max(issue, marks.backward_end)
        return when, max(when, done), "backward"
    place = bisect.bisect_right(gap_ends, done - _EARLY)
    if place < len(gaps) and gaps[place][0] < done:
        begin = max(gaps[place][0], issue)
        return begin, max(begin, done), "gap"
    if math.isfinite(marks.optimizer) and marks.optimizer > issue:
        return marks.optimizer, max(marks.optimizer, min(done, marks.optimizer)), "optimizer"
    raise Refusal(
        f"{trace.path}: step {step.number}: nothing shows what waits for {collective.kind} of {collective.elements} "
        "elements: trace a program with FSDP2, DDP, or a torch.optim optimizer"
    )


def _gaps(step: Step) -> list[tuple[float, float]]:
    """Return (begin, end) of each stretch in which the step's own thread ran no operation."""
    events = sorted(
        (
            (event.begin, event.end)
            for event in step.host
            if event.thread == step.thread and event.category == "cpu_op"
        ),
        key=lambda span: (span[0], -span[1]),
    )
    following = [*events[1:], (step.end, step.end)]
    leaves = [event for event, after in zip(events, following, strict=True) if after[0] >= event[1]]
    gaps, last = list[tuple[float, float]](), step.begin
    for begin, end in leaves:
        if begin - last > _GAP:
            gaps.append((last, begin))
        last = max(last, end)
    return [*gaps, (last, step.end)]


def on_device(
    trace: Trace, step: Step, marks: Marks, collectives: Sequence[Collective], begin: float
) -> RankStep:
    """Return the tasks of a step that computes on a GPU.

    Args:
        trace: The rank's trace.
        step: The step.
        marks: Its marks.
        collectives: Its collectives.
        begin: When the GPU ended the step before; its own step ends with its last kernel.

    Raises:
        Refusal: if streams are idle for reasons that the trace does not show.
    """
    device = sorted(step.device, key=lambda event: event.begin)
    result = RankStep(begin, max(event.end for event in device), collectives=list(collectives), marks=marks)
    launch = {event.arguments.get("correlation"): event.begin for event in step.launches}
    number = {id(collective.kernel): index for index, collective in enumerate(collectives)}
    launched = [launch[event.arguments.get("correlation")] for event in device]
    stream = [event.arguments.get("stream") for event in device]
    waits: dict[
        int, set[int]
    ] = {}  # by the place of a kernel, the places of kernels on other streams before it
    idle = _stream_waits(device, launched, stream, number, waits, begin)
    _collective_waits(device, launched, stream, number, waits)
    _attribute(device, launched, stream, number, waits, marks, collectives, result)
    for place, event in enumerate(device):
        if id(event) not in number:
            _note(result, marks, launched[place], event.end - event.begin)
    syncs = _synchronisations(step, device, launched)
    _cut(result, device, launched, stream, number, waits, syncs, step.begin)
    if idle > _UNEXPLAINED * (result.end - result.begin):
        share = idle / (result.end - result.begin)
        raise Refusal(
            f"{trace.path}: step {step.number}: a stream is idle for {share:.0%} of the step, and the trace does not show "
            "what it waits for, so its overlap cannot be attributed: trace with torch.profiler's CPU and CUDA activities"
        )
    return result


def _stream_waits(
    device: Sequence[Event],
    launched: Sequence[float],
    stream: Sequence[object],
    number: dict[int, int],
    waits: dict[int, set[int]],
    begin: float,
) -> float:
    """Note for each kernel that a stream was idle before it what it waited for; return the unexplained seconds.

    A kernel that had been launched already and starts right after the end of a kernel on another stream waited for it.
    """
    before = dict[object, float]()
    ends = sorted((event.end, place) for place, event in enumerate(device))
    moments, unexplained = [end for end, _ in ends], Counter[object]()
    for place, event in enumerate(device):
        previous = before.get(stream[place], begin)
        ready = max(previous, launched[place], begin)
        if id(event) not in number and event.begin - ready > _SOON:
            last = bisect.bisect_right(moments, event.begin + 1e-6) - 1
            while last >= 0 and moments[last] > previous:
                other = ends[last][1]
                if stream[other] != stream[place]:
                    if event.begin - moments[last] <= _SOON:
                        waits.setdefault(place, set()).add(other)
                    break
                last -= 1
            if place not in waits:
                unexplained[stream[place]] += event.begin - ready
        before[stream[place]] = max(previous, event.end)
    return max(unexplained.values(), default=0.0)


def _collective_waits(
    device: Sequence[Event],
    launched: Sequence[float],
    stream: Sequence[object],
    number: dict[int, int],
    waits: dict[int, set[int]],
) -> None:
    """Let each collective wait for the last kernel of other streams that was launched before it, as torch does."""
    for place, event in enumerate(device):
        if id(event) not in number:
            continue
        earlier = [
            other
            for other in range(max(0, place - _BEFORE), place)
            if stream[other] != stream[place]
            and launched[other] <= launched[place]
            and device[other].end <= event.begin + 1e-6
        ]
        if earlier:
            waits.setdefault(place, set()).add(max(earlier, key=lambda other: device[other].end))


def _attribute(
    device: Sequence[Event],
    launched: Sequence[float],
    stream: Sequence[object],
    number: dict[int, int],
    waits: dict[int, set[int]],
    marks: Marks,
    collectives: Sequence[Collective],
    result: RankStep,
) -> None:
    """Find what waits for each collective, also for one that was complete before its result was used."""
    waited = {other for others in waits.values() for other in others}
    by_launch = sorted(range(len(device)), key=lambda place: launched[place])
    moments = [launched[place] for place in by_launch]
    for place, event in enumerate(device):
        if (index := number.get(id(event))) is None:
            continue
        collective, when, rule = collectives[index], math.inf, "optimizer"
        if collective.kind == "all_gather":
            copied = copies_out(marks, collective.unit, collective.issued[0])
            when, rule = (math.inf, rule) if copied is None else (copied, "copy-out")
        if rule == "optimizer" and place in waited:
            result.rules["gap"] += 1
            continue
        if rule == "optimizer":
            when = marks.optimizer
        first = bisect.bisect_left(moments, when)
        users = (by_launch[i] for i in range(first, len(by_launch)))
        user = next(
            (
                other
                for other in users
                if id(device[other]) not in number
                and stream[other] != stream[place]
                and device[other].begin >= event.end - 1e-6
            ),
            None,
        )
        if user is not None:
            waits.setdefault(user, set()).add(place)
        result.rules[rule] += 1  # type: ignore[index]  # one of two literals


def _synchronisations(
    step: Step, device: Sequence[Event], launched: Sequence[float]
) -> list[tuple[float, float, int]]:
    """Return (begin, end, place of the kernel) of each time the host waited for a kernel."""
    ends = sorted((event.end, place) for place, event in enumerate(device))
    moments, found = [end for end, _ in ends], []
    for event in step.launches:
        if "Synchronize" not in event.name or event.end - event.begin < _SYNCHRONISED:
            continue
        last = bisect.bisect_right(moments, event.end) - 1
        while last >= 0 and moments[last] > event.begin:
            if launched[ends[last][1]] <= event.begin:
                found.append((event.begin, event.end, ends[last][1]))
                break
            last -= 1
    return found


def _cut(
    result: RankStep,
    device: Sequence[Event],
    launched: Sequence[float],
    stream: Sequence[object],
    number: dict[int, int],
    waits: dict[int, set[int]],
    syncs: Sequence[tuple[float, float, int]],
    host_begin: float,
) -> None:
    """Cut streams and host into tasks.

    Kernels of one stream between two waits form one task, whose seconds include the gaps between them.
    """
    ends_task = {other for others in waits.values() for other in others} | {place for *_, place in syncs}
    segments, open_segment = list[list[int]](), dict[object, list[int]]()
    for place, event in enumerate(device):
        alone = id(event) in number
        if alone or place in waits or stream[place] not in open_segment:
            segments.append(segment := [])
            open_segment[stream[place]] = segment
        open_segment[stream[place]].append(place)
        if alone or place in ends_task:
            del open_segment[stream[place]]
    # The host's tasks end where it launches the first kernel of a segment, and where it waits for a kernel.
    points = sorted(
        [(launched[segment[0]], 0, index, 0.0) for index, segment in enumerate(segments)]
        + [(begin, 1, place, end) for begin, end, place in syncs]
    )
    launches, now, last = dict[int, int](), host_begin, -1
    after_sync: list[tuple[int, int]] = []  # (task of the host, place of the kernel that it waits for)
    for when, what, index, until in points:
        task = Task(max(0.0, when - now), [last] if last >= 0 else [])
        if last < 0:
            task.earliest = host_begin - result.begin
        last, now = result.add(task), max(now, when)
        if what:
            last, now = result.add(Task(0.0, [last])), max(now, until)
            after_sync.append((last, index))
        else:
            launches[index] = last
    of_place, of_stream, ended = dict[int, int](), dict[object, tuple[int, float]](), dict[int, float]()
    for index, segment in enumerate(segments):
        first, final = device[segment[0]], max(device[place].end for place in segment)
        others = waits.get(segment[0], set())
        after = [launches[index], *(of_place[other] for other in others if other in of_place)]
        ready = max([launched[segment[0]], result.begin, *(device[other].end for other in others)])
        if (chained := of_stream.get(stream[segment[0]])) is not None:
            after.append(chained[0])
            ready = max(ready, chained[1])
        collective = number.get(id(first))
        lag = max(0.0, first.begin - ready)
        if collective is None:
            task = Task(lag + final - first.begin, after, earliest=0.0)
        else:
            task = Task(lag, after, collective, earliest=0.0)
        place_of_task = result.add(task)
        for place in segment:
            of_place[place] = place_of_task
        of_stream[stream[segment[0]]] = place_of_task, final
        ended[place_of_task] = final
    for task_number, place in after_sync:
        result.tasks[task_number].after.append(of_place[place])


def has_device(step: Step) -> bool:
    """Return whether a step ran kernels."""
    return any(event.category in DEVICE for event in step.device)
