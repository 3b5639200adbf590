"""Writes a predicted schedule as traces in the format of torch.profiler (Kineto), one file for each rank.

Perfetto and chrome://tracing draw these files, and ``zeropp whatif`` and HolisticTraceAnalysis read them.  A rank is
written as a GPU, even if it was traced on a processor: computation, codecs and links have a stream each, and one thread
of the host launches everything.  A collective is a kernel with the arguments that torch.profiler gives to NCCL's
kernels.

To see when something happens, read the times of kernels, not of launches.  If a step was traced on a processor, all its
launches are written at the beginning of the step.  If they were spread over the step, a reader of the file could take
the time between two launches for work of the host.

Sources: the files that torch 2.13 writes; torch/csrc/distributed/c10d/ParamCommsUtils.hpp and
torch/csrc/profiler/util.h (arguments of collectives).  This module does not import torch.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from harness.errors import Refusal
from harness.whatif.collectives import Kind
from harness.whatif.joint import Traced
from harness.whatif.kineto import STEP
from harness.whatif.policies import Target
from harness.whatif.predict import Prediction, row
from harness.whatif.predict import in_words as rate_in_words
from harness.whatif.schedules import COMPUTING, HOST, Activity, Message, RankSchedule, ranks_of, schedules
from harness.whole_file import written_whole

RANK: Final = "{rank}"  # stands for the rank's number in the name of a file
MOST: Final = 1024  # largest number of ranks that are written
_HOST_THREAD: Final = 1
_STREAM: Final = 7  # torch's first stream for computation
_APART: Final = 1e-6  # seconds from one launch to the next
_MOST_LISTED: Final = 30  # ranks of a group that torch lists with each collective
# Name of the collective, and a part of its kernel's name.
_NAMES: Final[Mapping[Kind, tuple[str, str]]] = {
    "all_gather": ("_allgather_base", "AllGather"),
    "reduce_scatter": ("_reduce_scatter_base", "ReduceScatter"),
    "all_reduce": ("allreduce", "AllReduce"),
    "all_to_all": ("all_to_allv", "SendRecv"),
    "broadcast": ("broadcast", "Broadcast"),
}
# Annotations of the host by phase.  A reader takes the phase of a launch from the annotation around it.
_PHASES: Final = {"forward": "forward", "backward": "autograd::engine", "optimizer": "Optimizer.step"}


def check(pattern: str, predictions: int) -> None:
    """Raise a Refusal if there are several predictions, or if the folder for the files does not exist.

    Args:
        pattern: The file's name, in which ``{rank}`` stands for the rank's number.
        predictions: Number of predictions.
    """
    if predictions > 1:
        raise Refusal(
            f"--export {pattern}: writes one prediction, and the policies and rates give {predictions}: give one "
            "--policy and one --rate"
        )
    folder = Path(pattern.replace(RANK, "0")).absolute().parent
    if not folder.is_dir():
        raise Refusal(f"--export {pattern}: there is no folder {folder}: make it, or name another file")


def paths(pattern: str, traced: Traced, target: Target) -> dict[int, Path]:
    """Return, for each rank, the file into which the rank's trace will be written.

    ``pattern`` is the file's name, in which ``{rank}`` stands for the rank's number.

    Raises:
        Refusal: if there are too many ranks, if ``pattern`` gives several ranks the same file, or if a file exists
            already.
    """
    ranks = ranks_of(traced, target)
    if len(ranks) > MOST:
        raise Refusal(
            f"--export {pattern}: the prediction has {len(ranks)} ranks, and at most {MOST} are written: lower --nodes "
            "or --ranks-per-node, or give the trace of one rank"
        )
    if len(ranks) > 1 and RANK not in pattern:
        example = Path(pattern).with_name(f"rank{RANK}.json")
        raise Refusal(
            f"--export {pattern}: the prediction has {len(ranks)} ranks, and a trace holds one: write {RANK} into the "
            f"name, as in {example}"
        )
    found = {rank: Path(pattern.replace(RANK, str(rank))) for rank in ranks}
    for path in found.values():
        if path.exists() or path.is_symlink():
            raise Refusal(f"{path}: exists already: remove it, or choose another file")
    return found


def write(files: Mapping[int, Path], traced: Traced, prediction: Prediction) -> None:
    """Write a prediction into one file for each rank.  A file whose name ends in ``.gz`` is compressed.

    The first step is written twice.  When ``zeropp whatif`` reads the files, it leaves out the first step of a GPU's
    trace, and thus still reads every predicted step.

    Raises:
        OSError: if a file cannot be written or exists already.  In this case none of the files is written.
    """
    steps = [*schedules(traced, prediction.target)]
    steps = [steps[0], *steps]
    groups, lengths = _groups_and_lengths(steps, files, prediction.target)
    begins = [0.0, *itertools.accumulate(lengths)]
    with written_whole([*files.values()], new=True) as unfinished:
        for rank, path in zip(files, unfinished, strict=True):
            of_rank = [(step(rank), begin) for step, begin in zip(steps, begins, strict=False)]
            text = "".join(_lines(rank, of_rank, groups, prediction)).encode()
            path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def in_words(files: Mapping[int, Path], target: Target) -> str:
    """Return a line of text with the names of the written files, and the options of ``zeropp whatif`` to read them."""
    first, *_, last = [*files.values()] * 2
    names = str(first) if len(files) == 1 else f"{first} to {last} ({len(files)} ranks)"
    return (
        f"Written: {names}. To predict from it: zeropp whatif --traced-rate '{rate_in_words(target.rate)}' "
        f"--traced-ranks-per-node {target.topology.ranks_per_node}"
    )


def _groups_and_lengths(
    steps: Sequence[Callable[[int], RankSchedule]], ranks: Iterable[int], target: Target
) -> tuple[dict[tuple[int, ...], str], list[float]]:
    """Return the names of the process groups that ``ranks`` use in a predicted run, and how long each step takes.

    ``steps`` has a function for each predicted step: it takes a rank's number and returns what this rank does in the
    step.

    Returns:
        (names, lengths).  ``names`` maps the ranks of each process group to the group's name.  The group of all ranks
        is called ``0``, as in torch.  ``lengths`` has the seconds of each step, from when the first rank begins the
        step to when the last rank ends it.
    """
    found, lengths = set[tuple[int, ...]](), [0.0] * len(steps)
    for rank in ranks:
        for number, step in enumerate(steps):
            for activity in step(rank).activities:
                lengths[number] = max(lengths[number], activity.end)
                if activity.message is not None:
                    found.add(activity.message.group)
    whole = tuple(range(target.topology.world))
    return {group: str(number) for number, group in enumerate([whole, *sorted(found - {whole})])}, lengths


def _lines(
    rank: int,
    steps: Iterable[tuple[RankSchedule, float]],
    groups: Mapping[tuple[int, ...], str],
    prediction: Prediction,
) -> Iterator[str]:
    """Yield the parts of the text of one rank's file.

    Args:
        rank: The rank.
        steps: For each step, the rank's schedule, and the seconds at which the earliest rank begins the step.
        groups: Names of the process groups, by their ranks.
        prediction: The prediction, which is stored in the file.
    """
    own = {group: name for group, name in groups.items() if rank in group}
    facts = {
        "schemaVersion": 1,
        "distributedInfo": {
            "backend": "nccl", "rank": rank, "world_size": prediction.target.topology.world, "pg_count": len(own),
            "pg_config": [
                {"pg_name": name, "pg_desc": _description(name), "backend_config": "cuda:nccl",
                 "pg_size": len(group), "ranks": [*group]}
                for group, name in own.items()
            ],
        },
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "host_name": "predicted",  # one for all ranks, whose clocks agree
        "zeropp_whatif": row(prediction),
    }  # fmt: skip
    events = _Events(rank, own)
    for number, (step, begin) in enumerate(steps):
        events.add_step(number, step, begin)
    yield json.dumps(facts)[:-1] + ', "traceEvents": [\n'
    title = f"rank {rank}, predicted by zeropp whatif: {prediction.target.policy}"
    yield ",\n".join(json.dumps(event) for event in [*events.names(title), *events.found])
    yield "\n]}\n"


def _listed(group: Sequence[int]) -> str:
    """Return the ranks of a process group as text, in the form in which torch writes them with each collective.

    If the group has more than 30 ranks, the text has only the first 29 ranks and the last rank.  The file lists all
    ranks of each group under ``distributedInfo``.
    """
    if len(group) <= _MOST_LISTED:
        return str([*group])
    return f"[{', '.join(map(str, group[: _MOST_LISTED - 1]))}, ..., {group[-1]}]"


def _description(name: str) -> str:
    return "default_pg" if name == "0" else f"group {name}"


@dataclass
class _Events:
    """The events of one rank's trace."""

    rank: int
    groups: Mapping[tuple[int, ...], str]
    found: list[dict[str, Any]] = field(default_factory=list)
    # Numbers of streams, by the name of the track.
    streams: dict[str, int] = field(default_factory=lambda: {COMPUTING: _STREAM})
    # Number of collectives so far, by the name of their group.
    sent: Counter[str] = field(default_factory=Counter)

    def add_step(self, number: int, step: RankSchedule, begin: float) -> None:
        """Add the events of one predicted step of this rank.

        Args:
            number: Number of the step, which becomes part of its name.
            step: What the rank does in the step.
            begin: The time in seconds at which the earliest rank begins the step.
        """
        start = begin + step.begin
        end = begin + max(activity.end for activity in step.activities)
        self._add("user_annotation", f"{STEP}{number}", start, end, _HOST_THREAD)
        launches = [
            (self._launch(place, start, activity, begin), activity)
            for place, activity in enumerate(step.activities)
            if activity.track != HOST
        ]
        moments = [(phase, [at for at, one in launches if one.phase == phase]) for phase in _PHASES]
        marks = [(phase, min(at)) for phase, at in moments if at]
        for (phase, at), (_, until) in zip(marks, [*marks[1:], ("", end)], strict=True):
            if until > at:
                self._add("user_annotation", _PHASES[phase], at, until, _HOST_THREAD)
        for activity in step.activities:
            if activity.track == HOST:
                since, until = (min(end, max(start, begin + at)) for at in (activity.begin, activity.end))
                category = "cuda_runtime" if activity.name.startswith("cuda") else "cpu_op"
                self._add(category, activity.name, since, until, _HOST_THREAD)
        for at, activity in launches:
            correlation = len(self.found) + 1
            self._add("cuda_runtime", "cudaLaunchKernel", at, at, _HOST_THREAD, correlation=correlation)
            self._add_kernel(activity, begin, correlation)

    @staticmethod
    def _launch(place: int, start: float, activity: Activity, begin: float) -> float:
        """Return the time in seconds at which the host launches an activity of a predicted step.

        - If the launch was predicted, the result is the predicted time (``activity.launched``), or ``start`` if
          ``start`` is later.
        - Otherwise the activities of the step are launched one after the other, one each microsecond from ``start`` on.
          The result is ``place`` microseconds after ``start``, or the beginning of the activity if the activity begins
          earlier.

        Args:
            place: Index of the activity in its step.
            start: When this rank begins the step.
            activity: The activity, whose times are relative to ``begin``.
            begin: When the earliest rank begins the step.
        """
        if activity.launched is None:
            return min(start + place * _APART, begin + activity.begin)
        return max(start, begin + activity.launched)

    def _add_kernel(self, activity: Activity, begin: float, correlation: int) -> None:
        name, facts = activity.name, dict[str, Any]()
        if (message := activity.message) is not None:
            kernel = _NAMES["all_reduce" if message.as_all_reduce else message.kind][1]
            name = f"ncclDevKernel_{kernel}" + (f" ({name})" if name else "")
            facts = self._facts(message)
        stream = self._stream(activity.track)
        facts = {"device": self.rank, "stream": stream, "correlation": correlation, **facts}
        self._add("kernel", name, begin + activity.begin, begin + activity.end, stream, **facts)

    def _facts(self, message: Message) -> dict[str, Any]:
        group = self.groups[message.group]
        self.sent[group] += 1
        facts = {
            "Collective name": _NAMES[message.kind][0], "In msg nelems": message.given,
            "Out msg nelems": message.received, "Group size": len(message.group), "dtype": message.dtype,
            "In split size": "[]", "Out split size": "[]", "Process Group Name": group,
            "Process Group Description": _description(group), "Process Group Ranks": _listed(message.group),
            "Rank": self.rank, "Seq": self.sent[group],
        }  # fmt: skip
        return facts | ({"codec": message.codec} if message.codec else {})

    def _stream(self, track: str) -> int:
        """Return the number of the CUDA stream under which a track's activities are written.

        A track is a row of activities that one resource runs, such as the rank's computation or a link.  Computation
        becomes stream 7.  A track that was a stream in the trace, such as ``stream 20``, keeps this number.  Other
        tracks get numbers from 101 on.
        """
        if track not in self.streams:
            own = track.removeprefix("stream ")
            self.streams[track] = int(own) if own.isdecimal() else 100 + len(self.streams)
        return self.streams[track]

    def _add(self, category: str, name: str, begin: float, end: float, thread: int, **facts: Any) -> None:
        ts, until = round(1e6 * begin, 3), round(1e6 * end, 3)
        event = {"ph": "X", "cat": category, "name": name, "pid": self.rank, "tid": thread, "ts": ts}
        self.found.append({**event, "dur": round(until - ts, 3), "args": facts})

    def names(self, title: str) -> Iterator[dict[str, Any]]:
        """Yield the events that give the process the name ``title``, and each thread the name of its track."""
        threads = {_HOST_THREAD: "host", **{stream: track for track, stream in self.streams.items()}}
        yield self._named("process_name", 0, name=title)
        yield self._named("process_sort_index", 0, sort_index=self.rank)
        for thread, name in threads.items():
            yield self._named("thread_name", thread, name=name)
            yield self._named("thread_sort_index", thread, sort_index=thread)

    def _named(self, kind: str, thread: int, **facts: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": self.rank, "tid": thread, "ts": 0, "args": facts}
