"""``zeropp trace``: records one training step of every rank as a Chrome trace.

The ranks run the trial's warm-up steps, then one step without tracing, whose duration shows what tracing costs, and
then the traced step.  Each activity of a rank, such as computing, encoding or waiting, has its own lane.
``chrome://tracing`` and ui.perfetto.dev open the file.  Only trials on the CPU of one machine are traced, since their
ranks share a clock.
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
from impl.comm.ledger import WAITING, Span, Timeline

_OPERATIONS: Final = ("encode", "decode", "decode_sum", "decode_sum_encode")
_PART: Final = "part of the step"  # lane of forward, backward and optimizer, which contain everything else


class RankTrace(NamedTuple):
    """The traced step of one rank."""

    spans: list[Span]
    seconds: float  # duration of the traced step
    before: float  # duration of the step before it, which was not traced


def refusal(trial: Trial) -> str | None:
    """Return why a trial cannot be traced; None if it can."""
    if not trial.measures_time:
        return "cluster.ranks = 'threads' has no times to trace: ranks take turns; set cluster.ranks = 'processes'"
    by_engine = trial.resolved_policy() is not None and trial.host is None and trial.workload == "train"
    if by_engine and trial.cluster.device == "cpu" and trial.cluster.launcher == "local":
        return None
    place = f"device {trial.cluster.device!r}, launcher {trial.cluster.launcher!r}"
    kind = f"strategy {trial.strategy!r}, workload {trial.workload!r}, {place}"
    return (
        f"{kind}: only training with our engine on the CPU of one machine can be traced; use torch.profiler for "
        "other trials"
    )


def write_trace(trial: Trial, folder: Path) -> tuple[Path, list[RankTrace]]:
    """Run a trial's ranks until a step is traced, and write ``traces/trace-<id>.json``.

    Args:
        trial: The trial; its validation and its measurements of errors are left out.
        folder: The suite's results folder.

    Returns:
        The path of the file, and the step of each rank.

    Raises:
        Refusal: if the trial cannot be traced.
        LinkError: if the link between nodes cannot be opened.
        LaunchError: if a rank fails.
    """
    if (why := refusal(trial)) is not None:
        raise Refusal(f"trial {trial.id}: {why}")
    start_server()
    path = path_of(folder, trial.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_link(cluster_of(trial), secrets.token_hex(3)) as link:
        launch = replace(TrialRunner(folder, None).launch(trial, link, ""), log=path.with_suffix(".log"))
        plain = trial.model_copy(update={"measure_quantisation": False, "validate_every": None})
        ranks = run_ranks(trace_step, Assignment(plain, None), launch)
    pool = machine.pool_key(machine.facts(), machine.code())
    write_whole(path, json.dumps(chrome(trial, ranks, pool)))
    return path, ranks


def trace_step(rank: Rank, assignment: Assignment) -> RankTrace:
    """Run warm-up steps (at least one), an untraced step and the traced step; runs on every rank."""
    run, timeline, warmup = TrialRun(rank, assignment), Timeline(), max(1, assignment.trial.warmup)
    assert run.strategy.wire is not None  # noqa: S101  # refusal() allows only our engine
    for index in range(warmup):
        run.step(index)
    dist.barrier()
    before = timed(partial(run.step, warmup))()
    dist.barrier()
    run.loop.clock.note = partial(timeline.add, _PART)
    with run.strategy.wire.traced(timeline), _noting_operations(timeline):
        seconds = timed(partial(run.step, warmup + 1))()
    dist.barrier()
    run.strategy.close()
    others = [span for span in timeline.spans if span.lane != _PART]
    return RankTrace([*computing(timeline.spans), *others], seconds, before)


@contextlib.contextmanager
def _noting_operations(timeline: Timeline) -> Iterator[None]:
    """Add each call of a codec's operation to the timeline, while the body of ``with`` runs.

    The engine looks these functions up in :mod:`impl.ops` at each call, so they are replaced there.
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
    """Return spans of computing: the parts of a step, without the times of waiting, encoding and decoding."""
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
    """Return one line on what a trace shows: the step's duration, and how much communication was hidden."""
    seconds, before = max(rank.seconds for rank in ranks), max(rank.before for rank in ranks)
    step = (
        f"the traced step took {seconds:.3f} s ({seconds / before - 1:+.0%} against the untraced one before)"
    )
    total, behind = map(statistics.fmean, zip(*(overlap(rank.spans) for rank in ranks), strict=True))
    if not total:
        return f"{step}; nothing was sent between nodes"
    return (
        f"{step}; messages between nodes were in flight for {total:.3f} s, {behind / total:.0%} of it hidden "
        "behind other work"
    )


def chrome(trial: Trial, ranks: Sequence[RankTrace], pool: str) -> dict[str, Any]:
    """Return the JSON object of the trace event format: a process for each rank, threads for its lanes."""
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
    """Distribute spans over as few rows as possible, such that the spans of a row do not overlap."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        free = next((row for row in rows if row[-1].end <= span.begin), None)
        if free is None:
            rows.append(free := [])
        free.append(span)
    return rows
