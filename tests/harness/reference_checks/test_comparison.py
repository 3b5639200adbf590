"""Which trials are compared with a single process, and when."""

from __future__ import annotations

import math
from typing import Any

import pytest

from harness.measure.gradient_bounds import GradientError
from harness.reference_checks.comparison import Compared, Comparison, compares_first
from tests.harness.runs.test_rank_trial import trial


@pytest.mark.parametrize(
    ("strategy", "changes", "expected"),
    [
        ("zeropp", {}, False),
        ("zeropp", {"repeat": 0}, True),
        ("zeropp", {"warmup": 0}, True),  # a timed step would be the process's first
        ("zeropp", {"policy": {"differences": "int4:64", "secondary_format": "bf16"}}, True),
        ("zeropp", {"policy": {"feedback": "loco"}}, True),
        ("zeropp", {"policy": {"compute": "fp16", "loss_scale": "dynamic"}}, True),
        ("ddp", {}, True),
        ("ddp+qgz", {}, True),
        ("fsdp2", {}, True),
    ],
)
def test_what_the_drawn_step_cannot_show_is_compared_before_training(
    strategy: str, changes: dict[str, Any], expected: bool
) -> None:
    """The first repeat, peers, policies whose drawn step is not compared, and trials without warm-up are compared."""
    changed = trial("stdlib", strategy, **{"repeat": 1, **changes})
    assert compares_first(changed, 4) == expected
    assert compares_first(changed, None)


def test_a_skipped_step_is_not_compared() -> None:
    """Of a drawn step whose gradients have overflowed, no gradient is judged; those of other steps still are."""
    comparison = object.__new__(Comparison)
    errors = [GradientError("unit", 1, 2.0, math.inf, 1.0, 1.0, step=step) for step in (0, 3)]
    comparison.compared = Compared(gradient_errors=errors)
    comparison.forget_step(3)
    assert comparison.compared.gradient_errors == errors[:1]
