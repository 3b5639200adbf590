"""Runs the trials of a suite that have no record yet, one after the other, and writes their records.

Links are opened when a trial first needs them, calibrated once, and kept until no later trial
needs them; shaped ones, until another link is needed.  A failed trial is recorded and the sweep goes
on; Ctrl-C ends it, and the current trial
is recorded as interrupted, to be run again next time.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from harness.cluster.link import (
    Link,
    LinkError,
    Setting,
    choose_hcas,
    message_bytes,
    nccl_in_words,
    open_link,
    shape,
    slowest,
)
from harness.cluster.node_supervisors import Nodes
from harness.cluster.rank import Progress
from harness.cluster.rank_processes import (
    BACKENDS,
    REFUSALS,
    Kind,
    Launch,
    LaunchError,
    run_ranks,
    start_server,
)
from harness.errors import Refusal
from harness.measure import machine, provenance
from harness.records import run_record
from harness.records.record import Failed, Failure, LinkRecord, Record, RecordError, path_of, read, write
from harness.records.run_record import SuiteText
from harness.runs.assemble import TrialError, assemble
from harness.runs.forecast import beyond_limit, findings, forecast, this_host
from harness.runs.lease import Lease, sharing_machine
from harness.runs.progress import Display
from harness.runs.repeats import Batch
from harness.runs.trial_loop import Assignment, Outcome
from harness.runs.work import EXCHANGE, TRIAL, WORKS
from harness.strategies import deepspeed
from harness.suites.labels import counted
from harness.suites.on_failure import SKIP, Answer
from harness.suites.peers import DEEPSPEED
from harness.suites.question import Said
from harness.suites.trial import Trial
from harness.workloads.input_digests import digests
from impl.plan.topology import Topology

LOGS: Final = "logs"
LOCK: Final = ".lock"
SCRATCH: Final = ".scratch"
INTERRUPTED: Final = "Ctrl-C; not yet run again"
_CALIBRATION_SECONDS: Final = 120.0
_TAIL_LINES: Final = 20  # of a log, on the record


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """Counts of a sweep's trials by outcome.

    Attributes:
        failed: trials without a result, those of earlier runs included.
        skipped: trials that had a record before.
    """

    ok: int
    failed: int
    skipped: int
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """What a suite says of all its trials together.

    Attributes:
        role_of: what the question compares a trial as; written also to records that are there.
        on_failure: what follows a failure, by its kind; the next trial for others.
        text: of the suite's file.
        said: the quantity that the suite names as its answer.
    """

    suite: str
    question: str = ""
    role_of: Callable[[Trial], str] = lambda _: ""
    on_failure: Mapping[str, Answer] = field(default_factory=dict)
    text: SuiteText | None = None
    said: Said = ""

    def answer(self, record: Record) -> Answer:
        """What follows the outcome of a trial."""
        return (
            SKIP
            if record.answers or record.failure is None
            else self.on_failure.get(record.failure.kind, SKIP)
        )


class _Stopped(Exception):  # noqa: N818 - no error of the program
    """A failure after which the suite wants no further trial."""


def run_sweep(
    asked: Asked,
    trials: Sequence[Trial],
    results: Path,
    console: Console,
    *,
    nodes: Nodes | None = None,
    retry_failed: bool = False,
    more: Callable[[], Batch | None] | None = None,
    total: int = 0,
) -> SweepOutcome:
    """Run the trials that have no record in ``results``, in order; logs of failed ones go to its ``logs``.

    Args:
        asked: of all of them.
        trials: of the first sweep.
        results: folder of the records.
        console: where progress is printed.
        nodes: those of a launcher; None if all ranks run on this host.
        retry_failed: run those again that failed for good.
        more: the batch that follows, once all before have records, or None; a further sweep opens its links
            anew.
        total: trials that are known to come in all.

    Raises:
        RecordError: if ``results`` cannot be read or written.
    """
    counts = {"ok": 0, "failed": 0, "skipped": 0}
    interrupted = False
    with contextlib.ExitStack() as stack:
        sweep = _Sweep(asked, results, nodes, retry_failed, stack.enter_context(alone(results)))
        if (other := stack.enter_context(sharing_machine())) is not None:
            console.print(
                f"another zeropp run (process {other}) is under way on this machine: each disturbs the times "
                "that the other measures",
                soft_wrap=True,
                highlight=False,
            )
        batch: Batch | None = (first := Batch(0, tuple(trials)))
        missing, failures = _missing(sweep, first, counts)
        display = stack.enter_context(
            Display(console, trials, missing, results, total=total, role_of=asked.role_of)
        )
        display.failed_before(failures)
        stack.enter_context(sweep)
        try:
            while batch is not None:
                wanted = [setting_of(trial) for trial in batch.trials]
                for position, trial in enumerate(missing):
                    later = [setting_of(one) for one in missing[position:]]
                    sweep.keep_links(later if more is None else wanted)
                    _run_one(sweep, trial, display, counts)
                batch = more() if more is not None else None
                if batch is not None:
                    missing = _further(sweep, batch, counts, display)
        except _Stopped as stopped:
            display.stopped(str(stopped))
        except KeyboardInterrupt:
            interrupted = True
            display.interrupted()
    return SweepOutcome(counts["ok"], counts["failed"], counts["skipped"], interrupted)


def _missing(sweep: _Sweep, batch: Batch, tally: dict[str, int]) -> tuple[list[Trial], list[Record]]:
    """The trials of a batch that have to run, and the failures of those that need not; both are counted."""
    sweep.number_trials(batch)
    there = {trial.id: finished(sweep.results, trial, sweep.pool) for trial in batch.trials}
    for trial in batch.trials:
        record = there[trial.id]
        asked = {"role": sweep.asked.role_of(trial), "answer": sweep.asked.said}
        if record is not None and asked != {"role": record.role, "answer": record.answer}:
            write(sweep.results, record.model_copy(update=asked))  # the question has changed, not the trial
    failures = [record for record in there.values() if record is not None and not record.answers]
    if sweep.retry_failed:
        there |= {record.id: None for record in failures}
        failures = []
    missing = [trial for trial in batch.trials if there[trial.id] is None]
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
    record, earlier = sweep.run(trial, display), list[Failed]()
    answer = sweep.asked.answer(record)
    while record.failure is not None and len(earlier) < answer.retries:
        earlier.append(Failed(kind=record.failure.kind, message=record.failure.message))
        display.again(record, len(earlier), answer.retries)
        record = sweep.run(trial, display).model_copy(update={"earlier": earlier})
        answer = sweep.asked.answer(record)
    sweep.lease.check()
    write(sweep.results, record)
    if record.failure is None or record.failure.log is None:  # what an earlier run left
        (sweep.results / LOGS / f"{trial.id}.log").unlink(missing_ok=True)
    tally["ok" if record.answers else "failed"] += 1
    display.finished(record)
    if answer.stop and record.failure is not None:
        raise _Stopped(f"on_failure.{record.failure.kind} stops the run")


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


@contextlib.contextmanager
def alone(results: Path) -> Iterator[Lease]:
    """Hold the folder's lock and its lease, and remove temporary files that a killed run left there.

    Raises:
        RecordError: if another run holds it, or the folder cannot be written.
    """
    scratch = results / SCRATCH
    try:
        results.mkdir(parents=True, exist_ok=True)
        lock = (results / LOCK).open("w")
    except OSError as error:
        raise RecordError(f"{results}: cannot write there: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordError(
                f"{results}: another zeropp run is writing there; wait for it, or choose other --results"
            ) from None
        except OSError as error:
            raise RecordError(f"{results}: cannot be locked: {error.strerror or error}") from error
        with Lease(results) as lease:
            shutil.rmtree(scratch, ignore_errors=True)
            try:
                yield lease
            finally:
                shutil.rmtree(scratch, ignore_errors=True)


def setting_of(trial: Trial) -> Setting:
    """The link that a trial asks for."""
    cluster = trial.cluster
    latency = cluster.latency or 0.0
    nodes = 1 if trial.strategy == "single" else cluster.nodes
    if nodes == 1 and (cluster.link != "real" or cluster.launcher != "local"):
        return Setting("none", 1, None)
    transport = "gloo" if cluster.transport == "shm" else cluster.transport  # which shm has between nodes
    return Setting(cluster.link, nodes, cluster.rate, latency, transport, cluster.hcas)


@dataclass(slots=True)
class _Sweep:
    """State of a sweep between trials: open links, and facts about the machine."""

    asked: Asked
    results: Path
    nodes: Nodes | None
    retry_failed: bool
    lease: Lease
    number: int = 0
    _orders: dict[str, int] = field(default_factory=dict)
    _run: str | None = None
    _links: dict[Setting, Link | LinkError] = field(default_factory=dict)
    _machine: dict[str, Any] = field(default_factory=machine.facts)
    _code: dict[str, Any] = field(default_factory=machine.code)

    @property
    def pool(self) -> str:
        """Pool key of its records."""
        return machine.pool_key(self._machine, self._code)

    def __enter__(self) -> None:
        start_server()

    def __exit__(self, *_: object) -> None:
        self.keep_links([])

    def keep_links(self, settings: Sequence[Setting]) -> None:
        """Close the links that none of ``settings`` needs."""
        for setting in [setting for setting in self._links if setting not in settings]:
            link = self._links.pop(setting)
            if isinstance(link, Link):
                try:
                    link.close()
                except LinkError as error:  # later links of these nodes are refused
                    print(error, file=sys.stderr, flush=True)

    def number_trials(self, batch: Batch) -> None:
        """Number the trials of a batch in the order in which they are asked for; a new sweep closes links."""
        for trial in batch.trials:
            self._orders.setdefault(trial.id, len(self._orders))
        if batch.sweep != self.number:
            self.keep_links([])
        self.number = batch.sweep

    def run(self, trial: Trial, display: Display) -> Record:
        """Run one trial and return its record, of a failure too.

        Raises:
            KeyboardInterrupt: after its record as interrupted is written.
        """
        if self._run is None:
            nodes = [provenance.identity()] if self.nodes is None else [n.facts for n in self.nodes.nodes]
            self._run = run_record.write(self.results, provenance.run_of(self.asked.text, nodes))
        display.began(trial)
        record, link = partial(self._record, trial, _now()), None
        if trial.memory_limit is not None:
            (foreseen,) = forecast((trial,), this_host())
            if foreseen.beyond_limit is not None:
                failure = Failure(kind="memory", message=f"not run: {foreseen.beyond_limit}", log=None)
                return record(None, failure, parameters=foreseen.parameters or 0)
        if (why := deepspeed.why_not(trial)) is not None:
            return record(None, Failure(kind="refused", message=why, log=None, by=DEEPSPEED))
        try:
            link = self._link(setting_of(trial), trial, display)
            _check(trial, link)
            outcomes = self._outcomes(trial, link, display.progress)
            result = assemble(outcomes, record(link, None))
            if result.link is not None:
                link.check(result.link.probed_mbit, after=True)
        except KeyboardInterrupt:
            write(self.results, record(link, Failure(kind="interrupted", message=INTERRUPTED, log=None)))
            raise
        except LaunchError as error:
            failure = _failure(error.kind, error)
            if error.log is not None:
                log = str(error.log.relative_to(self.results))
                failure = failure.model_copy(update={"log": log, "tail": _tail(error.log)})
            return record(link, failure)
        except LinkError as error:
            return record(link, _failure("link", error))
        except REFUSALS as error:
            return record(link, _failure("refused", error))
        except TrialError as error:
            return record(link, _failure("wrong", error))
        return result.model_copy(update={"failure": _beyond_limit(trial, result)})

    def _link(self, setting: Setting, trial: Trial, display: Display) -> Link:
        """The open, calibrated link of a setting; that it cannot be opened is kept for its later trials."""
        for other, link in [*self._links.items()]:  # what is shaped carries every link between the hosts
            if other != setting and isinstance(link, Link) and link.kind == "shaped":
                self._links.pop(other)
                link.close()
        if setting not in self._links:
            display.progress(Progress("link"))
            try:
                link = self._opened(setting, trial)
            except LinkError as error:
                self._links[setting] = error
                raise
            try:
                self._calibrate(link, trial)
            except BaseException:  # the next trial that needs it begins anew
                link.close()
                raise
            self._links[setting] = link
        found = self._links[setting]
        if isinstance(found, LinkError):
            raise found
        return found

    def _opened(self, setting: Setting, trial: Trial) -> Link:
        if trial.cluster.launcher == "local" or setting.nodes == 1:
            return open_link(setting, secrets.token_hex(3))
        nodes = self._nodes(trial)
        if setting.nodes > len(nodes.nodes):
            raise LinkError(f"the trial has {setting.nodes} nodes, the launcher started {len(nodes.nodes)}")
        if nodes.stuck is not None:
            raise LinkError(nodes.stuck)
        same, kind = nodes.on_one_host(setting.nodes), setting.kind
        told = "distinct hosts" if same is None else f"nodes {same[0]} and {same[1]} are one host"
        if kind == "auto":
            kind = "real" if same is None else "none"
        elif kind not in (("real", "shaped") if same is None else ("none",)) and kind != "paced":
            raise LinkError(
                f"link {kind!r}: {told}; a real or shaped link joins distinct hosts, 'none' those of one"
            )
        ports = nodes.ports[: setting.nodes]
        if kind == "shaped":
            return _shaped(setting, nodes, told)
        link = open_link(replace(setting, kind=kind), "")
        if setting.hcas is not None:
            there = [node.facts["hcas"] for node in nodes.nodes]
            ports = tuple(
                replace(port, hcas=choose_hcas(setting.hcas, there[node], node))
                for node, port in enumerate(ports)
            )
            link.details["nccl"] = nccl_in_words(ports)
        link.why, link.ports = told, ports
        return link

    def _calibrate(self, link: Link, trial: Trial) -> None:
        if link.setting.nodes == 1:
            return
        topology, backend = Topology(link.setting.nodes, 1), _backend(trial)
        launch = self._launch(link, topology, 1, _CALIBRATION_SECONDS, "calibration", backend)
        argument = (message_bytes(link.setting), link.setting.transport)
        found = self._start(trial, EXCHANGE, argument, launch, lambda _: None)
        link.calibrated_mbit = slowest([rates for rates in found if rates])
        link.check(link.calibrated_mbit)

    def _launch(  # noqa: PLR0917  # what differs between a calibration and a trial
        self,
        link: Link,
        topology: Topology,
        threads: int,
        seconds: float,
        log: str,
        backend: str,
    ) -> Launch:
        return Launch(
            topology=topology,
            ports=link.ports,
            paced_mbit=link.paced_mbit,
            paced_latency_ms=link.setting.latency_ms,
            threads=threads,
            timeout_seconds=seconds,
            log=self.results / LOGS / f"{log}.log",
            scratch=self.results / SCRATCH,
            backend=backend,
        )

    def _outcomes(self, trial: Trial, link: Link, on_progress: Callable[[Progress], None]) -> list[Outcome]:
        single = trial.strategy == "single"
        topology = Topology(1, 1) if single else trial.topology()
        here = topology.world if trial.cluster.launcher == "local" else topology.ranks_per_node
        threads = trial.threads or max(1, machine.cores() // here)
        launch = self._launch(link, topology, threads, trial.timeout_seconds, trial.id, _backend(trial))
        assignment = Assignment(
            trial=trial,
            probe_bytes=message_bytes(link.setting) if link.setting.nodes > 1 else None,
            count=link.kind == "namespaces",
        )
        return self._start(trial, TRIAL, assignment, launch, on_progress)

    def _start(
        self,
        trial: Trial,
        work: str,
        argument: Any,
        launch: Launch,
        on_progress: Callable[[Progress], None],
    ) -> list[Any]:
        """Run the ranks where the trial's launcher has them; returns their results by rank."""
        if trial.cluster.launcher == "local":
            return run_ranks(WORKS[work].target, argument, launch, on_progress)
        return self._nodes(trial).run(work, argument, launch, on_progress)

    def _nodes(self, trial: Trial) -> Nodes:
        """The launcher's nodes; a Refusal without them."""
        if self.nodes is None:
            launcher = trial.cluster.launcher
            raise Refusal(f"cluster.launcher = {launcher!r}: this process was not started by it")
        return self.nodes

    def _record(
        self,
        trial: Trial,
        started: str,
        link: Link | None,
        failure: Failure | None,
        parameters: int = 0,
    ) -> Record:
        return Record(
            id=trial.id,
            suite=self.asked.suite,
            question=self.asked.question,
            role=self.asked.role_of(trial),
            answer=self.asked.said,
            trial=trial.canonical(),
            started=started,
            finished=_now(),
            order=self._orders[trial.id],
            sweep=self.number,
            machine=self._machine,
            code=self._code,
            inputs=digests(trial),
            pool=self.pool,
            findings=list(findings(trial)),
            link=None if link is None else _link_record(link),
            failure=failure,
            parameters=parameters,
            run=self._run,
        )


