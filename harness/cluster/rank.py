"""Context of one rank process: number, topology, port, pacer, progress.  No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.cluster.link import Pacer, Port
from impl.plan.topology import Topology


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a trial.

    Attributes:
        stage: set-up, warm-up, steps, validation, probe.
        step: steps done.
        steps: steps in all.
        text: a line for the parent process to print; empty for none.
    """

    stage: str
    step: int = 0
    steps: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a running process group.

    Attributes:
        rank: its number; ``node * ranks_per_node + local``.
        topology: nodes x ranks per node.
        port: its node's end of the link.
        pacer: its node's token bucket, where the link is paced.
        report: sends progress to the parent process.
        threads: of torch.
    """

    rank: int
    topology: Topology
    port: Port
    pacer: Pacer | None
    report: Callable[[Progress], None]
    threads: int

    @property
    def node(self) -> int:
        """Index of its node."""
        return self.topology.node_of(self.rank)

    @property
    def local(self) -> int:
        """Its index inside the node."""
        return self.rank % self.topology.ranks_per_node

    @property
    def speaks(self) -> bool:
        """Whether it is the first rank of its node, which reports for it."""
        return self.local == 0
