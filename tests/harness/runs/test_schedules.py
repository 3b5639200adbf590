"""Trials whose policy changes while training send in each step what its span says, and a late schedule is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.records import record_checks
from harness.records.sent_by_step import in_runs
from harness.records.trial_record import Record, StepsSent
from harness.reference_checks.comparison import TrialError
from harness.runs.feasibility import any_host, forecast
from harness.runs.predict import per_node_bytes
from harness.suites.trial import Trial
from report.data.frames import frames_of
from report.data.metrics import derive
from tests.harness.runs.test_rank_trial import result, text, trial
from tests.report.records import changed_steps

__all__ = ["text"]  # a fixture

CODECS: dict[str, Any] = {"max_padding": 9.0, "weights": "int8:64", "gradients": "int4:64"}
EXACT: dict[str, Any] = {"weights": "bf16", "gradients": "bf16"}
WARM_UP: list[dict[str, Any]] = [{"until": "40 %", **EXACT}, {}]
ALTERNATING: list[dict[str, Any]] = [{"every": 2, "gradients": "bf16"}]


def scheduled(text: str, schedule: list[dict[str, Any]], **changes: Any) -> Trial:
    """A trial of ZeRO++ with 1 + 6 steps."""
    policy = {**CODECS, **changes.pop("policy", {}), "schedule": schedule}
    fields = {"strategy": "zeropp", "steps": 6, "warmup": 1, **changes}
    return trial(text, fields.pop("strategy"), policy=policy, **fields)


def _steps(record: Record) -> list[StepsSent]:
    return record.ranks[0].sent_by_step


@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_step_of_a_record_is_as_predicted(text: str, tmp_path: Path, accumulation: int) -> None:
    """With validations, measured errors and clipping, spans change the bytes at their step, and all checks pass."""
    changes = {"accumulation": accumulation, "clip": 1.0, "validate_every": 2, "measure_quantisation": True}
    own = scheduled(text, WARM_UP, **changes)
    record = result(own, tmp_path / "log")
    assert record.predicted is not None
    assert record.predicted.equal
    assert [rank.sent_by_step for rank in record.ranks] == record.predicted.sent_by_step
    # The order of messages is checked every 32 backward passes, of which there are fewer.
    assert [(run.first, run.steps) for run in _steps(record)] == [(0, 3), (3, 4)]
    before, after = _steps(record)
    assert before.inter > after.inter
    (planned,) = forecast([own], any_host())
    timed = [rank.sent_by_step for rank in record.ranks]
    mean = sum(2 * first.inter + 4 * then.inter for first, then in timed) / own.steps
    assert planned.inter == pytest.approx(mean, abs=2)
    for rank in record.ranks:
        engine = {part: size for part, size in rank.memory.engine.items() if part in ("secondary", "masters")}
        assert engine == {part: rank.memory.formula[part] for part in engine}
    assert {error.codec for error in record.communication_errors if error.purpose == "weights"} == {
        "bf16",
        "int8:64",
    }


@pytest.mark.parametrize(
    "schedule",
    [
        [{"until": "50 %", "secondary": 0}, {}],
        [{"until": 3, "feedback": "classic:all"}, {"gradients": "bf16"}],
        [{"until": 3}, {"secondary_format": "bf16", "differences": "int4:64", "refresh": 2}],
        ALTERNATING,
    ],
)
def test_what_a_plan_predicts_is_sent(text: str, tmp_path: Path, schedule: list[dict[str, Any]]) -> None:
    """Whatever changes, the mean bytes of a plan are those of the record's timed steps."""
    own = scheduled(text, schedule)
    record = result(own, tmp_path / "log")
    sent = sum(row.bytes for rank in record.ranks for row in rank.ledger or [] if row.link == "inter")
    (planned,) = forecast([own], any_host())
    assert planned.inter == pytest.approx(sent / own.steps, abs=2)


@pytest.mark.parametrize("schedule", [WARM_UP, ALTERNATING])
def test_a_schedule_one_step_late_is_named(text: str, tmp_path: Path, schedule: list[dict[str, Any]]) -> None:
    """The control changes the bytes of single steps, even where the sum over the timed steps is right."""
    late = scheduled(text, schedule, control="late_schedule")
    with pytest.raises(TrialError, match=r"rank 0 sent \d+ bytes .*predicted are \d+"):
        result(late, tmp_path / "log")


