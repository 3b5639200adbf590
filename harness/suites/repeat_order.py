"""How often a suite's trials are repeated, and in which order.

``repeats = 3`` says how often; ``repeats = "until 2 %"`` says how close the interval of each ratio must come,
and :mod:`harness.runs.further_repeats` asks for more until it does.  A sweep is all of that once; its
repeats have numbers of their own, so that a further sweep changes no trial of those before.  No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from harness.suites.trial import Trial

BASELINE: Final = "zero3"  # the strategy that ratios are over
LEAST: Final = 6  # repeats that an interval takes
BEYOND: Final = 3  # repeats after an interval was narrow for the first time: that may have been by chance
MOST: Final = 20  # repeats of a cell, where the suite does not say
CONTENDER: Final = ("strategy", "policy", "peer", "deepspeed_config", "control")  # fields: who ran
_UNTIL: Final = re.compile(r"until (\d+(?:\.\d+)?) ?%(?:, at most (\d+))?")


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often each trial is repeated in one sweep."""

    least: int = 1  # times that all are
    # half the width that the interval of each ratio may have, as a share of the ratio; None if nothing is
    # repeated until then
    within: float | None = None
    most: int = 1  # times that any is; the first repeat of sweep s has number ``s * most``

    @classmethod
    def of(cls, value: Any) -> Repeats:
        """Read the key ``repeats``: a whole number, ``until 2 %`` or ``until 2 %, at most 30``.

        Raises:
            ValueError: for any other; one line.
        """
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 1:
                raise ValueError("expected at least 1")
            return cls(value, None, value)
        found = _UNTIL.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            raise ValueError(
                'expected a whole number, "until 2 %" (of the ratio, on each side), or "until 2 %, '
                'at most 30"'
            )
        share, most = float(found[1]) / 100, int(found[2] or MOST)
        if not 0 < share < 1:
            raise ValueError("expected more than 0 % and less than 100 %")
        if most < LEAST + BEYOND:
            raise ValueError(
                f"expected at most {LEAST + BEYOND} or a larger number: fewer repeats are never enough"
            )
        return cls(LEAST, share, most)

    def __str__(self) -> str:
        if self.within is None:
            return f"{self.least} repeat{'s' if self.least > 1 else ''}"
        return f"{self.least} to {self.most} repeats, until {100 * self.within:g} %"


def compared(trials: Sequence[Trial], *also: str) -> list[list[Trial]]:
    """Trials that differ in strategy, policy and ``also`` alone, together, in the order of the first."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(setting_of(trial, *also), []).append(trial)
    return list(groups.values())


def setting_of(trial: Trial, *also: str) -> str:
    """A key that is equal for trials that differ in who ran and, if said, in ``also``."""
    data = {name: value for name, value in trial.canonical().items() if name not in (*CONTENDER, *also)}
    return json.dumps(data, sort_keys=True)


def roles(trials: Sequence[Trial], base: Sequence[bool], against: Sequence[bool]) -> dict[str, str]:
    """``baseline`` or ``contrast`` by id, of trials that are one or the other; not both, one base a cell.

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


def contender_of(trial: Trial) -> str:
    """A key of who ran."""
    data = trial.canonical()
    return json.dumps({name: data.get(name) for name in CONTENDER}, sort_keys=True)


def interleaved(cells: Sequence[Trial], repeat: int) -> Iterator[Trial]:
    """Every trial with one number of repeat; compared ones adjacent, in an order that no drift can favour."""
    for index, block in enumerate(_rotated(compared(cells, "repeat"), repeat)):
        turned = _rotated(block, repeat + index)
        for trial in turned if repeat % 2 == 0 else reversed(turned):
            yield trial.model_copy(update={"repeat": repeat})


def _rotated(items: list[Any], by: int) -> list[Any]:
    return items[by % len(items) :] + items[: by % len(items)]
