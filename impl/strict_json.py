"""JSON, parsed strictly: Python takes ``NaN``, lets the last of equal keys win, and overflows its stack."""

from __future__ import annotations

import json
from typing import Any


class StrictError(ValueError):
    """Text that Python takes for JSON, and that has no one meaning."""


def parsed(text: str) -> Any:
    """What ``text`` says.

    Raises:
        StrictError: if it names a key twice, or what is not a number.
        ValueError: if it is not JSON, or nests too deep.
    """
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refuse(word: str) -> None:
    raise StrictError(f"{word} is not a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise StrictError(f"key {key!r} stands twice")
        table[key] = value
    return table
