"""Defines how often a suite's trials are repeated, in which order, and which trials are compared.

Trials of one *setting* differ only in their *configuration* (strategy, policy and the like).  They are compared with
the baseline of this setting.  In each repeat they run one directly after the other.  Their order changes from repeat to
repeat, so that slow drift of the machine affects all configurations alike.

A sweep runs all repeats once.  The second sweep numbers its repeats from where the first sweep ends, so that a further
sweep does not change the ids of earlier trials.  This module does not import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from harness.suites.labels import flatten
from harness.suites.trial import Trial

BASELINE: Final = "zero3"  # the strategy that ratios divide by, unless the suite names a baseline
LEAST: Final = 6  # least number of repeats for a confidence interval
# Repeats that follow after an interval became narrow enough, since it may be narrow by chance.
BEYOND: Final = 3
MOST: Final = 20  # largest number of repeats, unless the suite gives one
CONFIGURATION: Final = (
    "strategy",
    "policy",
    "method",
    "gather_method",
    "peer",
    "deepspeed_config",
    "control",
)
"""The fields of a configuration.  All other fields, except ``seed`` and ``repeat``, make up the setting."""
TRAINING: Final = ("optimizer", "clip", "activation_checkpointing")
"""Fields that may belong to the configuration instead of the setting (:func:`compared_also`)."""
_UNTIL: Final = re.compile(r"until (\d+(?:\.\d+)?) ?%(?:, at most (\d+))?")


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often each trial is repeated in one sweep."""

    least: int = 1  # repeats of every trial
    # Trials are repeated until half the width of each ratio's interval is at most this share of the ratio.  None for a
    # fixed number of repeats.
    within: float | None = None
    most: int = 1  # largest number of repeats; the first repeat of sweep s has number ``s * most``

    @classmethod
    def parse(cls, value: Any) -> Repeats:
        """Parse the value of a suite's key ``repeats``.

        A whole number above 0 is the number of repeats.  With ``"until 2 %, at most 30"``, trials are repeated until
        each speed-up over the baseline is known to 2 % (half the width of its confidence interval), but at most 30
        times.  With ``"until 2 %"``, they are repeated at most :data:`MOST` times.

        Raises:
            ValueError: For other values.
        """
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return cls(value, None, value)
        match = _UNTIL.fullmatch(value) if isinstance(value, str) else None
        share, most = (float(match[1]) / 100, int(match[2] or MOST)) if match else (0.0, 0)
        if not 0 < share < 1 or most < LEAST + BEYOND:
            until = (
                f'"until 2 %", or "until 2 %, at most 30" with {LEAST + BEYOND} or more as the last number'
            )
            raise ValueError(f"expected a whole number above 0, {until}")
        return cls(LEAST, share, most)

    def __str__(self) -> str:
        if self.within is None:
            return f"{self.least} repeat{'s' if self.least > 1 else ''}"
        return f"{self.least} to {self.most} repeats, until {100 * self.within:g} %"


def comparable_groups(trials: Sequence[Trial], *also: str) -> list[list[Trial]]:
    """Divide trials into groups that can be compared with each other, and return the groups.

    The trials of a group differ only in their configuration (strategy, policy and so on) and in the fields ``also``.
    To let them differ in ``seed`` or ``repeat`` too, name these fields in ``also``.  Groups, and the trials of a group,
    are in the order of ``trials``.
    """
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(setting_of(trial, *also), []).append(trial)
    return list(groups.values())


def setting_of(trial: Trial, *also: str) -> str:
    """Return a trial's setting as JSON text: all its fields except its configuration and the fields in ``also``.

    Trials with equal settings can be compared with each other.  The configuration is strategy, policy and the other
    fields of :data:`CONFIGURATION`.  ``seed`` and ``repeat`` belong to the setting if ``also`` does not name them.
    """
    data = {name: value for name, value in trial.canonical().items() if name not in (*CONFIGURATION, *also)}
    return json.dumps(data, sort_keys=True)


