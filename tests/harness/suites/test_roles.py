"""What a suite's question compares."""

from __future__ import annotations

import pytest

from harness.suites.suite import Suite, SuiteError
from tests.harness.suites.test_suite_file import HEAD, Read, read

__all__ = ["read"]  # a fixture

BODY = """
[defaults.cluster]
nodes = 2
ranks_per_node = 2
[matrix]
strategy = ["zero3", "zeropp"]
policy.weights = ["int8:64", "int6:64"]
tokens_per_rank = [64, 128]
sequence = [32]
"""


def suite_of(read: Read, keys: str) -> Suite:
    """The suite with these keys."""
    return read(BODY, f"{HEAD}repeats = 2\n{keys}\n")


def test_all_repeats_of_the_baseline_are_it(read: Read) -> None:
    """A partial match names it in every cell; all others are the contrast, or those that are named.

    Without keys nobody has a role.
    """
    assert {suite_of(read, "").role_of(trial) for trial in suite_of(read, "").trials} == {""}
    keys = 'baseline = { strategy = "zeropp", policy.weights = "int8:64" }'
    suite = suite_of(read, keys)
    for trial in suite.trials:
        base = trial.strategy == "zeropp" and trial.policy.weights == "int8:64"
        assert suite.role_of(trial) == ("baseline" if base else "contrast")
    narrow = suite_of(read, f'{keys}\ncontrast = {{ policy.weights = "int6:64", strategy = "zeropp" }}')
    roles = {(trial.strategy, str(trial.policy.weights)): narrow.role_of(trial) for trial in narrow.trials}
    assert roles["zeropp", "int6:64"] == "contrast"
    assert {role for (strategy, _), role in roles.items() if strategy == "zero3"} == {""}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('contrast = { strategy = "zeropp" }', "expected a baseline beside it"),
        ('baseline = { strategy = "zeropp" }', "matches several contenders of one cell"),
        ('baseline = { strategy = "ddp" }', "matches no trial of this suite"),
        ('baseline = { strategy = ["zero3", "zeropp"] }', "every trial is the baseline"),
        ('baseline = { strategy = "zero3" }\ncontrast = { strategy = "zero3" }', "are baseline and contrast"),
        ('baseline = { strategie = "zero3" }', "did you mean 'strategy'"),
    ],
)
def test_what_names_no_two_groups_is_refused(keys: str, message: str, read: Read) -> None:
    """In one line with the key."""
    with pytest.raises(SuiteError, match=message):
        suite_of(read, keys)
