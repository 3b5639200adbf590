"""Learning-rate schedules begin, peak and end as specified; those read from DeepSpeed equal DeepSpeed's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impl.deepspeed.config_to_policy import recipe
from impl.plan.learning_rate import Schedule
from impl.policy.topology import Topology


@given(
    warmup=st.integers(0, 20),
    decaying=st.integers(1, 30),
    start=st.floats(0, 1),
    floor=st.floats(0, 1),
    decay=st.sampled_from(["none", "linear", "cosine"]),
)
def test_it_rises_to_one_and_falls_to_its_floor(
    warmup: int, decaying: int, start: float, floor: float, decay: Any
) -> None:
    """A schedule rises to 1 in ``warmup`` steps, reaches its floor in the last step, and stays there."""
    steps = warmup + decaying
    schedule = Schedule(steps=steps, warmup=warmup, start=start, decay=decay, floor=floor)
    factors = [schedule.factor(step) for step in range(steps + 3)]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(factors[:warmup]))
    if warmup:
        assert factors[0] == pytest.approx(start + (1 - start) / warmup)
        assert factors[warmup - 1] == pytest.approx(1)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(factors[warmup:]))
    assert factors[steps - 1 :] == pytest.approx([1.0 if decay == "none" else floor] * 4)


@pytest.mark.needs("DeepSpeed")
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize("shape", ["log", "linear"])
@pytest.mark.parametrize("warmup", [1, 5])
def test_deepspeeds_schedules_are_deepspeeds(kind: str, shape: str, warmup: int) -> None:
    """Factors equal, step by step, those that DeepSpeed's class sets on an optimizer."""
    from deepspeed.runtime import lr_schedules as schedules

    parameters: dict[str, Any] = {"warmup_num_steps": warmup, "warmup_type": shape}
    if kind == "WarmupCosineLR":
        parameters |= {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.2}
    else:
        parameters |= {"warmup_min_lr": 0.02, "warmup_max_lr": 0.4}
    if kind != "WarmupLR":
        parameters["total_num_steps"] = 12
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = getattr(schedules, kind)(optimizer, **parameters)
    table = {
        "scheduler": {"type": kind, "params": parameters},
        "optimizer": {"type": "Adam", "params": {"lr": 0.4}},
    }
    parsed = recipe(table, topology=Topology(1, 1))
    for step in range(15):
        rate = optimizer.param_groups[0]["lr"]
        assert parsed.optimizer.lr * parsed.schedule.factor(step) == pytest.approx(rate, abs=1e-12)
        scheduler.step()


def test_a_schedule_without_a_length_has_the_runs_steps() -> None:
    """``total_num_steps`` may be a number, ``auto`` or missing; the last two mean the steps of the run."""
    for given_steps in ({}, {"total_num_steps": "auto"}, {"total_num_steps": 30}):
        table = {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4, **given_steps}}}
        parsed = recipe(table, topology=Topology(1, 1), steps=30)
        assert parsed.schedule.steps == 30
        assert parsed.peak == 0.001
