"""Who ran: strategies and policies by the names that figures print, and what they resolve to.

A contender is a strategy with the policy fields that a trial replaced.  Changes that every policy
of a results folder shares say nothing in a comparison and are left out of the name.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Final

from harness.suite import Trial
from impl.policy import PRESETS

BASELINE: Final = "zero3"
PROPOSED: Final = "zeropp"
TECHNIQUES: Final = ("qwz", "hpz", "qgz")
COMBINATIONS: Final = ("zero3", "qwz", "hpz", "qgz", "qwz+hpz", "qwz+qgz", "hpz+qgz", "zeropp")
NAMES: Final = {
    "single": "single process",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "exact": "exact (fp32)",
    "zero3": "ZeRO-3",
    "qwz": "qwZ",
    "hpz": "hpZ",
    "qgz": "qgZ",
    "qwz+hpz": "qwZ+hpZ",
    "qwz+qgz": "qwZ+qgZ",
    "hpz+qgz": "hpZ+qgZ",
    "zeropp": "ZeRO++",
}
"""Printed names, in the order in which figures and tables list strategies."""

_SILENT: Final = ("align", "max_padding")  # change the layout, not what is compared
_SHORT: Final = {"weights": "w", "gradients": "g", "secondary": "groups of"}
_LABEL_CHARACTERS: Final = 48


def plain(text: object, limit: int = _LABEL_CHARACTERS) -> str:
    """One line of printable characters that the figures' font has, cut at ``limit``."""
    words = " ".join(str(text).split())
    kept = "".join(c if ord(c) < 0x2000 and unicodedata.category(c)[0] != "C" else "?" for c in words)
    return kept if len(kept) <= limit else kept[: limit - 1] + "…"


def order_of(strategy: str) -> int:
    """Place of a strategy in lists; unknown ones stand last."""
    names = list(NAMES)
    return names.index(strategy) if strategy in names else len(names)


def changes_of(trial: Trial) -> dict[str, Any]:
    """Policy fields that the trial replaced, without those that only change the layout."""
    changes = trial.policy.model_dump(exclude_none=True, exclude=set(_SILENT))
    return changes if trial.strategy in PRESETS else {}


def shared_changes(trials: Sequence[Trial]) -> dict[str, Any]:
    """Changes with the same value in every trial of a policy."""
    of_policies = [changes_of(trial) for trial in trials if trial.strategy in PRESETS]
    if not of_policies:
        return {}
    first, *others = of_policies
    return {key: value for key, value in first.items() if all(o.get(key) == value for o in others)}


def label_of(trial: Trial, shared: Mapping[str, Any]) -> str:
    """``ZeRO++``, or ``ZeRO++ (w int8:64)`` where a change distinguishes it.

    ``w`` and ``g`` are the codecs of weights and gradients.
    """
    name = NAMES.get(trial.strategy, trial.strategy)
    changes = {key: value for key, value in changes_of(trial).items() if key not in shared}
    if not changes:
        return name
    return f"{name} ({', '.join(f'{_SHORT.get(key, key)} {_told(changes[key])}' for key in changes)})"


def _told(value: object) -> str:
    return "/".join(str(v) for v in value) if isinstance(value, list | tuple) else str(value)
