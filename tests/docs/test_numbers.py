"""Numbers that documents take from records are those of the pages, and what is not there is named."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs import numbers
from docs.numbers import DocumentError, Estimate, losses
from harness.records.confidence_intervals import Interval
from harness.suites.peers import PEERS
from harness.suites.trial import Trial
from report.data import speedups
from report.data.frames import frames_of, groups
from report.data.metrics import derive
from report.data.text import counted, listed
from report.tables import all_tables
from report.verdicts import verdicts
from tests.report.records import changed_steps, record_of

FINITE = st.floats(0.1, 10.0)


def estimate(value: float, low: float, high: float, *, more_is_better: bool = True) -> Estimate:
    return Estimate(
        Interval(value, low, high, 6), "{:.2f}".format, "a speed-up", equal=1.0, more_is_better=more_is_better
    )


@given(FINITE, st.floats(0.01, 0.9), st.booleans())
def test_a_verdict_needs_an_interval_without_the_value_of_no_difference(
    value: float, half: float, more_is_better: bool
) -> None:
    """It is better on one side, worse on the other, by which side is better; else it is not significant."""
    low, high = value * (1 - half), value * (1 + half)
    verdict = estimate(value, low, high, more_is_better=more_is_better).verdict
    if low <= 1.0 <= high:
        assert verdict == "not significant"
    else:
        assert verdict == ("better" if (value > 1.0) is more_is_better else "worse")
    assert estimate(value, math.nan, math.nan).verdict == "not significant"


def test_an_estimate_prints_its_interval_where_it_has_one() -> None:
    """A counted number and one of too few pairs print alone, and predict no further run."""
    assert str(estimate(2.36, 2.29, 2.42)) == "2.36 (2.29 to 2.42)"
    assert estimate(2.36, 2.29, 2.42).ci == "95 % CI 2.29 to 2.42"
    for alone in (estimate(2.36, math.nan, math.nan), estimate(2.36, 2.36, 2.36)):
        assert str(alone) == "2.36"
        with pytest.raises(DocumentError, match=r"a speed-up has no interval"):
            alone.again  # noqa: B018


def test_an_estimate_says_what_limits_it_in_every_form() -> None:
    """An interval of one occasion is within this start and predicts nothing; a disturbed number says so, also in what
    is computed from it, so that no template can drop it.
    """
    one = Estimate(Interval(2.36, 2.29, 2.42, 6, 1), "{:.2f}".format, "a speed-up", equal=1.0)
    assert str(one) == "2.36 (2.29 to 2.42 within this start)"
    assert one.ci == "95 % CI within this start 2.29 to 2.42"
    assert (one.value, one.cell) == ("2.36", "2.36 (2.29 to 2.42)")
    with pytest.raises(DocumentError, match=r"no interval over occasions"):
        one.again  # noqa: B018
    three = Estimate(Interval(2.0, 1.9, 2.1, 18, 3), "{:.2f}".format, "a speed-up", equal=1.0)
    assert (str(three), three.occasions) == ("2.00 (1.90 to 2.10)", 3)
    assert three.again == "1.80 to 2.21"
    taken = Estimate(
        Interval(0.73, math.nan, math.nan, 2, 1, disturbed=True), "{:.2f}".format, "a ratio", equal=1.0
    )
    assert (str(taken), taken.value, taken.cell) == ("0.73 (disturbed)",) * 3
    assert (taken.percent, taken.change) == ("73 % (disturbed)", "27 % (disturbed)")
    for computed in (taken / three, three / taken, taken * 2.0, taken / 2.0):
        assert computed.value.endswith(" (disturbed)")
    known = Estimate(Interval(0.73, 0.7, 0.8, 6, 1, disturbed=True), "{:.2f}".format, "a ratio", equal=1.0)
    assert str(known) == "0.73 (0.70 to 0.80 within this start, disturbed)"
    assert known.ci.endswith(", disturbed")


SEVERAL_OCCASIONS: Final = ["bandwidth", "peers", "quickstart", "successors"]


def test_readme_names_the_suites_of_several_occasions() -> None:
    """README, which is built from all records, names the suites that are tested below."""
    readme = " ".join((numbers.ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"Only the suites {listed(SEVERAL_OCCASIONS)} ran on several occasions." in readme


@pytest.mark.long
def test_suites_of_several_occasions_are_those_tested_below() -> None:
    """All other suites with records ran at one occasion."""
    assert numbers.several_occasions() == listed(SEVERAL_OCCASIONS)


@pytest.mark.parametrize("suite", SEVERAL_OCCASIONS)
def test_intervals_of_suites_of_several_occasions_hold_each_occasions_mean(suite: str) -> None:
    """Or the footnotes of the verdicts name the configurations whose occasions lie outside."""
    derived = numbers.derived(suite)
    pairs = derived.pairs[derived.pairs["id"] != derived.pairs["baseline"]]
    assert len({*pairs["occasion"]}) > 1
    notes, apart = verdicts(derived).table.footnotes, dict[int, list[str]]()
    for (_, name), rows in groups(pairs, ["setting", "configuration"]):
        ratio = speedups.speedup(rows)
        assert ratio.occasions == pairs["occasion"].nunique()
        means = speedups.undisturbed(rows).groupby("occasion")["speedup"].agg(speedups.geometric)
        outside = [mean for mean in means if not ratio.contains(mean)]
        assert speedups.outside(rows) == len(outside)
        apart.setdefault(len(outside), []).append(name)
        expected = speedups.expected(rows)
        assert expected.low < ratio.estimate < expected.high
        # A prediction for one speed of the machine may be narrower, since it lacks the differences between speeds.
        if math.isnan(expected.at):
            assert expected.low < ratio.low < ratio.high < expected.high
    apart.pop(0, None)
    assert notes.count("lies outside of the row's interval") == len(apart)
    for count, names in apart.items():
        assert f"{listed(names)}, the mean of {counted(count, 'occasion')} alone lies outside" in notes


@given(st.floats(-2, 2), st.floats(0, 1))
def test_a_magnitude_has_the_interval_of_the_sizes(value: float, half: float) -> None:
    """Its ends are in order and without a sign, whichever sign the estimate has."""
    signed = Estimate(
        Interval(value, value - half, value + half, 8), "{:+.4f}".format, "a difference", equal=0.0
    )
    size = signed.magnitude
    assert size.interval.low <= size.interval.high
    assert size.value[0] not in "+-"


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: numbers.speedup("nope", "ZeRO++"), r"no suite 'nope' in .*: expected one of ablation, "),
        (
            lambda: numbers.speedup("slow_node", "qwZ", at="equal nodes"),
            r"no configuration 'qwZ' at 'equal nodes': .* ZeRO\+\+",
        ),
        (lambda: numbers.seconds("slow_node", "ZeRO++"), r"matches several settings: .*equal nodes"),
        (
            lambda: numbers.cell("slow_node", "sums", "ZeRO++", "n"),
            r"no table 'sums': expected one of summary",
        ),
        (lambda: numbers.cell("slow_node", "summary", "ZeRO++, equal nodes", "speed"), r"no column 'speed'"),
        (lambda: numbers.fact("slow_node", "weather"), r"no fact 'weather': expected one of suite, trials"),
        (lambda: numbers.count("slow_node", "nodes"), r"expected one of trials, sweeps"),
        (lambda: numbers.planned("paper_scale", "memory_bytes", strategy="zero3"), r"4 planned trials"),
        (
            lambda: numbers.net_speed("slow_node", "ZeRO++", at="equal nodes"),
            r"slow_node: the loss of 'ZeRO\+\+' is not compared with a baseline's",
        ),
        (
            lambda: numbers.net_speed("budget", numbers.derived("budget").compared.contrast[0]),
            r"budget: no net speed-up of 'qgZ \(.*\)': no seconds of a step on a link with a rate",
        ),
        (
            lambda: numbers.budgeted("budget", "int9"),
            r"0 configurations have a budget beside the codec 'int9'",
        ),
    ],
)
def test_what_is_not_there_is_named(ask: object, message: str) -> None:
    """With what there is."""
    assert callable(ask)
    with pytest.raises(DocumentError, match=message):
        ask()


def test_numbers_are_those_of_the_suites_tables() -> None:
    """Speed-up, seconds, megabytes and loss are as the page prints them."""
    derived = numbers.derived("slow_node")
    rows = {
        (row["configuration"], row["where"]): row
        for row in all_tables.summary(derived).data.to_dict("records")
    }
    for at in ("equal nodes", "one node at 0.5 of the rate"):
        row = next(row for (name, where), row in rows.items() if name == "ZeRO++" and at in where)
        assert numbers.speedup("slow_node", "ZeRO++", at=at).interval == row["speedup"]
        assert numbers.seconds("slow_node", "ZeRO++", at=at).interval == row["step_seconds"]
        over_itself = numbers.speedup("slow_node", "ZeRO-3", over="ZeRO++", at=at).interval.estimate
        assert over_itself == pytest.approx(1 / row["speedup"].estimate)


def test_a_reader_computes_the_net_speed_up_with_pandas_alone() -> None:
    """The program in metrics.md imports nothing of ours, runs as printed, and finds numbers and intervals of README.

    One is of one occasion, the other of several.
    ``tox -e long`` compares those of the README with the records (tests/docs/test_build.py).
    """
    page = (numbers.ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    imported = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))
    assert imported == {"json", "math", "tarfile", "pandas"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=numbers.ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    readme = (numbers.ROOT / "README.md").read_text(encoding="utf-8")
    (short,), (net,) = (
        re.findall(
            rf"^\| {where}.* \| ZeRO\+\+ \|.*\*\*(.*?)(?: within this start)?\)\*\* \|$", readme, re.MULTILINE
        )
        for where in ("quickstart's, ", "gpt-tiny, ")
    )
    (loss,) = re.findall(r"steps are counted to (\S+) nats, ZeRO\+\+'s final loss", readme)
    first, second = done.stdout.splitlines()
    assert first == f"at {loss} nats: {net})"
    assert second.endswith(f" nats: {short})")


def test_a_net_speed_up_over_another_configuration_is_of_these_two() -> None:
    """Its factors are those of the two, and its product is the quotient of both net speed-ups, to equal losses."""
    late = "ZeRO++ (gradients int8:256 from 50 %)"
    net = numbers.net_speed("schedules", late, over="ZeRO++")
    assert net.step.interval.estimate == numbers.speedup("schedules", late, over="ZeRO++").interval.estimate
    assert net.base_loss.interval == numbers.net_speed("schedules", "ZeRO++").loss.interval
    assert net.reached
    back = numbers.net_speed("schedules", "ZeRO++", over=late)
    assert not back.reached
    assert math.isclose(net.total.interval.estimate * back.total.interval.estimate, 1.0)


def test_a_net_speed_up_over_another_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two configurations that each have one setting are not compared across these."""
    monkeypatch.setattr(losses, "_net_speed", lambda *_: SimpleNamespace(row={"setting": "a"}))
    monkeypatch.setattr(losses, "trials_of", lambda *_: pd.DataFrame({"id": ["t"], "setting": ["b"]}))
    with pytest.raises(numbers.DocumentError, match=r"'ZeRO-3' at '' is of another setting than 'qgZ'"):
        numbers.net_speed("quickstart", "qgZ", over="ZeRO-3")


