"""Trials whose gradients are reduced by a class of one's own, and what their records and pages say of it."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

from harness.records.record_checks import ledger_mismatch
from harness.records.trial_record import Record, read_all
from harness.runs.feasibility import any_host, forecast
from harness.suites.expand_suite import expand
from harness.suites.suite import Suite, SuiteError, SuiteTables
from harness.suites.trial import Trial
from harness.workloads.input_digests import digests
from impl import named_object
from report.build import build
from tests.harness.runs.test_rank_trial import trial
from tests.harness.runs.test_sweep import sweep

THREADS: dict[str, Any] = {"nodes": 2, "ranks_per_node": 2, "ranks": "threads"}
MEAN, HOPS, HALVED = (f"tests.support.methods:{name}" for name in ("Mean", "Hops", "Beyond"))


def _trial(reduce: str, strategy: str = "zero3", **changes: Any) -> Trial:
    policy = {"max_padding": 9.0, "reduce": reduce, **changes.pop("policy", {})}
    return trial("stdlib", strategy, cluster=THREADS, policy=policy, **changes)


def _records(trials: list[Trial], folder: Path) -> dict[str, Record]:
    outcome, shown = sweep(trials, folder)
    assert outcome.failed == 0, shown
    return {str(record.trial["policy"]["reduce"]): record for record in read_all(folder)}


def _text(folder: Path) -> str:
    text = re.sub("<[^>]+>", " ", build(folder).read_text(encoding="utf-8"))
    return re.sub(r"\s+", " ", html.unescape(text))


def test_records_say_what_was_predicted_and_compared(tmp_path: Path) -> None:
    """Declared bytes are predicted and equal; others are measured, and neither record nor page says equal of them.

    Gradients are compared with a single process where the class promises a bound, or exactness, and the page says
    where they were not.
    """
    own = {"validate_every": 2, "measure_quantisation": True}
    powersgd = "examples.powersgd:PowerSGD"
    records = _records(
        [_trial(MEAN, **own), _trial(HOPS, **own), _trial(powersgd, method={"rank": 1}, **own)], tmp_path
    )
    mean, hops, low_rank = records[MEAN], records[HOPS], records[powersgd]
    assert mean.predicted is not None
    assert hops.predicted is not None
    assert (mean.predicted.equal, mean.predicted.unpredicted) == (True, [])
    assert (hops.predicted.equal, hops.predicted.unpredicted) == (None, ["gradients"])
    assert all(row.purpose != "gradients" for ledger in hops.predicted.ledgers for row in ledger)
    assert any(row.purpose == "gradients" for row in hops.ranks[0].ledger or [])
    assert (
        {check.unit for check in mean.first_gradients}
        == {check.unit for check in hops.first_gradients}
        != set()
    )
    assert low_rank.first_gradients == []
    assert low_rank.ran["method"]["class"] == "examples.powersgd:PowerSGD(rank=1)"
    assert "method" in digests(Trial.from_canonical(mean.trial))
    page = _text(tmp_path)
    assert "measured, not predicted" in page
    assert f"The bytes of {HOPS}'s gradients were measured, not predicted: the class declares none." in page
    assert (
        f"The reduced gradients of {powersgd}(rank=1) were not compared with those of a single process"
        in page
    )
    assert f"The reduced gradients of {MEAN} were not compared" not in page


def test_a_rank_that_hangs_is_named_before_the_trial_times_out(tmp_path: Path) -> None:
    """A rank that stays in the class ends the trial with class, rank, unit and line, although no wait has failed."""
    pair = {"nodes": 1, "ranks_per_node": 2}
    stuck = trial(
        "stdlib", "zero3", cluster=pair, timeout_seconds=20, method={"seconds": 60},
        policy={"max_padding": 9.0, "reduce": "tests.support.methods:Stuck"},
    )  # fmt: skip
    outcome, _ = sweep([stuck], tmp_path)
    (failure,) = [record.failure for record in read_all(tmp_path)]
    assert outcome.failed == 1
    assert failure is not None
    assert re.search(
        r"method tests\.support\.methods:Stuck\(seconds=60\) on rank 1, unit '.*': start\(\) has run for \d+ s without "
        r"waiting for a message, in start \(\S*methods\.py:\d+\)",
        failure.message,
    ), failure.message


def test_a_record_that_calls_unpredicted_bytes_equal_is_refused(tmp_path: Path) -> None:
    """``equal`` beside unpredicted messages is a mismatch, as are wrong bytes of weights."""
    (record,) = _records([_trial(HOPS)], tmp_path).values()
    assert ledger_mismatch(record) is None
    assert record.predicted is not None
    forged = record.model_copy(update={"predicted": record.predicted.model_copy(update={"equal": True})})
    assert "were not predicted" in str(ledger_mismatch(forged))
    row = record.predicted.ledgers[1][0]
    ledgers = [*record.predicted.ledgers]
    ledgers[1] = [row.model_copy(update={"bytes": row.bytes + 1}), *ledgers[1][1:]]
    changed = record.model_copy(
        update={"predicted": record.predicted.model_copy(update={"ledgers": ledgers})}
    )
    assert f"predicted are {row.bytes + 1} bytes" in str(ledger_mismatch(changed))


def test_a_gradient_beyond_the_declared_bound_fails_the_trial(tmp_path: Path) -> None:
    """A class that halves the gradient, and promises a quarter, is caught by the comparison before training."""
    outcome, _ = sweep([_trial(HALVED)], tmp_path)
    assert outcome.failed == 1
    (record,) = read_all(tmp_path)
    assert record.failure is not None
    assert "reduced gradient of unit" in record.failure.message


def test_an_exception_on_one_rank_is_recorded_with_class_rank_and_unit(tmp_path: Path) -> None:
    """The failure on record is the class's error, with the rank on which it was raised, and the unit."""
    own = _trial("tests.impl.unit.test_own_reduction:Wrong", method={"how": "one rank"})
    outcome, _ = sweep([own], tmp_path)
    assert outcome.failed == 1
    (record,) = read_all(tmp_path)
    assert record.failure is not None
    assert "Wrong(how='one rank') on rank 2, unit '" in record.failure.message


