"""A sweep: the trials of a suite that have no record yet, one after the other, each leaving one.

Links are brought up when a trial first needs them, calibrated once, and kept until no later trial
needs them.  A failed trial is a record too, and the sweep goes on; Ctrl-C ends it, and what was
under way is recorded as interrupted, to be run again next time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from harness import machine
from harness.launch import REFUSALS, Kind, Launch, LaunchError, run_ranks, start_server
from harness.link import (
    REPETITIONS,
    Exchange,
    Link,
    LinkError,
    Setting,
    message_bytes,
    open_link,
    slowest,
)
from harness.progress import Display
from harness.rank import Progress, Rank, Refusal
from harness.record import Failure, LinkRecord, Record, path_of, read, write
from harness.suite import Trial
from harness.trial import Assignment, Outcome, TrialError, assemble
from harness.trial import run as run_trial
from impl.topology import Topology

LOGS: Final = "logs"
_CALIBRATION_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """How many trials of a sweep ended how; ``interrupted`` if Ctrl-C ended it."""

    ok: int
    failed: int
    skipped: int
    interrupted: bool = False


def run_sweep(suite_name: str, trials: Sequence[Trial], results: Path, console: Console) -> SweepOutcome:
    """Run the trials that have no record in ``results``, in order.

    Args:
        suite_name: goes on the records.
        trials: in the order in which they are to run.
        results: folder of the records; logs of failed trials go to its ``logs``.
        console: for live progress, or plain lines where it is no terminal.

    Raises:
        RecordError: if ``results`` cannot be read or written.
    """
    missing = [(order, trial) for order, trial in enumerate(trials) if not finished(results, trial)]
    counts = {"ok": 0, "failed": 0}
    skipped, interrupted = len(trials) - len(missing), False
    sweep = _Sweep(suite_name, results)
    with Display(console, len(trials), skipped) as display, sweep:
        try:
            for position, (order, trial) in enumerate(missing):
                sweep.keep_links([_setting(later) for _, later in missing[position:]])
                record = sweep.run(trial, order, display)
                write(results, record)
                counts["ok" if record.failure is None else "failed"] += 1
                display.finished(record)
        except KeyboardInterrupt:
            interrupted = True
            display.interrupted()
    return SweepOutcome(counts["ok"], counts["failed"], skipped, interrupted)


def finished(results: Path, trial: Trial) -> bool:
    """Whether a trial has a record other than of its interruption.

    Raises:
        RecordError: if there is a file that is not a record.
    """
    path = path_of(results, trial.id)
    if not path.exists():
        return False
    failure = read(path).failure
    return failure is None or failure.kind != "interrupted"


def _setting(trial: Trial) -> Setting:
    cluster = trial.cluster
    nodes = 1 if trial.strategy == "single" else cluster.nodes
    if nodes == 1 and cluster.link != "real":
        return Setting("none", 1, None)
    return Setting(cluster.link, nodes, cluster.rate)


@dataclass(slots=True)
class _Sweep:
    """What a sweep keeps from trial to trial: links, and facts about the machine."""

    suite: str
    results: Path
    _links: dict[Setting, Link | LinkError] = field(default_factory=dict)
    _machine: dict[str, Any] = field(default_factory=machine.facts)
    _code: dict[str, Any] = field(default_factory=machine.code)

    def __enter__(self) -> None:
        start_server()

    def __exit__(self, *_: object) -> None:
        self.keep_links([])

    def keep_links(self, settings: Sequence[Setting]) -> None:
        """Take apart the links that none of ``settings`` needs."""
        for setting in [setting for setting in self._links if setting not in settings]:
            link = self._links.pop(setting)
            if isinstance(link, Link):
                link.close()

    def run(self, trial: Trial, order: int, display: Display) -> Record:
        """One trial, whatever becomes of it.

        Raises:
            KeyboardInterrupt: after its record as interrupted is written.
        """
        display.began(trial)
        started, link = _now(), None
        try:
            link = self._link(_setting(trial), display)
            _check_peer(trial, link)
            result = assemble(trial, self._outcomes(trial, link, display.progress))
        except KeyboardInterrupt:
            failure = Failure(kind="interrupted", message="Ctrl-C", log=None)
            write(self.results, self._failed(trial, order, started, link, failure))
            raise
        except LaunchError as error:
            failure = _failure(error.kind, error, self._relative(error.log))
            return self._failed(trial, order, started, link, failure)
        except REFUSALS as error:
            return self._failed(trial, order, started, link, _failure("refused", error))
        except TrialError as error:
            return self._failed(trial, order, started, link, _failure("crashed", error))
        return self._record(
            trial,
            order,
            started,
            failure=None,
            ran=result.ran,
            units=result.units,
            parameters=result.parameters,
            link=_link_record(link, result.probed_mbit),
            ranks=result.ranks,
            interfaces=result.interfaces,
            validations=result.validations,
            quantisation=result.quantisation,
            predicted=result.predicted,
            reference_loss=result.reference_loss,
            power=result.power,
        )

    def _link(self, setting: Setting, display: Display) -> Link:
        """The link of a setting, up and calibrated.

        Raises:
            LinkError: also for every later trial that asks for what was impossible once.
        """
        if setting not in self._links:
            display.progress(Progress("link"))
            try:
                link = open_link(setting, secrets.token_hex(3))
            except LinkError as error:
                self._links[setting] = error
            else:
                self._links[setting] = link
                self._calibrate(link)
        found = self._links[setting]
        if isinstance(found, LinkError):
            raise found
        return found

    def _calibrate(self, link: Link) -> None:
        nodes = link.setting.nodes
        if nodes == 1:
            return
        exchange = Exchange(message_bytes(link.setting.rate_mbit), REPETITIONS, tuple(range(nodes)))
        launch = Launch(
            topology=Topology(nodes, 1),
            ports=link.ports,
            paced_mbit=link.paced_mbit,
            threads=1,
            timeout_seconds=_CALIBRATION_SECONDS,
            log=self.results / LOGS / "calibration.log",
        )
        link.calibrated_mbit = slowest(run_ranks(_exchange, exchange, launch))

    def _outcomes(self, trial: Trial, link: Link, on_progress: Callable[[Progress], None]) -> list[Outcome]:
        cluster = trial.cluster
        if cluster.launcher != "local":
            raise Refusal(f"cluster.launcher = {cluster.launcher!r}: not yet; expected 'local'")
        single = trial.strategy == "single"
        topology = Topology(1, 1) if single else trial.topology()
        launch = Launch(
            topology=topology,
            ports=link.ports,
            paced_mbit=link.paced_mbit,
            threads=trial.threads or max(1, machine.cores() // topology.world),
            timeout_seconds=trial.timeout_seconds,
            log=self.results / LOGS / f"{trial.id}.log",
            backend="cpu:gloo,cuda:nccl" if cluster.transport == "nccl" else "gloo",
        )
        return run_ranks(run_trial, assignment(trial, link), launch, on_progress)

    def _relative(self, log: Path | None) -> str | None:
        return None if log is None else str(log.relative_to(self.results))

    def _failed(self, trial: Trial, order: int, started: str, link: Link | None, failure: Failure) -> Record:
        known = None if link is None else _link_record(link, [])
        return self._record(trial, order, started, failure=failure, link=known)

    def _record(self, trial: Trial, order: int, started: str, **fields: Any) -> Record:
        return Record(
            id=trial.id,
            suite=self.suite,
            trial=trial.canonical(),
            started=started,
            finished=_now(),
            order=order,
            machine=self._machine,
            code=self._code,
            pool=machine.pool_key(self._machine, self._code),
            **fields,
        )


def assignment(trial: Trial, link: Link) -> Assignment:
    """What the ranks of a trial on ``link`` are given."""
    several = link.setting.nodes > 1
    return Assignment(
        trial=trial,
        probe_bytes=message_bytes(link.setting.rate_mbit) if several else None,
        count=link.kind == "namespaces",
    )


def _check_peer(trial: Trial, link: Link) -> None:
    """Refuse peers that nothing would hold to the rate.

    Raises:
        LinkError: naming both.
    """
    if link.paced_mbit is not None and trial.resolved_policy() is None:
        raise LinkError(
            f"strategy {trial.strategy!r} sends past our wire, and link 'paced' holds only that to "
            f"{link.paced_mbit:g} Mbit/s; it needs network namespaces ({link.why})"
        )


def _exchange(rank: Rank, exchange: Exchange) -> list[float]:
    return exchange.run(rank.pacer)


def _link_record(link: Link, probed: list[float]) -> LinkRecord:
    return LinkRecord(
        kind=link.kind,
        why=link.why,
        requested_mbit=link.setting.rate_mbit,
        calibrated_mbit=link.calibrated_mbit,
        probed_mbit=probed,
        message_bytes=message_bytes(link.setting.rate_mbit) if link.setting.nodes > 1 else 0,
        details=link.details,
    )


def _failure(kind: Kind, error: BaseException, log: str | None = None) -> Failure:
    return Failure(kind=kind, message=" ".join(str(error).split()) or type(error).__name__, log=log)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
