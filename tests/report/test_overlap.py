"""The best step that a schedule allows."""

from __future__ import annotations

import statistics

import pytest

from report.frame import frames_of
from report.metrics import derive
from tests.report.records import records_of


def test_the_best_step_is_between_the_ideal_one_and_no_overlap_at_all() -> None:
    """No schedule hides more than the longer of compute and wire; none takes longer than both in turn."""
    table = derive(frames_of(records_of("quickstart"))).trials
    ours = table.dropna(subset=["best_seconds"])
    assert len(ours)
    # medians of parts are not parts of medians: a hundredth of room
    assert (ours["best_seconds"] >= 0.99 * ours["ideal_seconds"]).all()
    assert (ours["best_seconds"] <= 1.01 * (ours["compute_seconds"] + ours["wire_seconds"])).all()


def test_zero_bytes_between_nodes_leave_the_computation() -> None:
    """Where nothing crosses, the best step is what the slowest rank computed."""
    record = next(record for record in records_of("quickstart") if record.trial["strategy"] == "zero3")
    ranks = [
        rank.model_copy(update={"ledger": [row for row in rank.ledger or [] if row.link != "inter"]})
        for rank in record.ranks
    ]
    (row,) = derive(frames_of([record.model_copy(update={"ranks": ranks})])).trials.to_dict("records")
    computed = [
        sum(
            statistics.median(value(step) for step in rank.steps if not step.warmup)
            for value in (
                lambda step: step.forward - step.exposed_forward,
                lambda step: step.backward - step.exposed_backward,
                lambda step: step.total - step.forward - step.backward,
            )
        )
        for rank in ranks
    ]
    assert row["best_seconds"] == pytest.approx(max(computed))
