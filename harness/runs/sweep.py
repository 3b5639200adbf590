"""Runs the trials of a suite that have no record yet, one after the other, and writes their records.

Before a trial runs, its record is prepared with everything that is known beforehand, such as predictions and facts on
the machine (the trial's *blank*).  When the trial ends, its measurements are added and the record is written.  A trial
that fails is recorded too.  The suite's ``on_failure`` decides whether it is retried, and whether the sweep goes on.
After Ctrl-C the current trial is recorded as interrupted; the same command runs this trial again and continues.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from harness.cluster.node_supervisors import Nodes
from harness.cluster.rank_processes import start_server
from harness.errors import Refusal
from harness.measure import machine, run_environment
from harness.records import chained_journal, run_record
from harness.records.run_record import SuiteText
from harness.records.trial_record import (
    Failed,
    Foreseen,
    Record,
    RecordError,
    path_of,
    read,
    read_valid,
    write,
)
from harness.runs.feasibility import any_host, failure_after, forecast, input_text
from harness.runs.further_repeats import Batch
from harness.runs.progress import Display
from harness.runs.trial_on_cluster import LOGS, TrialRunner
from harness.runs.trial_step import predict
from harness.suites.labels import counted
from harness.suites.suite import SKIP, FailureResponse, Kind, Suite
from harness.suites.trial import Trial
from harness.workloads.input_digests import digests
from impl import regular_file
from impl.plan.step_time import Machine


@dataclass(slots=True)
class SweepOutcome:
    """How many trials have a result, failed or were skipped in one call of :func:`run_sweep`."""

    ok: int = 0
    failed: int = 0  # trials without a result, including those of earlier runs
    skipped: int = 0  # trials that already had a record
    interrupted: bool = False


def run_sweep(
    suite: Suite,
    batches: Iterable[Batch],
    results: Path,
    console: Console,
    *,
    nodes: Nodes | None = None,
    retry_failed: bool = False,
    total: int = 0,
    on: Machine | None = None,
) -> SweepOutcome:
    """Run the trials that have no record in ``results``, in order, and count the trials by outcome.

    Args:
        suite: The suite.
        batches: Batches of trials; the next one is taken when all trials of earlier batches have records.
        results: The results folder; logs of failed trials are written to its folder ``logs``.
        console: Where progress is printed.
        nodes: The nodes that a launcher started; None if all ranks run on this machine.
        retry_failed: Whether to run trials again that failed in an earlier run.
        total: Number of trials that are known in advance, including those that have a record.  Only the progress
            display uses it.
        on: The machine for which the duration of steps is predicted and recorded; None for no prediction.

    Returns:
        The counts of trials that have a result, failed, or were skipped because they had a record.

    Raises:
        RecordError: If ``results`` cannot be read or written.
        Refusal: If a sweep was begun on another machine or with other versions of Python, torch or the code, or if a
            user's module was edited during the run.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(results))
        chained_journal.complete(results)
        display = stack.enter_context(Display(console, results, total))
        runner = stack.enter_context(TrialRunner(results, nodes))
        sweep = _Sweep(suite, results, runner, display, retry_failed, on)
        sweep.renew()
        try:
            for batch in batches:
                for trial in sweep.missing(batch):
                    if sweep.run_and_write(trial):
                        return sweep.tally
        except KeyboardInterrupt:
            sweep.tally.interrupted = True
            display.stopped("interrupted")
        return sweep.tally


