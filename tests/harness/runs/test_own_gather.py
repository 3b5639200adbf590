"""Trials whose weights are gathered by a class of one's own, and what their records and pages say of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from harness.records.trial_record import Record, read_all
from harness.runs.feasibility import any_host, forecast
from harness.suites.suite import SuiteError
from harness.suites.trial import Trial
from harness.workloads.input_digests import digests
from impl import named_object
from tests.harness.runs.test_own_method import THREADS, _suite, _text
from tests.harness.runs.test_rank_trial import trial
from tests.harness.runs.test_sweep import sweep

WHOLE, HOPS, HALVED, BEYOND = (
    f"tests.support.gathers:{name}" for name in ("Whole", "Hops", "Halved", "Beyond")
)
DIFFERENCES = "examples.differences:Differences"


def _trial(gather: str, strategy: str = "zero3", **changes: Any) -> Trial:
    policy = {"max_padding": 9.0, "gather": gather, **changes.pop("policy", {})}
    return trial("stdlib", strategy, cluster=THREADS, policy=policy, **changes)


def _records(trials: list[Trial], folder: Path) -> dict[str, Record]:
    outcome, shown = sweep(trials, folder)
    assert outcome.failed == 0, shown
    return {str(record.trial["policy"]["gather"]): record for record in read_all(folder)}


def test_records_say_what_was_predicted_and_compared(tmp_path: Path) -> None:
    """Declared bytes are predicted and equal; others are measured, and neither record nor page says equal of them.

    Losses and gradients are compared with a single process that computes with the gathered weights.
    """
    own = {"validate_every": 2, "measure_quantisation": True}
    dither = "tests.support.gathers:Dither"
    trials = [_trial(name, **own) for name in (WHOLE, HOPS, dither)]
    trials.append(_trial(DIFFERENCES, gather_method={"block": 32}, **own))
    records = _records(trials, tmp_path)
    whole, hops, differences = records[WHOLE], records[HOPS], records[DIFFERENCES]
    for record in (whole, differences):
        assert record.predicted is not None
        assert (record.predicted.equal, record.predicted.unpredicted) == (True, [])
        assert any(row.purpose == "weights" for row in record.ranks[0].ledger or [])
    assert hops.predicted is not None
    assert (hops.predicted.equal, hops.predicted.unpredicted) == (None, ["weights"])
    assert all(row.purpose != "weights" for ledger in hops.predicted.ledgers for row in ledger)
    assert all(record.first_gradients for record in records.values())
    assert differences.ran["gather_method"]["class"] == f"{DIFFERENCES}(block=32)"
    errors = [
        error for error in differences.communication_errors if error.purpose == "weights" and not error.unit
    ]
    assert 0 < float(errors[-1].squared_error or 0) < float(errors[-1].squared_value or 0) / 100
    assert "gather_method" in digests(Trial.from_canonical(differences.trial))
    page = _text(tmp_path)
    assert (
        f"The bytes of the weights that {HOPS} gathered were measured, not predicted: the class declares"
        in page
    )
    assert f"The weights that {dither} gathered were not compared with the masters" in page
    assert f"The weights that {WHOLE} gathered were not compared" not in page


def test_both_classes_of_ones_own_train_together(tmp_path: Path) -> None:
    """A reduction and a gather of one's own have arguments of their own, in one trial of ranks that are processes."""
    policy = {"max_padding": 9.0, "gather": DIFFERENCES, "reduce": "examples.top_k:TopK"}
    arguments = {"method": {"share": 0.5}, "gather_method": {"block": 16}}
    pair = {"nodes": 1, "ranks_per_node": 2}
    outcome, shown = sweep([trial("stdlib", "zero3", cluster=pair, policy=policy, **arguments)], tmp_path)
    assert outcome.failed == 0, shown
    (record,) = read_all(tmp_path)
    assert record.predicted is not None
    assert record.predicted.equal
    assert record.ran["method"]["class"] == "examples.top_k:TopK(share=0.5)"


@pytest.mark.parametrize(
    ("gather", "message"),
    [
        (
            BEYOND,
            r"before training the weights of unit '.*' that .*Beyond has gathered differ from the masters of rank",
        ),
        (
            HALVED,
            r"before training the weights of unit '.*' that .*Halved has gathered differ from the masters of rank",
        ),
    ],
)
def test_weights_beyond_the_declared_bound_fail_the_trial(gather: str, message: str, tmp_path: Path) -> None:
    """A class that halves the weights, and promises a quarter or nothing lost, is caught before training."""
    outcome, _ = sweep([_trial(gather)], tmp_path)
    assert outcome.failed == 1
    (record,) = read_all(tmp_path)
    assert record.failure is not None
    assert re.search(message, record.failure.message), record.failure.message


