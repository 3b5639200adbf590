"""What a rank process knows of itself, however it was started.  No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.cluster.link import Pacer, Port
from impl.plan.topology import Topology


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a trial is.

    Attributes:
        stage: set-up, warm-up, steps, validation, probe.
        step: steps done.
        steps: of how many.
        text: a line for whoever started the rank to print; empty for none.
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
        topology: where all ranks stand.
        port: its node's end of the link.
        pacer: its node's token bucket, where the link is paced.
        report: tells whoever started the rank how far it is.
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
        """The node it stands on."""
        return self.topology.node_of(self.rank)

    @property
    def local(self) -> int:
        """Its index inside the node."""
        return self.rank % self.topology.ranks_per_node

    @property
    def speaks(self) -> bool:
        """Whether it speaks for its node: the first rank there."""
        return self.local == 0
