"""Who ran: strategies and policies by the names that figures print, and what they resolve to.

A contender is a strategy with the policy fields that a trial replaced.  Changes that every policy
of a results folder shares say nothing in a comparison and are left out of the name.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final

from impl.codec import CodecError, parse
from impl.policy import PRESETS, Policy, PolicyError

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


def changes_of(trial: Mapping[str, Any]) -> dict[str, Any]:
    """Policy fields that the trial replaced, without those that only change the layout."""
    changes = trial.get("policy") or {}
    return {key: value for key, value in changes.items() if value is not None and key not in _SILENT}


def shared_changes(trials: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Changes with the same value in every trial of a policy."""
    of_policies = [changes_of(trial) for trial in trials if trial.get("strategy") in PRESETS]
    if not of_policies:
        return {}
    first, *others = of_policies
    return {key: value for key, value in first.items() if all(o.get(key) == value for o in others)}


def label_of(trial: Mapping[str, Any], shared: Mapping[str, Any]) -> str:
    """``ZeRO++``, or ``ZeRO++ (weights int8:64)`` where a change distinguishes it."""
    strategy = str(trial.get("strategy"))
    name = NAMES.get(strategy) or plain(strategy)
    changes = {k: v for k, v in changes_of(trial).items() if k not in shared}
    if not changes:
        return name
    told = ", ".join(f"{key} {_told(value)}" for key, value in sorted(changes.items()))
    return plain(f"{name} ({told})", 2 * _LABEL_CHARACTERS)


def policy_of(trial: Mapping[str, Any]) -> Policy | None:
    """The policy that a trial ran; None for peers, and for what this version does not know."""
    strategy = trial.get("strategy")
    if strategy not in PRESETS:
        return None
    known = {field.name for field in fields(Policy)}
    try:
        changes: dict[str, Any] = {}
        for key, value in changes_of(trial).items():
            if key == "weights":
                changes[key] = parse(value)
            elif key == "gradients":
                first, second = (value, value) if isinstance(value, str) else value
                changes[key] = (parse(first), parse(second))
            elif key in known:
                changes[key] = value
        return replace(PRESETS[strategy], **changes)
    except (CodecError, PolicyError, TypeError, ValueError):
        return None


def _told(value: object) -> str:
    return "/".join(str(v) for v in value) if isinstance(value, list | tuple) else str(value)
