"""Bits by budget: never above it, never worse than one codec for all, and near the best there is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.plan.bit_budget import Cost, choose, total

NAMES = ("a", "b", "c")
COSTS = st.lists(
    st.fixed_dictionaries({
        name: st.builds(Cost, st.integers(1, 40), st.floats(0, 100, allow_subnormal=False)) for name in NAMES
    }),
    min_size=1,
    max_size=5,
)  # fmt: skip


@given(COSTS, st.integers(0, 200))
def test_a_choice_is_within_its_budget_and_no_worse_than_one_codec(
    parts: list[dict[str, Cost]], more: int
) -> None:
    """Whatever the costs: bytes are within the budget, errors at most those of any single codec that fits."""
    budget = sum(min(cost.bytes for cost in part.values()) for part in parts) + more
    chosen = choose(parts, budget)
    spent = total(parts, chosen)
    assert spent.bytes <= budget
    for name in NAMES:
        uniform = total(parts, [name] * len(parts))
        assert uniform.bytes > budget or spent.error <= uniform.error
    assert choose(parts, budget) == chosen


@given(COSTS)
def test_an_ample_budget_gives_the_least_errors(parts: list[dict[str, Cost]]) -> None:
    """Where everything fits, each part travels in its most exact codec."""
    budget = sum(max(cost.bytes for cost in part.values()) for part in parts)
    assert total(parts, choose(parts, budget)).error == sum(
        min(cost.error for cost in part.values()) for part in parts
    )


def test_errors_of_convex_costs_are_the_least_of_all_choices_at_the_greedy_bytes() -> None:
    """Halving errors for each further byte: no choice of as many bytes errs less."""
    parts = [
        {name: Cost(n, weight / 4**n) for n, name in enumerate("abcd", 1)} for weight in (1.0, 8.0, 64.0)
    ]
    for budget in range(3, 13):
        spent = total(parts, choose(parts, budget))
        best = min(
            total(parts, one).error
            for one in itertools.product("abcd", repeat=3)
            if total(parts, one).bytes <= budget
        )
        assert spent.error == pytest.approx(best)


def test_a_budget_that_is_too_small_is_refused() -> None:
    """Both numbers are named."""
    with pytest.raises(ValueError, match="a budget of 3 bytes: the smallest codecs take 4"):
        choose([{"a": Cost(4, 1.0), "b": Cost(8, 0.0)}], 3)
