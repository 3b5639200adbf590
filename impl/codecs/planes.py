"""Turns bands (:class:`impl.plan.shard_layout.Band`) of matrices, so that blocks run along columns."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def turn(shard: Tensor, bands: Iterable[tuple[int, int, int]], rows: int, *, back: bool = False) -> None:
    """Turn ``bands`` of ``rows`` rows, (start, count, columns) each, of ``shard`` (S,) in place, or back."""
    for start, count, columns in bands:
        band = shard[start : start + count * rows * columns]
        shape = (count, columns, rows) if back else (count, rows, columns)
        band.copy_(band.view(shape).transpose(1, 2).reshape(-1))
