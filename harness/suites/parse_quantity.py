"""Quantities with units, as suites write them: rates, latencies and sizes.  No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from pydantic import BeforeValidator, ValidationInfo

_QUANTITY: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(\S+)\s*")
CANONICAL: Final = {"canonical": True}  # validation context: quantities are plain numbers


def parse_rate(value: object) -> float | None:
    """``"50 Mbit/s"`` or ``"unshaped"`` to Mbit/s or None; a ValueError for a rate that no link has."""
    valid = "kbit/s, Mbit/s or Gbit/s, or 'unshaped', from 1 kbit/s to 1000 Gbit/s"
    units = {"kbit/s": 1e-3, "Mbit/s": 1.0, "Gbit/s": 1e3}
    return _parsed(None if value == "unshaped" else value, units, 1e-3, 1e6, valid)


def parse_latency(value: object) -> float | None:
    """``"2 ms"`` or ``"50 us"`` to milliseconds; a ValueError above a second."""
    return _parsed(value, {"us": 1e-3, "ms": 1.0}, 0.0, 1e3, "us or ms, and at most 1000 ms")


def parse_size(value: object) -> int | None:
    """``"48 MiB"`` to bytes; a ValueError for more than can be counted."""
    size = _parsed(value, {"MiB": 2.0**20, "GiB": 2.0**30}, 0.0, 2.0**62, "MiB or GiB, below 2^63")
    return None if size is None else round(size)


def _parsed(value: object, units: Mapping[str, float], least: float, most: float, valid: str) -> float | None:
    """A number with one of these units, above 0 and between these ends."""
    if value is None:
        return None
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    number = float(match[1]) * units.get(match[2], 0.0) if match else 0.0
    if not (number > 0 and least <= number <= most):
        raise ValueError(f"expected a number above 0 with a unit, {valid}")
    return number


def text_or_number(parse_text: Callable[[object], object]) -> BeforeValidator:
    """Parses text, as suites have it; the number of a trial's canonical JSON stays as it is."""

    def read(value: object, info: ValidationInfo) -> object:
        return value if info.context == CANONICAL else parse_text(value)

    return BeforeValidator(read)