@given(st.floats(1.01, 1.5), st.integers(3, 30))
def test_a_detectable_difference_is_found_in_four_of_five_runs(ratio: float, n: int) -> None:
    """An estimate drawn around it, with the same standard error, excludes 1 with a probability of about 0.8."""
    from scipy import stats

    student = stats.t(n - 1)
    error = math.log(ratio) / student.ppf(0.975)
    found = Estimate(Interval(1.0, 1 / ratio, ratio, n), "{:.2f}".format, "a ratio", equal=1.0)
    true = math.log1p(float(found.detectable.rstrip(" %")) / 100)  # printed in whole percents
    power = 1 - student.cdf(student.ppf(0.975) - true / error)
    near = math.log1p(0.01) / error  # one percent of rounding, in standard errors
    assert abs(student.ppf(power) - student.ppf(0.8)) <= near


@pytest.mark.parametrize(
    "interval", [Interval(1.1, math.nan, math.nan, 3), Interval(1.1, 1.0, 1.2, 28, occasions=3)]
)
def test_no_detectable_difference_follows_from_other_intervals(interval: Interval) -> None:
    """Without an interval, or with one whose degrees of freedom are those of occasions, a document gets no number."""
    with pytest.raises(numbers.DocumentError, match=r"a ratio: a detectable change needs an interval"):
        _ = Estimate(interval, "{:.2f}".format, "a ratio", equal=1.0).detectable


