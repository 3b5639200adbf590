"""Which trials of a suite its question compares: the baseline, and what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from harness.suites.repeat_order import setting_of
from harness.suites.trial import Trial


def roles(trials: Sequence[Trial], base: Sequence[bool], against: Sequence[bool]) -> dict[str, str]:
    """``baseline`` or ``contrast`` by id, of trials that are one or the other.

    Raises:
        ValueError: if a trial is both, none is the contrast, or a cell has several baselines.
    """
    if both := sum(one and other for one, other in zip(base, against, strict=True)):
        raise ValueError(f"{both} trials are baseline and contrast; expected two groups")
    if not any(against):
        raise ValueError("every trial is the baseline; expected two groups")
    bases = {trial.id: trial for trial, hit in zip(trials, base, strict=True) if hit}
    if len({setting_of(one) for one in bases.values()}) < len(bases):
        raise ValueError("matches several contenders of one cell; expected one")
    others = {trial.id: "contrast" for trial, hit in zip(trials, against, strict=True) if hit}
    return others | dict.fromkeys(bases, "baseline")
