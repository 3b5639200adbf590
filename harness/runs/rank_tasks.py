"""What ranks can be told to do, by name, with arguments and results as JSON: a trial, or an exchange."""

from __future__ import annotations

from typing import Final

from pydantic import TypeAdapter

from harness.cluster.link import REPETITIONS
from harness.cluster.node_supervisors import Work
from harness.cluster.rank import Rank, exchange, groups
from harness.runs.rank_trial import Assignment, Outcome, run

TRIAL: Final = "trial"
EXCHANGE: Final = "exchange"


def measure_link(rank: Rank, argument: tuple[int, str]) -> list[float]:
    """Rates of a calibration (:func:`harness.cluster.rank.exchange`), by message bytes and transport."""
    nbytes, transport = argument
    device = f"cuda:{rank.local}" if transport == "nccl" else "cpu"
    return exchange(rank, nbytes, REPETITIONS, device, grouped=groups(transport))


WORKS: Final = {
    TRIAL: Work(run, TypeAdapter(Assignment), TypeAdapter(Outcome)),
    EXCHANGE: Work(measure_link, TypeAdapter(tuple[int, str]), TypeAdapter(list[float])),
}