def _beyond_limit(trial: Trial, result: Record) -> Failure | None:
    """The failure of a trial whose engine exceeded its limit in the predicted parts; else None."""
    for rank in result.ranks:
        foreseen = rank.memory.formula or rank.memory.engine  # peers have no formula
        held = {part: size for part, size in rank.memory.engine.items() if part in foreseen}
        if (why := beyond_limit(trial, held)) is not None:
            return Failure(kind="memory", message=f"it ran, and {why}", log=None)
    return None


def _check(trial: Trial, link: Link) -> None:
    """Refuse trials that the link cannot run.

    Raises:
        LinkError: for a peer whose rate nothing would limit.
    """
    if link.paced_mbit is not None and trial.resolved_policy() is None:
        raise LinkError(
            f"strategy {trial.strategy!r} sends past our wire, and link 'paced' holds only that to "
            f"{link.paced_mbit:g} Mbit/s; it needs network namespaces ({link.why})"
        )


def _shaped(setting: Setting, nodes: Nodes, why: str) -> Link:
    """The link of hosts whose interfaces are shaped until it closes; a LinkError if one may not be."""
    assert setting.rate_mbit is not None  # noqa: S101  # a suite without one is refused
    found, form = nodes.shape(setting.rate_mbit, setting.nodes), shape(setting.rate_mbit)
    details = {
        "queue": "tbf",
        "burst": form.burst,
        "limit": form.limit,
        "segment": form.segment,
        "untimed": "shaped",  # the hosts' keepers are not asked during a trial
        "nodes": found,
    }
    ports = tuple(replace(port, shaped=True) for port in nodes.ports[: setting.nodes])
    if setting.transport == "nccl":
        details["nccl"] = nccl_in_words(ports)
    return Link(setting, "shaped", why, ports, details, release=partial(nodes.unshape, setting.nodes))


def _backend(trial: Trial) -> str:
    return BACKENDS.get(trial.cluster.transport, trial.cluster.transport)  # else a module that gives one


def _link_record(link: Link) -> LinkRecord:
    return LinkRecord(
        kind=link.kind,
        why=link.why,
        requested_mbit=link.setting.rate_mbit,
        calibrated_mbit=link.calibrated_mbit,
        probed_mbit=[],
        message_bytes=message_bytes(link.setting) if link.setting.nodes > 1 else 0,
        details=link.details,
    )


def _failure(kind: Kind, error: BaseException) -> Failure:
    return Failure(kind=kind, message=" ".join(str(error).split()) or type(error).__name__, log=None)


def _tail(log: Path) -> list[str]:
    """The last lines of a log."""
    with contextlib.suppress(OSError):
        return log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return []


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
