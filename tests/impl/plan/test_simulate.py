"""The bound on a pass: what any schedule may reach, and nothing better."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.plan.prefetch_schedule import Schedule
from impl.plan.simulate import Load, pass_seconds

SECONDS = st.floats(0, 10)
LOADS = st.lists(
    st.builds(Load, forward=SECONDS, backward=SECONDS, gather=SECONDS, regather=SECONDS, reduce=SECONDS),
    min_size=2,
    max_size=9,
)


def _schedule(units: int, prefetch: int = 1 << 40) -> Schedule:
    """Unit 0 is the root's; all have one element."""
    return Schedule([1] * units, tuple(range(1, units)), (0,), prefetch)


def _wire(load: Load) -> float:
    return load.gather + load.regather + load.reduce


@given(LOADS, st.integers(0, 4))
def test_no_pass_is_shorter_than_its_computation_its_link_or_its_two_halves(
    loads: list[Load], prefetch: int
) -> None:
    """At least all computation, at least all sending, and at least forward's longer one plus backward's."""
    found = pass_seconds(_schedule(len(loads), prefetch), loads)
    computing = sum(load.forward + load.backward for load in loads)
    halves = max(sum(load.forward for load in loads), sum(load.gather for load in loads)) + max(
        sum(load.backward for load in loads), sum(load.regather + load.reduce for load in loads)
    )
    assert found >= max(computing, sum(map(_wire, loads)), halves) - 1e-9


@given(LOADS, st.integers(0, 4))
def test_no_pass_is_longer_than_everything_one_after_the_other(loads: list[Load], prefetch: int) -> None:
    """Overlap never costs."""
    found = pass_seconds(_schedule(len(loads), prefetch), loads)
    assert found <= sum(load.forward + load.backward + _wire(load) for load in loads) + 1e-9


@given(LOADS)
def test_gathering_ahead_never_makes_a_forward_pass_longer(loads: list[Load]) -> None:
    """Without gradients to send, more prefetch is no slower."""
    silent = [
        Load(forward=one.forward, backward=one.backward, gather=one.gather, regather=one.regather, reduce=0)
        for one in loads
    ]
    ahead, alone = (pass_seconds(_schedule(len(loads), prefetch), silent) for prefetch in (4, 0))
    assert ahead <= alone + 1e-9


def test_a_pass_by_hand() -> None:
    """Two blocks, a second of everything: gathered, computed, and back again with their reductions."""
    nothing = Load(forward=0, backward=0, gather=0, regather=0, reduce=0)
    block = Load(forward=1, backward=1, gather=1, regather=0, reduce=1)
    # forward: gathered at 1 and 2, computed until 3; backward: until 5, reduced at 5 and 6
    assert pass_seconds(_schedule(3), [nothing, block, block]) == pytest.approx(6)


@given(LOADS, st.integers(0, 4))
def test_computation_around_the_blocks_may_hide_anything(loads: list[Load], prefetch: int) -> None:
    """What an embedding computes makes a pass longer by itself at most, and never shorter."""
    root, *blocks = loads
    without = [
        Load(forward=0, backward=0, gather=root.gather, regather=root.regather, reduce=root.reduce),
        *blocks,
    ]
    schedule = _schedule(len(loads), prefetch)
    bare, found = pass_seconds(schedule, without), pass_seconds(schedule, loads)
    assert bare - 1e-9 <= found <= bare + root.forward + root.backward + 1e-9


def test_an_embedding_hides_the_last_reduction() -> None:
    """Its backward comes last: a second of it and a second on the link are one second."""
    root = Load(forward=0, backward=1, gather=0, regather=0, reduce=0)
    block = Load(forward=0, backward=0.1, gather=0, regather=0, reduce=1)
    assert pass_seconds(_schedule(2), [root, block]) == pytest.approx(1.1)