def configuration_of(trial: Trial, also: Sequence[str] = ()) -> str:
    """Return, as JSON text, a trial's configuration: strategy, policy and the other fields of :data:`CONFIGURATION`.

    The fields that ``also`` names count as part of the configuration.
    """
    data = trial.canonical()
    return json.dumps({name: data.get(name) for name in (*CONFIGURATION, *also)}, sort_keys=True)


def compared_also(bases: Sequence[Trial], others: Sequence[Trial]) -> tuple[str, ...]:
    """Return the training fields, such as ``optimizer``, in which trials may differ from their baseline in this suite.

    These are the fields of :data:`TRAINING` for which a trial of ``others`` has a value that no baseline has.  If the
    baseline uses AdamW and the other trials use SGD, the suite compares optimizers, so ``optimizer`` is in the result.
    If both the baselines and the other trials run with AdamW and with SGD, ``optimizer`` is not in the result: AdamW is
    compared with AdamW, and SGD with SGD.

    Args:
        bases: All baselines; if empty, the result is empty.
        others: All trials that are compared with a baseline.
    """
    if not bases:
        return ()
    return tuple(
        name
        for name in TRAINING
        if {json.dumps(trial.canonical().get(name), sort_keys=True) for trial in others}
        - {json.dumps(trial.canonical().get(name), sort_keys=True) for trial in bases}
    )


def is_baseline(trial: Trial, roles: Mapping[str, str]) -> bool:
    """Return whether a trial is a baseline, with which other trials are compared.

    Args:
        trial: The trial.
        roles: Maps ids to ``baseline`` or ``contrast``.  All repeats of a trial have the same role, which is found
            under the id of the trial with ``repeat = 0``.  If ``roles`` is empty, every trial with strategy
            :data:`BASELINE` is a baseline.
    """
    if roles:
        return roles.get(trial.model_copy(update={"repeat": 0}).id) == "baseline"
    return trial.strategy == BASELINE


def nearest_baselines(trial: Trial, baselines: Sequence[Trial]) -> list[Trial]:
    """Return the baselines that differ from a trial in the fewest fields; several if they are equally near.

    A suite may have several baselines in a setting, such as a baseline with 4-bit codecs and a baseline with 8-bit
    codecs.  Each trial is then compared with the nearest baseline.

    Args:
        trial: The trial.
        baselines: The baselines of the trial's setting.
    """
    fields = dict(flatten(trial.canonical()))

    def distance(base: Trial) -> int:
        others = dict(flatten(base.canonical()))
        paths = {*fields, *others} - {"seed", "repeat"}
        return sum(fields.get(path) != others.get(path) for path in paths)

    distances = [distance(base) for base in baselines]
    return [
        base for base, each in zip(baselines, distances, strict=True) if each == min(distances, default=0)
    ]


def interleave(settings: Sequence[Trial], repeat: int) -> Iterator[Trial]:
    """Yield the trials of one repeat, in the order in which they run.

    Trials that are compared with each other (those that differ only in configuration) run one directly after the other.
    Their order changes from repeat to repeat, so that slow drift of the machine affects all configurations alike: every
    second repeat has the order of the repeat before it, reversed, and after two repeats the order is rotated by one.
    In the first setting, with the configurations a, b and c, repeats 0 to 3 run abc, cba, bca and acb.  The second
    setting begins with bca instead of abc, and so on.  The order of settings is rotated by one in each repeat.

    Args:
        settings: The trials to repeat.  The yielded trials are copies of them, with their field ``repeat`` set.
        repeat: Number of the repeat.
    """
    groups = [*enumerate(comparable_groups(settings, "repeat"))]
    for number, group in _rotated(groups, repeat):
        turned = _rotated(group, repeat // 2 + number)
        for trial in turned if repeat % 2 == 0 else reversed(turned):
            yield trial.model_copy(update={"repeat": repeat})


def _rotated(items: list[Any], by: int) -> list[Any]:
    return items[by % len(items) :] + items[: by % len(items)]
