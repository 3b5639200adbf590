"""``zeropp trace``: records training steps of every rank with torch.profiler.

The ranks run these steps:

1. the trial's warm-up steps, at least one;
2. one step without tracing, whose duration shows what tracing costs;
3. only with this project's engine, the *timeline step*.  The times at which each rank computes, encodes, sends and
   waits are written into a file in Chrome's format.  From this file, the suite's page draws a figure with one row
   (lane) for each of these activities;
4. one step that warms torch.profiler up, and :data:`PROFILED` steps under torch.profiler.  ``zeropp whatif`` and
   Perfetto read the traces of these steps.

With this project's engine, torch.profiler's trace has a named range for each encoding, decoding, message and wait.  The
names begin with ``zeropp::``.  The names of messages and waits contain the unit (the parameters that are sent together)
and the hop (the axis of ranks along which they are sent).

Only trials on the CPU of one machine are traced, since their ranks share a clock.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from harness.bench.rounds import timed
from harness.cluster.link import open_link
from harness.cluster.rank import Rank
from harness.cluster.rank_processes import run_ranks, start_server
from harness.errors import Refusal
from harness.measure import machine
from harness.records.trace_record import CODING, COMPUTE, LANES, overlap, path_of
from harness.records.trial_record import write_whole
from harness.runs.rank_trial import Assignment, TrialRun
from harness.runs.trial_on_cluster import TrialRunner, cluster_of
from harness.suites.trial import Trial
from impl import ops
from impl.comm.exchanges import Exchange
from impl.comm.ledger import WAITING, Span, Timeline
from impl.comm.wire import Wire
from impl.plan.traffic import Tag
from impl.policy.topology import Axis

_OPERATIONS: Final = ("encode", "decode", "decode_sum", "decode_sum_encode")
_EXCHANGES: Final = ("all_gather", "all_to_all", "shift")
PROFILED: Final = 5  # steps under torch.profiler; predictions take the median of these
# Name of the timeline's lane (row) for whole forward and backward passes and optimizer steps.  All other spans of time,
# such as those of encoding, lie within these.
_PART: Final = "part of the step"


class RankTrace(NamedTuple):
    """The traced steps of one rank.  Durations are in seconds."""

    # When the rank computed, encoded, sent and waited in the timeline step; empty if there was no such step.
    spans: list[Span]
    seconds: float  # duration of the timeline step; if there is none, duration of the last profiled step
    before: float  # duration of the step without tracing
    profile: Path  # the file that torch.profiler wrote


class Tracing(NamedTuple):
    """The argument of :func:`trace_step`: what a rank runs, and where the profiler's file goes."""

    assignment: Assignment
    folder: Path  # folder of the profiler's files


def refusal(trial: Trial) -> str | None:
    """Return why a trial cannot be traced; None if it can."""
    if not trial.measures_time:
        return "cluster.ranks = 'threads' has no times to trace: ranks take turns; set cluster.ranks = 'processes'"
    on_this_machine = trial.cluster.device == "cpu" and trial.cluster.launcher == "local"
    if trial.workload == "train" and on_this_machine and trial.topology().world > 1:
        return None
    place = f"device {trial.cluster.device!r}, launcher {trial.cluster.launcher!r}, {trial.topology()} ranks"
    kind = f"strategy {trial.strategy!r}, workload {trial.workload!r}, {place}"
    return (
        f"{kind}: only training on the CPU of one machine, on two or more ranks, can be traced; use torch.profiler for "
        "other trials"
    )


def has_lanes(trial: Trial) -> bool:
    """Return whether a timeline of a step can be recorded: when a rank computes, encodes, sends and waits.

    Each of these activities is a row (lane) of the timeline.  This needs a trial in which this project's engine sends
    all messages.  In trials of peers (DDP, FSDP2 or DeepSpeed as they are), and of policies inside FSDP2 or DDP, other
    libraries send messages.
    """
    return trial.resolved_policy() is not None and trial.host is None


