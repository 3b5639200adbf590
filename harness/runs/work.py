"""What ranks can be told to do, by name, with arguments and results as JSON: a trial, or an exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from harness.cluster.link import REPETITIONS
from harness.cluster.node_supervisors import Work
from harness.cluster.rank import Rank, exchange, groups
from harness.runs.trial_loop import Assignment, Outcome, run
from harness.suites.trial import Trial

TRIAL: Final = "trial"
EXCHANGE: Final = "exchange"

_OUTCOME: Final = TypeAdapter(Outcome)


def measure_link(rank: Rank, argument: tuple[int, str]) -> list[float]:
    """Rates of a calibration (:func:`harness.cluster.rank.exchange`), by message bytes and transport."""
    nbytes, transport = argument
    device = f"cuda:{rank.local}" if transport == "nccl" else "cpu"
    return exchange(rank, nbytes, REPETITIONS, device, grouped=groups(transport))


def _told(assignment: Assignment) -> dict[str, Any]:
    return {
        "trial": assignment.trial.canonical(),
        "probe_bytes": assignment.probe_bytes,
        "count": assignment.count,
        "folder": str(assignment.folder),
    }


def _understood(told: dict[str, Any]) -> Assignment:
    trial = Trial.from_canonical(told["trial"])
    return Assignment(trial, told["probe_bytes"], told["count"], Path(told["folder"]))


def _same(value: Any) -> Any:
    return value


WORKS: Final = {
    TRIAL: Work(
        run, (_told, _understood), (lambda o: _OUTCOME.dump_python(o, mode="json"), _OUTCOME.validate_python)
    ),
    EXCHANGE: Work(measure_link, (list, tuple), (_same, _same)),
}
