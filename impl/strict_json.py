"""JSON, parsed strictly: Python takes ``NaN``, lets the last of equal keys win, and overflows its stack."""

from __future__ import annotations

import json
from typing import Any


def parsed(text: str) -> Any:
    """What ``text`` says.

    Raises:
        ValueError: if it is not JSON, names a key twice, or nests too deep.
    """
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"key {key!r} stands twice")
        table[key] = value
    return table
