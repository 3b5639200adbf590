"""Bits by budget: which codec each part travels in, so that the sum of errors is least within a budget.

Pure: no torch.  A knapsack with one choice for each part, taken greedily: from the smallest codecs on, the
change that saves most error for a byte of those that still fit, which is the best of the relaxed problem but
for the last step.  The result never exceeds the budget, and is no worse than the best uniform choice within
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Cost(NamedTuple):
    """What a part costs in one codec: bytes on the wire, and the sum of its squared errors."""

    bytes: int
    error: float


def choose(parts: Sequence[Mapping[str, Cost]], budget: int) -> list[str]:
    """The codec of each part, by name.

    Args:
        parts: costs by codec; all parts have the same codecs.
        budget: bytes of all parts together.

    Raises:
        ValueError: if even the smallest codecs take more, naming both.
    """
    least = [min(part, key=lambda name: (part[name].bytes, part[name].error, name)) for part in parts]
    spent = sum(part[name].bytes for part, name in zip(parts, least, strict=True))
    if spent > budget:
        raise ValueError(f"a budget of {budget} bytes: the smallest codecs take {spent}")
    chosen = list(least)
    while (step := _steepest(parts, chosen, budget - spent)) is not None:
        index, name = step
        spent += parts[index][name].bytes - parts[index][chosen[index]].bytes
        chosen[index] = name
    candidates = [chosen, *([name] * len(parts) for name in (parts[0] if parts else ()))]
    return min(
        (one for one in candidates if total(parts, one).bytes <= budget),
        key=lambda one: total(parts, one).error,
    )


def total(parts: Sequence[Mapping[str, Cost]], chosen: Sequence[str]) -> Cost:
    """Bytes and error of all parts in the codecs that were chosen."""
    costs = [part[name] for part, name in zip(parts, chosen, strict=True)]
    return Cost(sum(one.bytes for one in costs), sum(one.error for one in costs))


def _steepest(
    parts: Sequence[Mapping[str, Cost]], chosen: Sequence[str], left: int
) -> tuple[int, str] | None:
    """The change that saves most error for a byte, of those that fit; of equal ones the first."""
    best: tuple[float, int, str] | None = None
    for index, (part, now) in enumerate(zip(parts, chosen, strict=True)):
        for name, cost in part.items():
            more, saved = cost.bytes - part[now].bytes, part[now].error - cost.error
            if saved <= 0 or more > left:
                continue
            rate = saved / more if more > 0 else float("inf")
            if best is None or rate > best[0]:
                best = rate, index, name
    return None if best is None else best[1:]
