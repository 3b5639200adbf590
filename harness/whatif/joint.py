"""Joins the traces of all ranks, step by step, and replays a step: simulates when each rank computes, sends and waits.

The clocks of hosts are aligned by collectives, which end on all ranks at about the same time.

A collective between nodes first waits until its last rank has begun it, and until earlier collectives have left the
link.  The time after this wait has two parts: time on the link, which is the collective's bytes divided by the link's
rate, and overhead, which is the rest.

In a replay, the link between nodes carries one collective after the other, in the order in which all their ranks are
ready.  Collectives inside nodes take as long as in the trace.

This module does not import torch.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from harness.errors import Refusal
from harness.whatif import collectives, device_tasks, tasks
from harness.whatif.collectives import Collective, Marks
from harness.whatif.kineto import Trace
from harness.whatif.tasks import RankStep
from impl.policy.topology import Topology

# Only collectives with at least this share of the largest collective's bytes are used to find the link's rate.
_LARGE: Final = 0.5
# If the clocks of ranks differ by this many seconds, the ranks are on different hosts, even if their traces name the
# same host: several hosts may have one name.
_APART: Final = 0.1


@dataclass(frozen=True, slots=True)
class Joined:
    """One collective, as the traces of all its ranks together show it; times are in seconds."""

    # The collective as its rank with the lowest number saw it, except for ``ran``, which is common to all ranks: from
    # when the last rank entered the collective to when the first rank left it.
    seen: Collective
    between: bool  # whether the collective has ranks on several nodes
    link: float  # seconds on the link at the traced rate
    # By rank, seconds from the end of the time on the link to the end of the collective on this rank.
    overhead: Mapping[int, float]
    # For a collective between nodes: whether the next collective began before this collective ended, so that the
    # overhead may include time of the next collective.  False for collectives inside a node.
    shared: bool = False


@dataclass(frozen=True, slots=True)
class JointStep:
    """One traced step on all ranks: the tasks of each rank, and the collectives that the ranks run together."""

    ranks: Mapping[int, RankStep]
    # By rank, seconds from when the earliest rank begins the step to when this rank begins the step.
    skew: Mapping[int, float]
    collectives: Sequence[Joined]
    seconds: float  # traced seconds from the last rank's beginning to the last rank's end


@dataclass(frozen=True, slots=True)
class Traced:
    """The joined traces of all ranks: their steps, with the topology, link rate and clocks that they show."""

    topology: Topology  # topology of the traced run
    rate: float  # bytes a second of a node's link, as the user gave it or as the largest collectives achieved it
    rate_given: bool  # whether the user gave the rate
    steps: Sequence[JointStep]
    offsets: Mapping[int, float]  # by rank, seconds that were subtracted from the rank's clock
    # How it was found which task waits for a collective: for each rule of :mod:`harness.whatif.tasks`, the number of
    # collectives to which the rule applied.
    rules: Counter[tasks.Rule]
    alone: bool  # whether only one rank's trace was given; all ranks are then taken to do the same
    backend: str  # backend of torch.distributed, such as ``nccl``


@dataclass(frozen=True, slots=True)
class Run:
    """How one collective runs in a replay, the simulation of a traced step; times are in seconds."""

    link: float  # time on the link
    # By rank, from the end of the time on the link to the end of the collective.
    overhead: Mapping[int, float]
    between: bool  # whether the collective has ranks on several nodes
    # Seconds of encoding before the collective, and of decoding after it.
    coding: tuple[float, float] = (0.0, 0.0)
    # The collective that is sent.  None if the collective is left out; then no rank waits for other ranks either.
    sent: Collective | None = None


def join(read: Iterable[Trace], ranks_per_node: int, rate: float | None) -> Traced:
    """Join the traces of one run.

    Args:
        read: One trace of each rank, or the trace of a single rank.  With a single trace, all ranks are taken to do the
            same.  Each trace is reduced to its tasks before the next one is taken from ``read``, so that a lazy
            ``read`` keeps only one whole trace in memory.
        ranks_per_node: Number of ranks of a node in the traced run.
        rate: Bytes a second of a node's link.  If it is None, it is found from the largest collectives.

    Raises:
        Refusal: if the traces do not belong together, or lack what a prediction needs.
    """
    traces, by_rank = list[Trace](), dict[int, Sequence[RankStep]]()
    for trace in read:
        reduced = _rank_steps(trace)
        by_rank.setdefault(trace.rank, reduced)
        slim = [replace(step, host=[], launches=[], device=[]) for step in trace.steps[-len(reduced) :]]
        traces.append(replace(trace, steps=slim))
        del trace  # frees the whole trace before the next one is read
    traces.sort(key=lambda trace: trace.rank)
    first, world, alone = traces[0], traces[0].world, len(traces) == 1
    _check(traces, world, ranks_per_node)
    topology = Topology(world // ranks_per_node, ranks_per_node)
    steps = [
        {rank: reduced[number] for rank, reduced in sorted(by_rank.items())}
        for number in range(len(first.steps))
    ]
    rules = Counter[tasks.Rule]()
    for step in itertools.chain(*by_rank.values()):
        rules += step.rules
    if not any(rank.collectives for ranks in steps for rank in ranks.values()):
        raise Refusal(f"{first.path}: has no collectives: trace the training on two or more ranks")
    for ranks in steps:
        _check_alike(traces, ranks)
    bases = {trace.rank: (trace.base - first.base) / 1e9 for trace in traces}
    offsets = {} if alone else _offsets(traces, steps, bases)
    ahead = {rank: offsets.get(rank, 0.0) - base for rank, base in bases.items()}
    joined = [_joined(ranks, topology, ahead) for ranks in steps]
    found_rate = rate or _rate(joined)
    return Traced(
        topology=topology,
        rate=found_rate,
        rate_given=rate is not None,
        steps=[_timed(step, found_rate) for step in joined],
        offsets=offsets,
        rules=rules,
        alone=alone,
        backend=first.backend,
    )


def _rank_steps(trace: Trace) -> list[RankStep]:
    """Divide each step of one rank into tasks, and return the steps.

    The first step of a GPU's trace is left out, because kernels of the untraced step before may have run in it.
    """
    reduced = []
    for before, step in zip([None, *trace.steps], trace.steps, strict=False):
        marks = Marks.of(step)
        found = collectives.find(trace, step, marks)
        if not device_tasks.has_device(step):
            reduced.append(tasks.on_host(trace, step, marks, found))
        elif before is not None:
            begin = max([step.begin, *(event.end for event in before.device)])
            reduced.append(device_tasks.on_device(trace, step, marks, found, begin))
    return reduced


def _check(traces: Sequence[Trace], world: int, ranks_per_node: int) -> None:
    first = traces[0]
    ranks = [trace.rank for trace in traces]
    for trace in traces[1:]:
        if trace.world != world:
            raise Refusal(
                f"{trace.path}: its run had a world size of {trace.world}, but the run of {first.path} had a world "
                f"size of {world}: give traces of one run"
            )
    if len(traces) > 1 and ranks != list(range(world)):
        twice = sorted(rank for rank, count in Counter(ranks).items() if count > 1)
        missing = sorted({*range(world)} - {*ranks})
        given = len(traces)
        what = (
            f"more than one of the {given} traces is of rank {twice[0]}"
            if twice
            else f"none of the {given} traces is of rank {missing[0]}"
        )
        raise Refusal(
            f"{first.path}: its run had a world size of {world}, but {what}: give one trace of each rank, or only one "
            "trace"
        )
    if world == 1:
        raise Refusal(f"{first.path}: its run had one rank, which sends nothing: trace two or more ranks")
    if world % ranks_per_node:
        raise Refusal(
            f"--traced-ranks-per-node {ranks_per_node} does not divide the {world} ranks of {first.path}: give a "
            "divisor"
        )
    numbers = [step.number for step in first.steps]
    for trace in traces[1:]:
        if [step.number for step in trace.steps] != numbers:
            others = [step.number for step in trace.steps]
            raise Refusal(
                f"{trace.path}: has steps {others[0]} to {others[-1]}, and {first.path} has steps {numbers[0]} to "
                f"{numbers[-1]}: trace the same steps on all ranks"
            )


def _check_alike(traces: Sequence[Trace], ranks: Mapping[int, RankStep]) -> None:
    """Raise a Refusal if two ranks of a process group issued different collectives of this group in a step."""
    seen: dict[tuple[int, ...], tuple[int, list[object]]] = {}
    for rank, step in ranks.items():
        by_group = dict[tuple[int, ...], list[object]]()
        for collective in step.collectives:
            by_group.setdefault(collective.group, []).append(collective.signature)
        for group, signatures in by_group.items():
            other, known = seen.setdefault(group, (rank, signatures))
            if known != signatures:
                raise Refusal(
                    f"{traces[0].path}: ranks {other} and {rank} issued different collectives in the same step and "
                    f"process group ({len(known)} and {len(signatures)} of them): give traces "
                    "of one run and of the same steps"
                )


def match_collectives(ranks: Mapping[int, RankStep]) -> list[dict[int, int]]:
    """Match the collectives of a step across ranks.

    The n-th collective of a process group on one rank is the n-th collective of this group on all its other ranks.

    Returns:
        A dict for each collective.  It maps each rank that takes part to the collective's index, from 0, in the list
        ``collectives`` of this rank.
    """
    matched, by_key = list[dict[int, int]](), dict[tuple[tuple[int, ...], int], dict[int, int]]()
    for rank in sorted(ranks):
        counts = Counter[tuple[int, ...]]()
        for number, collective in enumerate(ranks[rank].collectives):
            key = collective.group, counts[collective.group]
            counts[collective.group] += 1
            if key not in by_key:
                by_key[key] = {}
                matched.append(by_key[key])
            by_key[key][rank] = number
    return matched


def _offsets(
    traces: Sequence[Trace], steps: Sequence[Mapping[int, RankStep]], bases: Mapping[int, float]
) -> dict[int, float]:
    """Return by how many seconds the clock of each rank is ahead of the clock of the first rank.

    A collective ends on all hosts at about the same time.  If the traces of two hosts say that collectives ended 3 s
    later on the second host (in the median), the second host's clock is therefore 3 s ahead.

    Ranks on one host share a clock.  There are two cases:

    - The traces name several hosts.  Each host's clock is compared with the clock of the first rank's host.
    - All traces name the same host, or a trace names none.  Each rank's clock is compared with the first rank's clock.
      If all differences are below 0.1 s, the ranks are taken to be on one host, and all results are 0.  Otherwise the
      ranks are taken to be on several hosts, and the differences are returned.

    Args:
        traces: The traces of all ranks.
        steps: For each step, the step of every rank.
        bases: By rank, seconds to add to all times of the rank's trace, because each trace counts time from its own
            base.
    """
    names = {trace.rank: trace.host for trace in traces}
    if len(set(names.values())) > 1 and "" not in names.values():
        return _aligned(names, steps, bases)
    offsets = _aligned({rank: str(rank) for rank in names}, steps, bases)
    apart = max(map(abs, offsets.values())) >= _APART  # then the ranks' hosts only share a name
    return offsets if apart else dict.fromkeys(names, 0.0)


def _aligned(
    hosts: Mapping[int, str], steps: Sequence[Mapping[int, RankStep]], bases: Mapping[int, float]
) -> dict[int, float]:
    """Return by how many seconds the clock of each rank is ahead of the first rank's, given each rank's host.

    The difference between two clocks is the median difference between the times at which the same collectives ended on
    both hosts.  Only the clocks of neighbours are compared directly.  Two hosts are neighbours if one follows the other
    when the hosts of a collective are listed in the order of their ranks.  For other hosts, differences are added: if
    collectives run on hosts A, B and C, the clock of C is ahead of the clock of A by the difference from A to B plus
    the difference from B to C.  If no collectives connect a host with the first rank's host, the result is 0.

    Args:
        hosts: Name of each rank's host; ranks of one host have the same clock.
        steps: For each step, the step of every rank.
        bases: By rank, seconds to add to all times of the rank's trace, because each trace counts time from its own
            base.
    """
    apart: dict[str, dict[str, list[float]]] = {host: {} for host in hosts.values()}
    for ranks in steps:
        for places in match_collectives(ranks):
            ends = dict[str, float]()
            for rank, own in places.items():
                ends.setdefault(hosts[rank], ranks[rank].collectives[own].ran[1] + bases[rank])
            for (one, end), (other, later) in itertools.pairwise(ends.items()):
                apart[one].setdefault(other, []).append(later - end)
                apart[other].setdefault(one, []).append(end - later)
    first = hosts[min(hosts)]
    found, reached = {first: 0.0}, [first]
    for host in reached:
        for other, values in apart[host].items():
            if other not in found:
                found[other] = found[host] + statistics.median(values)
                reached.append(other)
    return {rank: found.get(host, 0.0) for rank, host in hosts.items()}


def _joined(ranks: Mapping[int, RankStep], topology: Topology, offsets: Mapping[int, float]) -> JointStep:
    """Join the traces of one step on all ranks: align their clocks, and match their collectives.

    Two fields of the result's collectives do not have their final values yet: ``link`` is 0, and ``overhead`` holds the
    time at which the collective ended on each rank.  :func:`_timed` replaces both.

    Args:
        ranks: The step on each rank.
        topology: Nodes and ranks per node.
        offsets: By rank, seconds to subtract from all times of the rank.
    """
    begins = {rank: step.begin - offsets.get(rank, 0.0) for rank, step in ranks.items()}
    ends = {rank: step.end - offsets.get(rank, 0.0) for rank, step in ranks.items()}
    first, found = min(begins.values()), list[Joined]()
    for places in match_collectives(ranks):
        runs = {
            rank: tuple(
                moment - offsets.get(rank, 0.0) - first for moment in ranks[rank].collectives[number].ran
            )
            for rank, number in places.items()
        }
        rank, number = next(iter(places.items()))
        seen = replace(
            ranks[rank].collectives[number],
            ran=(max(b for b, _ in runs.values()), min(e for _, e in runs.values())),
        )
        between = len({topology.node_of(rank) for rank in seen.group}) > 1
        found.append(Joined(seen, between, 0.0, {rank: end for rank, (_, end) in runs.items()}))
    return JointStep(
        ranks, {rank: begin - first for rank, begin in begins.items()}, found,
        max(ends.values()) - max(begins.values()),
    )  # fmt: skip


def _rate(steps: Sequence[JointStep]) -> float:
    """Return the rate of a node's link in bytes a second: the median rate of the largest collectives between nodes.

    If no collective is between nodes, the largest of all collectives are used.  Collectives that run at the same time
    share the link, so they are counted as one collective with the sum of their bytes.

    Raises:
        Refusal: If no collective was in progress on all its ranks at once, so that the clocks cannot be aligned.
    """
    achieved = list[tuple[float, float]]()  # (bytes, bytes a second)
    for step in steps:
        all_between = [joined.seen for joined in step.collectives if joined.between]
        until, begun, nbytes = -math.inf, 0.0, 0.0
        spans = [
            (*seen.ran, seen.wire_bytes()) for seen in all_between or [one.seen for one in step.collectives]
        ]
        for begin, end, size in [*sorted(spans), (math.inf, math.inf, 0.0)]:
            if begin >= until:
                if until > begun:
                    achieved.append((nbytes, nbytes / (until - begun)))
                begun, nbytes, until = begin, 0.0, begin
            nbytes, until = nbytes + size, max(until, end)
    if not achieved:
        raise Refusal(
            "the traces' clocks cannot be aligned, since no collective was in progress on all ranks at once: give "
            "traces of the same steps of one run"
        )
    largest = max(size for size, _ in achieved)
    return statistics.median(rate for size, rate in achieved if size >= _LARGE * largest)


def _timed(step: JointStep, rate: float) -> JointStep:
    """Divide the time of each collective of a step into time on the link and overhead, and return the step.

    Overhead is the rest of the collective's time, after its time on the link.  If a collective has ranks on several
    nodes, its time on the link is its bytes divided by ``rate`` (bytes a second).  If all its ranks are on one node,
    the whole time from the last rank's beginning to the first rank's end counts as time on the link.
    """
    by_number, free = dict[int, Joined](), 0.0
    order = sorted(range(len(step.collectives)), key=lambda number: step.collectives[number].seen.ran[0])
    for place, number in enumerate(order):
        joined = step.collectives[number]
        begin, end = joined.seen.ran
        if not joined.between:  # times inside a node do not depend on the rate of the link between nodes
            by_number[number] = replace(
                joined,
                link=max(0.0, end - begin),
                overhead={r: e - max(end, begin) for r, e in joined.overhead.items()},
            )
            continue
        begun = max(begin, free)
        link = joined.seen.wire_bytes() / rate
        free = begun + link
        following = step.collectives[order[place + 1]].seen.ran[0] if place + 1 < len(order) else math.inf
        shared = following < end
        overhead = {rank: ended - free for rank, ended in joined.overhead.items()}
        by_number[number] = replace(joined, link=link, overhead=overhead, shared=shared)
    return replace(step, collectives=[by_number[number] for number in range(len(order))])


@dataclass(frozen=True, slots=True)
class Replayed:
    """The times of a replayed step, that is, of a simulated traced step, in seconds."""

    seconds: float  # from the last rank's beginning to the last rank's end
    exposed: float  # seconds that tasks waited for collectives, on the rank with the longest waits
    link: float  # seconds in which the link between nodes was busy
    # (begin, end) of each task, by (rank, number of the task).  A collective begins when its rank is ready for it.
    spans: Mapping[tuple[int, int], tuple[float, float]]


def replay(step: JointStep, runs: Sequence[Run], slower: float = 1.0) -> Replayed:
    """Simulate a step and return its times.  Each task of each rank begins when the tasks that it waits for are done.

    Args:
        step: The traced step, which has the tasks.
        runs: How each collective of the step runs, in the order of ``step.collectives``.
        slower: Factor by which computation takes longer than traced.
    """
    return _Replay(step, runs, slower).run()


class _Replay:
    """Simulates one traced step; the arguments are those of :func:`replay`.

    A task begins when all tasks that it waits for are done.  The link between nodes carries collectives in the order in
    which all their ranks are ready.
    """

    def __init__(self, step: JointStep, runs: Sequence[Run], slower: float) -> None:
        self._step, self._runs, self._slower = step, runs, slower
        self._done: dict[tuple[int, int], float] = {}  # end of each finished task, by rank and number
        self._begun: dict[tuple[int, int], float] = {}
        self._left: dict[tuple[int, int], int] = {}  # for each task, how many tasks it still waits for
        # For each task, the numbers of the tasks of the same rank that wait for it.
        self._users: dict[tuple[int, int], list[int]] = {}
        self._runnable: list[tuple[int, int]] = []
        self._exposed = dict.fromkeys(step.ranks, 0.0)
        matched = match_collectives(step.ranks)
        self._joint = {
            (rank, own): number for number, places in enumerate(matched) for rank, own in places.items()
        }
        self._members: list[list[tuple[int, int]]] = [[] for _ in matched]  # tasks that have arrived
        self._sizes = [len(places) for places in matched]
        self._ready = [-math.inf] * len(matched)
        # Heap of the collectives for which all ranks are ready: (moment, number of the collective).
        self._pending: list[tuple[float, int]] = []
        for rank, rank_step in step.ranks.items():
            for place, task in enumerate(rank_step.tasks):
                needed = {*task.after}
                self._left[rank, place] = len(needed)
                for other in needed:
                    self._users.setdefault((rank, other), []).append(place)
                if not needed:
                    self._runnable.append((rank, place))

    def run(self) -> Replayed:
        """Simulate all tasks, and return their times."""
        free = busy = 0.0
        while self._runnable or self._pending:
            while self._runnable:
                self._start(self._runnable.pop())
            if not self._pending:
                break
            moment, number = heapq.heappop(self._pending)
            run = self._runs[number]
            end = moment + run.link
            if run.between and run.link:
                end = free = max(moment, free) + run.link
                busy += run.link
            for key in self._members[number]:
                self._finish(key, max(moment, end + run.overhead.get(key[0], 0.0)))
        skew = max(self._step.skew.values())
        spans = {key: (self._begun[key], end) for key, end in self._done.items()}
        return Replayed(max(self._done.values()) - skew, max(self._exposed.values()), busy, spans)

    def _start(self, key: tuple[int, int]) -> None:
        """Start a task, after all tasks that it waits for are done.

        - If the task computes, its end follows from its seconds, and is noted now.
        - If the task is a collective that the policy leaves out, it ends at the moment at which it begins.
        - If the task is any other collective, the collective is put into the queue for the link once all its ranks have
          started it.

        Args:
            key: (rank, number of the task).
        """
        rank, place = key
        tasks_of_rank, skew = self._step.ranks[rank].tasks, self._step.skew[rank]
        task = tasks_of_rank[place]
        own = arrival = max(skew + task.earliest, skew if not task.after else -math.inf)
        coded = 0.0
        for other in {*task.after}:
            end, collective = self._done[rank, other], tasks_of_rank[other].collective
            arrival = max(arrival, end)
            if collective is None:
                own = max(own, end)
            else:
                coded += self._runs[self._joint[rank, collective]].coding[1]
        self._begun[key] = arrival
        if task.collective is None:
            if math.isfinite(own):
                self._exposed[rank] += arrival - own
            self._finish(key, arrival + coded + task.seconds * self._slower)
            return
        number = self._joint[rank, task.collective]
        if self._runs[number].sent is None:
            self._finish(key, arrival)
            return
        self._begun[key] += task.seconds + self._runs[number].coding[0]
        self._members[number].append(key)
        self._ready[number] = max(self._ready[number], self._begun[key])
        if len(self._members[number]) == self._sizes[number]:
            heapq.heappush(self._pending, (self._ready[number], number))

    def _finish(self, key: tuple[int, int], end: float) -> None:
        self._done[key] = end
        for user in self._users.get(key, ()):
            self._left[key[0], user] -= 1
            if not self._left[key[0], user]:
                self._runnable.append((key[0], user))


def as_traced(step: JointStep) -> list[Run]:
    """Return the argument ``runs`` with which :func:`replay` repeats the collectives of a step as they were traced."""
    return [
        Run(joined.link, joined.overhead, joined.between, sent=joined.seen) for joined in step.collectives
    ]
