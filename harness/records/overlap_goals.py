"""What overlap promises, and whether a run of ``zeropp bench overlap`` kept it.  No torch.

Goals speak of one model and of one gradient, so a run of other sizes is judged by none of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from harness.records.bench_record import OverlapHops, OverlapStep
from harness.records.statistics import Interval, median_interval

# Of the goals: the model and its batch, and the gradient.
MODEL: Final = "gpt-small"
LAYERS: Final = 16
SEQUENCE: Final = 128
SEQUENCES: Final = 96
MEBIBYTES: Final = 128
CHUNKS: Final = 4

ROOM: Final = 1.2
"""Seconds of computation over those of communication, where they are closest: what sets the link's rate."""
MOST_ROOM: Final = 1.3
"""The same as found in the rounds, at most: drift between setting the rate and using it."""
HOPS_APART: Final = 3.0
"""Seconds of the second hop over those of the first: what sets the link's rate."""

MOST_OF_ALONE: Final = 1.10
LEAST_HIDDEN: Final = 0.80


def rate_for_step(sent: tuple[int, int], computed: tuple[float, float]) -> float:
    """Mbit/s, to three digits, at which computation takes :data:`ROOM` times as long as communication.

    Args:
        sent: bytes of a node to others in forward and in backward, in one step.
        computed: seconds of the same two of compute alone.

    Returns:
        The rate of the tighter of the two: in the other, computation takes longer still.
    """
    rates = (ROOM * 8e-6 * nbytes / seconds for nbytes, seconds in zip(sent, computed, strict=True))
    return _rounded(max(rates))


def rate_for_hops(sent: int, first_hop: float) -> float:
    """Mbit/s, to three digits, at which the second hop takes :data:`HOPS_APART` times as long as the first.

    Args:
        sent: bytes of a node to others in the second hop.
        first_hop: seconds.
    """
    return _rounded(8e-6 * sent / (HOPS_APART * first_hop))


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def of_alone_by_round(sample: OverlapStep) -> list[float]:
    """``seconds / seconds of compute alone``, round by round."""
    return [took / alone for took, alone in zip(sample.seconds, sample.reference_seconds, strict=True)]


def room_by_round(sample: OverlapStep) -> tuple[list[float], list[float]]:
    """Seconds of compute alone over those of communication at the link's rate, of forward and of backward."""
    forward, backward = (
        [took / (8e-6 * sent / sample.rate_mbit) for took in seconds]
        for seconds, sent in (
            (sample.forward_seconds, sample.sent_forward),
            (sample.backward_seconds, sample.sent_backward),
        )
    )
    return forward, backward


def hidden_by_round(sample: OverlapHops) -> list[float]:
    """``(seconds in one chunk - seconds) / seconds of the shorter hop``, round by round."""
    rounds = zip(
        sample.reference_seconds, sample.seconds, sample.first_seconds, sample.second_seconds, strict=True
    )
    return [(whole - took) / min(first, second) for whole, took, first, second in rounds]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal that a run can be held to.

    Attributes:
        goal: in words, with its number.
        found: median over rounds, with its interval.
        met: whether the median keeps the goal.
    """

    goal: str
    found: Interval
    met: bool


def verdicts(steps: Sequence[OverlapStep], hops: Sequence[OverlapHops]) -> list[Verdict]:
    """Of each sample that has the sizes of the goals.

    A step on a link on which computation has more than :data:`MOST_ROOM` in the tighter of forward and
    backward shows nothing, and does not meet its goal: the machine was not the same when the rate was set.
    """
    found = []
    for step in steps:
        if (step.model, step.layers, step.sequence, step.sequences) == (MODEL, LAYERS, SEQUENCE, SEQUENCES):
            ratio = median_interval(of_alone_by_round(step))
            room = min(median_interval(each).estimate for each in room_by_round(step))
            goal = (
                f"{step.policy}, computation {room:.3g} x communication (at most {MOST_ROOM:g}): "
                f"step <= {MOST_OF_ALONE:g} x compute alone"
            )
            found.append(Verdict(goal, ratio, ratio.estimate <= MOST_OF_ALONE and room <= MOST_ROOM))
    for sample in hops:
        if (sample.numel, sample.chunks) == (MEBIBYTES << 18, CHUNKS):
            share = median_interval(hidden_by_round(sample))
            goal = f"{sample.chunks} chunks hide >= {LEAST_HIDDEN:g} of the shorter hop"
            found.append(Verdict(goal, share, share.estimate >= LEAST_HIDDEN))
    return found


def told(verdict: Verdict) -> str:
    """One line: the goal, what was found, and whether it is met."""
    found = verdict.found
    spread = "" if math.isnan(found.low) else f" [{found.low:.3g}, {found.high:.3g}]"
    return f"goal: {verdict.goal}: {found.estimate:.3g}{spread}, {'met' if verdict.met else 'MISSED'}"
