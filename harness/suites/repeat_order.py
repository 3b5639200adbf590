"""How often a suite's trials are repeated, and in which order.  No torch.

A sweep is all repeats once; its repeats have numbers of their own, so that a further sweep changes no trial
of those before.
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
    within: float | None = None  # half the width of each ratio's interval that is enough, as a share of it
    most: int = 1  # times that any is; the first repeat of sweep s has number ``s * most``

    @classmethod
    def parse(cls, value: Any) -> Repeats:
        """Read the key: a whole number, ``until 2 %`` or ``until 2 %, at most 30``; else a ValueError."""
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return cls(value, None, value)
        found = _UNTIL.fullmatch(value) if isinstance(value, str) else None
        share, most = (float(found[1]) / 100, int(found[2] or MOST)) if found else (0.0, 0)
        if not 0 < share < 1 or most < LEAST + BEYOND:
            until = f'"until 2 %", or "until 2 %, at most 30", and there at least {LEAST + BEYOND}'
            raise ValueError(f"expected a whole number, at least 1, {until}")
        return cls(LEAST, share, most)

    def __str__(self) -> str:
        if self.within is None:
            return f"{self.least} repeat{'s' if self.least > 1 else ''}"
        return f"{self.least} to {self.most} repeats, until {100 * self.within:g} %"


def comparable_groups(trials: Sequence[Trial], *also: str) -> list[list[Trial]]:
    """Trials that differ in strategy, policy and ``also`` alone, together, in the order of the first."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(setting_of(trial, *also), []).append(trial)
    return list(groups.values())


def setting_of(trial: Trial, *also: str) -> str:
    """A key that is equal for trials that differ in who ran and, if said, in ``also``."""
    data = {name: value for name, value in trial.canonical().items() if name not in (*CONTENDER, *also)}
    return json.dumps(data, sort_keys=True)


def contender_of(trial: Trial) -> str:
    """A key of who ran."""
    data = trial.canonical()
    return json.dumps({name: data.get(name) for name in CONTENDER}, sort_keys=True)


def interleave(cells: Sequence[Trial], repeat: int) -> Iterator[Trial]:
    """Every trial with one number of repeat; compared ones adjacent, in an order that no drift can favour."""
    for index, block in enumerate(_rotated(comparable_groups(cells, "repeat"), repeat)):
        turned = _rotated(block, repeat + index)
        for trial in turned if repeat % 2 == 0 else reversed(turned):
            yield trial.model_copy(update={"repeat": repeat})


def _rotated(items: list[Any], by: int) -> list[Any]:
    return items[by % len(items) :] + items[: by % len(items)]
