"""A record in a few numbers, for tables and other programs.  No torch."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import Final

from harness.records.record import Record, slowest_seconds

_TRAINING: Final = ("forward", "backward", "step")  # phases


@dataclass(frozen=True, slots=True)
class Summary:
    """The main numbers of a record; None for what was not measured."""

    seconds: float | None = None  # median step of the slowest rank; a generation is a step without loss
    exposed: float | None = None  # median exposed communication of the first rank in a step
    sent: float | None = None  # bytes between nodes in a step
    by_interfaces: bool = False  # whether the nodes' interfaces counted ``sent``, for want of a ledger
    rate: float | None = None  # of the link, Mbit/s, the median of its probes
    loss: float | None = None  # the last, its mean over ranks


def summarise(one: Record) -> Summary:
    """Summarise a record in a few numbers."""
    timed = [[step for step in rank.steps if not step.warmup] for rank in one.ranks]
    tokens = [[token for token in rank.tokens if not token.warmup] for rank in one.ranks]
    waited: list[float] | None = None
    by_interfaces, loss = False, None
    if one.ranks and tokens[0]:
        of_steps = [list(group) for _, group in itertools.groupby(tokens[0], lambda token: token.step)]
        seconds = [sum(token.seconds for token in group) for group in of_steps]
        if tokens[0][0].exposed is not None:
            waited = [sum(token.exposed or 0.0 for token in group) for group in of_steps]
        sent = [token.inter_bytes for token in itertools.chain(*tokens) if token.inter_bytes is not None]
    elif one.ranks and timed[0]:
        seconds = slowest_seconds(one)
        if timed[0][0].exposed is not None:
            waited = [step.exposed or 0.0 for step in timed[0]]
        ledgers = [rank.ledger for rank in one.ranks if rank.ledger is not None]
        decodes = one.trial.get("workload") == "rlhf"  # else evaluations belong to no step
        sent = [
            sum(row.bytes for row in ledger if row.link == "inter" and (decodes or row.phase in _TRAINING))
            for ledger in ledgers
        ]
        if not ledgers and one.interfaces:
            sent, by_interfaces = [counters.tx_bytes for counters in one.interfaces], True
        loss = statistics.fmean(rank.steps[-1].loss for rank in one.ranks)
    else:
        return Summary()
    rates = [] if one.link is None else one.link.probed_mbit or one.link.calibrated_mbit
    return Summary(
        seconds=statistics.median(seconds),
        exposed=None if waited is None else statistics.median(waited),
        sent=sum(sent) / len(seconds) if sent else None,
        by_interfaces=by_interfaces,
        rate=statistics.median(rates) if rates else None,
        loss=loss,
    )
