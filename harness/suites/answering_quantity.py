"""Which quantity answers a suite's question, by the axes along which its trials differ.  No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from harness.suites.trial import Trial

LEAST_STEPS: Final = 100  # of training; the losses of fewer hardly depend on the policy

ChosenQuantity = Literal["", "loss", "step", "bytes", "error", "memory", "trials"]
"""What a suite may name with the key ``answer``; empty leaves it to the axes."""
Quantity = Literal["loss", "step", "bytes", "error", "memory", "trials", "rate", "nodes", "size", "tokens"]


def quantity(trials: Sequence[Trial], answer: ChosenQuantity = "") -> Quantity:
    """The quantity that answers a suite's question: ``answer``, else the first that applies."""
    if answer:
        return answer
    if all(trial.workload == "generate" for trial in trials):
        return "tokens"
    if any(trial.memory_limit is not None for trial in trials):
        return "size"
    validated = [trial for trial in trials if trial.validate_every is not None]
    if any(trial.validate_every or trial.warmup + trial.steps >= LEAST_STEPS for trial in validated):
        return "loss"

    def several(field: Callable[[Trial], Any]) -> bool:
        return len({field(trial) for trial in trials}) > 1

    if several(lambda trial: (trial.policy.offload_optimizer, trial.policy.offload_weights)):
        return "memory"
    if any(trial.measure_quantisation for trial in trials) and not several(lambda trial: trial.strategy):
        return "error"
    if several(lambda trial: trial.cluster.rate):
        return "rate"
    return "nodes" if several(lambda trial: trial.cluster.nodes) else "step"
