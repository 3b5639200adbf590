"""Decides which ``policy.*`` keys of a suite apply to a strategy.

A suite may set ``policy.weights = "int8:256"`` for all its strategies.  The key applies to ``qwz``, which quantises its
weights anyway.  ``zero3`` with quantised weights would no longer be ``zero3``, so ``zero3`` runs without the key.  This
module does not import torch.
"""

from __future__ import annotations

from typing import Final

from harness.suites.trial import KEYS, Trial
from impl.adapters.traffic import carries

# Fields that a strategy whose name ends in ``exact`` keeps, whatever a suite sets.
_CODECS: Final = ("weights", "gradients")


def unfitting_changes(trial: Trial) -> dict[str, str]:
    """Return the policy fields that a trial sets although they do not fit its strategy, with the reasons.

    A field does not fit if it would turn the strategy into another strategy.  It also does not fit if the strategy runs
    inside FSDP2 or DDP, and they cannot do what the field asks for.

    Returns:
        A dict from the dotted path of each such field, such as ``policy.weights``, to the reason.  A reason is a
        sentence without its last word, the name of the strategy, which the caller adds: for ``zero3``, the reason "it
        would make another strategy of" becomes "it would make another strategy of zero3".  The dict is empty for peers
        and for a strategy of the user's own.
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
