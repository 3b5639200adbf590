"""Schedules decide what is gathered ahead, and the order of reductions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from impl.plan.prefetch_schedule import MOST_AHEAD, Schedule

sizes = st.lists(st.integers(1, 100), min_size=2, max_size=9)


@given(sizes, st.integers(0, 300))
def test_prefetch_stays_within_its_limits_and_in_order(sizes: list[int], prefetch: int) -> None:
    """The units gathered ahead are the next ones, in order, within the limits of elements and of units."""
    schedule = Schedule(sizes, tuple(range(1, len(sizes))), (0,), prefetch)
    for unit in range(len(sizes)):
        for ahead, step in ((schedule.ahead_in_forward[unit], 1), (schedule.ahead_in_backward[unit], -1)):
            first = unit + step if unit else (1 if step == 1 else len(sizes) - 1)
            assert ahead == [first + step * i for i in range(len(ahead))]
            assert sum(sizes[i] for i in ahead) <= prefetch
            assert len(ahead) <= MOST_AHEAD


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
