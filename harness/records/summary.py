"""A record in a few numbers, for tables and other programs.  No torch."""

from __future__ import annotations

import itertools
import statistics
from typing import Any, Final

from harness.records.record import Record, slowest_seconds

_TRAINING: Final = ("forward", "backward", "step")  # phases


def summarise(one: Record) -> dict[str, Any]:
    """The main numbers of a record by name, None for what was not measured.

    Medians are of the slowest rank's steps (a generation is a step without loss), of the first rank's exposed
    communication, and of the link's probes; bytes between nodes are of a step, counted by the nodes'
    interfaces for want of a ledger; the loss is the last, its mean over ranks.
    """
    timed = [[step for step in rank.steps if not step.warmup] for rank in one.ranks]
    tokens = [[token for token in rank.tokens if not token.warmup] for rank in one.ranks]
    waited: list[float] | None = None
    seconds, sent = list[float](), list[int]()
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
    rates = [] if one.link is None else one.link.probed_mbit or one.link.calibrated_mbit
    return {
        "step_seconds": statistics.median(seconds) if seconds else None,
        "exposed_seconds": None if waited is None else statistics.median(waited),
        "inter_bytes": sum(sent) / len(seconds) if sent else None,
        "counted_by_interfaces": by_interfaces,
        "rate_mbit": statistics.median(rates) if seconds and rates else None,
        "loss": loss,
    }