STEPS = {  # seconds of a step by strategy and type in which it computes
    ("ddp", "fp32"): 3.0, ("ddp-tuned", "fp32"): 2.0, ("ddp-bf16", "fp32"): 1.5, ("ddp-bf16", "bf16"): 1.25,
    ("fsdp2", "fp32"): 5.0, ("fsdp2", "bf16"): 0.5, ("exact", "fp32"): 1.0, ("zero3", "fp32"): 1.0,
    ("zero3", "bf16"): 1.0, ("zeropp", "bf16"): 0.25,
}  # fmt: skip


def _taking(seconds: float, _: Any) -> dict[str, float]:
    return {"total": seconds}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Returns the name of a suite with records of these steps, and of the given strategies only."""

    def make(name: str, repeats: int, *strategies: str) -> str:
        trials = [
            (
                Trial.model_validate({"strategy": strategy, "repeat": repeat, part: {"compute": compute}}),
                seconds,
            )
            for (strategy, compute), seconds in STEPS.items()
            for repeat in range(repeats)
            for part in ["peer" if strategy in PEERS else "policy"]
            if strategy in strategies or not strategies
        ]
        records = [changed_steps(record_of(trial), partial(_taking, seconds)) for trial, seconds in trials]
        monkeypatch.setitem(numbers.records._DERIVED, name, derive(frames_of(records)))
        return name

    return make


def test_ours_is_compared_with_each_librarys_fastest_setting_of_equal_types(
    made: Callable[..., str],
) -> None:
    """Tuned DDP and not DDP as shipped; DDP with its hook in the type in which ours computes; ZeRO++ with bf16; and
    what has no records is named.
    """
    suite, ours = (
        made("made", 6),
        ("exact (fp32)", "ZeRO-3", "ZeRO-3 (compute bf16)", "ZeRO++ (compute bf16)"),
    )
    rows = numbers.beside_libraries(suite, *ours, "not there")
    assert [(row.types, row.setting, row.speedup.value) for row in rows] == [
        ("fp32", "DDP, tuned", "2.00"), ("fp32", "FSDP2", "5.00"),
        ("fp32, sent as bf16", "DDP, bf16 hook", "1.50"),
        ("bf16", "DDP, bf16 hook (compute bf16)", "1.25"), ("bf16", "FSDP2 (compute bf16)", "0.50"),
        ("bf16; ours sends int8 and int4", "DDP, bf16 hook (compute bf16)", "5.00"),
        ("bf16; ours sends int8 and int4", "FSDP2 (compute bf16)", "2.00"),
    ]  # fmt: skip
    assert numbers.outcomes(rows) == "faster in 6 of 7 comparisons and slower in 1"
    assert numbers.outcomes(rows[:3]) == "faster in all 3 comparisons"
    neither = replace(rows[0], faster=False)
    assert numbers.outcomes([neither, *rows[:2]]) == (
        "faster in 2 of 3 comparisons and not significantly different in 1"
    )
    assert numbers.not_beside(suite) == "DeepSpeed in fp32, DeepSpeed in bf16"
    assert numbers.settings_tried(suite) == 6
    with pytest.raises(
        DocumentError, match=r"^made: no records of DeepSpeed in bf16 at '': name another type"
    ):
        numbers.fastest_setting(suite, "DeepSpeed", "bf16")
    with pytest.raises(
        DocumentError, match=r"^made: no configuration not there at '': expected one of DDP; "
    ):
        numbers.beside_libraries(suite, "not there")


def test_few_pairs_are_a_range(made: Callable[..., str]) -> None:
    """Without an interval the text has the lowest and highest pair, and all pairs must agree."""
    (row, *_) = numbers.beside_libraries(made("few", 2), "exact (fp32)")
    assert row.text == "2.00 (pairs 2.00 to 2.00)"
    assert (row.faster, row.slower) == (True, False)


def test_a_search_s_fastest_settings_are_repeated(made: Callable[..., str]) -> None:
    """Those that are not are named, but not the slower ones."""
    search = made("search", 1)
    assert numbers.not_repeated(search, made("all", 2)) == ""
    assert numbers.not_repeated(search, made("one", 2, "ddp", "ddp-bf16", "fsdp2")) == "DDP, tuned"


def test_parts_multiply_as_their_pairs_do() -> None:
    """The composition is the speed-up over the product of the parts' speed-ups, of the same pairs."""
    parts = ["qwZ", "hpZ", "qgZ"]
    composed = numbers.composition("ablation", parts, "ZeRO++").interval
    pairs = numbers.derived("ablation").pairs
    of = {name: pairs[pairs["configuration"].eq(name)].set_index("repeat") for name in (*parts, "ZeRO++")}
    disturbed = {repeat for table in of.values() for repeat in table.index[table["disturbed"].astype(bool)]}
    together, *alone = (
        speedups.geometric(of[name].drop(index=disturbed)["speedup"]) for name in ("ZeRO++", *parts)
    )
    assert composed.estimate == pytest.approx(together / math.prod(alone))
    assert composed.low < composed.estimate < composed.high
