"""Which trials of a suite its question compares: the baseline, and what it is compared with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from harness.suites.trial import Trial

_OF_CONTENDERS: Final = {"strategy", "policy", "peer", "deepspeed_config", "control"}


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
    cells = {json.dumps(one.model_dump(mode="json", exclude=_OF_CONTENDERS)) for one in bases.values()}
    if len(cells) < len(bases):
        raise ValueError("matches several contenders of one cell; expected one")
    others = {trial.id: "contrast" for trial, hit in zip(trials, against, strict=True) if hit}
    return others | dict.fromkeys(bases, "baseline")
