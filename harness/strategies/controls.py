"""Positive controls: engines spoilt on purpose, which a test of losses must call inferior.

A test that finds no difference says something only if it finds one where there is one.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from impl.unit.gradient_reduction import GradientReduction
from impl.unit.master_shard import Version
from impl.unit.secondary_shard import SecondaryShard
from impl.zero import Zero


def never_renew_secondary(zero: Zero) -> None:
    """Have every unit's secondary shard keep the weights of its first all-gather for good.

    The bytes sent stay the same: only the values are old.
    """
    for unit in zero.units:
        _freeze(unit.weight_gather.secondary)


def renew_secondary_late(zero: Zero) -> None:
    """Have every unit's secondary shard keep what was gathered before the last optimizer step.

    The bytes sent stay the same: only the values are one step old.
    """
    for unit in zero.units:
        _delay(unit.weight_gather.secondary)


def keep_rank_order(zero: Zero) -> None:
    """Have every unit's gradients go through the two hops in the order of ranks, not of hops.

    Each message then holds neighbours in memory: rank l of node n, of N nodes with L ranks, ends with slice
    ``l * N + n`` in place of ``n * L + l`` (paper section 3.3, where the reordering avoids it).
    """
    for unit in zero.units:
        _keep_order(unit.reduction)


def _keep_order(reduction: GradientReduction) -> None:
    right = reduction.how
    strides = [math.prod(right.sizes[hop + 1 :]) for hop in range(len(right.sizes))]
    reduction.how = replace(right, strides=strides)


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
