"""Lists what each rank does in a predicted step, and when: computation, codecs, messages, and waits of the host.

All times are predicted.  There are two kinds of predictions.  If the policy keeps the traced program and changes only
its messages (:data:`harness.whatif.policies.REWRITES`), the times come from a replay of the traces.  If the policy is a
preset of our engine, they come from a simulation of our engine's step.  :mod:`harness.whatif.export` writes the lists
to trace files.  This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from harness.whatif import joint, policies
from harness.whatif.collectives import Kind, Phase
from harness.whatif.joint import JointStep, Run, Traced
from harness.whatif.policies import DTYPES, REWRITES, Simulated, Target
from harness.whatif.tasks import Task
from impl.codecs.codec import ITEM_BYTES, Raw
from impl.plan.timeline import Message as PostedMessage
from impl.policy.topology import Topology

HOST: Final = "host"
COMPUTING: Final = "computation"
CODECS: Final = "codecs"
BETWEEN: Final = "link between nodes"
INSIDE: Final = "links inside nodes"
_SHORTEST: Final = 1e-9  # shortest computation, in seconds, that is listed


class Message(NamedTuple):
    """One rank's part in a collective: what the rank passes in and receives, and with which other ranks."""

    kind: Kind
    given: int  # elements that the rank passes in
    received: int  # elements that the rank receives
    dtype: str  # type of an element, as NCCL's traces name it, such as ``BFloat16``
    group: tuple[int, ...]  # the ranks that take part
    as_all_reduce: bool = False  # whether it is a reduce-scatter that sends the messages of an all-reduce
    codec: str = ""  # codec of our engine's messages; empty for other programs


class Activity(NamedTuple):
    """What one rank does from ``begin`` to ``end``; times are in seconds since the earliest rank began the step."""

    track: str  # a constant of this module, or ``stream N`` of a traced GPU
    name: str
    begin: float
    end: float
    phase: Phase
    # When the host launches the activity; None if the host launches everything at the beginning of the step.
    launched: float | None = None
    message: Message | None = None  # None if the activity sends nothing


@dataclass(frozen=True, slots=True)
class RankSchedule:
    """One predicted step of one rank."""

    begin: float  # seconds from when the earliest rank begins the step to when this rank begins the step
    activities: Sequence[Activity]  # in the order in which the rank issues them


def ranks_of(traced: Traced, target: Target) -> list[int]:
    """Return the ranks for which a prediction has a schedule.

    These are all ranks of the target.  There is one exception: if the trace of only one rank was given, the list has
    one number, the traced rank's number modulo the target's number of ranks.
    """
    world = target.topology.world
    return [min(traced.steps[0].ranks) % world] if traced.alone else [*range(world)]


def schedules(traced: Traced, target: Target) -> Iterator[Callable[[int], RankSchedule]]:
    """Yield one function for each predicted step; it takes a rank's number and returns that rank's schedule.

    The steps are predicted with ``scale`` of :data:`harness.whatif.policies.Overheads`: the overhead of a collective is
    assumed to grow in proportion to its time on the link.
    """
    for step in traced.steps:
        if target.policy in REWRITES:
            found = _replayed(step, traced, target)
            yield found.__getitem__
        else:
            yield _simulated(policies.of_our_engine(step, traced, target, "scale"), target.topology)


