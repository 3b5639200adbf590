"""Values of checkpoints in JSON without loss: tuples become ``{"__tuple__": [...]}``, and tensors without
dimensions ``{"__number__": ["float32", 3.0]}``.  Nothing else is guessed or pickled.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from impl.checkpoint.commit import CheckpointError

_KEYS: Final = ("__tuple__", "__number__")


def to_json(value: object, place: str) -> Any:
    """``value``, at ``place``, in JSON's types; a CheckpointError names what has no form, and where."""
    kind = type(value)  # subclasses would come back as these
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, Tensor) and not value.dim() and not value.is_complex():
        return {"__number__": [str(value.dtype).removeprefix("torch."), value.item()]}
    if isinstance(value, list | tuple) and kind in (list, tuple):
        items = [to_json(item, f"{place}[{i}]") for i, item in enumerate(value)]
        return items if kind is list else {"__tuple__": items}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key in _KEYS:
                raise CheckpointError(f"{place}: key {key!r} cannot be written as JSON")
        return {key: to_json(item, f"{place}[{key!r}]") for key, item in value.items()}
    raise CheckpointError(
        f"{place}: {kind.__name__} cannot be written as JSON: expected None, bool, int, float, str, a tensor "
        "without dimensions, or lists, tuples and dicts of them"
    )


def from_json(value: Any) -> Any:
    """The value that :func:`to_json` converted."""
    match value:
        case {"__tuple__": items}:
            return tuple(from_json(item) for item in items)
        case {"__number__": [dtype, number]}:
            return torch.tensor(number, dtype=getattr(torch, dtype))
        case dict():
            return {key: from_json(item) for key, item in value.items()}
        case list():
            return [from_json(item) for item in value]
    return value
