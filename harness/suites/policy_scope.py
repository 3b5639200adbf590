"""Which policy keys a strategy takes: others would make it another technique.  No torch."""

from __future__ import annotations

from collections.abc import Sequence

from harness.suites.trial import Trial
from impl.adapters.traffic import carries
from impl.codecs.codec import Codec, Raw, parse


def unfitting_changes(trial: Trial) -> dict[str, str]:
    """Why policy changes do not fit the trial's preset, by path; the preset's name follows each reason."""
    try:
        base = trial.base_policy()
    except ValueError:  # a missing configuration, which is refused later
        base = None
    if base is None:
        return {}
    changes, host = trial.policy, trial.host
    raw_weights, raw_gradients = _raw((base.weights,)), _raw(base.gradients)
    exact = trial.strategy.endswith("exact")
    lacks = {  # whether the preset has nothing that the field changes
        "weights": raw_weights and (exact or not _raw(_codecs(changes.weights))),
        "gradients": raw_gradients and (exact or not _raw(_codecs(changes.gradients))),
        "stage": True,
        "group": not base.group,
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
