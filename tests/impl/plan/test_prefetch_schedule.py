"""Events become actions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from impl.plan.prefetch_schedule import MOST_AHEAD, Schedule

sizes = st.lists(st.integers(1, 100), min_size=2, max_size=9)


@given(sizes, st.integers(0, 300))
def test_prefetch_stays_within_its_limits_and_in_order(sizes: list[int], prefetch: int) -> None:
    """What is gathered ahead are the next units, in order, within the element and count limits."""
    schedule = Schedule(sizes, tuple(range(1, len(sizes))), (0,), prefetch)
    for unit in range(len(sizes)):
        for actions, step in ((schedule.pre_forward(unit), 1), (schedule.pre_backward(unit), -1)):
            assert actions[0] == ("gather", unit)
            assert actions[-1] == ("wait", unit)
            ahead = [action.unit for action in actions[1:-1]]
            first = unit + step if unit else (1 if step == 1 else len(sizes) - 1)
            assert ahead == [first + step * i for i in range(len(ahead))]
            assert sum(sizes[i] for i in ahead) <= prefetch
            assert len(ahead) <= MOST_AHEAD


@given(sizes)
def test_reductions_go_backward_with_the_root_last(sizes: list[int]) -> None:
    """All trainable units are reduced once, in reverse forward order, the root's at the end."""
    schedule = Schedule(sizes, tuple(range(1, len(sizes))), (0,), 0)
    assert schedule.reduction_order == (*range(len(sizes) - 1, 0, -1), 0)


def test_after_backward_a_unit_goes_before_it_is_reduced() -> None:
    """Weights are released before the gradient is sent, so both are never held for long."""
    schedule = Schedule([1, 1], (1,), (0,), 0)
    assert [action.kind for action in schedule.post_backward(1)] == ["release", "reduce"]
