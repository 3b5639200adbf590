"""Divides one rank's step on a GPU into tasks of its streams and of the host, and finds which task waits for which.

A task is a piece of computation, or a collective (:mod:`harness.whatif.tasks`).

A trace does not name the waits between streams.  They are found in three ways:

- When torch issues a collective, it makes the collective's stream wait for the current stream.
- Other waits are found by their effect: a stream was idle although its next kernel had been launched, and the kernel
  began when a kernel on another stream ended.
- Waits for the output of collectives are also found from FSDP's annotations, and from the beginning of the optimizer's
  step.

This module does not import torch.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from harness.errors import Refusal
from harness.whatif.collectives import Collective, Marks, copies_out
from harness.whatif.kineto import DEVICE, Event, Step, Trace
from harness.whatif.tasks import RankStep, Rule, Task, note_computing

# Most seconds between the end of a kernel and the beginning of the kernel of another stream that waited for it.
_SOON: Final = 20e-6
_CLOSE: Final = 1e-6  # seconds by which the times of two streams may be wrong
_SYNCHRONISED: Final = 20e-6  # shortest synchronisation of the host with a device that counts as waiting
_BEFORE: Final = 256  # number of kernels before a collective among which the awaited kernel is sought
_UNEXPLAINED: Final = 0.1  # largest share of a step in which a stream may be idle for no known reason


def has_device(step: Step) -> bool:
    """Return whether a step ran anything on a GPU: kernels, copies or fills."""
    return any(event.category in DEVICE for event in step.device)


def on_device(
    trace: Trace, step: Step, marks: Marks, collectives: Sequence[Collective], begin: float
) -> RankStep:
    """Return the tasks of a step that computes on a GPU.

    Args:
        trace: The rank's trace.
        step: The step.
        marks: Moments of the step that the trace names, such as the beginning of the backward pass.
        collectives: The collectives of the step.
        begin: Seconds of the rank's clock at which the step begins on the GPU: the end of the last kernel of the step
            before.  The step ends with its last kernel.

    Raises:
        Refusal: if a stream is idle for more than 10 % of the step for reasons that the trace does not show.
    """
    end = max(event.end for event in step.device)
    result = RankStep(begin, end, marks, collectives=list(collectives))
    streams = _Streams(step, collectives, result)
    idle = streams.find_waits()
    streams.attribute(marks)
    streams.note_computing()
    streams.cut(step.begin)
    if idle > _UNEXPLAINED * (end - begin):
        share = idle / (end - begin)
        raise Refusal(
            f"{trace.path}: step {step.number}: a stream is idle for {share:.0%} of the step, and the trace does not "
            "show what the stream waits for, so its overlap cannot be predicted: trace the activities CPU and CUDA"
        )
    return result


class _Streams:
    """The kernels of one step on one rank, with the waits between them.

    The *place* of a kernel is its index in the order in which kernels begin.
    """

    def __init__(self, step: Step, collectives: Sequence[Collective], result: RankStep) -> None:
        launch = {event.arguments.get("correlation"): event.begin for event in step.launches}
        self._step, self._collectives, self._result = step, collectives, result
        self._kernels: list[Event] = sorted(step.device, key=lambda event: event.begin)
        self._launched = [launch[event.arguments.get("correlation")] for event in self._kernels]
        self._stream = [event.arguments.get("stream") for event in self._kernels]
        kernels = {id(collective.kernel): number for number, collective in enumerate(collectives)}
        self._collective = [kernels.get(id(event)) for event in self._kernels]
        # By place of a kernel, the places of the kernels on other streams that this kernel waits for.
        self._waits: dict[int, set[int]] = {}
        self._by_end = sorted(range(len(self._kernels)), key=lambda place: self._kernels[place].end)
        self._ends = [self._kernels[place].end for place in self._by_end]

    def find_waits(self) -> float:
        """Find, for each kernel, the kernel of another stream that it waited for, if there is one.

        - A collective waits for the kernel that :meth:`_wait_as_issued` finds.
        - Any other kernel has waited if its stream was idle for more than 20 us although the kernel had been launched.
          The kernel is taken to have waited for the kernel of another stream that had ended right before.

        Returns:
            The unexplained idle time, in seconds, of the stream that has most of it.  Idle time is unexplained if a
            kernel waited, but no kernel was found for which it waited.
        """
        before, unexplained = dict[object, float](), defaultdict[object, float](float)
        for place, event in enumerate(self._kernels):
            stream, begin = self._stream[place], self._result.begin
            previous = before.get(stream, begin)
            ready = max(previous, self._launched[place], begin)
            if self._collective[place] is not None:
                self._wait_as_issued(place)
            elif event.begin - ready > _SOON:
                other = self._ended_before(place, previous)
                if other is not None:
                    self._waits.setdefault(place, set()).add(other)
                else:
                    unexplained[stream] += event.begin - ready
            before[stream] = max(previous, event.end)
        return max(unexplained.values(), default=0.0)

    def _wait_as_issued(self, place: int) -> None:
        """Note which kernel of another stream a collective waits for, if there is one.

        The collective waits for work that the host launched on other streams before the collective.  Of this work, the
        kernel that ended last before the collective began is noted.  Only the 256 kernels before the collective are
        searched.

        Args:
            place: The collective's index in the order in which kernels begin.
        """
        earlier = [
            other
            for other in range(max(0, place - _BEFORE), place)
            if self._stream[other] != self._stream[place]
            and self._launched[other] <= self._launched[place]
            and self._kernels[other].end <= self._kernels[place].begin + _CLOSE
        ]
        if earlier:
            last = max(earlier, key=lambda other: self._kernels[other].end)
            self._waits.setdefault(place, set()).add(last)

    def _ended_before(self, place: int, after: float) -> int | None:
        """Find the kernel of another stream that ended right before a kernel began, at most 20 us earlier.

        Args:
            place: The kernel that began, as its index in the order in which kernels begin.
            after: Time in seconds; kernels that had ended by then are not considered.

        Returns:
            The index of the kernel that ended; None if there is no such kernel.
        """
        begin = self._kernels[place].begin
        for last in range(bisect.bisect_right(self._ends, begin + _CLOSE) - 1, -1, -1):
            if self._ends[last] <= after or begin - self._ends[last] > _SOON:
                return None
            if self._stream[self._by_end[last]] != self._stream[place]:
                return self._by_end[last]
        return None

    def attribute(self, marks: Marks) -> None:
        """Find, for each collective, the kernel that uses the collective's output and therefore waits for it.

        Three rules are tried in this order:

        1. ``copy-out``, for an all-gather: the first kernel that the host launched after FSDP had begun to copy the
           gathered weights out of the all-gather's buffer;
        2. ``gap``: a kernel for which :meth:`find_waits` has found that it waited for the collective, for example
           because its stream was idle until the collective ended;
        3. ``optimizer``: the first kernel that the host launched after the optimizer's step had begun.

        Rules 1 and 3 skip collectives, kernels of the collective's stream, and kernels that began before the collective
        ended.  The field ``rules`` of the :class:`RankStep` counts how many collectives each rule applied to.
        Collectives for which no kernel waits are counted under ``none``.
        """
        waited = {other for others in self._waits.values() for other in others}
        by_launch = sorted(range(len(self._kernels)), key=lambda place: self._launched[place])
        moments = [self._launched[place] for place in by_launch]
        for place, number in enumerate(self._collective):
            if number is None:
                continue
            seen, when = self._collectives[number], marks.optimizer
            rule: Rule = "optimizer"
            copied = copies_out(marks, seen.unit, seen.issued[0]) if seen.kind == "all_gather" else None
            if copied is not None:
                when, rule = copied, "copy-out"
            elif place in waited:
                self._result.rules["gap"] += 1
                continue
            users = by_launch[bisect.bisect_left(moments, when) :] if math.isfinite(when) else []
            if (user := next((other for other in users if self._may_use(other, place)), None)) is None:
                rule = "none"
            else:
                self._waits.setdefault(user, set()).add(place)
            self._result.rules[rule] += 1

    def _may_use(self, other: int, place: int) -> bool:
        begins_later = self._kernels[other].begin >= self._kernels[place].end - _CLOSE
        return self._collective[other] is None and self._stream[other] != self._stream[place] and begins_later

    def note_computing(self) -> None:
        """Add the seconds of each computing kernel, and when it was launched, to the :class:`RankStep`.

        Kernels of collectives do not compute, and are left out.  For every other kernel, the time from the end of all
        earlier computing kernels to the end of this kernel is added.  This time includes idle time before the kernel,
        for example while the host had not launched the kernel yet.  If the kernel waited for a collective, the idle
        time before the kernel is left out: only the time from the kernel's own beginning is added.
        """
        reached = self._result.begin
        for place, event in enumerate(self._kernels):
            if self._collective[place] is not None:
                continue
            waited = any(self._collective[other] is not None for other in self._waits.get(place, ()))
            begin = max(reached, event.begin) if waited else reached
            if event.end > begin:
                note_computing(self._result, self._launched[place], event.end - begin)
            reached = max(reached, event.end)

    def _synchronisations(self) -> Iterator[tuple[float, float, int]]:
        """Yield the host's waits of 20 us or more for a kernel, in calls such as ``cudaStreamSynchronize``.

        Yields:
            (begin, end, place).  ``begin`` and ``end`` of the wait are in seconds.  ``place`` is the kernel that the
            host waited for, as its index in the order in which kernels begin.
        """
        for event in self._step.launches:
            if "Synchronize" not in event.name or event.end - event.begin < _SYNCHRONISED:
                continue
            for last in range(bisect.bisect_right(self._ends, event.end) - 1, -1, -1):
                if self._ends[last] <= event.begin:
                    break
                if self._launched[self._by_end[last]] <= event.begin:
                    yield event.begin, event.end, self._by_end[last]
                    break

    def _segments(self, ends: set[int]) -> list[list[int]]:
        """Divide the kernels into tasks, and return each task as a list of its kernels.

        A task consists of kernels that one stream runs one after the other, without a wait between them.  A collective
        is a task of its own.  Kernels are given by their indices in the order in which kernels begin.

        Args:
            ends: The kernels that another stream or the host waits for.  Each of them is the last of its task.
        """
        segments, under_way = list[list[int]](), dict[object, list[int]]()
        for place, stream in enumerate(self._stream):
            alone = self._collective[place] is not None
            if alone or place in self._waits or stream not in under_way:
                under_way[stream] = []
                segments.append(under_way[stream])
            under_way[stream].append(place)
            if alone or place in ends:
                del under_way[stream]
        return segments

    def cut(self, host_begin: float) -> None:
        """Divide the step into tasks of the streams and of the host, and add them to the :class:`RankStep`.

        A task is a collective, or a piece of computation, whose time includes the gaps between its kernels.
        ``host_begin`` is the moment in seconds at which the host began the step.
        """
        result, syncs = self._result, list(self._synchronisations())
        waited = {other for others in self._waits.values() for other in others}
        segments = self._segments(waited | {place for *_, place in syncs})
        launches, waiting = self._host(host_begin, segments, syncs)
        of_place, last = dict[int, int](), dict[object, tuple[int, float]]()
        for number, segment in enumerate(segments):
            first, stream = self._kernels[segment[0]], self._stream[segment[0]]
            others = [other for other in self._waits.get(segment[0], ()) if other in of_place]
            after = [launches[number], *(of_place[other] for other in others)]
            ready = [
                self._launched[segment[0]],
                result.begin,
                *(self._kernels[other].end for other in others),
            ]
            if stream in last:
                after.append(last[stream][0])
                ready.append(last[stream][1])
            delay, end = (
                max(0.0, first.begin - max(ready)),
                max(self._kernels[place].end for place in segment),
            )
            collective = self._collective[segment[0]]
            seconds = delay if collective is not None else delay + end - first.begin
            kernels = f"{first.name} and {len(segment) - 1} more" if segment[1:] else first.name
            phase = result.marks.phase(self._launched[segment[0]])
            task = result.add(
                Task(seconds, after, collective, earliest=0.0, name=kernels, phase=phase, stream=stream or 0)
            )
            of_place.update(dict.fromkeys(segment, task))
            last[stream] = task, end
        for task, place in waiting:
            result.tasks[task].after.append(of_place[place])

    def _host(
        self, begin: float, segments: Sequence[Sequence[int]], syncs: Sequence[tuple[float, float, int]]
    ) -> tuple[dict[int, int], list[tuple[int, int]]]:
        """Divide the host's time into tasks, and add them to the :class:`RankStep`.

        A task of the host ends when the host launches the first kernel of a stream's task, or begins to wait for a
        kernel.  The wait is a task of its own.  Kernels are given by their indices in the order in which kernels begin.

        Args:
            begin: When the host began the step, in seconds.
            segments: The streams' tasks, each as a list of its kernels (:meth:`_segments`).
            syncs: Each wait of the host as (begin, end, kernel that it waits for).

        Returns:
            (launches, waiting).  ``launches`` maps the index of each of ``segments`` to the number of the host's task
            that launches it.  ``waiting`` has a pair for each wait: (number of the task that is the wait, kernel that
            the host waits for).
        """
        points = [(self._launched[segment[0]], 0, number, 0.0) for number, segment in enumerate(segments)]
        points += [(start, 1, place, end) for start, end, place in syncs]
        launches, waiting, now, last = dict[int, int](), list[tuple[int, int]](), begin, -1
        for when, what, number, until in sorted(points):
            task = Task(max(0.0, when - now), [last] if last >= 0 else [])
            task.earliest = begin - self._result.begin if last < 0 else -math.inf
            last, now = self._result.add(task), max(now, when)
            if what:
                last, now = self._result.add(Task(0.0, [last])), max(now, until)
                waiting.append((last, number))
            else:
                launches[number] = last
        return launches, waiting
