"""Which units are offloaded: whole ones, in model order, as many as the share asks for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from impl.plan.policy import Offload, Policy
from impl.plan.shard_layout import FROZEN, ParameterSpec, UnitGeometry, lay_out
from impl.plan.traffic import placements_of, realised

shares = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))


def unit(index: int, size: int, *, trainable: bool) -> UnitGeometry:
    """A unit of ``size`` elements."""
    name = f"blocks.{index}" + ("" if trainable else FROZEN)
    specs = [ParameterSpec("w", (size,))]
    return lay_out(name, specs, grain=1, world=1, max_padding=0, trainable=trainable)


@st.composite
def units(draw: st.DrawFn) -> list[UnitGeometry]:
    """One to eight units, some frozen."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 1000), st.booleans()), min_size=1, max_size=8))
    return [unit(index, size, trainable=trained) for index, (size, trained) in enumerate(sizes)]


@given(units(), shares, shares)
def test_shares_are_reached_by_the_first_units_and_no_more(
    cut: list[UnitGeometry], optimizer: float, weights: float
) -> None:
    """At least each share is offloaded, and without the last chosen unit less than it would be; a frozen
    unit, which has no optimizer state, has its shard where its frames are.
    """
    placements = placements_of(Offload(optimizer=optimizer, weights=weights), cut)
    assert all(u.trainable or there.shard == there.frames for u, there in zip(cut, placements, strict=True))
    trained = [(u.padded, t.shard) for u, t in zip(cut, placements, strict=True) if u.trainable]
    every = [(u.padded, t.frames) for u, t in zip(cut, placements, strict=True)]
    for share, sizes in ((optimizer, trained), (weights, every)):
        chosen = [size for size, there in sizes if there]
        assert [there for _, there in sizes] == [index < len(chosen) for index in range(len(sizes))]
        wanted = share * sum(size for size, _ in sizes)
        assert sum(chosen) >= wanted
        assert not chosen or sum(chosen[:-1]) < wanted
    found = realised(Policy(secondary=2), placements, cut)
    assert found.weights >= weights - 1e-12
    assert found.optimizer >= optimizer - 1e-12 or not trained


@given(units(), shares, shares)
def test_a_share_is_of_what_is_there_to_offload(
    cut: list[UnitGeometry], optimizer: float, weights: float
) -> None:
    """Without hpZ's copies, trained weights whose masters stay on the device count for nothing."""
    placements = placements_of(Offload(optimizer=optimizer, weights=weights), cut)
    moved = sum(u.padded for u, t in zip(cut, placements, strict=True) if t.frames and t.shard)
    assert realised(Policy(), placements, cut).weights == moved / sum(u.padded for u in cut)
    if optimizer == 0 and all(u.trainable for u in cut):
        assert realised(Policy(), placements, cut) == Offload()
