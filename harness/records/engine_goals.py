"""What the engine promises beside its peers, and whether a run of ``zeropp bench engine`` kept it.  No torch.

A ratio is one of tokens per second of the same round: seconds of the peer over ours.  Goals speak of one
model, so a run of another, or on other nodes and ranks, is judged by none of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from harness.records.bench_record import EngineSample
from harness.records.statistics import Interval, median_interval

ALONE: Final = "alone"
"""The contender that computes and sends nothing."""

JUDGED: Final = "exact"
FSDP2: Final = ("fsdp2", "fsdp2-kept")
SHARDED: Final = (*FSDP2, "deepspeed", "deepspeed-kept")

# Of the goals: the model and its batch.
MODEL: Final = "gpt-small"
SEQUENCE: Final = 128
SEQUENCES: Final = 4

LOSS_TOLERANCE: Final = 1e-3
"""Largest relative difference of two contenders' losses in a step: what the order of fp32 sums makes of
AdamW's steps, far below what a lost or doubled gradient does (docs/reference/metrics.md)."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Tokens per second of ``exact`` beside the best of some peers.

    Attributes:
        nodes: of the topology.
        ranks_per_node: likewise.
        rate_mbit: of the link between nodes; None is unshaped.
        transport: of ours.
        peers: contenders, of which the fastest counts.
        of_whom: what they are called together.
        ratio: at least this.
    """

    nodes: int
    ranks_per_node: int
    rate_mbit: float | None
    transport: str
    peers: tuple[str, ...]
    of_whom: str
    ratio: float


GOALS: Final = (
    Goal(1, 4, None, "shm", SHARDED, "the best sharded peer", 1.4),
    Goal(1, 4, None, "shm", ("ddp",), "DDP", 1.0),
    Goal(1, 4, None, "backend", SHARDED, "the best sharded peer", 1.05),
    Goal(2, 2, 1000.0, "shm", FSDP2, "FSDP2", 1.4),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal that a run can be held to.

    Attributes:
        goal: which.
        peer: the fastest of its peers that ran.
        found: median ratio over rounds, with its interval.
    """

    goal: Goal
    peer: str
    found: Interval

    @property
    def met(self) -> bool:
        """Whether the median reaches the goal."""
        return self.found.estimate >= self.goal.ratio


def verdicts(samples: Sequence[EngineSample]) -> list[Verdict]:
    """Of each goal whose contenders ran, in the order of :data:`GOALS`; the hardest peer counts."""
    found = []
    for goal in GOALS:
        here: dict[tuple[str, str], EngineSample] = {
            (sample.contender, sample.transport): sample
            for sample in samples
            if (sample.nodes, sample.ranks_per_node, sample.rate_mbit)
            == (goal.nodes, goal.ranks_per_node, goal.rate_mbit)
            and (sample.model, sample.sequence, sample.sequences) == (MODEL, SEQUENCE, SEQUENCES)
        }
        ours = here.get((JUDGED, goal.transport))
        theirs = [sample for (name, _), sample in here.items() if name in goal.peers]
        if ours is not None and theirs:
            judged = [Verdict(goal, peer.contender, times(ours, peer)) for peer in theirs]
            found.append(min(judged, key=lambda verdict: verdict.found.estimate))
    return found


def told(verdict: Verdict) -> str:
    """One line: the goal, what was found, and whether it is met."""
    goal, found = verdict.goal, verdict.found
    carried = "shared memory" if goal.transport == "shm" else "gloo alone"
    rate = "unshaped" if goal.rate_mbit is None else f"at {goal.rate_mbit:g} Mbit/s"
    whom = goal.of_whom if goal.of_whom.lower() == verdict.peer else f"{goal.of_whom} ({verdict.peer})"
    spread = "" if math.isnan(found.low) else f" [{found.low:.3g}, {found.high:.3g}]"
    return (
        f"goal: {goal.nodes}x{goal.ranks_per_node} {rate} over {carried} >= {goal.ratio:g} x {whom}: "
        f"{found.estimate:.3g}{spread}, {'met' if verdict.met else 'MISSED'}"
    )


def times(sample: EngineSample, other: EngineSample) -> Interval:
    """Tokens per second of ``sample`` over those of ``other``, of the same rounds of one run."""
    return median_interval(
        [theirs / ours for ours, theirs in zip(sample.seconds, other.seconds, strict=True)]
    )


def unequal(samples: Sequence[EngineSample]) -> str | None:
    """What to say of contenders whose losses are not the first one's; None if all are equal.

    Each is held to the steps that it says must be equal (:attr:`EngineSample.equal_steps`).
    """
    for sample in samples:
        first = next(other for other in samples if _place(other) == _place(sample) and other.equal_to_end)
        pairs = zip(sample.losses[: sample.equal_steps], first.losses, strict=False)
        for step, (loss, expected) in enumerate(pairs):
            if not abs(loss - expected) <= LOSS_TOLERANCE * abs(expected):  # NaN is not equal either
                return (
                    f"{sample.contender} over {sample.transport} has loss {loss:.6g} in step {step} on "
                    f"{sample.nodes}x{sample.ranks_per_node} ranks, {first.contender} over {first.transport} "
                    f"{expected:.6g}: more than {LOSS_TOLERANCE:g} apart, so they do not train the same"
                )
    return None


def _place(sample: EngineSample) -> tuple[int, int, float | None]:
    return sample.nodes, sample.ranks_per_node, sample.rate_mbit
