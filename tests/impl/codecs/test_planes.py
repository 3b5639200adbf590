"""Blocks of a transposed shard are columns of whole rows of its matrices, and transposing back restores it."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from impl.codecs.planes import turn
from impl.policy.shard_layout import ParameterSpec, lay_out

SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 200)),
        st.tuples(st.integers(1, 40), st.sampled_from([1, 8, 16, 24, 32])),
        st.tuples(st.integers(1, 20), st.sampled_from([2, 4]), st.sampled_from([3, 4, 8])),
    ),
    min_size=1,
    max_size=5,
)


@given(SHAPES, st.integers(1, 5), st.sampled_from([4, 8]))
def test_blocks_of_a_turned_shard_are_columns(shapes: list[tuple[int, ...]], world: int, rows: int) -> None:
    """Each block is a column of ``rows`` rows; in whole matrices only the rows after the last band are left out."""
    specs = [ParameterSpec(f"p{i}", shape) for i, shape in enumerate(shapes)]
    unit = lay_out("u", specs, grain=8, world=world, max_padding=math.inf)
    whole = torch.arange(unit.padded, dtype=torch.float32)
    for rank in range(world):
        shard = whole[slice(*unit.bounds(rank))].clone()
        before, bands = shard.clone(), unit.bands(rank, rows)
        turn(shard, bands, rows)
        moved = torch.zeros(unit.shard, dtype=torch.bool)
        for start, count, columns in bands:
            blocks = shard[start : start + count * rows * columns].view(-1, rows)
            assert bool((blocks.diff(dim=1) == columns).all())
            first, last = int(blocks[0, 0]), int(blocks[-1, -1])
            (slot,) = (slot for slot in unit.slots if slot.offset <= first < slot.end)
            assert (first - slot.offset) % columns == 0
            assert last < slot.end
            moved[start : start + blocks.numel()] = True
        assert torch.equal(shard[~moved], before[~moved])
        for slot in unit.slots:
            start, end = unit.part(slot, rank)
            columns = math.prod(slot.spec.shape[1:])
            if len(slot.spec.shape) > 1 and end - start == slot.spec.numel and columns % rows == 0:
                assert int(moved[start:end].sum()) == slot.spec.shape[0] // rows * rows * columns
        turn(shard, bands, rows, back=True)
        assert torch.equal(shard, before)
