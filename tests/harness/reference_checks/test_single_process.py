"""Which trials have a step that a single process can repeat."""

from __future__ import annotations

from typing import Any

import pytest

from harness.reference_checks.single_process import checked_step
from tests.harness.runs.test_rank_trial import trial


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"warmup": 1, "steps": 8}, True),
        ({"warmup": 0, "steps": 1}, False),  # only step 0, which is compared before training
        ({"workload": "rlhf", "warmup": 1, "steps": 8}, False),
        ({"workload": "generate", "warmup": 1, "steps": 8}, False),
    ],
)
def test_a_step_is_compared_if_one_process_can_repeat_it(changes: dict[str, Any], *, expected: bool) -> None:
    """Trials that train on the data set have a step in their second half, after the warm-up; others have none."""
    made = trial("stdlib", "zeropp", **changes)
    step = checked_step(made)
    assert (step is not None) == expected
    if step is not None:
        assert max(made.warmup, (made.warmup + made.steps) // 2) <= step < made.warmup + made.steps