def write_trace(trial: Trial, folder: Path) -> tuple[Path, list[RankTrace]]:
    """Run the traced steps of a trial on all ranks, and write the traces of all ranks into files.

    torch.profiler's traces become ``traces/<id>/rank-<rank>.json.gz``.  With this project's engine (:func:`has_lanes`),
    ``traces/trace-<id>.json`` has the timeline of one step: when each rank computed, encoded, sent and waited.

    Args:
        trial: The trial.  Its validation and its measurements of errors are left out.
        folder: The suite's results folder.

    Returns:
        The path of ``trace-<id>.json``, which exists only with this project's engine, and the trace of each rank.

    Raises:
        Refusal: If the trial cannot be traced.
        LinkError: If the link between nodes cannot be opened.
        LaunchError: If a rank fails.
    """
    if (why := refusal(trial)) is not None:
        raise Refusal(f"trial {trial.id}: {why}")
    start_server()
    path = path_of(folder, trial.id)
    profiles = (path.parent / trial.id).absolute()
    profiles.mkdir(parents=True, exist_ok=True)
    with open_link(cluster_of(trial), secrets.token_hex(3)) as link:
        launch = replace(TrialRunner(folder, None).launch(trial, link, ""), log=path.with_suffix(".log"))
        plain = trial.model_copy(update={"measure_quantisation": False, "validate_every": None})
        ranks = run_ranks(trace_step, Tracing(Assignment(plain, None), profiles), launch)
    if not has_lanes(trial):
        return path, ranks
    pool = machine.pool_key(machine.facts(), machine.code())
    write_whole(path, json.dumps(chrome(trial, ranks, pool)))
    return path, ranks


def trace_step(rank: Rank, tracing: Tracing) -> RankTrace:
    """Run a trial's steps on this rank, and return this rank's trace.

    The steps are, in this order: warm-up steps (at least one), a step without tracing, a step whose timeline is
    recorded (only with this project's engine), and the steps under torch.profiler.
    """
    trial = tracing.assignment.trial
    run, timeline, warmup = TrialRun(rank, tracing.assignment), Timeline(), max(1, trial.warmup)
    for index in range(warmup):
        run.step(index)
    dist.barrier()
    before, seconds, done = timed(partial(run.step, warmup))(), 0.0, warmup + 1
    dist.barrier()
    wire = run.strategy.wire
    if has_lanes(trial) and wire is not None:
        run.loop.clock.note = partial(timeline.add, _PART)
        with wire.traced(timeline), _noting_operations(timeline):
            seconds = timed(partial(run.step, done))()
        run.loop.clock.note, done = None, done + 1
        dist.barrier()
    # Checks are not part of a step, but would lie within the steps of the profiler's trace.
    run.loop.checks = None
    profiled = tracing.folder / f"rank-{rank.rank}.json.gz"
    with contextlib.nullcontext() if wire is None else _named(wire):
        whole = _profiled(run, done, profiled)
    run.strategy.close()
    others = [span for span in timeline.spans if span.lane != _PART]
    return RankTrace([*computing(timeline.spans), *others], seconds or whole, before, profiled)


def _profiled(run: TrialRun, first: int, path: Path) -> float:
    """Run steps under torch.profiler, write the trace to ``path``, and return the seconds of the last step.

    ``first`` is the number of the first step, which warms torch.profiler up and is not in the trace.
    """
    seconds, plan = 0.0, schedule(wait=0, warmup=1, active=PROFILED, repeat=1)
    # gloo's collectives have sizes in a trace only with record_shapes.
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan) as profiler:
        for index in range(first, first + 1 + PROFILED):
            seconds = timed(partial(run.step, index))()
            if index < first + PROFILED:
                profiler.step()
    dist.barrier()  # no rank writes its file while another one runs its last step
    profiler.export_chrome_trace(str(path))
    return seconds


class _NamedExchange:
    """Wraps an exchange (the messages of one collective); calls of ``post`` and ``wait`` get named ranges in a trace.

    The trace is torch.profiler's.  The ranges are called ``zeropp::post NAME`` and ``zeropp::wait NAME``.
    """

    def __init__(self, exchange: Exchange, name: str) -> None:
        self._exchange, self._name = exchange, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)

    def post(self) -> None:
        with record_function(f"zeropp::post {self._name}"):
            self._exchange.post()

    def wait(self) -> Any:
        with record_function(f"zeropp::wait {self._name}"):
            return self._exchange.wait()


@contextlib.contextmanager
def _named(wire: Wire) -> Iterator[None]:
    """Context in which each message, wait and codec operation has a named range in torch.profiler's trace."""
    operations = {name: getattr(ops, name) for name in _OPERATIONS}
    opened = {name: getattr(wire, name) for name in _EXCHANGES}

    def call(name: str, *arguments: Any, **options: Any) -> None:
        codec = arguments[1] if name == "decode_sum_encode" else arguments[0]
        with record_function(f"zeropp::{name} {codec}"):
            operations[name](*arguments, **options)

    def exchange(kind: str, axis: Axis, nbytes: int, tag: Tag, **options: Any) -> Any:
        name = " ".join([tag.purpose, *([tag.unit] if tag.unit else []), f"hop {axis.name}", f"{nbytes} B"])
        return _NamedExchange(opened[kind](axis, nbytes, tag, **options), name)

    try:
        for name in operations:
            setattr(ops, name, partial(call, name))
        for name in opened:
            setattr(wire, name, partial(exchange, name))
        yield
    finally:
        for name, operation in operations.items():
            setattr(ops, name, operation)
        for name in opened:
            delattr(wire, name)


