"""Layouts place every parameter, pad and shard."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from impl.policy.shard_layout import (
    GeometryError,
    PaddingError,
    ParameterSpec,
    chunked,
    lay_out,
    padding_share,
)

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
specs = st.lists(st.tuples(shapes, st.integers(0, 2)), min_size=1, max_size=8).map(
    lambda items: [ParameterSpec(f"p{i}", shape, group) for i, (shape, group) in enumerate(items)]
)


@given(specs, st.integers(1, 70), st.integers(1, 9))
def test_every_parameter_and_shard_starts_on_the_grain(
    parameters: list[ParameterSpec], grain: int, world: int
) -> None:
    """No block spans two parameters or shards, nothing overlaps or is lost, and spans of groups cover the shards."""
    unit = lay_out("u", parameters, grain=grain, world=world, max_padding=1e9)
    assert unit.shard * world == unit.padded
    assert unit.shard % grain == 0
    end = 0
    for slot in unit.slots:
        assert slot.offset % grain == 0
        assert slot.offset >= end
        end = slot.end
    assert end <= unit.padded
    assert sorted(slot.spec.name for slot in unit.slots) == sorted(spec.name for spec in parameters)
    for rank in range(world):
        spans = unit.spans(rank)
        assert [group for group, _, _ in spans] == sorted({spec.group for spec in parameters})
        assert sum(end - start for _, start, end in spans) == unit.shard
        for slot in unit.slots:
            low, high = rank * unit.shard, (rank + 1) * unit.shard
            begin, end = max(slot.offset, low) - low, min(slot.end, high) - low
            if begin < end:
                inside = [g for g, start, stop in spans if start <= begin and end <= stop]
                assert inside == [slot.spec.group]


def test_too_much_padding_is_refused_by_name_with_numbers() -> None:
    """A unit that would be mostly padding is refused; the error names the unit, the share and the way out."""
    with pytest.raises(
        GeometryError, match=r"unit 'ln'.*8128 of 8192.*blocks of 2048 on 4 ranks.*max_padding"
    ):
        lay_out("ln", [ParameterSpec("w", (64,))], grain=2048, world=4, max_padding=0.05)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=4), st.integers(1, 4096), st.integers(1, 8))
@example([75], 3441, 3)  # 10248 elements of padding, and 136.64 * 75 is less than that in floating point
def test_a_refusal_says_how_much_padding_to_allow(sizes: list[int], grain: int, world: int) -> None:
    """A unit can be laid out with the share that its refusal names, and not with a hundredth less."""
    specs = [ParameterSpec(f"p{i}", (size,)) for i, size in enumerate(sizes)]
    try:
        unit = lay_out("u", specs, grain=grain, world=world, max_padding=0.0)
    except PaddingError as error:
        needed = error.needed
        unit = lay_out("u", specs, grain=grain, world=world, max_padding=needed)
        with pytest.raises(PaddingError, match=f"to {needed:.2f}$"):
            lay_out("u", specs, grain=grain, world=world, max_padding=needed - 0.01)
    else:
        needed = 0.0
    assert padding_share([(unit.numel, unit.padded)]) <= needed


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 8]))
def test_received_pieces_tile_the_unit(group: int, groups: int, grain: int) -> None:
    """Each rank's piece is in its shard, and all pieces cover the unit; with several groups another rank reduced it."""
    world = group * groups
    unit = lay_out("u", [ParameterSpec("p", (100,))], grain=grain, world=world, max_padding=1e9, group=group)
    pieces = [unit.received_piece(rank) for rank in range(world)]
    assert sorted(pieces) == [(k * unit.piece, (k + 1) * unit.piece) for k in range(world)]
    for rank, (start, end) in enumerate(pieces):
        low, high = unit.bounds(rank)
        assert low <= start < end <= high
        reduced, _ = unit.own_piece(rank)
        assert (start == low + reduced) == (groups == 1)


@given(st.integers(1, 5000), st.integers(1, 40), st.sampled_from([1, 8, 256]))
def test_chunks_cover_a_piece(piece: int, chunks: int, grain: int) -> None:
    """Chunks follow one another from the first element to the last, none is empty, and each starts on the grain."""
    bounds = chunked(piece, chunks, grain)
    assert 1 <= len(bounds) <= chunks
    assert (bounds[0][0], bounds[-1][1]) == (0, piece)
    assert all(start < end for start, end in bounds)
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(bounds))
    assert all(start % grain == 0 for start, _ in bounds)


@given(st.integers(1, 500), st.integers(3, 12), st.sampled_from([1, 256]))
def test_chunks_taper(scale: int, chunks: int, grain: int) -> None:
    """With three or more chunks the first and the last are a third of the others; two chunks are equal."""
    weights = [1, *[3] * (chunks - 2), 1]
    sizes = [end - start for start, end in chunked(scale * sum(weights) * grain, chunks, grain)]
    assert sizes == [scale * grain * weight for weight in weights]
    assert chunked(2 * scale * grain, 2, grain) == ((0, scale * grain), (scale * grain, 2 * scale * grain))
