"""Values of checkpoints in JSON without loss.

Pure: no torch.  JSON has no tuples and no numbers that are not finite; they become objects of one key,
``{"__tuple__": [...]}`` and ``{"__float__": "nan"}``.  Nothing else is guessed or pickled: what has no such
form is refused by its place.
"""

from __future__ import annotations

import math
from typing import Any, Final

from impl.checkpoint.atomic_files import CheckpointError

_TUPLE: Final = "__tuple__"
_FLOAT: Final = "__float__"
NUMBER: Final = "__number__"  # a tensor without dimensions (:mod:`impl.checkpoint.optimizer_state`)


def to_json(value: object, where: str) -> Any:
    """``value`` in what JSON has.

    Args:
        value: None, bool, int, float, str; lists, tuples and dicts with str keys of them.
        where: what it is, for the error.

    Raises:
        CheckpointError: naming the place of what has no such form.
    """
    if value is None or type(value) in (bool, int, float, str):  # subclasses would come back as these
        return {_FLOAT: repr(value)} if isinstance(value, float) and not math.isfinite(value) else value
    match value:
        case list() if type(value) is list:
            return [to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
        case tuple() if type(value) is tuple:
            return {_TUPLE: [to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]}
        case dict():
            odd = [key for key in value if not isinstance(key, str) or key in (_TUPLE, _FLOAT, NUMBER)]
            if odd:
                raise CheckpointError(f"{where}: key {odd[0]!r} cannot be written as JSON")
            return {key: to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise CheckpointError(
        f"{where}: {type(value).__name__} cannot be written as JSON: expected None, bool, int, float, str or "
        "lists, tuples and dicts of them"
    )


def from_json(value: Any) -> Any:
    """What :func:`to_json` was given.

    Raises:
        CheckpointError: for what it never gives.
    """
    match value:
        case {"__tuple__": list(items)} if len(value) == 1:
            return tuple(from_json(item) for item in items)
        case {"__float__": "nan" | "inf" | "-inf" as text} if len(value) == 1:
            return float(text)
        case {"__tuple__": _} | {"__float__": _}:
            raise CheckpointError(f"{str(value)[:60]!r} is neither a tuple nor a number that is not finite")
        case dict():
            return {key: from_json(item) for key, item in value.items()}
        case list():
            return [from_json(item) for item in value]
    return value
