"""Which process of a launcher this is, and the nodes that it leads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from harness.cluster.control import Place, place_under_torchrun
from harness.cluster.supervisor import Nodes, leading
from harness.errors import Refusal
from harness.measure import machine
from harness.suites.trial import Trial


def place(trials: Sequence[Trial]) -> Place | None:
    """This process's place among those that the trials' launcher started; None if ranks run here alone.

    Raises:
        Refusal: if the launcher did not start it.
    """
    named = {trial.cluster.launcher for trial in trials} - {"local"}
    if "torchrun" not in named:
        return None
    found = place_under_torchrun()
    if found is None:
        nodes = max(trial.cluster.nodes for trial in trials)
        raise Refusal(
            "cluster.launcher = 'torchrun': this process was not started by it; start on every host "
            f"torchrun --nnodes={nodes} --nproc-per-node=1 --node-rank=... --master-addr=... --no-python "
            "zeropp run ..."
        )
    return found


@contextlib.contextmanager
def gathered(here: Place | None) -> Iterator[Nodes | None]:
    """Lead the nodes of a launcher in the body; None without one."""
    if here is None:
        yield None
        return
    from harness.runs.work import WORKS

    with leading(here, WORKS, machine.identity()) as nodes:
        yield nodes
