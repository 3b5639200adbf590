"""A suite's baseline and contrast are resolved."""

from __future__ import annotations

import pytest

from harness.suites.expand_suite import _difference
from harness.suites.repeat_order import nearest_baselines
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
    """Return the suite with these keys."""
    return read(BODY, f"{HEAD}repeats = 2\n{keys}\n")


def test_all_repeats_of_the_baseline_are_it(read: Read) -> None:
    """A partial match names the baseline in every setting; the contrast is all other trials, or those that are named.

    Without these keys no trial has a role.
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
        ('contrast = { strategy = "zeropp" }', "needs a baseline; name one, or remove contrast"),
        ('baseline = { strategy = "zeropp" }', "matches several configurations of one setting"),
        ('baseline = { strategy = "ddp" }', "matches no trial of this suite"),
        ('baseline = { strategy = ["zero3", "zeropp"] }', "every trial is the baseline"),
        (
            'baseline = { strategy = "zero3" }\ncontrast = { strategy = "zero3" }',
            "baseline and contrast both match 4 trials",
        ),
        ('baseline = { strategie = "zero3" }', "did you mean 'strategy'"),
        (
            'baseline = { strategy = "zero3", tokens_per_rank = 64 }',
            "matches no trial in the setting of 3 of 5 other trials, the first with tokens_per_rank = 128",
        ),
        (
            'baseline = { strategy = "zero3" }\ncontrast = { strategy = "zeropp", tokens_per_rank = 64 }',
            "some baseline trials have tokens_per_rank = 128, and no trial of the contrast does: add a trial",
        ),
    ],
)
def test_what_names_no_two_groups_is_refused(keys: str, message: str, read: Read) -> None:
    """The refusal is one line with the key."""
    with pytest.raises(SuiteError, match=message):
        suite_of(read, keys)


def test_an_equal_trial_is_the_most_similar_one(read: Read) -> None:
    """The fields of an error are those of the most similar trial, also if other trials follow it."""
    first, *others = suite_of(read, "").trials
    assert {trial.tokens_per_rank for trial in others} == {64, 128}
    assert _difference(first, others) == ""
    longer = [trial for trial in others if trial.tokens_per_rank == 128]
    assert _difference(first, longer) == "tokens_per_rank = 64"
    slow = first.model_copy(update={"cluster": first.cluster.model_copy(update={"slow": 0.5})})
    assert _difference(first, [slow]) == "cluster.slow = 1"  # the default, which a trial's id leaves out
    assert _difference(slow, [first]) == "cluster.slow = 0.5"


_CODECS = """
[matrix]
strategy = ["qgz"]
policy.gradients = ["int8:128", "int4:128"{more}]
policy.prefetch = [0, 1]
"""
_TWO = 'baseline = { policy.prefetch = 1, policy.gradients = ["int8:128", "int4:128"] }'


def test_a_setting_may_have_several_baselines(read: Read) -> None:
    """If each trial of the contrast is nearest to one of them."""
    suite = read(_CODECS.format(more=""), f"{HEAD}repeats = 6\n{_TWO}\n")
    bases = [trial for trial in suite.trials if suite.role_of(trial) == "baseline"]
    assert len({str(base.policy.gradients) for base in bases}) == 2
    for trial in suite.trials:
        (nearest,) = {str(base.policy.gradients) for base in nearest_baselines(trial, bases)}
        assert nearest == str(trial.policy.gradients)


@pytest.mark.parametrize(
    ("repeats", "more", "message"),
    [
        (
            "6",
            ', "int6:128"',
            r"and a trial of .* differs from two of them in equally many fields; let baseline match only one",
        ),
        (
            '"until 2 %"',
            "",
            r'which repeats = "until 2 %" does not allow; let baseline match one configuration',
        ),
    ],
)
def test_several_baselines_that_leave_open_which_is_compared_are_refused(
    repeats: str, more: str, message: str, read: Read
) -> None:
    """A trial between two baselines, and repeats that go on until the ratios to one baseline are narrow."""
    with pytest.raises(SuiteError, match=f"matches several configurations of one setting, {message}"):
        read(_CODECS.format(more=more), f"{HEAD}repeats = {repeats}\n{_TWO}\n")


MERGED = """
[matrix]
strategy = ["zero3", "qwz", "hpz"]
[[override]]
match = { strategy = "zero3" }
set = { policy.weights = "int8:2048" }
"""


def test_a_merged_baseline_is_the_run_that_it_became(read: Read) -> None:
    """A baseline that is run under another strategy's name keeps its role; ids are the same as without the key."""
    suite = read(MERGED, f'{HEAD}baseline = {{ strategy = "zero3" }}\n')
    assert suite.combinations == read(MERGED).combinations
    assert [(t.strategy, suite.role_of(t)) for t in suite.combinations] == [
        ("qwz", "baseline"), ("hpz", "contrast"),
    ]  # fmt: skip
    same = read(MERGED, f'{HEAD}baseline = {{ strategy = ["zero3", "qwz"] }}\n')
    assert same.roles == suite.roles


def test_a_baseline_and_a_contrast_that_are_one_run_are_refused(read: Read) -> None:
    """They are refused also if they have different names, and if nothing else is left to compare."""
    both = f'{HEAD}baseline = {{ strategy = "zero3" }}\ncontrast = {{ strategy = "qwz" }}\n'
    with pytest.raises(SuiteError, match="is the same run as a trial of the contrast"):
        read(MERGED, both)
    with pytest.raises(SuiteError, match="every trial is the baseline"):
        read(MERGED.replace(', "hpz"', ""), f'{HEAD}baseline = {{ strategy = "zero3" }}\n')


@pytest.mark.parametrize(
    ("baseline", "axes", "also"),
    [
        ('optimizer.name = "AdamW"', 'optimizer.name = ["AdamW", "SGD"]', ("optimizer",)),
        ("optimizer.arguments.lr = 1e-3", "optimizer.arguments.lr = [1e-3, 3e-3]", ("optimizer",)),
        ("clip = 1.0", "clip = [1.0, 2.0]", ("clip",)),
        ("activation_checkpointing = false", "activation_checkpointing = [false, true]",
         ("activation_checkpointing",)),
        ('strategy = "zero3", clip = 1.0', 'strategy = ["zero3", "hpz"]\nclip = [1.0, 2.0]', ("clip",)),
        ('strategy = "zero3"', 'strategy = ["zero3", "hpz"]\nclip = [1.0, 2.0]', ()),
    ],
)  # fmt: skip
def test_a_baseline_may_differ_in_how_it_trains(
    read: Read, baseline: str, axes: str, also: tuple[str, ...]
) -> None:
    """The differing training field is then part of the configuration; if the baseline has all values, each value is a
    setting.
    """
    suite = read(f"[matrix]\n{axes}\n", f"{HEAD}baseline = {{ {baseline} }}\n")
    roles = [suite.role_of(trial) for trial in suite.combinations]
    assert roles.count("baseline") == (1 if also else 2)
    assert roles.count("contrast") == len(suite.combinations) - roles.count("baseline")
    assert suite.compared_also == also


def test_repeats_until_are_of_ratios_over_the_suites_baseline(read: Read) -> None:
    """If the suite names a baseline, ratios need no ZeRO-3."""
    body = '[matrix]\nstrategy = ["hpz", "qgz"]\n'
    until = f'{HEAD}repeats = "until 5 %"\n'
    with pytest.raises(
        SuiteError, match="each trial with zero3, but no trial of zero3 has the setting of hpz, qgz"
    ):
        read(body, until)
    assert read(body, f'{until}baseline = {{ strategy = "hpz" }}\n').roles
