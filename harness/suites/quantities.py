"""Quantities with units, as suites write them: rates, latencies and sizes.  No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from pydantic import BeforeValidator, ValidationInfo

_QUANTITY: Final = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(\S+)\s*$")
_MBIT: Final = {"kbit/s": 1e-3, "Mbit/s": 1.0, "Gbit/s": 1e3}
_MILLISECONDS: Final = {"us": 1e-3, "ms": 1.0}
_BYTES: Final = {"MiB": 2.0**20, "GiB": 2.0**30}
_RATES: Final = (1e-3, 1e6)  # 1 kbit/s to 1 Tbit/s: nothing outside is a link between nodes
_LONGEST_LATENCY: Final = 1000.0  # ms
MOST_COUNTED: Final = 2**63  # of anything
CANONICAL: Final = {"canonical": True}  # validation context: rates are plain Mbit/s


def parse_rate(value: object) -> float | None:
    """``"50 Mbit/s"`` or ``"unshaped"`` to Mbit/s or None; a ValueError for a rate that no link has."""
    if value is None or value == "unshaped":
        return None
    mbit = _quantity(value, _MBIT)
    if not mbit:
        raise ValueError("expected a number above 0 with a unit, kbit/s, Mbit/s or Gbit/s, or 'unshaped'")
    if not _RATES[0] <= mbit <= _RATES[1]:
        raise ValueError("expected a rate from 1 kbit/s to 1000 Gbit/s, or 'unshaped'")
    return mbit


def parse_latency(value: object) -> float | None:
    """``"2 ms"`` or ``"50 us"`` to milliseconds, at most a second's.

    Raises:
        ValueError: for a number without a unit, an unknown unit, or a latency above a second.
    """
    if value is None:
        return None
    found = _quantity(value, _MILLISECONDS)
    if not 0 < found <= _LONGEST_LATENCY:
        raise ValueError("expected a number above 0 with a unit, us or ms, and at most 1000 ms")
    return found


def parse_size(value: object) -> int | None:
    """``"48 MiB"`` to bytes.

    Raises:
        ValueError: for a number without a unit, an unknown unit, or more than can be counted.
    """
    if value is None:
        return None
    size = _quantity(value, _BYTES)
    if not size:
        raise ValueError("expected a number above 0 with a unit, MiB or GiB")
    if size >= MOST_COUNTED:
        raise ValueError("expected less than 2^63 bytes")
    return round(size)


def _quantity(value: object, units: Mapping[str, float]) -> float:
    """A number with one of these units; 0 for anything else."""
    match = _QUANTITY.match(value) if isinstance(value, str) else None
    return float(match[1]) * units[match[2]] if match and match[2] in units else 0.0


def written(parse_text: Callable[[object], object]) -> BeforeValidator:
    """Parses a value as people write it; in a trial's canonical JSON it is the number itself."""

    def read(value: object, info: ValidationInfo) -> object:
        return value if info.context == CANONICAL else parse_text(value)

    return BeforeValidator(read)
