"""Schedules decide what is gathered ahead, and the order of reductions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.suites.model_sizes import PRESETS as MODELS
from harness.suites.trial import Model
from harness.workloads.models import build, unfilled
from impl.codecs.codec import parse
from impl.engine.unit_planning import plan_units
from impl.plan.prefetch_schedule import MOST_AHEAD, Schedule, small_units
from impl.policy.policy import MOST_LIVE, MemoryLimits, Offload, Policy
from impl.policy.presets import PRESETS, preset
from impl.policy.shard_layout import UnitGeometry
from impl.policy.spans import Span
from impl.policy.topology import Topology

TOPOLOGY = Topology(2, 8)

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


def units_of(model: str, policy: Policy, topology: Topology = TOPOLOGY) -> list[UnitGeometry]:
    """Returns the units of a preset model."""
    with unfilled():
        return list(plan_units(build(Model(name=model), 64), topology, policy))


@given(st.integers(2, 12), st.integers(1, 300))
def test_small_units_are_gathered_ahead_in_pairs(count: int, prefetch: int) -> None:
    """Pairs start whole, and the next pair starts at the latest when the first unit of a pair runs."""
    order = tuple(range(1, count))
    schedule = Schedule([10] * count, order, (0,), prefetch, small=frozenset(order))
    for ahead, run in ((schedule.ahead_in_forward, order), (schedule.ahead_in_backward, order[::-1])):
        pairs = [run[i : i + 2] for i in range(1, len(run) - 1, 2)]
        assert schedule.pairs.issuperset(pairs)
        started = list[int]()
        for place, unit in enumerate((0, *run), -1):
            started += [index for index in ahead[unit] if index not in started]
            assert all((one in started) == (other in started) for one, other in pairs)
            begun = sum(one in started for one, _ in pairs)
            assert begun >= min(len(pairs), max(1, (place + 3) // 2))
        assert tuple(started) == run


@given(sizes, st.integers(1, 300), st.integers(0, 400), st.booleans())
def test_nothing_is_gathered_ahead_beyond_a_max_live_that_is_set(
    sizes: list[int], prefetch: int, max_live: int, paired: bool
) -> None:
    """The outer unit, the unit in use and those ahead have at most max_live elements together, the next unit too."""
    order = tuple(range(1, len(sizes)))
    small = frozenset(order) if paired else frozenset()
    schedule = Schedule(sizes, order, (0,), prefetch, max_live=max_live, small=small)
    for unit in range(len(sizes)):
        for ahead in (schedule.ahead_in_forward[unit], schedule.ahead_in_backward[unit]):
            assert not ahead or sum(sizes[i] for i in {0, unit, *ahead}) <= max_live


@pytest.mark.parametrize(
    ("model", "changes", "small"),
    [
        ("gpt-1.5b", {}, True),  # 3.84 MB in bf16 from each of 16 ranks
        ("gpt-1.5b", {"memory": MemoryLimits(pair_below=3_800_000)}, False),
        ("gpt-1.5b", {"memory": MemoryLimits(pair_below=0)}, False),
        ("gpt-1.5b", {"offload": Offload(weights=1.0)}, False),
        ("gpt-1.5b", {"stage": 2}, False),
        ("gpt-1.5b", {"memory": MemoryLimits(prefetch=30_000_000)}, False),  # a block has 30.7 M elements
        ("gpt-1.5b", {"schedule": (Span(until=2, weights=parse("int8:2048")), Span())}, True),
        ("gpt-10b", {"memory": MemoryLimits(pair_below=10**9)}, False),
    ],
)
def test_small_units_have_a_short_first_message(model: str, changes: dict[str, Any], small: bool) -> None:
    """Blocks of at most prefetch elements with a first message of at most pair_below bytes are small on the device."""
    policy = preset("zero3", compute="bf16", **changes)
    units = units_of(model, policy)
    blocks = frozenset(index for index, unit in enumerate(units) if not unit.outer)
    assert small_units(policy, TOPOLOGY, units) == (blocks if small else frozenset())


def test_a_single_rank_has_no_small_units() -> None:
    """Without messages there is nothing to post together."""
    policy, alone = preset("zero3", compute="bf16"), Topology(1, 1)
    assert not small_units(policy, alone, units_of("gpt-tiny", policy, alone))


@pytest.mark.parametrize("model", MODELS)
def test_no_preset_model_waits_for_each_of_its_gathers(model: str) -> None:
    """With every strategy's own limits, a unit that has a next one gathers it ahead, in both directions."""
    with unfilled():
        net = build(Model(name=model), 64)
    for name in (name for name, policy in PRESETS.items() if policy.stage == 3):
        policy = preset(name, memory=MemoryLimits(max_padding=1e9))
        units = plan_units(net, TOPOLOGY, policy)
        for small in (frozenset[int](), small_units(policy, TOPOLOGY, units)):
            schedule = Schedule.for_units(policy, units, small)
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
