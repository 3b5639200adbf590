"""Chooses the quantity that answers a suite's question, such as step time, loss, bytes or memory.

A suite may name the quantity with its key ``answer``.  Otherwise :func:`quantity` infers it from the workload and
from the fields in which the trials differ; a report then begins with a sentence about this quantity.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from harness.suites.trial import Trial

LEAST_STEPS: Final = 100  # training steps; after fewer, losses hardly depend on the policy

ChosenQuantity = Literal["", "loss", "step", "bytes", "error", "memory", "trials"]
"""Values of a suite's key ``answer``; the empty text lets :func:`quantity` choose."""
Quantity = Literal["loss", "step", "bytes", "error", "memory", "trials", "rate", "nodes", "size", "tokens"]
"""All quantities.

``rate`` is a break-even bandwidth, ``nodes`` is how the step time grows with the number of nodes, ``size`` is the
largest model that fits, and ``tokens`` is tokens per second.
"""


def quantity(trials: Sequence[Trial], answer: ChosenQuantity = "") -> Quantity:
    """Return the quantity that answers a suite's question.

    Args:
        trials: The suite's trials.
        answer: The suite's key ``answer``.  If it is not empty, it is returned.  If it is empty, the first rule that
            applies decides:

            - ``tokens`` if all trials have workload ``generate``, which decodes text;
            - ``size`` if a trial has a memory limit;
            - ``loss`` if a trial is validated repeatedly, or once after :data:`LEAST_STEPS` steps or more;
            - ``memory`` if trials differ in offload;
            - ``error`` if a trial measures quantisation errors, and all trials have the same strategy;
            - ``rate`` if trials differ in the rate of the link;
            - ``nodes`` if trials differ in the number of nodes;
            - otherwise ``step``.
    """
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
