"""How often a suite's trials are repeated, and in which order.  No torch.

A sweep runs all repeats once; no two sweeps share a repeat's number, so a further one changes no trial.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from harness.suites.trial import Trial

BASELINE: Final = "zero3"  # the strategy that ratios divide by
LEAST: Final = 6  # repeats that an interval needs
BEYOND: Final = 3  # repeats after an interval was narrow for the first time, which may be chance
MOST: Final = 20  # repeats of a setting, where the suite does not say
CONFIGURATION: Final = (
    "strategy",
    "policy",
    "peer",
    "deepspeed_config",
    "control",
)  # the fields of a configuration
TRAINING: Final = ("optimizer", "clip", "activation_checkpointing")
"""Fields that belong to a configuration too where the suite's baseline has other values of them."""
_UNTIL: Final = re.compile(r"until (\d+(?:\.\d+)?) ?%(?:, at most (\d+))?")


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often each trial is repeated in one sweep."""

    least: int = 1  # repeats of every trial
    within: float | None = None  # half the width of each ratio's interval that is enough, as a share of it
    most: int = 1  # repeats of any trial; the first of sweep s has number ``s * most``

    @classmethod
    def parse(cls, value: Any) -> Repeats:
        """Read the key: a whole number, ``until 2 %`` or ``until 2 %, at most 30``; else a ValueError."""
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return cls(value, None, value)
        match = _UNTIL.fullmatch(value) if isinstance(value, str) else None
        share, most = (float(match[1]) / 100, int(match[2] or MOST)) if match else (0.0, 0)
        if not 0 < share < 1 or most < LEAST + BEYOND:
            until = f'"until 2 %", or "until 2 %, at most 30", and there at least {LEAST + BEYOND}'
            raise ValueError(f"expected a whole number, at least 1, {until}")
        return cls(LEAST, share, most)

    def __str__(self) -> str:
        if self.within is None:
            return f"{self.least} repeat{'s' if self.least > 1 else ''}"
        return f"{self.least} to {self.most} repeats, until {100 * self.within:g} %"


def comparable_groups(trials: Sequence[Trial], *also: str) -> list[list[Trial]]:
    """Groups of trials that differ only in configuration and ``also``, in the order of their first trials."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(setting_of(trial, *also), []).append(trial)
    return list(groups.values())


def setting_of(trial: Trial, *also: str) -> str:
    """A key that is equal for trials that differ only in configuration and ``also``."""
    data = {name: value for name, value in trial.canonical().items() if name not in (*CONFIGURATION, *also)}
    return json.dumps(data, sort_keys=True)


def configuration_of(trial: Trial, also: Sequence[str] = ()) -> str:
    """A key that is equal for trials of one configuration, which differ neither in its fields nor in ``also``."""
    data = trial.canonical()
    return json.dumps({name: data.get(name) for name in (*CONFIGURATION, *also)}, sort_keys=True)


def compared_also(bases: Sequence[Trial], others: Sequence[Trial]) -> tuple[str, ...]:
    """The fields of :data:`TRAINING` in which trials differ from every one of the suite's baselines.

    They are part of the configuration: of two optimizers, one of which is the baseline, the question is which is
    better.  Where the baseline has all of their values, they are settings, each with a baseline of its own.
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
    """Whether ratios divide by a trial: the suite's baseline by ``roles``, else :data:`BASELINE`."""
    if roles:
        return roles.get(trial.model_copy(update={"repeat": 0}).id) == "baseline"
    return trial.strategy == BASELINE


def interleave(settings: Sequence[Trial], repeat: int) -> Iterator[Trial]:
    """Every trial as repeat ``repeat``; comparable ones adjacent, in an order that no drift can favour."""
    for index, block in enumerate(_rotated(comparable_groups(settings, "repeat"), repeat)):
        turned = _rotated(block, repeat + index)
        for trial in turned if repeat % 2 == 0 else reversed(turned):
            yield trial.model_copy(update={"repeat": repeat})


def _rotated(items: list[Any], by: int) -> list[Any]:
    return items[by % len(items) :] + items[: by % len(items)]
