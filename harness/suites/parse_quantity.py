"""Parses quantities with units, as suites write them: rates, latencies and sizes.

This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from pydantic import BeforeValidator, ValidationInfo

_QUANTITY: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(\S+)\s*")
# Validation context for a trial's canonical JSON, in which quantities are plain numbers.
CANONICAL: Final = {"canonical": True}


def parse_rate(value: object) -> float | None:
    """Return the number of Mbit/s that a text such as ``"50 Mbit/s"`` or ``"1 Gbit/s"`` names.

    Returns None for ``"unshaped"``, and if the value is None.  Raises a ValueError for other values.
    """
    valid = "kbit/s, Mbit/s or Gbit/s, from 1 kbit/s to 100,000 Gbit/s, or 'unshaped'"
    units = {"kbit/s": 1e-3, "Mbit/s": 1.0, "Gbit/s": 1e3}
    return _parsed(None if value == "unshaped" else value, units, 1e-3, 1e8, valid)


def parse_latency(value: object) -> float | None:
    """Return the number of milliseconds that a text such as ``"2 ms"`` or ``"50 us"`` names.

    Returns None if the value is None.  Raises a ValueError for other values.
    """
    return _parsed(value, {"us": 1e-3, "ms": 1.0}, 0.0, 1e3, "us or ms, and at most 1000 ms")


def parse_size(value: object) -> int | None:
    """Return the number of bytes that a text such as ``"48 MiB"`` or ``"2 GiB"`` names.

    Returns None if the value is None.  Raises a ValueError for other values.
    """
    size = _parsed(
        value, {"MiB": 2.0**20, "GiB": 2.0**30}, 0.0, 2.0**62, "MiB or GiB, and at most 2^62 bytes"
    )
    return None if size is None else round(size)


def _parsed(value: object, units: Mapping[str, float], least: float, most: float, valid: str) -> float | None:
    """Convert a text such as ``"50 Mbit/s"`` to a number: the number in the text times the factor of its unit.

    Args:
        value: The text.  If it is None, None is returned.
        units: The factor of each unit.
        least: Smallest valid result.  The result must also be above 0.
        most: Largest valid result.
        valid: Names the valid units and values in the error message.

    Raises:
        ValueError: If the value is not a number with one of the units, or if the result is out of range.
    """
    if value is None:
        return None
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    number = float(match[1]) * units.get(match[2], 0.0) if match else 0.0
    if not (number > 0 and least <= number <= most):
        raise ValueError(f"expected a number above 0 with the unit {valid}")
    return number


def text_or_number(parse_text: Callable[[object], object]) -> BeforeValidator:
    """Return a pydantic validator for a field that is a text with a unit in a suite, and a number in a record.

    When a suite is read, the validator passes the field's text to ``parse_text`` and returns the result.  When a record
    is read, with the validation context :data:`CANONICAL`, the validator returns the number unchanged.
    """

    def read(value: object, info: ValidationInfo) -> object:
        return value if info.context == CANONICAL else parse_text(value)

    return BeforeValidator(read)
