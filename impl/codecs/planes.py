"""Transposes bands of matrices in a shard (:class:`~impl.policy.shard_layout.Band`): blocks then run along columns."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def turn(shard: Tensor, bands: Iterable[tuple[int, int, int]], rows: int, *, back: bool = False) -> None:
    """Transpose bands of ``shard`` (S,) in place; with ``back=True``, undo the transposition.

    Every band is a matrix of ``rows`` rows.  Each entry of ``bands`` describes consecutive bands of equal size:
    (first element in the shard, number of bands, columns of a band).
    """
    for start, count, columns in bands:
        band = shard[start : start + count * rows * columns]
        shape = (count, columns, rows) if back else (count, rows, columns)
        band.copy_(band.view(shape).transpose(1, 2).reshape(-1))