@contextlib.contextmanager
def _noting_operations(timeline: Timeline) -> Iterator[None]:
    """Context in which each call of a codec's operation, such as ``encode``, is recorded as a span in ``timeline``.

    The engine looks the operations up in :mod:`impl.ops` at each call.  This function therefore replaces the operations
    there.
    """
    operations = {name: getattr(ops, name) for name in _OPERATIONS}

    def call(name: str, *arguments: Any, **options: Any) -> None:
        begin = time.perf_counter()
        operations[name](*arguments, **options)
        codec = arguments[1] if name == "decode_sum_encode" else arguments[0]
        timeline.add(CODING, f"{name.replace('_', ', ')} {codec}", begin)

    try:
        for name in operations:
            setattr(ops, name, partial(call, name))
        yield
    finally:
        for name, operation in operations.items():
            setattr(ops, name, operation)


def computing(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of time, within a step, in which the rank computes.

    ``spans`` are all that were recorded in the step on this rank.  The result is made of the spans of forward, backward
    and the optimizer, without the times in which the rank waits, encodes or decodes.
    """
    busy = sorted((span.begin, span.end) for span in spans if span.lane in (WAITING, CODING))
    computed = []
    for part in (span for span in spans if span.lane == _PART):
        at = part.begin
        for begin, end in [*busy, (part.end, part.end)]:
            if at < (until := min(begin, part.end)):
                computed.append(Span(COMPUTE, part.name, at, until))
            at = max(at, end)
    return computed


def summary(ranks: Sequence[RankTrace]) -> str:
    """Return one line on a trace: the duration of the traced step, and the share of its communication that was hidden.

    While messages between nodes are in flight, a rank either waits for other nodes or does other work.  The hidden
    share is the share of this time in which it does not wait, as the mean over ranks.  If no timeline was recorded, the
    line has the duration of the last profiled step and the folder of torch.profiler's files.
    """
    seconds, before = max(rank.seconds for rank in ranks), max(rank.before for rank in ranks)
    kind = "traced" if ranks[0].spans else "last profiled"
    more = f"{seconds / before - 1:+.0%} against the untraced one before"
    step = f"the {kind} step took {seconds:.3f} s ({more})"
    if not ranks[0].spans:
        return f"{step}; {PROFILED} steps of each rank are in {ranks[0].profile.parent}"
    total, behind = map(statistics.fmean, zip(*(overlap(rank.spans) for rank in ranks), strict=True))
    if not total:
        return f"{step}; nothing was sent between nodes"
    return (
        f"{step}; messages between nodes were in flight for {total:.3f} s, {behind / total:.0%} of it hidden "
        "behind other work"
    )


def chrome(trial: Trial, ranks: Sequence[RankTrace], pool: str) -> dict[str, Any]:
    """Return the recorded timelines of all ranks as a JSON object in Chrome's trace event format.

    In this format, each rank is shown as a process.  Each kind of activity, such as computing or waiting, is shown as a
    thread of the rank's process.  If its spans of time overlap, it is shown as several threads.  ``pool`` is the hash
    of this machine and of the code.
    """
    topology = trial.topology()
    start = min(span.begin for rank in ranks for span in rank.spans)
    events: list[dict[str, Any]] = []
    for number, rank in enumerate(ranks):
        name = f"rank {number}, node {topology.node_of(number)}"
        events.append(_name_event("process", number, 0, name))
        rows = [(lane, row) for lane in LANES for row in _rows([s for s in rank.spans if s.lane == lane])]
        for thread, (lane, row) in enumerate(rows, 1):
            events.append(_name_event("thread", number, thread, lane))
            events += [
                {
                    "ph": "X", "name": span.name, "cat": lane, "pid": number, "tid": thread,
                    "ts": (span.begin - start) * 1e6, "dur": (span.end - span.begin) * 1e6,
                    "args": {"bytes": span.nbytes} if span.nbytes else {},
                }
                for span in row
            ]  # fmt: skip
    about = {
        "trial": trial.id, "strategy": trial.strategy, "pool": pool, "shows": summary(ranks),
        **{name: max(getattr(rank, name) for rank in ranks) for name in ("seconds", "before")},
    }  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _name_event(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{kind}_name", "pid": process, "tid": thread, "args": {"name": name}}


def _rows(spans: list[Span]) -> list[list[Span]]:
    """Distribute spans of time over as few rows as possible, such that spans in the same row do not overlap."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        free = next((row for row in rows if row[-1].end <= span.begin), None)
        if free is None:
            rows.append(free := [])
        free.append(span)
    return rows
