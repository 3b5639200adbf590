"""Positive controls: engines spoilt on purpose, which a test of losses must call inferior.

A test that finds no difference says something only if it finds one where there is one.
"""

from __future__ import annotations

from torch import Tensor

from impl.unit.master_shard import Version
from impl.unit.secondary_shard import SecondaryShard
from impl.zero import Zero


def never_renew_secondary(zero: Zero) -> None:
    """Have every unit's secondary shard keep the weights of its first all-gather for good.

    The bytes sent stay the same: only the values are old.
    """
    for unit in zero.units:
        _freeze(unit.weight_gather.secondary)


def _freeze(secondary: SecondaryShard) -> None:
    keep, first = secondary.keep, list[Tensor]()

    def keep_first(received: Tensor, version: Version) -> None:
        if not first:
            first.append(received.clone())
        keep(first[0], version)

    secondary.keep = keep_first  # type: ignore[method-assign]
