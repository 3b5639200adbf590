"""Runs the trials of a suite that have no record yet, one after the other, and writes their records.

What needs to be known of a trial is decided before any runs; then it goes one way:
its ranks run on the cluster, their outcomes are merged, and the record is written.  A failed trial is
recorded and the sweep goes on; Ctrl-C ends it, and the current trial is recorded as interrupted, to be run
again next time.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.cluster.node_supervisors import Nodes
from harness.errors import Refusal
from harness.measure import machine, provenance
from harness.records import chained_journal, run_record
from harness.records.record import Failed, Foreseen, Record, path_of, read, write
from harness.records.run_record import SuiteText
from harness.runs.assemble import assemble
from harness.runs.correctness_checks import TrialError
from harness.runs.feasibility import (
    any_host,
    failure_after,
    failures_before,
    findings,
    forecast,
    this_host,
)
from harness.runs.further_repeats import Batch
from harness.runs.locks import alone, sharing_machine
from harness.runs.predict import Models, foreseen, predict
from harness.runs.progress import Display
from harness.runs.trial_on_cluster import LOGS, Cluster, failure_of
from harness.suites.labels import counted
from harness.suites.on_failure import SKIP, Answer
from harness.suites.suite import Suite
from harness.suites.trial import Trial
from harness.workloads.input_digests import digests
from impl.plan.step_time import Machine


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """Counts of a sweep's trials by outcome."""

    ok: int
    failed: int  # trials without a result, those of earlier runs included
    skipped: int  # trials that had a record before
    interrupted: bool = False


class _Stopped(Exception):  # noqa: N818 - no error of the program
    """A failure after which the suite wants no further trial."""


def run_sweep(
    suite: Suite,
    trials: Sequence[Trial],
    results: Path,
    console: Console,
    *,
    nodes: Nodes | None = None,
    retry_failed: bool = False,
    more: Callable[[], Batch | None] | None = None,
    total: int = 0,
    on: Machine | None = None,
) -> SweepOutcome:
    """Run the trials that have no record in ``results``, in order; logs of failed ones go to its ``logs``.

    What the suite says of all trials is written to records that are there, too.

    Args:
        suite: whose trials they are.
        trials: of the first sweep.
        results: folder of the records.
        console: where progress is printed.
        nodes: those of a launcher; None if all ranks run on this host.
        retry_failed: run those again that failed for good.
        more: the batch that follows, once all before have records, or None.
        total: trials that are known to come in all.
        on: machine on which steps are predicted before they run; None predicts nothing.

    Raises:
        RecordError: if ``results`` cannot be read or written.
    """
    counts = {"ok": 0, "failed": 0, "skipped": 0}
    interrupted = False
    with contextlib.ExitStack() as stack:
        stack.enter_context(alone(results))
        sweep = _Sweep(suite, results, Cluster(results, nodes), retry_failed, on)
        if (other := stack.enter_context(sharing_machine())) is not None:
            console.print(
                f"another zeropp run (process {other}) is under way on this machine: each disturbs what the "
                "other measures",
                soft_wrap=True,
                highlight=False,
            )
        batch: Batch | None = (first := Batch(0, tuple(trials)))
        missing, failures = _missing(sweep, first, counts)
        display = stack.enter_context(Display(console, trials, missing, results, total=total))
        display.failed_before(failures)
        stack.enter_context(sweep.cluster)
        try:
            while batch is not None:
                sweep.prepare(missing)
                for position, trial in enumerate(missing):
                    sweep.cluster.keep_links(trial, missing[position:] if more is None else batch.trials)
                    _run_one(sweep, trial, display, counts)
                batch = more() if more is not None else None
                if batch is not None:
                    missing = _further(sweep, batch, counts, display)
        except _Stopped as stopped:
            display.stopped(str(stopped))
        except KeyboardInterrupt:
            interrupted = True
            display.stopped("interrupted")
    return SweepOutcome(counts["ok"], counts["failed"], counts["skipped"], interrupted)


