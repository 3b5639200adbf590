"""Transposes the bands of matrices in a shard, so that the codec's blocks run along columns instead of rows.

A band is a fixed number of whole rows of a matrix that follow one another (:class:`impl.policy.shard_layout.Band`).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def turn(shard: Tensor, bands: Iterable[tuple[int, int, int]], rows: int, *, back: bool = False) -> None:
    """Transpose bands of ``shard`` (S,) in place; with ``back=True``, undo the transposition.

    A band is a matrix (rows, columns) that is stored row by row before, and column by column after the transposition.
    Each entry of ``bands`` describes bands of one size that follow one another in the shard: (number of the first
    element, number of bands, columns of a band).
    """
    for start, count, columns in bands:
        band = shard[start : start + count * rows * columns]
        shape = (count, columns, rows) if back else (count, rows, columns)
        band.copy_(band.view(shape).transpose(1, 2).reshape(-1))