@contextlib.contextmanager
def locked(results: Path) -> Iterator[None]:
    """Lock a results folder during the body of ``with``, so that only one run at a time writes into it.

    The lock also works on NFS.  The folder is created if it does not exist.

    Raises:
        RecordError: If another run holds the lock, or the folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            results.mkdir(parents=True, exist_ok=True)
            if (results / ".lock").exists():
                regular_file.status(results / ".lock")
            lock = stack.enter_context((results / ".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordError(
                f"{results}: another zeropp run is writing there; wait for it, or choose another folder with --results"
            ) from None
        except OSError as error:
            raise RecordError(f"{results}: cannot write there: {error.strerror or error}") from error
        yield


def finished(results: Path, trial: Trial, pool: str) -> Record | None:
    """Return the record of a trial if the trial need not run again, else None.

    A trial must run again in three cases:

    - it has no record;
    - its record has a failure that may not happen again (:data:`~harness.records.trial_record.PASSING`);
    - its record has no measurements, and the trial's inputs, the machine or the code have changed since the record was
      written.

    Args:
        results: The results folder.
        trial: The trial.
        pool: A hash of this machine and of the code.  It is compared with the field ``pool`` of the trial's record.
    """
    path = path_of(results, trial.id)
    if not path.exists():
        return None
    record = read(path)
    current = record.measured or (record.pool == pool and record.inputs == digests(trial))
    return record if record.settled and current else None


@dataclass(slots=True)
class _Sweep:
    """Runs the trials of a suite one by one, and keeps what must be known from one trial to the next."""

    suite: Suite
    results: Path
    runner: TrialRunner
    display: Display
    retry_failed: bool
    on: Machine | None
    tally: SweepOutcome = field(default_factory=SweepOutcome)
    _number: int = 0  # of the current sweep
    # By sweep, the hashes of machines and code that its results are from.
    _pools: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    # By trial's id, its place in the order of all trials.
    _orders: dict[str, int] = field(default_factory=dict)
    _blanks: dict[str, Record] = field(default_factory=dict)  # records of trials that have not run yet
    _run: str | None = None  # hash that names the run record, once it is written
    _machine: dict[str, Any] = field(default_factory=machine.facts)
    _code: dict[str, Any] = field(default_factory=machine.code)

    def renew(self) -> None:
        """Rewrite records whose comparison settings (role, answer and margin) differ from those of the suite file.

        The settings differ if the suite's author changed them after the record was written.  Records of all sweeps are
        rewritten, not only of those that this run asks for, since a report compares all of them.
        """
        records = read_valid(self.results)[0]
        known = self.suite.all_repeats(1 + max((record.sweep for record in records), default=0))
        for record in records:
            if (trial := known.get(record.id)) is not None:
                fields = self._question_fields(trial)
                if fields != record.model_dump(include=set(fields)):
                    write(self.results, record.model_copy(update=fields))

    def missing(self, batch: Batch) -> list[Trial]:
        """Return the trials of a batch that have to run, and prepare for each a record without measurements.

        Raises:
            Refusal: If other trials of the sweep ran on another machine, or with other versions of Python, torch or the
                code.  A comparison of their results with results of this run would be unfair.
        """
        why, pool = "some intervals are not narrow enough", machine.pool_key(self._machine, self._code)
        if batch.sweep != self._number:
            why = f"sweep {batch.sweep + 1}"
            self._number = batch.sweep
            self.runner.close_links()  # each sweep calibrates its links anew
        done = dict[str, Record]()
        for trial in batch.trials:
            self._orders.setdefault(trial.id, batch.first + len(self._orders))
            if (record := finished(self.results, trial, pool)) is not None:
                done[trial.id] = record
        failures = [record for record in done.values() if not record.answers]
        if self.retry_failed:
            done = {name: record for name, record in done.items() if record.answers}
            failures = []
        missing = [trial for trial in batch.trials if trial.id not in done]
        pools = self._pools[batch.sweep]
        beside = (path_of(self.results, trial.id) for trial in batch.beside)
        recorded = [*done.values(), *(read(path) for path in beside if path.exists())]
        pools |= {record.pool for record in recorded if record.measured}
        if missing and (others := pools - {pool}):
            raise Refusal(
                f"{self.results}: sweep {batch.sweep + 1} was begun on another machine or with other versions of "
                f"Python, torch or the code (hash {min(others)}, here {pool}): finish this sweep where it was begun, "
                "or choose another folder with --results; once this sweep is finished, a larger --sweeps runs further "
                "sweeps on this machine"
            )
        self.tally.failed += len(failures)
        self.tally.skipped += len(batch.trials) - len(missing)
        self.display.batch(batch.trials, len(missing), f"{why}: {counted(len(missing), 'trial')}", failures)
        if missing:
            self._prepare(missing, pool)
        return missing

    def run_and_write(self, trial: Trial) -> bool:
        """Run one trial, with the retries that the suite asks for, and write its record.

        Returns:
            True if the trial failed and the suite's ``on_failure`` ends the sweep after such a failure.
        """
        self.display.began(trial)
        record, earlier = self.run(trial), list[Failed]()
        while record.failure is not None and len(earlier) < self._response(record).retries:
            earlier.append(Failed(kind=record.failure.kind, message=record.failure.message))
            self.display.retried(record, len(earlier), self._response(record).retries)
            self.display.began(trial)
            record = self.run(trial).model_copy(update={"earlier": earlier})
        chained_journal.append(self.results, record)
        if record.failure is None or record.failure.log is None:  # an earlier run may have left a log
            (self.results / LOGS / f"{trial.id}.log").unlink(missing_ok=True)
        self.tally.ok += record.answers
        self.tally.failed += not record.answers
        self.display.finished(record)
        stops = self._response(record).stop
        if stops and record.failure is not None:
            self.display.stopped(f"on_failure.{record.failure.kind} stops the run")
        return stops

    def _response(self, record: Record) -> FailureResponse:
        """Return how often a trial with this record is retried, and whether the sweep stops if the trial still fails.

        The suite's ``on_failure`` decides this for each kind of failure.  In these cases the trial is not retried, and
        the sweep goes on:

        - the trial did not fail;
        - its failure is itself an answer (:attr:`Record.answers`), such as a model that exceeds the memory limit;
        - ``on_failure`` does not name this kind of failure.
        """
        failure = None if record.answers else record.failure
        return SKIP if failure is None else self.suite.on_failure.get(cast("Kind", failure.kind), SKIP)

    def _question_fields(self, trial: Trial) -> dict[str, Any]:
        """Return the fields of a trial's record that depend on what the suite compares.

        ``role`` is ``baseline``, ``contrast``, or an empty text for neither.  ``answer`` is the quantity that answers
        the suite's question, or an empty text if the suite does not name it.  ``margin`` is the suite's margin for
        losses, in training steps: a loss may be higher than its baseline's by as much as the baseline's loss falls in
        so many steps.
        """
        suite = self.suite
        return {"role": suite.role_of(trial), "answer": suite.answer, "margin": suite.margin}

    def _prepare(self, missing: Sequence[Trial], pool: str) -> None:
        """Prepare the records of trials that have to run, with everything except the measurements.

        The first call also writes the run record, which holds what all trials of this run have in common.

        Args:
            missing: The trials.
            pool: A hash of this machine and of the code.
        """
        suite = self.suite
        if self._run is None:
            start_server()  # which imports torch while trials are planned
            nodes = self.runner.nodes
            facts = [run_environment.identity()] if nodes is None else [node.facts for node in nodes.nodes]
            text = SuiteText(name=suite.file, text=suite.text, configurations=dict(suite.configurations))
            run = run_environment.run_of(text if suite.text else None, facts)
            self._run = run_record.write(self.results, run)
        for prediction in forecast(missing, any_host()):
            trial, foreseen = prediction.trial, None
            if (
                self.on is not None
                and trial.measures_time
                and (step := predict(trial, prediction.step, prediction.egress, self.on))
            ):
                foreseen = Foreseen.model_validate({"machine": self.on.name} | asdict(step))
            self._blanks[trial.id] = Record(
                id=trial.id,
                suite=suite.name,
                question=suite.question,
                **self._question_fields(trial),
                trial=trial.canonical(),
                started="",
                finished="",
                order=self._orders[trial.id],
                sweep=self._number,
                machine=self._machine,
                code=self._code,
                inputs=digests(trial),
                pool=pool,
                failure=prediction.failure,
                findings=list(prediction.findings),
                parameters=prediction.parameters or 0,
                foreseen=foreseen,
                run=self._run,
            )

    def run(self, trial: Trial) -> Record:
        """Run one trial once, and return its record even if the trial failed.

        Raises:
            KeyboardInterrupt: After Ctrl-C, once the record of the interrupted trial is written.
        """
        now = _now()
        blank = self._blanks[trial.id].model_copy(update={"started": now, "finished": now})
        if blank.failure is not None:
            return blank
        self._check_sources(trial, blank.inputs)
        record = self.runner.run(trial, blank, self.display.progress)
        self._check_sources(trial, blank.inputs)
        record = record.model_copy(update={"finished": _now()})
        if record.failure is None:
            return record.model_copy(update={"failure": failure_after(trial, record)})
        if record.failure.kind == "interrupted":
            chained_journal.append(self.results, record)
            raise KeyboardInterrupt
        return record

    def _check_sources(self, trial: Trial, before: dict[str, str]) -> None:
        """Raise a Refusal if one of the user's modules was edited during this run.

        After an edit, the ranks may have imported other code than the code whose hash is in the trial's record.

        Args:
            trial: The trial that is about to run, or has just run.
            before: Hashes of the trial's inputs by the input's name, from when the record was prepared.
        """
        now = digests(trial)
        for name in sorted(name for name in before | now if before.get(name) != now.get(name)):
            # Corpora and data files are not checked: a model may write files that its source names.
            if name != "corpus" and not name.startswith("file "):
                edited = f"{input_text(trial, name)} was edited during this run"
                raise Refusal(
                    f"{self.results}: {edited}, so trial {trial.id} is not recorded and the run ends; undo "
                    "the edit and run again, or choose another folder with --results"
                )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
