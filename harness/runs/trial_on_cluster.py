"""Runs trials one at a time: opens and calibrates the link between nodes, starts ranks on it, and makes the record.

A link is opened when the first trial needs it, and calibrated (its rate is measured) once per sweep.  Later trials
whose clusters have the same link settings use the same link.  On real hosts, the rates of the network interfaces are
limited only while ranks run.  If a rank, a node, the link or a check of the results fails, the record holds a
:class:`~harness.records.trial_record.Failure`, and the next trial gets fresh ranks.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

from harness.cluster.link import PACED, REPETITIONS, Link, measure_link, open_link, slowest_rates
from harness.cluster.nccl_environment import choose_hcas, nccl_in_words
from harness.cluster.node_supervisors import Nodes, Work
from harness.cluster.port import Port
from harness.cluster.rank import Progress, Report
from harness.cluster.rank_processes import (
    BACKENDS,
    REFUSALS,
    Launch,
    LaunchError,
    kind_of,
    run_ranks,
)
from harness.errors import LinkError
from harness.measure import machine
from harness.records.trial_record import Failure, Record
from harness.suites import folder
from harness.suites.trial import Cluster, Trial
from impl.policy.topology import Topology

LOGS: Final = "logs"
INTERRUPTED: Final = "Ctrl-C; not yet run again"
_CALIBRATION_SECONDS: Final = 120.0
_TAIL_LINES: Final = 20  # last lines of a log that go into the record
# Fields of a cluster that determine its link: trials that share them share the link.
_JOINING: Final = {"link", "nodes", "rate", "latency", "transport", "hcas", "slow", "inner_rate", "launcher"}


def cluster_of(trial: Trial) -> Cluster:
    """Return the cluster on which a trial's ranks run; strategy ``single`` has one rank."""
    single = {"nodes": 1, "ranks_per_node": 1}
    return trial.cluster.model_copy(update=single) if trial.strategy == "single" else trial.cluster