def _replayed(step: JointStep, traced: Traced, target: Target) -> dict[int, RankSchedule]:
    """Replay (simulate) a traced step under the target, and return the schedule of each rank.

    If the target has more ranks than were traced, the schedules of the traced ranks are repeated: with 4 traced ranks,
    rank 4 has the schedule of rank 0.
    """
    runs = policies.rewritten(step, traced, target, "scale")
    spans = joint.replay(step, runs, target.slower).spans
    numbers = {
        (rank, own): number
        for number, places in enumerate(joint.match_collectives(step.ranks))
        for rank, own in places.items()
    }
    found = {}
    for rank, rank_step in step.ranks.items():
        activities = list[Activity]()
        on_gpu = any(task.stream is not None for task in rank_step.tasks)
        for place, task in enumerate(rank_step.tasks):
            span = spans[rank, place]
            launched = None
            if on_gpu:
                hosts = [other for other in task.after if _on_host(rank_step.tasks[other])]
                launched = max((spans[rank, other][1] for other in hosts), default=step.skew[rank])
            if task.collective is not None:
                activities += _sent(task, span, launched, runs[numbers[rank, task.collective]])
            else:
                seconds = task.seconds * target.slower
                activities += _computed(task, span, launched, seconds, on_gpu=on_gpu)
        found[rank] = RankSchedule(step.skew[rank], [*_in_turn(activities)])
    traced_ranks = [*found]
    return {
        rank: found[traced_ranks[place % len(traced_ranks)]]
        for place, rank in enumerate(ranks_of(traced, target))
    }


def _on_host(task: Task) -> bool:
    return task.stream is None and task.collective is None


def _computed(
    task: Task, span: tuple[float, float], launched: float | None, seconds: float, *, on_gpu: bool
) -> Iterator[Activity]:
    """Yield the activities of a task that computes, in order of time.

    There are two cases:

    - The task computes on the CPU of a CPU run, or on a stream of a GPU.  Its activities are the decoding of the
      messages that it waited for, if that takes time, and then the computation.
    - The task is host code of a GPU run.  Its activities are the host's wait for a kernel, if the task waited for one,
      and then the host's work.

    Args:
        task: The task.
        span: Beginning and end of the task, in seconds.
        launched: When the host launched the task, in seconds; None if the rank computes on a CPU.
        seconds: How long the task computes.  The computation is at the end of ``span``, after the decoding.
        on_gpu: Whether the rank computes on a GPU.
    """
    begin, end = span
    if on_gpu and task.stream is None:
        if launched is not None and len(task.after) > 1 and begin > launched:
            yield Activity(HOST, "cudaStreamSynchronize", launched, begin, task.phase)
        if end - begin > _SHORTEST:
            yield Activity(HOST, "host", begin, end, task.phase)
        return
    track = COMPUTING if task.stream is None else f"stream {task.stream}"
    decoded = max(begin, end - seconds)
    if decoded - begin > _SHORTEST:
        yield Activity(track, "decode", begin, decoded, task.phase, launched)
    else:
        decoded = begin
    if on_gpu or end - decoded > _SHORTEST:
        yield Activity(track, task.name, decoded, end, task.phase, launched)


def _sent(task: Task, span: tuple[float, float], launched: float | None, run: Run) -> Iterator[Activity]:
    """Yield the activities of a task that is a collective: the encoding, if there is any, and the collective.

    If the policy leaves the collective out, nothing is yielded.

    Args:
        task: The task.  Its ``seconds`` are the seconds from the collective's issue to its beginning.
        span: Beginning and end of the collective.  The encoding ends when the collective is issued.
        launched: When the host launched the collective; None if the rank computes on a CPU.
        run: How the collective runs.
    """
    if (sent := run.sent) is None:
        return
    (begin, end), encode = span, run.coding[0]
    if encode > _SHORTEST:
        posted = begin - encode - task.seconds
        yield Activity(CODECS, "encode", posted, posted + encode, sent.phase, launched)
    parts = sent.elements // len(sent.group)
    message = Message(
        kind=sent.kind,
        given=parts if sent.kind == "all_gather" else sent.elements,
        received=parts if sent.kind == "reduce_scatter" else sent.elements,
        dtype=sent.dtype,
        group=sent.group,
        as_all_reduce=sent.as_all_reduce,
    )
    track = BETWEEN if run.between else INSIDE
    yield Activity(track, sent.unit, begin, end, sent.phase, launched, message)


