"""Positive controls: engines spoilt on purpose, which a test of losses must call inferior.

A test that finds no difference says something only if it finds one where there is one.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from impl.unit.master_shard import Version
from impl.unit.secondary_shard import SecondaryShard
from impl.zero import Zero


def spoil(zero: Zero, control: str | None) -> None:
    """Spoil an engine as a control says; the bytes sent stay the same.

    ``stale_secondary``: every unit's secondary shard keeps the weights of its first all-gather for good;
    ``late_secondary``: those gathered before the last optimizer step.  ``unordered``: gradients go through
    the two hops in the order of ranks, not of hops: each message holds neighbours in memory, and rank l of
    node n, of N nodes with L ranks, ends with slice ``l * N + n`` in place of ``n * L + l`` (paper section
    3.3).
    """
    for unit in zero.units:
        if control == "stale_secondary":
            _freeze(unit.weight_gather.secondary)
        elif control == "late_secondary":
            _delay(unit.weight_gather.secondary)
        elif control == "unordered":
            right = unit.reduction.collective
            strides = [math.prod(right.sizes[hop + 1 :]) for hop in range(len(right.sizes))]
            unit.reduction.collective = replace(right, strides=strides)


def _freeze(secondary: SecondaryShard) -> None:
    keep, first = secondary.keep, list[Tensor]()

    def keep_first(received: Tensor, version: Version, *, step: int = 0) -> None:
        if not first:
            first.append(received.clone())
        keep(first[0], version, step=step)

    secondary.keep = keep_first  # type: ignore[method-assign]


def _delay(secondary: SecondaryShard) -> None:
    keep, gathered = secondary.keep, dict[int, Tensor]()  # the last two, by torch's count of the master

    def keep_last_but_one(received: Tensor, version: Version, *, step: int = 0) -> None:
        if version[1] not in gathered:
            gathered[version[1]] = received.clone()
        for old in sorted(gathered)[:-2]:
            del gathered[old]
        keep(gathered[min(gathered)], version, step=step)

    secondary.keep = keep_last_but_one  # type: ignore[method-assign]