def test_codecs_of_equal_size_one_step_late_are_named(text: str, tmp_path: Path) -> None:
    """Where bytes do not tell the spans apart, the codecs of the measured and of the drawn step do."""
    spans = [{"until": 6, "weights": "fp8e4m3:64"}, {"weights": "int8:64"}]
    own = scheduled(text, spans, policy={"gradients": "bf16"}, measure_quantisation=True)
    assert result(own, tmp_path / "log").failure is None
    late = own.model_copy(update={"control": "late_schedule"})
    with pytest.raises(
        TrialError, match=r"in step 6 \w+ of .* were sent as fp8e4m3:64; the trial's policy has"
    ):
        result(late, tmp_path / "log")


def test_a_record_whose_steps_differ_is_refused(text: str, tmp_path: Path) -> None:
    """A report finds a step that differs from its prediction in a record of any age."""
    record = result(scheduled(text, WARM_UP), tmp_path / "log")
    assert record_checks.ledger_mismatch(record) is None
    moved = [run.model_copy(update={"inter": run.inter + 8 * (run.first == 3)}) for run in _steps(record)]
    ranks = [record.ranks[0].model_copy(update={"sent_by_step": moved}), *record.ranks[1:]]
    why = record_checks.ledger_mismatch(record.model_copy(update={"ranks": ranks}))
    assert why is not None
    assert "in step 3; predicted are" in why
    assert record.predicted is not None
    short = record.predicted.model_copy(update={"sent_by_step": record.predicted.sent_by_step[:-1]})
    why = record_checks.ledger_mismatch(record.model_copy(update={"predicted": short}))
    assert why == "bytes of each step are predicted for 3 ranks, but the record has 4"


def test_equal_steps_are_one_entry() -> None:
    """Cumulative bytes become runs of equal steps."""
    runs = in_runs([(1, 0), (3, 1), (5, 2), (5, 2)])
    assert [(run.first, run.steps, run.inter, run.intra) for run in runs] == [(0, 2, 2, 1), (2, 1, 0, 0)]
    assert in_runs([]) == []


def test_a_step_s_seconds_are_the_mean_over_the_policies(text: str, tmp_path: Path) -> None:
    """With a third of the steps at 3 s and the others at 1 s, a step takes 5/3 s, not the median of 1 s."""
    own = scheduled(text, WARM_UP)
    record = result(own, tmp_path / "log")
    record = changed_steps(record, lambda step: {"total": 3.0 if step.index < 3 else 1.0})
    shown = record.model_copy(
        update={"id": own.id, "started": "2026-01-02", "finished": "2026-01-02", "pool": "p"}
    )
    trials = derive(frames_of([shown])).trials
    assert trials["step_seconds"].tolist() == pytest.approx([5 / 3])
    assert trials["configuration"].tolist() == [
        "ZeRO++ (w int8:64, g int4:64, weights bf16, gradients bf16 until 40 %)"
    ]


def test_a_plan_counts_each_policy_as_often_as_it_has_steps(text: str) -> None:
    """The bytes of a schedule are the mean of its policies' bytes over the timed steps."""
    own = scheduled(text, WARM_UP)
    policy = own.resolved_policy()
    assert policy is not None
    (planned,) = forecast([own], any_host())
    assert planned.step is not None
    units = planned.step.units
    exact, quantised = (per_node_bytes(phase, own.topology(), units, own)[0] for phase in policy.phases)
    assert planned.egress == pytest.approx((2 * exact + 4 * quantised) / 6, abs=2)


def test_what_muon_sends_belongs_to_its_step(text: str, tmp_path: Path) -> None:
    """With a schedule and Muon, the exchanges with owners of matrices are in the bytes of each step."""
    muon = {"name": "Muon", "arguments": {"lr": 0.02, "adamw": {"lr": 1e-3}}}
    own = scheduled(text, WARM_UP, optimizer=muon)
    plain = result(scheduled(text, WARM_UP), tmp_path / "log")
    record = result(own, tmp_path / "muon")
    assert record.predicted is not None
    assert [rank.sent_by_step for rank in record.ranks] == record.predicted.sent_by_step
    more = [run.inter - other.inter for run, other in zip(_steps(record), _steps(plain), strict=True)]
    assert more[0] == more[1] > 0
