"""Schedules decide what is gathered ahead, and the order of reductions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.suites.model_sizes import PRESETS as MODELS
from harness.suites.trial import Model
from harness.workloads.models import build, unfilled
from impl.engine.unit_planning import plan_units
from impl.plan.prefetch_schedule import MOST_AHEAD, Schedule
from impl.policy.policy import MOST_LIVE, MemoryLimits
from impl.policy.presets import PRESETS, preset
from impl.policy.topology import Topology

sizes = st.lists(st.integers(1, 100), min_size=2, max_size=9)


@given(sizes, st.integers(0, 300))
def test_prefetch_stays_within_its_limits_and_in_order(sizes: list[int], prefetch: int) -> None:
    """The next units are gathered ahead, in order; all but the first stay within the limit; 0 gathers none."""
    schedule = Schedule(sizes, tuple(range(1, len(sizes))), (0,), prefetch)
    for unit in range(len(sizes)):
        for ahead, step in ((schedule.ahead_in_forward[unit], 1), (schedule.ahead_in_backward[unit], -1)):
            first = unit + step if unit else (1 if step == 1 else len(sizes) - 1)
            assert ahead == [first + step * i for i in range(len(ahead))]
            assert len(ahead) <= 1 or sum(sizes[i] for i in ahead) <= prefetch
            assert bool(ahead) == (prefetch > 0 and first in schedule.order)
            assert len(ahead) <= MOST_AHEAD


@given(sizes, st.integers(1, 300), st.integers(0, 400))
def test_nothing_is_gathered_ahead_beyond_a_max_live_that_is_set(
    sizes: list[int], prefetch: int, max_live: int
) -> None:
    """The outer unit, the unit in use and those ahead have at most max_live elements together, the next unit too."""
    schedule = Schedule(sizes, tuple(range(1, len(sizes))), (0,), prefetch, max_live=max_live)
    for unit in range(len(sizes)):
        for ahead in (schedule.ahead_in_forward[unit], schedule.ahead_in_backward[unit]):
            assert not ahead or sum(sizes[i] for i in {0, unit, *ahead}) <= max_live


@pytest.mark.parametrize("model", MODELS)
def test_no_preset_model_waits_for_each_of_its_gathers(model: str) -> None:
    """With every strategy's own limits, a unit that has a next one gathers it ahead, in both directions."""
    with unfilled():
        net = build(Model(name=model), 64)
    for name in (name for name, policy in PRESETS.items() if policy.stage == 3):
        policy = preset(name, memory=MemoryLimits(max_padding=1e9))
        schedule = Schedule.for_units(policy, plan_units(net, Topology(2, 8), policy))
        for unit in schedule.order:
            assert bool(schedule.ahead_in_forward[unit]) == (unit != schedule.order[-1]), (name, unit)
            assert bool(schedule.ahead_in_backward[unit]) == (unit != schedule.order[0]), (name, unit)
        assert max(schedule.sizes) < MOST_LIVE or model == "gpt-100b"


@given(sizes)
def test_reductions_go_backward_with_the_root_last(sizes: list[int]) -> None:
    """All trained units are reduced once, in reverse forward order, and the root's unit last."""
    schedule = Schedule(sizes, tuple(range(1, len(sizes))), (0,), 0)
    assert schedule.reduction_order == (*range(len(sizes) - 1, 0, -1), 0)


def test_units_that_were_seen_to_run_come_first_in_their_order() -> None:
    """Units that ran in another order than the model's are gathered ahead, and reduced, in that order."""
    schedule = Schedule([1] * 4, (1, 2, 3), (0,), 1).after([3, 1])
    assert schedule.order == (3, 1, 2)
    assert schedule.ahead_in_forward[3] == [1]
    assert schedule.reduction_order == (2, 1, 3, 0)
