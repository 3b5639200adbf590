"""Transposes bands of matrices in a shard (:class:`impl.plan.shard_layout.Band`), so that blocks run along columns."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def turn(shard: Tensor, bands: Iterable[tuple[int, int, int]], rows: int, *, back: bool = False) -> None:
    """Transpose bands of ``rows`` rows each of ``shard`` (S,) in place, or transpose them ``back``.

    ``bands`` are (start, number of consecutive bands, columns).
    """
    for start, count, columns in bands:
        band = shard[start : start + count * rows * columns]
        shape = (count, columns, rows) if back else (count, rows, columns)
        band.copy_(band.view(shape).transpose(1, 2).reshape(-1))