# In suites


def _suite(**tables: Any) -> Suite:
    defaults = {"model.name": "gpt-tiny", "tokens_per_rank": 128, **tables.pop("defaults", {})}
    return expand(SuiteTables(name="mine", question="Why?", defaults=defaults, **tables))


def test_arguments_are_axes() -> None:
    """Values of an argument make trials; where no class of one's own reduces, they are one trial."""
    suite = _suite(
        matrix={"strategy": ["zero3"], "policy.reduce": ["two_hop", "nowhere:Class"], "method.rank": [1, 4]}
    )
    assert [(t.policy.reduce, t.method) for t in suite.combinations] == [
        ("two_hop", {}), ("nowhere:Class", {"rank": 1}), ("nowhere:Class", {"rank": 4}),
    ]  # fmt: skip
    assert len({t.id for t in suite.combinations}) == 3
    policies = [str(t.resolved_policy().reduce) for t in suite.combinations]  # type: ignore[union-attr]
    assert policies == ["two_hop", "nowhere:Class(rank=1)", "nowhere:Class(rank=4)"]


def test_an_argument_none_is_not_given() -> None:
    """``"none"`` stands for classes that do not take an argument."""
    suite = _suite(
        zip=[
            {
                "policy.reduce": ["nowhere:A", "nowhere:B"],
                "method.rank": [2, "none"],
                "method.share": ["none", 0.5],
            }
        ],
        defaults={"strategy": "zero3"},
    )
    assert [t.method for t in suite.combinations] == [{"rank": 2}, {"share": 0.5}]


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        (
            {"strategy": "zero3", "method.rank": 2},
            "method.rank = 2: has no effect with a policy.reduce and a strategy that name no class",
        ),
        (
            {"strategy": "qgz", "policy.reduce": "mine:A", "policy.gradients": "int4:64"},
            "policy.gradients = \"int4:64\": has no effect with policy.reduce = 'mine:A', which uses no codecs",
        ),
        ({"strategy": "zero3", "policy.reduce": "mine:A", "policy.chunks": 2}, "does not allow chunks='2'"),
        (
            {"strategy": "zero3", "policy.reduce": "mine:A", "policy.offload_optimizer": 1.0},
            "does not allow offload",
        ),
        (
            {"strategy": "fsdp2+bf16", "policy.reduce": "mine:A"},
            "reduce = mine:A inside fsdp2: a method of your own",
        ),
        ({"strategy": "zero3", "policy.reduce": "three_hop"}, 'policy.reduce = "three_hop": expected'),
    ],
)
def test_what_has_no_effect_or_cannot_be_is_refused(defaults: dict[str, Any], message: str) -> None:
    """Settings without effect, and what a method does not allow, are refused in one line."""
    with pytest.raises(SuiteError) as caught:
        _suite(defaults=defaults)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plans_do_not_import_the_class() -> None:
    """Without imports, a plan has no bytes and names the class; with imports it has those that the class declares."""
    trials = [_trial(name) for name in (MEAN, HOPS)]
    with named_object.forbidden():
        for plan in forecast(trials, any_host()):
            assert plan.inter is None
            assert plan.memory is not None
            assert list(plan.unread) == ["method"]
            assert not plan.problems
    mean, hops = forecast(trials, any_host())
    assert mean.inter
    assert hops.inter is None
    missing, *_ = forecast([_trial("nowhere:Class")], any_host())
    assert "nowhere:Class: cannot import 'nowhere'" in missing.problems[0]


