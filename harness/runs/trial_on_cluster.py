"""Where trials run: links between nodes, opened and calibrated when they are needed, and ranks on them.

Links are calibrated once a sweep and kept for its later trials; hosts' interfaces are shaped while ranks run.
Whatever fails, a rank, a node or the link, becomes one :class:`~harness.records.record.Failure`, and the next
trial has fresh ranks.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

from harness.cluster.link import Link, Setting, choose_hcas, nccl_in_words, open_link, slowest, tbf_details
from harness.cluster.node_supervisors import Nodes
from harness.cluster.rank import Progress
from harness.cluster.rank_processes import (
    BACKENDS,
    REFUSALS,
    Kind,
    Launch,
    LaunchError,
    kind_of,
    run_ranks,
    start_server,
)
from harness.errors import LinkError
from harness.measure import machine
from harness.records.record import Failure, LinkRecord
from harness.runs.locks import SCRATCH
from harness.runs.rank_tasks import EXCHANGE, TRIAL, WORKS
from harness.runs.rank_trial import Assignment, Outcome
from harness.suites import folder
from harness.suites.trial import Trial
from impl.plan.topology import Topology

LOGS: Final = "logs"
INTERRUPTED: Final = "Ctrl-C; not yet run again"
_CALIBRATION_SECONDS: Final = 120.0
_TAIL_LINES: Final = 20  # of a log, on the record


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a trial's ranks."""

    link: LinkRecord | None  # between its nodes; None if there was none
    outcomes: list[Outcome] = field(default_factory=list)  # by rank; empty after a failure
    failure: Failure | None = None


def setting_of(trial: Trial) -> Setting:
    """The link that a trial asks for."""
    cluster = trial.cluster
    latency = cluster.latency or 0.0
    nodes = 1 if trial.strategy == "single" else cluster.nodes
    if nodes == 1 and (cluster.link != "real" or cluster.launcher != "local"):
        return Setting("none", 1, None)
    transport = "gloo" if cluster.transport == "shm" else cluster.transport  # which shm has between nodes
    return Setting(
        cluster.link, nodes, cluster.rate, latency, transport, cluster.hcas, cluster.slow, cluster.inner_rate
    )