@dataclass(slots=True)
class TrialRunner:
    """Runs the trials of a sweep on this host or on the nodes of a launcher.

    A runner is a context manager.  It keeps the network links that it has set up between nodes, so that further trials
    can use them, and removes these links when its ``with`` block ends.
    """

    results: Path  # folder of the records and of logs of failures
    nodes: Nodes | None  # nodes that a launcher started; None if all ranks run on this host
    _links: dict[str, Link] = field(default_factory=dict)  # by the fields of _JOINING
    _folder: Path = field(default_factory=folder.current)
    _cores: int = field(default_factory=machine.cores)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_links()

    def close_links(self) -> None:
        """Close all links between nodes; later trials open new links and measure their rates again."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def run(self, trial: Trial, blank: Record, on_progress: Report) -> Record:
        """Run the ranks of a trial, and return its record.

        A trial that fails, or that Ctrl-C interrupts, raises no exception: the reason is in the record.

        Args:
            trial: The trial.
            blank: The trial's record without measurements.
            on_progress: Called when the trial's link is opened, and with the progress that ranks report.

        Returns:
            A copy of ``blank`` with the ranks' measurements, or with the failure.
        """
        # These modules import torch, which a suite whose trials are all on record does not need.
        from harness.reference_checks.comparison import TrialError
        from harness.runs.merge_ranks import assemble
        from harness.runs.rank_trial import Assignment, run

        try:
            link = self._link(trial, on_progress)
            blank = blank.model_copy(update={"link": link.record([])})
            nbytes = link.message_bytes if trial.measures_time else 0
            assignment = Assignment(trial, nbytes or None, self._folder)
            outcomes = self._start(trial)(run, assignment, self.launch(trial, link, trial.id), on_progress)
            per_node = cluster_of(trial).ranks_per_node
            probed = slowest_rates([outcome.probed for outcome in outcomes], per_node)
            blank = blank.model_copy(update={"link": link.record(probed)})
            return assemble(outcomes, blank)
        except KeyboardInterrupt:
            failure = Failure(kind="interrupted", message=INTERRUPTED, log=None)
        except (TrialError, LaunchError, *REFUSALS) as error:
            kind = "wrong" if isinstance(error, TrialError) else kind_of(error)
            failure = Failure(kind=kind, message=" ".join(str(error).split()), log=None)
            if isinstance(error, TrialError):
                failure = failure.model_copy(update={"losses": error.losses})
                blank = blank.model_copy(update={"validations": error.validations})
            if isinstance(error, LaunchError) and error.log is not None:
                tail = error.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
                log = str(error.log.relative_to(self.results))
                failure = failure.model_copy(update={"log": log, "tail": tail})
        return blank.model_copy(update={"failure": failure})

    def _link(self, trial: Trial, on_progress: Report) -> Link:
        """Return the link between nodes for a trial.

        Trials of a sweep with the same link settings share a link.  The first of them opens it and measures its rate.
        If ranks are threads, nothing is opened or measured.

        Raises:
            LinkError: If the link cannot be opened, misses its rate, or cannot limit the messages of the trial.
        """
        cluster = cluster_of(trial)
        if not trial.measures_time:
            ports = (Port("lo", "127.0.0.1"),) * cluster.nodes
            return Link(cluster, "threads", "cluster.ranks = 'threads': messages stay in one process", ports)
        # With NCCL, all ranks of a node measure the link's rate.  The rate is then valid only for this number of ranks.
        ranks = {"ranks_per_node"} if cluster.transport == "nccl" else set()
        key = cluster.model_dump_json(include=_JOINING | ranks)
        if (link := self._links.get(key)) is None:
            on_progress(Progress("link"))
            link = self._open(cluster)
            if link.kind == "paced" and cluster.link == "auto":
                on_progress(Progress("link", text=PACED.format(link.why)))
            try:
                self._calibrate(link, trial)
            except BaseException:  # the next trial that needs this link opens it anew
                link.close()
                raise
            self._links[key] = link
        if link.paced_mbit is not None and trial.resolved_policy() is None:
            raise LinkError(
                f"strategy {trial.strategy!r} sends its own messages, but link 'paced' limits only the messages of our "
                f"engine to {link.paced_mbit:g} Mbit/s: set cluster.link = 'namespaces', or remove cluster.rate "
                f"(reason for 'paced': {link.why})"
            )
        return link

    def _open(self, cluster: Cluster) -> Link:
        """Open the link of a cluster, on this host or between a launcher's nodes."""
        if cluster.launcher == "local" or cluster.nodes == 1:
            return open_link(cluster, secrets.token_hex(3))
        nodes, kind = self.nodes, cluster.link
        assert nodes is not None  # noqa: S101  # a launcher started them
        pair = nodes.on_one_host(cluster.nodes)
        why = "distinct hosts" if pair is None else f"nodes {pair[0]} and {pair[1]} are one host"
        if kind == "auto":
            kind = "real" if pair is None else "none"
        elif kind not in (("real", "shaped", "paced") if pair is None else ("none", "paced")):
            raise LinkError(
                f"cluster.link = {kind!r} is not possible here ({why}): set cluster.link to 'real', 'shaped' or "
                "'paced' for nodes on distinct hosts, and to 'none' or 'paced' for nodes on one host"
            )
        link = open_link(cluster.model_copy(update={"link": kind}), "")
        shaped = cluster.rate if kind == "shaped" else None
        ports = [replace(node.port, shaped_mbit=shaped) for node in nodes.nodes[: cluster.nodes]]
        if cluster.hcas is not None:
            for node, port in enumerate(ports):
                present = nodes.nodes[node].facts["hcas"]
                ports[node] = replace(port, hcas=choose_hcas(cluster.hcas, present, node))
        link.why, link.ports = why, tuple(ports)
        if cluster.hcas is not None or (kind == "shaped" and cluster.transport == "nccl"):
            link.details["nccl"] = nccl_in_words(ports)
        return link

    def _calibrate(self, link: Link, trial: Trial) -> None:
        """Measure the rate of the link between nodes, and store it in ``link``.

        With NCCL all ranks send, since each GPU may have a network adapter of its own.  Otherwise one rank of each node
        sends.  With a single node nothing is measured.

        Raises:
            LinkError: If the link's kind is ``shaped``, and the measured rate is far from the rate that was set.
        """
        if link.cluster.nodes == 1:
            return
        per_node = link.cluster.ranks_per_node if link.cluster.transport == "nccl" else 1
        launch = replace(
            self.launch(trial, link, "calibration"),
            topology=Topology(link.cluster.nodes, per_node),
            threads=1,
            timeout_seconds=_CALIBRATION_SECONDS,
        )
        message = link.message_bytes, REPETITIONS, link.cluster.transport, link.cluster.launcher
        by_rank = self._start(trial)(measure_link, message, launch, lambda _: None)
        link.calibrated_mbit = slowest_rates(by_rank, per_node)
        if link.kind == "shaped" and self.nodes is not None:
            link.details["nodes"] = self.nodes.shaped
        link.check()

    def launch(self, trial: Trial, link: Link, log: str) -> Launch:
        """Return the options for starting a trial's ranks on its link.

        If the ranks fail, their output is kept in the results folder, as ``logs/<log>.log``.
        """
        cluster = cluster_of(trial)
        topology = Topology(cluster.nodes, cluster.ranks_per_node)
        local_ranks = topology.world if cluster.launcher == "local" else topology.ranks_per_node
        return Launch(
            topology=topology,
            ports=link.ports,
            paced_mbit=link.paced_mbit,
            paced_latency_ms=cluster.latency or 0.0,
            # Ranks that are threads take turns.  More compute threads would help them little, and would change the
            # order of sums.
            threads=trial.threads or (max(1, self._cores // local_ranks) if trial.measures_time else 1),
            timeout_seconds=trial.timeout_seconds,
            log=self.results / LOGS / f"{log}.log",
            backend=BACKENDS.get(cluster.transport, cluster.transport),  # or a user's module
            threads_on=None if trial.measures_time or trial.strategy == "single" else cluster.device,
        )

    def _start(self, trial: Trial) -> Callable[[Work, Any, Launch, Report], list[Any]]:
        """Return the function with which a trial's ranks are started.

        The function runs some work on all ranks and returns a list of their results, in the order of ranks.  It starts
        the ranks on this host if no launcher has started nodes, or if the cluster's launcher is ``local``.  Otherwise
        it starts them on the launcher's nodes.
        """
        return run_ranks if self.nodes is None or trial.cluster.launcher == "local" else self.nodes.run
