"""Decides which ``policy.*`` keys apply to a strategy, and which would turn it into another one.  No torch.

A suite may set ``policy.weights = "int8:256"`` for all its strategies.  The key applies to ``qwz``, which quantises
its weights anyway.  ``zero3`` with quantised weights would no longer be ``zero3``, so ``zero3`` runs without the key.
"""

from __future__ import annotations

from typing import Final

from harness.suites.trial import KEYS, Trial
from impl.adapters.traffic import carries

_CODECS: Final = ("weights", "gradients")  # an exact strategy keeps its own, whatever a suite gives


def unfitting_changes(trial: Trial) -> dict[str, str]:
    """Return the reasons why policy changes do not fit the trial's preset, by the dotted path of the change.

    Each reason is the beginning of a sentence that ends with the preset's name.
    """
    try:
        base = trial.base_policy()
    except ValueError:  # the DeepSpeed configuration is missing, which a later check refuses
        base = None
    if base is None:
        return {}
    if trial.own_strategy:  # the suite's policy is the strategy's
        return {}
    changes, host, exact = trial.policy, trial.host, trial.strategy.endswith("exact")
    reasons = {}
    for name in trial.changes:
        each, value = KEYS.get(name), getattr(changes, name)
        if host is not None and not carries(host, name):
            reasons[f"policy.{name}"] = "it cannot be carried out in"
        elif each is None:  # a schedule, whose spans say by themselves what they change
            continue
        elif value not in (None, "none", getattr(base, name, None)) and (
            (exact and name in _CODECS) or each.alters(base, each.parsed(value))
        ):
            reasons[f"policy.{name}"] = "it would make another strategy of"
    return reasons
