"""Which units are offloaded: whole ones, in model order, as many as the share asks for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from impl.plan.policy import Offload
from impl.plan.shard_layout import FROZEN, ParameterSpec, UnitGeometry, lay_out
from impl.plan.traffic import ON_DEVICE, placements_of

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


@given(units(), shares)
def test_shares_of_none_and_of_all(cut: list[UnitGeometry], share: float) -> None:
    """Shares of 0 leave every unit on the device, shares of 1 none, in nothing; a frozen unit, which has no
    optimizer state, has its shard where its frames are.
    """
    assert placements_of(Offload(), cut) == [ON_DEVICE] * len(cut)
    assert all(one.shard and one.frames for one in placements_of(Offload(optimizer=1, weights=1), cut))
    for of, placement in zip(cut, placements_of(Offload(optimizer=1, weights=share), cut), strict=True):
        assert placement.shard == (of.trainable or placement.frames)
