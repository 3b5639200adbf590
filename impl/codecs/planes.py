"""Turns the bands of a shard's matrices, so that blocks of consecutive elements run along columns.

A band is as many rows as a block has elements; turned, its elements lie column by column, and encoding the
shard then quantises every column of a band with a scale of its own (:meth:`UnitGeometry.bands`).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def turn(shard: Tensor, bands: Iterable[tuple[int, int, int]], rows: int, *, back: bool = False) -> None:
    """Turn ``bands`` of ``rows`` rows, (start, count, columns) each, of ``shard`` (S,) in place, or back."""
    for start, count, columns in bands:
        band = shard[start : start + count * rows * columns]
        shape = (count, columns, rows) if back else (count, rows, columns)
        band.copy_(band.view(shape).transpose(1, 2).reshape(-1))
