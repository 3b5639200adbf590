"""JSON without what its grammar does not have, or does not decide: files may come from anybody.

Pure: no torch.  Python's parser takes ``NaN``, lets the last of equal keys win, and overflows its stack.
"""

from __future__ import annotations

import json
from typing import Any


def parsed(text: str | bytes) -> Any:
    """What ``text`` says.

    Raises:
        ValueError: if it is not JSON, names a key twice, or nests too deep.
    """
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found
