"""Lists the bytes that a rank sent in each step of a trial whose policy changes by a schedule.  No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from harness.records.trial_record import Record, StepsSent

Sent = tuple[int, int]
"""Bytes to other nodes, and bytes inside the node."""


def in_runs(totals: Sequence[Sent]) -> list[StepsSent]:
    """Convert cumulative byte counts into the bytes of each step, run-length encoded.

    Args:
        totals: The bytes sent before the first step, and then the bytes sent until the end of each step.  Each entry is
            the pair (bytes to other nodes, bytes inside the node).

    Returns:
        One entry for each run of consecutive steps that sent equal numbers of bytes.
    """
    runs, first = list[StepsSent](), 0
    sent = [(now[0] - old[0], now[1] - old[1]) for old, now in itertools.pairwise(totals)]
    for (inter, intra), group in itertools.groupby(sent):
        count = len(list(group))
        runs.append(StepsSent(first=first, steps=count, inter=inter, intra=intra))
        first += count
    return runs


def mismatch(record: Record) -> str | None:
    """Return a sentence on the first step in which a rank did not send the predicted bytes.

    If the record has predictions for a different number of ranks than it has ranks, the sentence says so.  Returns None
    if all ranks sent the predicted bytes, or if there are no predictions by step.
    """
    predicted = [] if record.predicted is None else record.predicted.sent_by_step
    if not predicted:
        return None
    if len(predicted) != len(record.ranks):
        return f"bytes of each step are predicted for {len(predicted)} ranks, but the record has {len(record.ranks)}"
    for rank, expected in zip(record.ranks, predicted, strict=True):
        steps = itertools.zip_longest(_single(rank.sent_by_step), _single(expected))
        for index, (sent, wanted) in enumerate(steps):
            if sent != wanted:
                return f"rank {rank.rank} sent {_in_words(sent)} in step {index}; predicted are {_in_words(wanted)}"
    return None


def _single(runs: Sequence[StepsSent]) -> Iterator[Sent]:
    for run in runs:
        yield from itertools.repeat((run.inter, run.intra), run.steps)


def _in_words(sent: Sent | None) -> str:
    return "nothing" if sent is None else f"{sent[0]} bytes between nodes and {sent[1]} inside them"
