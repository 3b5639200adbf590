"""Transposes parts of matrices in a shard, so that a codec's blocks run along columns instead of rows.

The parts are called bands.  A band is a fixed number of consecutive whole rows of a matrix
(:class:`impl.policy.shard_layout.Band`).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def turn(shard: Tensor, bands: Iterable[tuple[int, int, int]], rows: int, *, back: bool = False) -> None:
    """Transpose bands (groups of whole matrix rows) of ``shard`` in place; with ``back=True``, undo this.

    Before the transposition a band is stored row by row, and after it column by column.

    Args:
        shard: (S,), the elements of a shard.
        bands: triples (start, count, columns).  Each stands for ``count`` bands that follow one another in ``shard``,
            from the element with index ``start`` on, and that have ``columns`` columns each.
        rows: the number of rows of every band.
        back: whether to undo the transposition.
    """
    for start, count, columns in bands:
        band = shard[start : start + count * rows * columns]
        shape = (count, columns, rows) if back else (count, rows, columns)
        band.copy_(band.view(shape).transpose(1, 2).reshape(-1))
