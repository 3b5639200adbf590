"""Decides which ``policy.*`` keys apply to a strategy, and which would turn it into another one.  No torch.

A suite may set ``policy.weights = "int8:256"`` for all its strategies.  The key applies to ``qwz``, which quantises
its weights anyway.  ``zero3`` with quantised weights would no longer be ``zero3``, so ``zero3`` runs without the key.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.suites.trial import Trial
from impl.adapters.traffic import carries
from impl.codecs.codec import Codec, Raw, parse


def unfitting_changes(trial: Trial) -> dict[str, str]:
    """Return, by dotted path, why policy changes do not fit the trial's preset.

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
    changes, host = trial.policy, trial.host
    raw_weights, raw_gradients = _raw((base.weights,)), _raw(base.gradients)
    exact = trial.strategy.endswith("exact")
    lacks = {  # by field: whether the preset lacks the technique that the field configures
        "weights": raw_weights and (exact or not _raw(_codecs(changes.weights))),
        "gradients": raw_gradients and (exact or not _raw(_codecs(changes.gradients))),
        "stage": True,
        **dict.fromkeys(
            ("group", "local_steps", "local_fragments", "outer_rate", "outer_momentum"), not base.group
        ),
        "reduce_every": base.stage < 2 and changes.reduce_every == "micro_batch",
        "planes": raw_weights,
        "gather": base.gather == "flat",
        **dict.fromkeys(("secondary", "secondary_format"), not base.secondary),
        **dict.fromkeys(("differences", "refresh"), base.differences is None),
        **dict.fromkeys(("sums", "feedback"), raw_gradients),
        **dict.fromkeys(("blocks", "budget"), raw_weights and raw_gradients),
        **dict.fromkeys(("reduce", "chunks"), base.reduce == "ring"),
    }
    reasons = {}
    for name in trial.changes:
        if host is not None and not carries(host, name):
            reasons[f"policy.{name}"] = "it cannot be carried out in"
        elif lacks.get(name) and getattr(changes, name) not in (None, "none", getattr(base, name)):
            reasons[f"policy.{name}"] = "it would make another strategy of"
    return reasons


def _codecs(texts: str | tuple[str, str] | None) -> list[Codec]:
    return [parse(text) for text in ((texts,) if isinstance(texts, str) else texts or ())]


def _raw(codecs: Sequence[Codec]) -> bool:
    return all(isinstance(codec, Raw) for codec in codecs)