@dataclass(slots=True)
class Cluster:
    """Links and ranks of a sweep; a context manager that closes all links."""

    results: Path  # folder of the records, in which logs of failures are left
    nodes: Nodes | None  # those of a launcher; None if all ranks run on this host
    _links: dict[Setting, Link | LinkError] = field(default_factory=dict)
    _folder: Path = field(default_factory=folder.here)
    _cores: int = field(default_factory=machine.cores)

    def __enter__(self) -> Self:
        start_server()
        return self

    def __exit__(self, *_: object) -> None:
        self.close_links()

    def close_links(self) -> None:
        """Close all links; later trials have new ones."""
        for link in self._links.values():
            if isinstance(link, Link):
                link.close()
        self._links.clear()

    def run(self, trial: Trial, on_progress: Callable[[Progress], None]) -> Ran:
        """Run the ranks of a trial; a Ctrl-C, too, is a failure."""
        link: Link | None = None
        requested: float | None = None
        outcomes: list[Outcome] = []
        failure: Failure | None = None
        try:
            link = self._link(trial, on_progress)
            requested, counts = link.setting.slowest_mbit, link.kind == "namespaces"
            assignment = Assignment(trial, link.message_bytes or None, count=counts, folder=self._folder)
            launch = self.launch(trial, link, trial.id)
            outcomes = self._start(trial, TRIAL, assignment, launch, on_progress)
            link.check(_probed(outcomes), after=True)
        except KeyboardInterrupt:
            failure = Failure(kind="interrupted", message=INTERRUPTED, log=None)
        except LaunchError as error:
            failure = failure_of(error.kind, error)
            if error.log is not None:
                log = str(error.log.relative_to(self.results))
                failure = failure.model_copy(update={"log": log, "tail": _tail(error.log)})
        except REFUSALS as error:
            failure = failure_of(kind_of(error), error)
        outcomes = [] if failure else outcomes
        if link is None:
            return Ran(None, outcomes, failure)
        record = LinkRecord(
            kind=link.kind,
            why=link.why,
            requested_mbit=requested,
            calibrated_mbit=link.calibrated_mbit,
            probed_mbit=_probed(outcomes),
            message_bytes=link.message_bytes,
            details=link.details,
        )
        return Ran(record, outcomes, failure)

    def _link(self, trial: Trial, on_progress: Callable[[Progress], None]) -> Link:
        """The open, calibrated link of a trial; that it cannot be opened is kept for later trials."""
        setting = setting_of(trial)
        if setting not in self._links:
            on_progress(Progress("link"))
            try:
                link = self._open(setting, trial)
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
        if found.paced_mbit is not None and trial.resolved_policy() is None:
            raise LinkError(
                f"strategy {trial.strategy!r} sends past our wire, and link 'paced' holds only that to "
                f"{found.paced_mbit:g} Mbit/s; it needs network namespaces ({found.why})"
            )
        return found

    def _open(self, setting: Setting, trial: Trial) -> Link:
        if trial.cluster.launcher == "local" or setting.nodes == 1:
            return open_link(setting, secrets.token_hex(3))
        nodes, kind = self.nodes, setting.kind
        assert nodes is not None  # noqa: S101  # the launcher's
        same = nodes.on_one_host(setting.nodes)
        why = "distinct hosts" if same is None else f"nodes {same[0]} and {same[1]} are one host"
        if kind == "auto":
            kind = "real" if same is None else "none"
        elif kind not in (("real", "shaped", "paced") if same is None else ("none", "paced")):
            raise LinkError(
                f"link {kind!r}: {why}; a real or shaped link joins distinct hosts, 'none' those of one"
            )
        ports = [replace(port, shaped=kind == "shaped") for port in nodes.ports[: setting.nodes]]
        if kind == "shaped":
            assert setting.rate_mbit is not None  # noqa: S101  # a suite without one is refused
            # The hosts' keepers are not asked during a trial.
            link = Link(setting, kind, why, (), tbf_details(setting.rate_mbit) | {"untimed": "shaped"})
        else:
            link = open_link(replace(setting, kind=kind), "")
        if setting.hcas is not None:
            for node, port in enumerate(ports):
                there = nodes.nodes[node].facts["hcas"]
                ports[node] = replace(port, hcas=choose_hcas(setting.hcas, there, node))
        link.why, link.ports = why, tuple(ports)
        if setting.hcas is not None or (kind == "shaped" and setting.transport == "nccl"):
            link.details["nccl"] = nccl_in_words(ports)
        return link

    def _calibrate(self, link: Link, trial: Trial) -> None:
        if link.setting.nodes == 1:
            return
        launch = replace(
            self.launch(trial, link, "calibration"),
            topology=Topology(link.setting.nodes, 1),
            threads=1,
            timeout_seconds=_CALIBRATION_SECONDS,
        )
        argument = (link.message_bytes, link.setting.transport)
        rates = self._start(trial, EXCHANGE, argument, launch, lambda _: None)
        link.calibrated_mbit = slowest([of_rank for of_rank in rates if of_rank])
        if link.kind == "shaped" and self.nodes is not None:
            link.details["nodes"] = self.nodes.shaped
        link.check(link.calibrated_mbit)

    def launch(self, trial: Trial, link: Link, log: str) -> Launch:
        """How the ranks of a trial are started on its link."""
        topology = Topology(trial.cluster.nodes, trial.cluster.ranks_per_node)
        topology = Topology(1, 1) if trial.strategy == "single" else topology
        here = topology.world if trial.cluster.launcher == "local" else topology.ranks_per_node
        return Launch(
            topology=topology,
            ports=link.ports,
            paced_mbit=link.paced_mbit,
            paced_latency_ms=link.setting.latency_ms,
            shaped_mbit=link.setting.rate_mbit if link.kind == "shaped" else None,
            threads=trial.threads or max(1, self._cores // here),
            timeout_seconds=trial.timeout_seconds,
            log=self.results / LOGS / f"{log}.log",
            scratch=self.results / SCRATCH,
            backend=BACKENDS.get(trial.cluster.transport, trial.cluster.transport),  # else a module's
        )

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
        assert self.nodes is not None  # noqa: S101  # the launcher's
        return self.nodes.run(work, argument, launch, on_progress)


def _probed(outcomes: Sequence[Outcome]) -> list[float]:
    """Mbit/s of the slowest node, as ranks probed the link after the trial."""
    return slowest([outcome.probed for outcome in outcomes if outcome.probed])


def failure_of(kind: Kind, error: BaseException) -> Failure:
    """The failure that an error is, in one line."""
    return Failure(kind=kind, message=" ".join(str(error).split()) or type(error).__name__, log=None)


def _tail(log: Path) -> list[str]:
    """The last lines of a log."""
    with contextlib.suppress(OSError):
        return log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return []
