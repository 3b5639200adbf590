"""Positive controls: engines spoilt on purpose, which a test of losses must call inferior."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from impl.unit.master_shard import Version
from impl.unit.secondary_shard import SecondaryShard
from impl.zero import Zero


def spoil(zero: Zero, control: str | None) -> None:
    """Spoil an engine as a control says; the bytes sent stay the same.

    ``stale_secondary``: secondary shards keep the weights of their first all-gather; ``late_secondary``: of
    the step before.  ``unordered``: gradients go through two hops in the order of ranks: of N nodes with L
    ranks, rank l of node n ends with slice ``l * N + n`` in place of ``n * L + l`` (paper section 3.3).
    """
    for unit in zero.units:
        if control in ("stale_secondary", "late_secondary"):
            _keep_old(unit.weight_gather.secondary, forever=control == "stale_secondary")
        elif control == "unordered":
            right = unit.reduction.collective
            strides = [math.prod(right.sizes[hop + 1 :]) for hop in range(len(right.sizes))]
            unit.reduction.collective = replace(right, strides=strides)


def _keep_old(secondary: SecondaryShard, *, forever: bool) -> None:
    """Keep what was gathered first, or before the last step, in place of what is gathered."""
    keep, gathered = secondary.keep, dict[int, Tensor]()  # the last two, by torch's count of the master

    def keep_old(received: Tensor, version: Version, *, step: int = 0) -> None:
        if version[1] not in gathered and not (forever and gathered):
            gathered[version[1]] = received.clone()
        for old in sorted(gathered)[:-2]:
            del gathered[old]
        keep(gathered[min(gathered)], version, step=step)

    secondary.keep = keep_old  # type: ignore[method-assign]
