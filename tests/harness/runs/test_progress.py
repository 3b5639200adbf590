"""Progress lines name a trial by the fields that vary."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from harness.cluster.rank import Progress
from harness.records.trial_record import Failure, Record
from harness.runs.progress import Display
from harness.suites.trial import Cluster, PolicyChanges, Trial


def line(trials: list[Trial], log: str | None = None, over: int = 1) -> str:
    """Return the lines that are printed when the first ``over`` of ``trials`` are refused."""
    shown = io.StringIO()
    with Display(Console(file=shown, width=80), Path("results/q")) as display:
        display.batch(trials, len(trials), "", [])
        for trial in trials[:over]:
            display.began(trial)
            record = Record(
                id=trial.id, suite="q", trial=trial.canonical(), started="1", finished="2", order=0, pool="p",
                failure=Failure(kind="refused", message="no", log=log), machine={}, code={},
            )  # fmt: skip
            display.finished(record)
    return shown.getvalue()


def test_a_line_names_the_values_that_vary() -> None:
    """A line has strategy, topology and rate, the values of axes by name, and no field that all trials share."""
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
    """The path is relative to the working folder, not to the results folder."""
    assert "; log: results/q/logs/x.log (" in line([Trial()], "logs/x.log")


def test_the_first_trial_of_a_run_is_no_measure_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first trial includes starting up: no time left is shown after it, and after the second only the second
    counts.
    """
    ends = iter([0.0, 0.0, 90.0, 90.0, 100.0])  # construction; begin and end of both
    monkeypatch.setattr("harness.runs.progress.time.monotonic", lambda: next(ends))
    first, second = line([Trial(seed=seed) for seed in range(4)], over=2).splitlines()
    assert "left" not in first
    assert second.endswith("(10.0 s, 20 s left)")


def test_a_rank_s_text_is_printed_once(tmp_path: Path) -> None:
    """A text such as that kernels are missing is printed once, before the line of the first trial."""
    shown = io.StringIO()
    why = "no C++ kernels: no C++ compiler installed"
    with Display(Console(file=shown, width=80), tmp_path) as display:
        for seed in (0, 1):
            display.began(Trial(seed=seed))
            display.progress(Progress("set-up", text=why))
            display.progress(Progress("steps", 1, 2))
    assert shown.getvalue() == f"{why}\n"
