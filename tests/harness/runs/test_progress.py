"""Progress lines say which trial it is by what varies."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from harness.cluster.rank import Progress
from harness.records.record import Failure, Record
from harness.runs.progress import Display
from harness.suites.trial import Cluster, PolicyChanges, Trial


def line(trials: list[Trial], log: str | None = None, over: int = 1) -> str:
    """What is printed when the first ``over`` of ``trials`` are, which are refused."""
    shown = io.StringIO()
    with Display(Console(file=shown, width=80), Path("results/q")) as display:
        display.batch(trials, len(trials), "", [])
        for one in trials[:over]:
            display.began(one)
            record = Record(
                id=one.id, suite="q", trial=one.canonical(), started="1", finished="2", order=0, pool="p",
                failure=Failure(kind="refused", message="no", log=log), machine={}, code={},
            )  # fmt: skip
            display.finished(record)
    return shown.getvalue()


def test_what_varies_is_said() -> None:
    """Strategy, place and rate always stand there, axes by name, and nothing that all share."""
    cluster = Cluster(rate="50 Mbit/s")  # type: ignore[arg-type]
    trials = [
        Trial(
            strategy="zeropp", cluster=cluster, seed=seed,
            policy=PolicyChanges(weights=weights, align=2048, max_padding=0.1 + seed),
        )
        for seed in (0, 1) for weights in ("int8:64", "int4:64")
    ]  # fmt: skip
    text = line(trials)
    assert "zeropp, 2x2, 50 Mbit/s, weights int8:64, seed 0, repeat 0: refused: no (" in text


def test_a_log_is_named_by_a_path_that_can_be_opened() -> None:
    """From where the user stands, not from the results folder."""
    assert "; log: results/q/logs/x.log (" in line([Trial()], "logs/x.log")


def test_the_first_trial_of_a_run_is_no_measure_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts everything up: nothing is said after it, and after the second what that took counts."""
    ends = iter([0.0, 0.0, 90.0, 90.0, 100.0])  # construction; begin and end of both
    monkeypatch.setattr("harness.runs.progress.time.monotonic", lambda: next(ends))
    first, second = line([Trial(seed=seed) for seed in range(4)], over=2).splitlines()
    assert "left" not in first
    assert second.endswith("(10.0 s, 20 s left)")


def test_what_a_rank_says_is_printed_once(tmp_path: Path) -> None:
    """A line such as that kernels are missing stands before the first trial's, whichever says it again."""
    shown = io.StringIO()
    why = "no C++ kernels: no C++ compiler installed"
    with Display(Console(file=shown, width=80), tmp_path) as display:
        for seed in (0, 1):
            display.began(Trial(seed=seed))
            display.progress(Progress("set-up", text=why))
            display.progress(Progress("steps", 1, 2))
    assert shown.getvalue() == f"{why}\n"
