"""Transposes parts of matrices in a shard, so that a codec's blocks run along columns instead of rows.

The parts are called bands.  A band is a fixed number of consecutive whole rows of a matrix
(:class:`impl.policy.shard_layout.Band`).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def turn(shard: Tensor, bands: Iterable[tuple[int, int, int]], rows: int, *, back: bool = False) -> None:
    """Transpose the bands of ``shard`` in place; with ``back=True``, undo the transposition.

    Before the transposition a band is stored row by row, and after it column by column.

    Args:
        shard: (S,), the elements of a shard.
        bands: a triple for each run of bands that follow one another: the index of the run's first element in
            ``shard``, the number of bands, and the number of columns of each band.
        rows: the number of rows of every band.
        back: whether to undo the transposition.
    """
    for start, count, columns in bands:
        band = shard[start : start + count * rows * columns]
        shape = (count, columns, rows) if back else (count, rows, columns)
        band.copy_(band.view(shape).transpose(1, 2).reshape(-1))
