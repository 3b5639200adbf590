"""Casts whole weights to a narrower type for a state dict or an export, and reports values that are lost.

A value is lost if it is finite but beyond the type's largest value, or if it is not 0 and becomes 0.  Values that were
infinite or NaN before the cast are reported too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from impl.codecs.reference import DTYPES, NAMES
from impl.errors import ZeroError

_MOST_NAMED: Final = 4  # a message names at most this many tensors and counts the rest
_OTHERS: Final = (torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """Return ``dtype`` as a torch type.  A name is looked up: ``bf16`` gives ``torch.bfloat16``.

    Raises a ZeroError if weights cannot be cast to this type.
    """
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in (*DTYPES.values(), *_OTHERS):
        others = ", ".join(map(str, (*DTYPES.values(), *_OTHERS)))
        raise ZeroError(f"dtype={dtype!r}: expected one of {', '.join(map(repr, DTYPES))}, {others}")
    return found


@dataclass(frozen=True, slots=True)
class _Lost:
    """Counts, for one tensor, the values that were lost in a cast to a narrower type, or were not finite before it."""

    name: str
    numel: int  # number of all values
    overflowed: int  # number of finite values beyond the type's largest value
    largest: float  # the overflowed value with the largest magnitude; 0 if none overflowed
    vanished: int  # number of values that were not 0 and became 0
    not_finite: int  # number of values that were infinite or NaN before the cast


class Narrowing:
    """Casts tensors to ``dtype``, one after the other, and counts the values that are lost.

    A value is lost if it is finite but beyond the type's largest value, or if it is not 0 and becomes 0.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, info = dtype, torch.finfo(dtype)
        # Values up to half a step beyond the type's largest value are rounded to it.  All larger values overflow, also
        # if torch's cast does not make them infinite, because the type saturates.
        self._bound = info.max + math.ldexp(info.eps, math.frexp(info.max)[1] - 2)
        self._lost: dict[str, _Lost] = {}

    def cast(self, name: str, values: Tensor) -> Tensor:
        """Return ``values`` (fp32) cast to ``dtype``; remember under ``name`` how many values are lost.

        A second call with the same name replaces the counts of the first.  A tied parameter, which has several names in
        a state dict, is therefore counted once if every call for it gives the same name.
        """
        cast = values.to(self.dtype)
        back, finite = cast.to(values.dtype), values.isfinite()
        overflowed = finite & ~back.isfinite()
        if self._bound < torch.finfo(values.dtype).max:
            overflowed |= finite & (values.abs() > self._bound)
        vanished = int(((back == 0) & (values != 0)).sum())
        count, not_finite = int(overflowed.sum()), values.numel() - int(finite.sum())
        if count or vanished or not_finite:
            largest = 0.0
            if count:
                inside = values[overflowed]
                largest = float(inside[inside.abs().argmax()])
            self._lost[name] = _Lost(name, values.numel(), count, largest, vanished, not_finite)
        return cast

    def overflow(self) -> str | None:
        """Return a sentence that names the tensors with finite values beyond the type's largest value.

        Returns None if no tensor has such values.
        """
        parts = [
            f"{lost.name!r} ({lost.overflowed:,} of {lost.numel:,}, largest {lost.largest:g})"
            for lost in self._lost.values()
            if lost.overflowed
        ]
        largest = torch.finfo(self.dtype).max
        return (
            f"finite values overflow {self._kind}, whose largest is {largest:g}: {_some(parts)}"
            if parts
            else None
        )

    def notes(self) -> tuple[str, ...]:
        """Return lines of text that name the tensors with lost values, and the tensors with values that were not
        finite.

        There are at most three lines: on finite values that overflowed, on values that became 0, and on values that
        were infinite or NaN before the cast.  A line without tensors is left out.
        """
        lines = [self.overflow()]
        for sentence, key in (
            (f"values became 0 in {self._kind}", "vanished"),
            ("values are infinite or NaN, as they were before the cast", "not_finite"),
        ):
            counts = [(lost, getattr(lost, key)) for lost in self._lost.values()]
            parts = [f"{lost.name!r} ({count:,} of {lost.numel:,})" for lost, count in counts if count]
            lines.append(f"{sentence}: {_some(parts)}" if parts else None)
        return tuple(filter(None, lines))

    @property
    def _kind(self) -> str:
        return NAMES.get(self.dtype, str(self.dtype).removeprefix("torch."))


def _some(parts: list[str]) -> str:
    rest = len(parts) - _MOST_NAMED
    return ", ".join(parts[:_MOST_NAMED]) + (f" and {rest:,} more parameters" if rest > 0 else "")
