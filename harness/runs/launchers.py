"""Launchers: which of a launcher's processes this is, and the nodes that it leads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from harness.cluster import remote
from harness.cluster.control import Place, place_in_slurm, place_under_torchrun
from harness.cluster.node_supervisors import Nodes, leading
from harness.errors import Refusal
from harness.measure import run_environment
from harness.suites.trial import Cluster, Trial


def clusters(trials: Sequence[Trial]) -> list[Cluster]:
    """The distinct clusters of a launcher's trials, most nodes first; a Refusal of several launchers."""
    found = {t.cluster.model_dump_json(): t.cluster for t in trials if t.cluster.launcher != "local"}
    several = sorted(found.values(), key=lambda one: -one.nodes)
    for name in ("launcher", "hosts", "slurm"):
        named = {str(getattr(one, name)) for one in several}
        if len(named) > 1:
            raise Refusal(f"one run has one cluster.{name}; this suite has {', '.join(sorted(named))}")
    return several


def place(trials: Sequence[Trial]) -> Place | None:
    """This process's place among those of the trials' launcher, None without one; or a Refusal."""
    asked = clusters(trials)
    if not asked:
        return None
    most = asked[0]
    found: Place | None
    if most.launcher == "hosts":
        found = place_under_torchrun() or remote.place_of(most.hosts)
    elif most.launcher == "slurm":
        if (found := place_in_slurm()) is None:
            raise Refusal("cluster.launcher = 'slurm': this process is in no job step; start it by srun")
    elif (found := place_under_torchrun()) is None:
        raise Refusal(
            "cluster.launcher = 'torchrun': this process was not started by it; start on every host "
            f"torchrun --nnodes={most.nodes} --nproc-per-node=1 --node-rank=... --master-addr=... "
            "--no-python zeropp run ..."
        )
    if found.nodes < most.nodes:
        raise Refusal(f"cluster.nodes is {most.nodes}, the launcher started {found.nodes} nodes")
    return found


def for_slurm(trials: Sequence[Trial]) -> Cluster | None:
    """The cluster that Slurm has yet to give nodes to, or to start steps on; None if there is none."""
    asked = clusters(trials)
    outside = "SLURM_STEP_NODELIST" not in os.environ
    return asked[0] if asked and asked[0].launcher == "slurm" and outside else None


@contextlib.contextmanager
def gathered(
    here: Place | None, trials: Sequence[Trial], *, same_code: bool = True
) -> Iterator[Nodes | None]:
    """Lead a launcher's nodes in the body, None without one; with ``same_code`` a Refusal of other code."""
    if here is None:
        yield None
        return
    with leading(here, run_environment.identity(), clusters(trials)[0].hosts) as nodes:
        if same_code:
            nodes.check_code()
        yield nodes
