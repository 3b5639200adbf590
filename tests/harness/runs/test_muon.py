"""Trials with Muon pass all checks, and their records hold what was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.records.trial_record import Record, read_all
from harness.runs.sweep import SweepOutcome
from harness.suites.suite_file import load
from harness.suites.trial import Trial
from report.build import build
from tests.harness.runs.test_rank_trial import trial
from tests.harness.runs.test_sweep import sweep

SUITES = Path(__file__).resolve().parents[3] / "suites"
MUON: dict[str, Any] = {"name": "Muon", "arguments": {"lr": 0.02, "adamw": {"lr": 1e-3}}}
THREADS: dict[str, Any] = {"nodes": 2, "ranks_per_node": 2, "ranks": "threads"}


def muon(strategy: str, **changes: Any) -> Trial:
    fields = {
        "cluster": THREADS,
        "optimizer": MUON,
        "accumulation": 2,
        "clip": 1.0,
        "validate_every": 2,
        "steps": 6,
    }
    return trial("stdlib", strategy, **(fields | changes))


def by_strategy(folder: Path) -> dict[str, Record]:
    return {record.trial["strategy"]: record for record in read_all(folder)}


def test_trials_with_muon_are_as_predicted(tmp_path: Path) -> None:
    """Ledgers and memory are the predictions on every rank, one drawn matrix is stepped again, and a page is drawn."""
    owned = {"max_padding": 1.0, "owned": ["int8:256", "int4:64"]}
    trials = [
        muon("zero3", measure_quantisation=True), muon("zeropp", policy=owned), muon("exact"),
        muon("single", accumulation=2),
    ]  # fmt: skip
    outcome, shown = sweep(trials, tmp_path)
    assert outcome == SweepOutcome(ok=4), shown
    records = by_strategy(tmp_path)
    for name, record in records.items():
        if name == "single":
            continue
        assert record.predicted is not None
        assert record.predicted.equal
        for rank in record.ranks:
            assert rank.memory.engine.items() <= rank.memory.formula.items()
            purposes = {row.purpose for row in rank.ledger or ()}
            assert {"momentum", "update"} <= purposes
    losses = {name: [step.loss for step in record.ranks[0].steps] for name, record in records.items()}
    means = [
        sum(rank.steps[-1].loss for rank in records[name].ranks) / len(records[name].ranks)
        for name in ("exact", "single")
    ]
    assert means[0] == pytest.approx(means[1], abs=0.02)
    assert losses["zero3"][-1] < losses["zero3"][0]
    assert "Owners of matrices" in build(tmp_path).read_text(encoding="utf-8")


def test_the_suite_compares_each_optimizer_with_its_own_baseline() -> None:
    """Suite muon has ZeRO-3 and ZeRO++ under both optimizers, three exchanges and six seeds."""
    trials = load(SUITES / "muon.toml").trials
    kinds = {(t.strategy, t.optimizer.name, t.policy.owned) for t in trials}
    assert len(kinds) == 8
    assert len({t.seed for t in trials}) >= 6
    assert all(t.optimizer.arguments["adamw"] == {"lr": 1e-3} for t in trials if t.optimizer.orthogonalises)
