"""Trials with local steps: what they send, how they are checked, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.records.trial_record import Record, read_all
from harness.runs.feasibility import any_host, forecast
from harness.suites.expand_suite import expand
from harness.suites.suite import Suite, SuiteError, SuiteTables
from harness.suites.trial import Trial
from tests.harness.runs.test_rank_trial import trial
from tests.harness.runs.test_sweep import sweep

THREADS: dict[str, Any] = {"nodes": 2, "ranks_per_node": 2, "ranks": "threads"}


def _trial(policy: dict[str, Any], **changes: Any) -> Trial:
    changes = {"cluster": THREADS, "steps": 6, "warmup": 1, **changes}
    return trial("stdlib", "mics", policy={"max_padding": 9.0, **policy}, **changes)


def _record(own: Trial, folder: Path) -> Record:
    outcome, shown = sweep([own], folder)
    assert outcome.failed == 0, shown
    (record,) = read_all(folder)
    assert record.failure is None, record.failure
    return record


@pytest.mark.parametrize(
    ("policy", "nodes"),
    [
        ({"local_steps": 3, "weights": "int8:64", "gradients": "int8:64"}, (2, 2)),
        (
            {"local_steps": 4, "local_fragments": 2, "gradients": "int4:64:clip", "feedback": "classic"},
            (2, 2),
        ),
        ({"local_steps": 2, "group": 2, "compute": "bf16", "gradients": "fp32", "weights": "fp32"}, (4, 1)),
    ],
    ids=["whole", "fragments", "pairs of nodes"],
)
def test_trials_pass_all_checks_and_send_what_is_planned(
    tmp_path: Path, policy: dict[str, Any], nodes: tuple[int, int]
) -> None:
    """With clipping, measured errors and validations, ledgers and memory are predicted, and the plan has their mean."""
    cluster = THREADS | dict(zip(("nodes", "ranks_per_node"), nodes, strict=True))
    own = _trial(
        policy, cluster=cluster, clip=0.5, measure_quantisation=True, validate_every=3, accumulation=2
    )
    record = _record(own, tmp_path)
    assert record.predicted is not None
    assert record.predicted.equal
    for rank in record.ranks:
        assert rank.memory.engine["outer"] == rank.memory.formula["outer"]
    rows = [row for rank in record.ranks for row in rank.ledger or [] if row.phase != "evaluate"]
    between = sum(row.bytes for row in rows if row.link == "inter")
    (plan,) = forecast([own], any_host())
    assert plan.inter is not None
    assert abs(between / own.steps - plan.inter) <= len(record.ranks)
    assert {(row.phase, row.purpose) for row in rows if row.link == "inter" and row.purpose != "control"} == {
        ("step", "gradients")
    } or nodes != (2, 2)
    # With error feedback, a single process has other gradients after the first step.
    assert ({check.step for check in record.first_gradients} == {0}) == ("feedback" in policy)
    norms = {tuple(step.gradient_norm for step in rank.steps) for rank in record.ranks}
    assert len(norms) == 2  # of two groups


def _suite(**tables: Any) -> Suite:
    defaults = {"model.name": "gpt-tiny", "tokens_per_rank": 128, **tables.pop("defaults", {})}
    return expand(SuiteTables(name="mine", question="Why?", defaults=defaults, **tables))


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"policy.local_steps": 0}, "local_steps=0: expected 1 or more"),
        ({"policy.local_steps": 4, "policy.group": 0}, "local_steps=4 needs groups of ranks"),
        ({"policy.local_steps": 40, "steps": 8}, "policy.local_steps = 40: the trial has 10 steps in all"),
        ({"policy.local_steps": 4, "cluster.nodes": 1}, "needs two groups or more"),
        ({"policy.local_steps": 4, "strategy": "zero3"}, "local_steps"),
        ({"policy.outer_rate": 1.0}, "outer_rate=1 has no effect without local_steps"),
        ({"policy.local_steps": 4, "policy.gather": "flat"}, "group='node' needs"),
        (
            {"policy.local_steps": 4, "control": "unordered"},
            "control = 'unordered': .* but policy.local_steps = 4",
        ),
    ],
)
def test_suites_that_cannot_be_are_refused_in_one_line(defaults: dict[str, Any], message: str) -> None:
    """No steps, no groups, one group, rounds longer than the trial, and keys without effect are refused."""
    with pytest.raises(SuiteError, match=message) as error:
        _suite(defaults={"strategy": "mics", **defaults})
    assert "\n" not in str(error.value)


def test_fragments_beyond_the_units_are_a_problem_of_the_plan() -> None:
    """A plan names the number of units if there are fewer than fragments."""
    (plan,) = forecast([_trial({"local_steps": 7, "local_fragments": 7})], any_host())
    assert "local_fragments=7 is more than the number of the model's units" in plan.problems[0]


def test_none_keeps_a_strategy_as_it_is() -> None:
    """In an axis, ``none`` stands for trials without local steps, whose ids are those of trials without the key."""
    own = _suite(defaults={"strategy": "mics"}, matrix={"policy.local_steps": ["none", 2]})
    assert [each.policy.local_steps for each in own.combinations] == [None, 2]
    assert own.combinations[0].id == _suite(defaults={"strategy": "mics"}).combinations[0].id