def _simulated(step: Simulated, topology: Topology) -> Callable[[int], RankSchedule]:
    """Return a function that takes a rank's number and returns the schedule of this rank in a simulated step.

    The schedules of two ranks differ only in the groups of their collectives.
    """
    began = 0.0
    by_time = list[tuple[float, int, Activity, PostedMessage | None]]()
    for run in step.passes:
        for stretch in run.stretches:
            begin, end = began + float(stretch.begin), began + float(stretch.end)
            if end - begin > _SHORTEST:
                names = ", ".join(step.units[unit].name for unit in stretch.units)
                name = f"{stretch.work} {names}".strip()
                phase: Phase = "forward" if begin < began + float(run.forward) else "backward"
                by_time.append((begin, 1, Activity(COMPUTING, name, begin, end, phase), None))
        for message in run.messages:
            if message.hop.hop is None:
                continue
            posted = began + float(message.posted)
            phase = "forward" if posted < began + float(run.forward) else "backward"
            track = BETWEEN if topology.crosses(message.hop.hop.axis) else INSIDE
            name = f"{message.purpose} of {step.units[message.unit].name}"
            sent = Activity(track, name, began + float(message.begin), began + float(message.arrival), phase)
            by_time.append((posted, 0, sent, message))
        began += float(run.seconds)
    optimizer = Activity(COMPUTING, "optimizer", began, began + step.optimizer, "optimizer")
    by_time = [*sorted(by_time, key=lambda item: item[:2]), (began, 2, optimizer, None)]
    laid_out, messages = [*_in_turn(item[2] for item in by_time)], [item[3] for item in by_time]

    def of_rank(rank: int) -> RankSchedule:
        activities = [
            activity if message is None else activity._replace(message=_posted(message, rank))
            for activity, message in zip(laid_out, messages, strict=True)
        ]
        return RankSchedule(0.0, activities)

    return of_rank


def _posted(posted: PostedMessage, rank: int) -> Message | None:
    """Convert a message of our engine's simulated step to the collective that the trace of ``rank`` records for it.

    The message may belong to a hop: one exchange between the ranks of a group.  In a hop of kind ``shift`` each rank
    sends only to the next rank.  Traces have no such collective, so the hop becomes an all-to-all with the same number
    of bytes.  Returns None if the message belongs to no hop.
    """
    hop, nbytes = posted.hop.hop, posted.hop.nbytes
    if hop is None:
        return None
    elements, dtype = nbytes, "Byte"
    if isinstance(hop.codec, Raw) and nbytes % ITEM_BYTES[hop.codec.dtype] == 0:
        elements, dtype = nbytes // ITEM_BYTES[hop.codec.dtype], DTYPES[hop.codec.dtype]
    whole = elements * (1 if hop.kind == "shift" else hop.axis.size)
    return Message(
        kind="all_gather" if hop.kind == "all_gather" else "all_to_all",
        given=elements if hop.kind == "all_gather" else whole,
        received=whole,
        dtype=dtype,
        group=hop.axis.group(rank),
        codec=str(hop.codec),
    )


def _in_turn(activities: Iterable[Activity]) -> Iterator[Activity]:
    """Yield all activities in their order, after shortening those that overlap on a track of codecs or links.

    A track is a row of the trace, such as the link between nodes.  If two activities on such a track overlap, the
    beginning of the activity that ends later is moved to the end of the activity that ends earlier.  Activities on
    tracks of computation and of the host stay as they are.
    """
    moved, free = dict[int, Activity](), dict[str, float]()
    numbered = [*enumerate(activities)]
    for number, activity in sorted(numbered, key=lambda item: (item[1].end, item[1].begin)):
        if activity.track in (CODECS, BETWEEN, INSIDE):
            begin = max(activity.begin, free.get(activity.track, -math.inf))
            moved[number] = activity._replace(begin=begin)
            free[activity.track] = activity.end
    for number, activity in numbered:
        yield moved.get(number, activity)
