"""Which quantity answers a suite's question, by the axes along which its trials differ.  No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, get_args

from harness.suites.trial import Trial

LEAST_STEPS: Final = 100  # of training, before which losses hardly depend on what is compared

Said = Literal["", "loss", "step", "bytes", "error", "memory", "trials"]
"""What a suite may name with the key ``answer``; empty leaves it to the axes."""
Quantity = Literal["loss", "step", "bytes", "error", "memory", "trials", "rate", "nodes", "size", "tokens"]
SAID: Final[tuple[str, ...]] = tuple(word for word in get_args(Said) if word)


def quantity(trials: Sequence[Trial], said: Said = "") -> Quantity:
    """The quantity that answers a suite's question.

    The first that applies: ``tokens`` decoded per second; ``size`` of the largest model under a limit of
    memory; ``loss``, where validation is repeated, or follows a long training; ``memory``, where shares of
    offload differ; ``error`` of what is sent, where it is measured and one strategy alone runs; the ``rate``
    of the link, or the number of ``nodes``, where they differ; else the seconds of a ``step``.

    Args:
        trials: of the suite, at least one.
        said: the suite's key ``answer``.
    """
    if said:
        return said
    if all(trial.workload == "generate" for trial in trials):
        return "tokens"
    if any(trial.memory_limit is not None for trial in trials):
        return "size"
    if any(trial.validate_every or _long(trial) for trial in trials):
        return "loss"

    def several(of: Callable[[Trial], Any]) -> bool:
        return len({of(trial) for trial in trials}) > 1

    if several(lambda trial: (trial.policy.offload_optimizer, trial.policy.offload_weights)):
        return "memory"
    if any(trial.measure_quantisation for trial in trials) and not several(lambda trial: trial.strategy):
        return "error"
    if several(lambda trial: trial.cluster.rate):
        return "rate"
    return "nodes" if several(lambda trial: trial.cluster.nodes) else "step"


def _long(trial: Trial) -> bool:
    """Whether it validates after so many steps that losses have a verdict."""
    return trial.validate_every is not None and trial.warmup + trial.steps >= LEAST_STEPS