def test_an_exception_on_one_rank_is_recorded_with_class_rank_and_unit(tmp_path: Path) -> None:
    """The failure on record is the class's error, with the rank on which it was raised, and the unit."""
    own = _trial("tests.impl.unit.test_own_gather:Wrong", gather_method={"how": "one rank"})
    outcome, _ = sweep([own], tmp_path)
    assert outcome.failed == 1
    (record,) = read_all(tmp_path)
    assert record.failure is not None
    assert "Wrong(how='one rank') on rank 2, unit '" in record.failure.message


def test_a_rank_that_hangs_is_named_before_the_trial_times_out(tmp_path: Path) -> None:
    """A rank that stays in the class ends the trial with class, rank, unit and line, although no wait has failed."""
    pair = {"nodes": 1, "ranks_per_node": 2}
    stuck = trial(
        "stdlib", "zero3", cluster=pair, timeout_seconds=20, gather_method={"seconds": 60},
        policy={"max_padding": 9.0, "gather": "tests.support.gathers:Stuck"},
    )  # fmt: skip
    outcome, _ = sweep([stuck], tmp_path)
    (failure,) = [record.failure for record in read_all(tmp_path)]
    assert outcome.failed == 1
    assert failure is not None
    assert re.search(
        r"method tests\.support\.gathers:Stuck\(seconds=60\) on rank 1, unit '.*': start\(\) has run for \d+ s without "
        r"waiting for a message, in start \(\S*gathers\.py:\d+\)",
        failure.message,
    ), failure.message


# In suites


def test_arguments_are_axes() -> None:
    """Values of an argument make trials; where no class of one's own gathers, they are one trial."""
    suite = _suite(
        matrix={
            "strategy": ["zero3"], "policy.gather": ["hierarchical", "nowhere:Class"], "gather_method.block": [1, 4],
        }
    )  # fmt: skip
    assert [(t.policy.gather, t.gather_method) for t in suite.combinations] == [
        ("hierarchical", {}), ("nowhere:Class", {"block": 1}), ("nowhere:Class", {"block": 4}),
    ]  # fmt: skip
    policies = [str(t.resolved_policy().gather) for t in suite.combinations]  # type: ignore[union-attr]
    assert policies == ["hierarchical", "nowhere:Class(block=1)", "nowhere:Class(block=4)"]


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        (
            {"strategy": "zero3", "gather_method.block": 2},
            "gather_method.block = 2: has no effect with a policy.gather that names no class of your own",
        ),
        (
            {"strategy": "qwz", "policy.gather": "mine:A", "policy.weights": "int4:64"},
            "policy.weights = \"int4:64\": has no effect with policy.gather = 'mine:A', which uses no codecs",
        ),
        (
            {"strategy": "zeropp", "policy.gather": "mine:A"},
            "does not allow secondary='node', since hpZ keeps",
        ),
        ({"strategy": "zero0", "policy.gather": "mine:A"}, "needs stage 1 to 3"),
        (
            {"strategy": "zero3", "policy.gather": "mine:A", "policy.offload_weights": 1.0},
            "does not allow offload",
        ),
        (
            {"strategy": "fsdp2+bf16", "policy.gather": "mine:A"},
            "gather = mine:A inside fsdp2: a method of your own",
        ),
        ({"strategy": "zero3", "policy.gather": "three_hop"}, 'policy.gather = "three_hop": expected'),
    ],
)
def test_what_has_no_effect_or_cannot_be_is_refused(defaults: dict[str, Any], message: str) -> None:
    """Settings without effect, and what a gather of one's own does not allow, are refused in one line."""
    with pytest.raises(SuiteError) as caught:
        _suite(defaults=defaults)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plans_do_not_import_the_class() -> None:
    """Without imports, a plan has no bytes and names the class; with imports it has those that the class declares."""
    trials = [_trial(name) for name in (WHOLE, HOPS, DIFFERENCES)]
    with named_object.forbidden():
        for plan in forecast(trials, any_host()):
            assert plan.inter is None
            assert plan.memory is not None
            assert list(plan.unread) == ["gather_method"]
            assert not plan.problems
    whole, hops, differences = forecast(trials, any_host())
    assert whole.inter
    assert hops.inter is None
    assert differences.inter
    missing, reduces = forecast([_trial("nowhere:Class"), _trial("examples.top_k:TopK")], any_host())
    assert "nowhere:Class: cannot import 'nowhere'" in missing.problems[0]
    assert "name TopK in reduce instead of gather" in reduces.problems[0]