# Strategies of one's own

LOCAL = "examples.local_steps:LocalSteps"


def _local(policy: dict[str, Any], strategy: str = LOCAL, **changes: Any) -> Trial:
    policy = {"max_padding": 9.0, **policy}
    return trial("stdlib", strategy, cluster=THREADS, policy=policy, steps=6, warmup=0, **changes)


def test_local_steps_train_with_fewer_bytes(tmp_path: Path) -> None:
    """Nodes that meet every third step send gradients inside nodes only, and the messages of their meetings are
    booked as state, which is measured and not predicted.
    """
    apart = {"group": "node", "reduce": "examples.local_steps:NodeMean"}
    trials = [_local(apart, method={"every": 3}, validate_every=3), _local({}, "zero3", validate_every=3)]
    outcome, shown = sweep(trials, tmp_path)
    assert outcome.failed == 0, shown
    own = next(record for record in read_all(tmp_path) if record.trial["strategy"] == LOCAL)
    assert own.predicted is not None
    assert (own.predicted.equal, own.predicted.unpredicted) == (None, ["state"])
    rows = own.ranks[0].ledger or []
    between = {row.purpose for row in rows if row.link == "inter"}
    assert "gradients" not in between
    assert "weights" not in between
    (state,) = (row for row in rows if row.purpose == "state" and row.link == "inter")
    assert state.messages == 2  # in 6 steps
    losses = [step.loss for step in own.ranks[0].steps]
    assert losses[-1] < losses[0]
    assert "LocalSteps" in _text(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "nowhere:Class"}, "strategy nowhere:Class: cannot import 'nowhere'"),
        ({"strategy": "examples.top_k:TopK"}, "expected a subclass of harness.strategies.Strategy"),
        ({"method": {"often": 3}}, "configure() raised TypeError:"),
    ],
)
def test_strategies_that_cannot_be_made_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """A class that cannot be imported, is no strategy, or refuses its arguments is named in one line."""
    own = _local({}, **changes)
    (plan,) = forecast([own], any_host())
    if plan.problems:
        assert message in plan.problems[0]
        return
    outcome, _ = sweep([own], tmp_path)
    assert outcome.failed == 1
    (record,) = read_all(tmp_path)
    assert record.failure is not None
    assert message in record.failure.message


def test_plans_do_not_import_a_strategy() -> None:
    """Without imports, a plan of a strategy of one's own has memory, and neither bytes nor time."""
    with named_object.forbidden():
        (plan,) = forecast([_local({}, "nowhere:Class")], any_host())
    assert plan.inter is None
    assert plan.unread == {"strategy": "nowhere:Class"}
    assert not plan.problems


def test_a_strategy_of_ones_own_keeps_the_suites_policy_and_arguments() -> None:
    """All ``policy.*`` of a suite apply to a strategy of one's own, which gets ``method.*`` instead of the method."""
    suite = _suite(
        matrix={"strategy": ["zero3", "zeropp", "mine:Own"], "policy.group": ["node"], "method.every": [2, 4]}
    )
    own = [t for t in suite.combinations if t.own_strategy]
    assert [(t.method, t.policy.group) for t in own] == [({"every": 2}, "node"), ({"every": 4}, "node")]
    with pytest.raises(
        SuiteError, match="measure_quantisation: errors are not measured with strategy = 'mine:Own'"
    ):
        _suite(defaults={"strategy": "mine:Own", "measure_quantisation": True})
