"""Repeats and sweeps of a suite: how many, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import pytest

from harness.suites.repeat_order import LEAST, MOST, Repeats, interleave
from harness.suites.suite import Suite, SuiteError
from harness.suites.trial import Trial
from tests.harness.suites.test_suite_file import HEAD, Read, read

__all__ = ["read"]  # a fixture
STRATEGIES: Final = ("zero3", "zeropp", "qwz", "qgz", "hpz")


def repeated(read: Read, repeats: str, strategies: str = '["zero3", "zeropp", "qwz"]') -> Suite:
    body = f"[matrix]\nstrategy = {strategies}\nseed = [0, 1]\n"
    return read(body, f"{HEAD}repeats = {repeats}\n")


@pytest.mark.parametrize(
    ("value", "repeats"),
    [
        (3, Repeats(3, None, 3)),
        ("until 2 %", Repeats(LEAST, 0.02, MOST)),
        ("until 0.5%", Repeats(LEAST, 0.005, MOST)),
        ("until 2 %, at most 30", Repeats(LEAST, 0.02, 30)),
    ],
)
def test_repeats_are_a_number_or_a_width(value: object, repeats: Repeats) -> None:
    """Repeats are a whole number, or a share of the ratio with a limit, which has a default."""
    assert Repeats.parse(value) == repeats
    assert str(repeats.most) in str(repeats)


@pytest.mark.parametrize("settings", [1, 2, 3])
@pytest.mark.parametrize(
    "strategies", [STRATEGIES[:count] for count in range(1, len(STRATEGIES) + 1)], ids=len
)
def test_each_configuration_has_each_place_equally_often(strategies: Sequence[str], settings: int) -> None:
    """In each setting, a configuration's mean place is the middle in every two repeats: linear drift cancels."""
    trials = [
        Trial(strategy=name, tokens_per_rank=128 * (1 + number))
        for number in range(settings)
        for name in strategies
    ]
    count, places = len(strategies), Counter[tuple[int, str, int]]()
    for pair in range(count):
        sums = Counter[tuple[int, str]]()
        for repeat in (2 * pair, 2 * pair + 1):
            run = [*interleave(trials, repeat)]
            assert {trial.repeat for trial in run} == {repeat}
            for index, trial in enumerate(run):
                key = trial.tokens_per_rank, trial.strategy
                places[*key, index % count] += 1
                sums[key] += index % count
        assert set(sums.values()) == {count - 1}
    assert len(places) == settings * count**2
    assert set(places.values()) == {2}


def test_a_further_sweep_changes_no_trial_of_those_before(read: Read) -> None:
    """Its repeats continue the first sweep's: two sweeps of three repeats are the trials of six repeats."""
    three, six = repeated(read, "3"), repeated(read, "6")
    first, second = three.sweep(0), three.sweep(1)
    assert first == three.trials
    assert [trial.id for trial in first + second] == [trial.id for trial in six.trials]
    assert not {trial.id for trial in first} & {trial.id for trial in second}


def test_sweeps_of_unknown_length_do_not_overlap(read: Read) -> None:
    """With ``repeats = "until ..."`` each sweep begins after the most repeats that the one before can have."""
    suite = repeated(read, '"until 2 %, at most 10"')
    assert {trial.repeat for trial in suite.sweep(0)} == set(range(LEAST))
    assert {trial.repeat for trial in suite.sweep(2)} == set(range(20, 20 + LEAST))


def test_ratios_need_a_baseline(read: Read) -> None:
    """Repeating until ratios are known is refused in a setting without a baseline."""
    with pytest.raises(SuiteError, match="with zero3, but no trial of zero3 has the setting of zeropp, qwz"):
        repeated(read, '"until 2 %"', '["zeropp", "qwz"]')
