"""Which policy keys a strategy takes: others would make it another technique.  No torch."""

from __future__ import annotations

from collections.abc import Sequence

from harness.suites.trial import Trial
from impl.adapters.traffic import carries
from impl.codecs.codec import Codec, Raw, parse


def foreign(trial: Trial) -> list[str]:
    """Paths of policy changes that would turn the trial's preset into another technique."""
    try:
        base = trial.base_policy()
    except ValueError:  # of a configuration that is missing, which is refused later
        base = None
    if base is None:
        return []
    changes, found = trial.policy, list[str]()
    if trial.host is not None:
        found = [name for name in trial.changes if not carries(trial.host, name)]
    raw_weights, raw_gradients = _raw((base.weights,)), _raw(base.gradients)
    exact = trial.strategy.endswith("exact")
    lacks = {
        "weights": raw_weights and (exact or not _raw(_codecs(changes.weights))),
        "gradients": raw_gradients and (exact or not _raw(_codecs(changes.gradients))),
        "secondary": not base.secondary,
        "secondary_format": not base.secondary,
        "differences": base.differences is None,
        "refresh": base.differences is None,
        "stage": True,
        "group": not base.group,
        "reduce_every": base.stage < 2 and changes.reduce_every == "micro_batch",
        "sums": raw_gradients,
        "blocks": raw_weights and raw_gradients,
        "planes": raw_weights,
        "feedback": raw_gradients,
        "budget": raw_weights and raw_gradients,
        "gather": base.gather == "flat",
        "reduce": base.reduce == "ring",
        "chunks": base.reduce == "ring",
    }  # what a field is about
    for name, lacking in lacks.items():
        if lacking and getattr(changes, name) not in (None, "none", getattr(base, name)):
            found.append(name)
    return [f"policy.{name}" for name in found]


def _codecs(asked: str | tuple[str, str] | None) -> list[Codec]:
    return [parse(text) for text in ((asked,) if isinstance(asked, str) else asked or ())]


def _raw(codecs: Sequence[Codec]) -> bool:
    return all(isinstance(codec, Raw) for codec in codecs)
