"""A suite's policy.schedule is read, resolved to the trial's steps, and refused in one line where it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.suites.labels import at
from harness.suites.suite import SuiteError
from harness.suites.suite_file import load
from harness.suites.trial import Trial
from impl.codecs.codec import parse
from impl.policy.presets import preset
from report.data.configuration import label_of

SUITES = Path(__file__).parents[3] / "suites"


def _suite(folder: Path, schedule: str, *more: str) -> Path:
    path = folder / "s.toml"
    lines = [
        'name = "s"',
        'question = "q"',
        "[defaults]",
        "steps = 8",
        "warmup = 2",
        f"policy.schedule = {schedule}",
    ]
    path.write_text("\n".join([*lines, *more]), encoding="utf-8")
    return path


def _of(schedule: list[dict[str, Any]], **fields: Any) -> Trial:
    return Trial.model_validate({"policy": {"schedule": schedule}, "steps": 8, "warmup": 2, **fields})


def test_a_schedule_has_the_policies_of_its_spans(tmp_path: Path) -> None:
    """Shares count all steps of a trial, untimed ones included, and codecs are read as in policy.gradients."""
    (trial,) = load(
        _suite(tmp_path, '[{ until = "50 %", gradients = "int8:256" }, { gradients = ["int8:256", "bf16"] }]')
    ).trials
    policy = trial.resolved_policy()
    assert policy is not None
    assert [policy.policy_at(step).gradients for step in (4, 5)] == [
        (parse("int8:256"), parse("int8:256")), (parse("int8:256"), parse("bf16")),
    ]  # fmt: skip
    assert policy.policy_at(0).weights == preset("zeropp").weights


def test_a_trial_without_a_schedule_has_the_id_of_before() -> None:
    """The canonical form has no schedule, and [] is none; spans have only the fields that are set."""
    assert "schedule" not in Trial().canonical()["policy"]
    assert Trial.model_validate({"policy": {"schedule": []}}).id == Trial().id
    own = _of([{"until": "50 %"}, {"gradients": "bf16"}])
    assert own.canonical()["policy"]["schedule"] == [{"until": "50 %"}, {"gradients": "bf16"}]
    assert Trial.from_canonical(own.canonical()) == own
    assert own.id != Trial(steps=8).id


def test_labels_say_when_what_is_sent() -> None:
    """In a plan as the suite writes it, and on a page beside the strategy."""
    own = _of([{"until": "50 %", "gradients": "int4:64"}, {"gradients": "bf16"}])
    words = "gradients int4:64 until 50 %, then gradients bf16"
    assert at(own.canonical(), "policy.schedule") == words
    assert label_of(own, {}) == f"ZeRO++ ({words})"
    assert at(Trial().canonical(), "policy.schedule") == "-"


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            '[{ until = "60 %" }, { until = "40 %", gradients = "bf16" }, {}]',
            "span 2 of schedule (until 40 %) is empty",
        ),
        ('[{ until = 4 }, { until = 4, gradients = "bf16" }, {}]', "is empty or overlaps the span before it"),
        ('[{ until = "1 %", gradients = "bf16" }, {}]', "(until step 0 of 10) is empty"),
        ('[{ until = 11, gradients = "bf16" }, {}]', "ends beyond the run of 10 steps"),
        (
            '[{ until = "50 %", gradients = "bf16" }]',
            "ends at 50 % of the run, and the steps after it have no span",
        ),
        ('[{ until = 5, gradients = "bf16" }]', "ends at step 5 of 10, and the steps after it have no span"),
        ('[{ gradients = "bf16" }, {}]', "span 1 of schedule has no 'until', so that span 2 never begins"),
        (
            '[{ until = "half" }, {}]',
            "until = 'half': expected a step of 1 or more, or a share such as '50 %'",
        ),
        ("[{ until = 0 }, {}]", "until = 0: expected a step of 1 or more"),
        ("[{ until = 2.5 }, {}]", "until"),
        ('[{ until = "140 %" }, {}]', "expected a share above 0 and at most 100 %"),
        ("[{ until = 5, stage = 2 }, {}]", "a schedule cannot change stage, because it decides which states"),
        ('[{ until = 5, compute = "bf16" }, {}]', "a schedule cannot change compute"),
        (
            "[{ until = 5, prefetch = 0 }, {}]",
            "a schedule cannot change prefetch, because it holds for the whole run",
        ),
        ("[{ until = 5, gradient = 2 }, {}]", "a span has no field 'gradient'; did you mean 'gradients'"),
        ('[{ until = 5, gradients = "int4:8:clop" }, {}]', "clop"),
        ("[{ until = 5, secondary = 2 }, { secondary = 4 }]", "whose copies lie on different ranks"),
        ("[{ until = 5, every = 0 }, {}]", "greater than or equal to 1"),
        ('"none"', "expected a valid array"),
        ('{ until = "50 %" }', "policy.schedule: is a table; expected a list: policy.schedule = [...]"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_in_one_line(
    tmp_path: Path, schedule: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the file, the span and the way out; commands end with status 2."""
    path = _suite(tmp_path, schedule)
    with pytest.raises(SuiteError) as error:
        load(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert main(["plan", str(path)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (['strategy = "fsdp2+qgz"'], "FSDP2 and DDP do not tell collectives when a step ends; expected none"),
        (
            ['workload = "rlhf"', "sequence = 64", "tokens_per_rank = 512"],
            "a schedule counts steps of training",
        ),
        (['control = "unordered"'], "this control spoils its first span only"),
        (
            ['policy.budget = "gradients every 2 of int3:128"'],
            "chooses codecs by itself, and so does schedule",
        ),
    ],
)
def test_what_a_schedule_does_not_allow_is_refused(tmp_path: Path, more: list[str], message: str) -> None:
    """Host engines, workloads that do not only train, other controls and budgets."""
    with pytest.raises(SuiteError, match=message):
        load(_suite(tmp_path, '[{ until = "50 %", gradients = "bf16" }, {}]', *more))


def test_a_late_schedule_needs_one(tmp_path: Path) -> None:
    """The control names the key that is missing."""
    path = _suite(tmp_path, "[]", 'control = "late_schedule"')
    with pytest.raises(SuiteError, match=r"has no policy\.schedule that could be late"):
        load(path)


def test_the_shipped_suite_has_each_schedule_beside_zero3_and_zeropp() -> None:
    """Eleven configurations with eight seeds; shares fall on whole steps, and labels differ."""
    trials = load(SUITES / "schedules.toml").trials
    labels = {label_of(trial, {}) for trial in trials}
    assert len(labels) == 11
    assert len({trial.seed for trial in trials}) == 8
    assert {"ZeRO-3", "ZeRO++", "ZeRO++ (gradients bf16 in every 2nd step)"} <= labels
    assert "ZeRO++ (weights bf16, gradients bf16 until 5 %)" in labels
    assert "ZeRO++ (gradients bf16 from 50 %)" in labels
