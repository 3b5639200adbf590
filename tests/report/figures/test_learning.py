"""Captions of the figures on losses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pandas as pd
import pytest

from harness.suites.trial import Cluster, Trial
from report.data.frames import frames_of
from report.data.metrics import derive
from report.figures import learning
from tests.report.records import ending_at


@pytest.mark.parametrize(
    ("seeds", "beginning"), [([0, 0], "There is 1 seed;"), ([0, 1, 1], "There are 2 seeds;")]
)
def test_the_number_of_seeds_agrees_with_its_verb(seeds: list[int], beginning: str) -> None:
    """One seed "is", several "are"."""
    assert learning._seeds_in_words(pd.DataFrame({"seed": seeds})).startswith(beginning)


@pytest.mark.parametrize(("ranks", "panels"), [("processes", 3), ("threads", 2)])
def test_a_panel_of_seconds_needs_timed_trials(ranks: Literal["processes", "threads"], panels: int) -> None:
    """Losses are drawn over steps, seconds and bytes; ranks that are threads have no seconds, and no empty panel."""
    trials = [
        ending_at(
            Trial(strategy=strategy, steps=120, warmup=0, validate_every=30, cluster=Cluster(ranks=ranks)),
            2.0,
        )
        for strategy in ("zero3", "zeropp")
    ]
    found = set(learning._curves(derive(frames_of(trials)))["panel"])
    assert len(found) == panels
    assert any("seconds" in panel for panel in found) == (ranks == "processes")


def test_a_trial_whose_last_step_has_no_error_shows_no_earlier_one() -> None:
    """Errors are those of the last measured step; if all of them are 0, the figure has no point of this trial."""
    rows = [("a", 0, 0.5), ("a", 8, 0.0), ("b", 0, 0.5), ("b", 8, 0.25)]
    errors = pd.DataFrame(rows, columns=["id", "step", "vnmse"]).assign(
        purpose="gradients", repeated=1, hop=float("nan")
    )
    derived: Any = SimpleNamespace(sent_errors=errors)
    shown = learning._sent(derived)
    assert shown[["id", "end_to_end"]].to_numpy().tolist() == [["b", 0.25]]


def test_seconds_are_of_all_trials_and_not_only_of_those_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The figure of costs has the seconds of repeats that measured no error; a configuration without errors is left
    out.
    """
    names = ["a", "b", "c", "d", "without"]
    trials = pd.DataFrame(
        {
            "id": f"{name}{repeat}",
            "configuration": name,
            "setting": "",
            "repeat": repeat,
            "sent_bytes": 100.0,
            "m_bytes": 50.0,
            "step_seconds": 1.0 + repeat,
        }
        for name in names
        for repeat in (0, 1, 2)
    )
    trials = trials.reindex(columns=dict.fromkeys([*trials, *learning.OF_TRIAL, "occasion", "disturbed"]))
    errors = pd.DataFrame({"id": [f"{name}0" for name in names], "vnmse": [0.1, 0.2, 0.3, 0.4, 0.0]}).assign(
        purpose="gradients", repeated=1, hop=float("nan"), step=8
    )
    monkeypatch.setattr(learning, "_excess", lambda _derived, trials: pd.Series(float("nan"), trials.index))
    derived: Any = SimpleNamespace(trials=trials, sent_errors=errors)
    shown = learning._costs(derived)
    assert sorted(shown["id"]) == [f"{name}{repeat}" for name in "abcd" for repeat in (0, 1, 2)]
    assert shown.groupby("configuration")["step_seconds"].mean().eq(2.0).all()
    assert shown.set_index("id")["vnmse"].dropna().to_dict() == {"a0": 0.1, "b0": 0.2, "c0": 0.3, "d0": 0.4}
    assert shown["m"].eq(2.0).all()


def test_two_settings_may_have_a_front_of_the_same_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial gets the verdict of its own setting."""
    fronts = pd.DataFrame(
        {"setting": ["s", "t"], "configuration": ["a", "a"], "front": ["yes", "no"], "sent": [1.0, 1.0]}
    )
    trials = pd.DataFrame(
        {"id": ["1", "2", "3"], "setting": ["s", "t", "u"], "configuration": "a", "validation_loss": 2.0}
    ).assign(sent_bytes=100.0, m_bytes=50.0)
    trials = trials.reindex(columns=dict.fromkeys([*trials, *learning.OF_TRIAL]))
    monkeypatch.setattr(learning.loss_verdicts, "front", lambda _: fronts)
    monkeypatch.setattr(learning, "_excess", lambda _derived, trials: pd.Series(0.5, trials.index))
    derived: Any = SimpleNamespace(trials=trials)
    shown = learning._front(derived)
    assert shown[["id", "front", "m", "excess"]].to_numpy().tolist() == [
        ["1", "yes", 2.0, 0.5],
        ["2", "no", 2.0, 0.5],
    ]
