"""Transposes bands of matrices in a shard (:class:`~impl.policy.shard_layout.Band`): blocks then run along columns."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def turn(shard: Tensor, bands: Iterable[tuple[int, int, int]], rows: int, *, back: bool = False) -> None:
    """Transpose bands of ``shard`` (S,), which have ``rows`` rows each, in place; ``back`` undoes it.

    Each entry of ``bands`` describes consecutive bands of equal size: (start, number of bands, columns).
    """
    for start, count, columns in bands:
        band = shard[start : start + count * rows * columns]
        shape = (count, columns, rows) if back else (count, rows, columns)
        band.copy_(band.view(shape).transpose(1, 2).reshape(-1))