def _missing(sweep: _Sweep, batch: Batch, tally: dict[str, int]) -> tuple[list[Trial], list[Record]]:
    """The trials of a batch that have to run, and the failures of those that need not; both are counted.

    Raises:
        Refusal: if some of the batch's sweep ran on another machine: its pairs would be of two machines.
    """
    sweep.number_trials(batch)
    there = {trial.id: finished(sweep.results, trial, sweep.pool) for trial in batch.trials}
    for trial in batch.trials:
        record = there[trial.id]
        asked = {
            "role": sweep.suite.role_of(trial), "answer": sweep.suite.answer, "margin": sweep.suite.margin
        }  # fmt: skip
        if record is not None and asked != record.model_dump(include=set(asked)):
            write(sweep.results, record.model_copy(update=asked))  # the question has changed, not the trial
    failures = [record for record in there.values() if record is not None and not record.answers]
    if sweep.retry_failed:
        there |= {record.id: None for record in failures}
        failures = []
    missing = [trial for trial in batch.trials if there[trial.id] is None]
    sweep.pools[batch.sweep] |= {one.pool for one in there.values() if one is not None and one.measured}
    if missing and (others := sweep.pools[batch.sweep] - {sweep.pool}):
        raise Refusal(
            f"{sweep.results}: sweep {batch.sweep + 1} was begun on another machine (hash {min(others)}, "
            f"here {sweep.pool}), and a sweep is of one machine: finish it there, or choose another folder "
            "with --results; finished ones stand beside further sweeps of this machine (--sweeps)"
        )
    tally["failed"] += len(failures)
    tally["skipped"] += len(batch.trials) - len(missing)
    return missing, failures


def _further(sweep: _Sweep, batch: Batch, tally: dict[str, int], display: Display) -> list[Trial]:
    """The trials of a later batch that have to run, once it is said why."""
    before = sweep.number
    missing, failures = _missing(sweep, batch, tally)
    why = f"sweep {batch.sweep + 1}" if batch.sweep != before else "some intervals are not narrow enough"
    why += f": {counted(len(missing), 'trial')}"
    display.further(batch.trials, missing, why)
    display.failed_before(failures)
    return missing


def _run_one(sweep: _Sweep, trial: Trial, display: Display, tally: dict[str, int]) -> None:
    """Run one trial, and write its record."""
    display.began(trial)
    record, earlier = sweep.run(trial, display), list[Failed]()
    answer = _answer(sweep.suite, record)
    while record.failure is not None and len(earlier) < answer.retries:
        earlier.append(Failed(kind=record.failure.kind, message=record.failure.message))
        display.again(record, len(earlier), answer.retries)
        display.began(trial)
        record = sweep.run(trial, display).model_copy(update={"earlier": earlier})
        answer = _answer(sweep.suite, record)
    chained_journal.append(sweep.results, record)
    if record.failure is None or record.failure.log is None:  # what an earlier run left
        (sweep.results / LOGS / f"{trial.id}.log").unlink(missing_ok=True)
    tally["ok" if record.answers else "failed"] += 1
    display.finished(record)
    if answer.stop and record.failure is not None:
        raise _Stopped(f"on_failure.{record.failure.kind} stops the run")


def _answer(suite: Suite, record: Record) -> Answer:
    """What follows the outcome of a trial."""
    failure = None if record.answers else record.failure
    return SKIP if failure is None else suite.on_failure.get(failure.kind, SKIP)


def finished(results: Path, trial: Trial, pool: str) -> Record | None:
    """The record of a trial that need not run again; None if it has to.

    A failure counts only if code and inputs are still the same.

    Raises:
        RecordError: if there is a file that is not a record.
    """
    path = path_of(results, trial.id)
    if not path.exists():
        return None
    record = read(path)
    same = record.measured or (record.pool == pool and record.inputs == digests(trial))
    return record if record.settled and same else None


@dataclass(slots=True)
class _Sweep:
    """State of a sweep between trials: what is known of them, and facts about the machine."""

    suite: Suite
    results: Path
    cluster: Cluster
    retry_failed: bool
    on: Machine | None
    number: int = 0
    pools: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))  # of results, by sweep
    _orders: dict[str, int] = field(default_factory=dict)
    _known: dict[str, dict[str, Any]] = field(default_factory=dict)  # fields of records before trials run
    _run: str | None = None
    _machine: dict[str, Any] = field(default_factory=machine.facts)
    _code: dict[str, Any] = field(default_factory=machine.code)
    pool: str = field(init=False)  # key of its records

    def __post_init__(self) -> None:
        self.pool = machine.pool_key(self._machine, self._code)

    def number_trials(self, batch: Batch) -> None:
        """Number the trials of a batch in the order in which they are asked for; a new sweep closes links."""
        for trial in batch.trials:
            self._orders.setdefault(trial.id, len(self._orders))
        if batch.sweep != self.number:
            self.cluster.keep_links()
        self.number = batch.sweep

    def prepare(self, missing: Sequence[Trial]) -> None:
        """Decide of trials that have to run what can be decided before any of them does."""
        if not missing:
            return
        if self._run is None:
            nodes, suite = self.cluster.nodes, self.suite
            facts = [provenance.identity()] if nodes is None else [node.facts for node in nodes.nodes]
            told = SuiteText(name=suite.file, text=suite.text, configurations=dict(suite.configurations))
            run = provenance.run_of(told if suite.text else None, facts)
            self._run = run_record.write(self.results, run)
        failures, models = failures_before(missing, this_host()), Models()
        steps = self._foreseen(missing)
        for trial in missing:
            failure, parameters = failures.get(trial.id, (None, 0))
            self._known[trial.id] = {
                "order": self._orders[trial.id],
                "role": self.suite.role_of(trial),
                "inputs": digests(trial),
                "findings": list(findings(trial, models)),
                "failure": failure,
                "parameters": parameters,
                "foreseen": steps.get(trial.id),
            }

    def _foreseen(self, trials: Sequence[Trial]) -> dict[str, Foreseen]:
        """The predicted steps of trials by id, where a machine is known."""
        if (on := self.on) is None:
            return {}
        planned = forecast(trials, any_host())
        steps = ((one.trial.id, predict(one.trial, one.step, one.egress, on)) for one in planned)
        return {identity: foreseen(on, step) for identity, step in steps if step is not None}

    def run(self, trial: Trial, display: Display) -> Record:
        """Run one trial and return its record, of a failure too; one that Ctrl-C ends is written first."""
        blank = self._record(trial)
        if blank.failure is not None:
            return blank
        ran = self.cluster.run(trial, display.progress)
        blank = blank.model_copy(update={"finished": _now(), "link": ran.link, "failure": ran.failure})
        if ran.failure is not None and ran.failure.kind == "interrupted":
            chained_journal.append(self.results, blank)
            raise KeyboardInterrupt
        if ran.failure is not None:
            return blank
        try:
            result = assemble(ran.outcomes, blank)
        except TrialError as error:
            return blank.model_copy(update={"failure": failure_of("wrong", error)})
        return result.model_copy(update={"failure": failure_after(trial, result)})

    def _record(self, trial: Trial) -> Record:
        """The record of a trial as far as it is known without running it."""
        now = _now()
        return Record(
            id=trial.id,
            suite=self.suite.name,
            question=self.suite.question,
            answer=self.suite.answer,
            margin=self.suite.margin,
            trial=trial.canonical(),
            started=now,
            finished=now,
            sweep=self.number,
            machine=self._machine,
            code=self._code,
            pool=self.pool,
            **self._known[trial.id],
            run=self._run,
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
