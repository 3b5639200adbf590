"""Converts values of checkpoints to JSON and back, without loss of values or types (for one exception, see below).

A value for which JSON has no form becomes an object with one key:

- ``{"__tuple__": [...]}``: a tuple
- ``{"__number__": ["float32", 3.0]}``: a tensor without dimensions
- ``{"__numpy__": ["float32", 3.0]}``: a NumPy scalar
- ``{"__dict__": [[key, value], ...]}``: a dict that has a key which is not text, or a key such as ``__tuple__``
- ``{"__counter__": [[key, value], ...]}``: a ``collections.Counter``
- ``{"__ordered__": [[key, value], ...]}``: a ``collections.OrderedDict``

The exception: instances of other subclasses of dict, such as ``collections.defaultdict``, are read back as plain dicts,
and keys of a subclass of str as plain texts.  Values of any other type are refused; nothing is pickled.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from impl.checkpoint.commit import CheckpointError

_DICTS: Final[dict[str, type[dict[Any, Any]]]] = {
    "__dict__": dict,
    "__counter__": Counter,
    "__ordered__": OrderedDict,
}
_NAMES: Final = {kind: name for name, kind in _DICTS.items()}
_KEYS: Final = ("__tuple__", "__number__", "__numpy__", *_DICTS)


def to_json(value: object, place: str) -> Any:
    """Returns ``value`` in JSON's types; ``place`` is where the value was found, for error messages.

    Raises CheckpointError: if a part of the value cannot be converted.  The message names the part's place and type.
    """
    kind = type(value)  # subclasses are refused, since loading would return the class itself
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, Tensor) and not value.dim() and not value.is_complex():
        return {"__number__": [str(value.dtype).removeprefix("torch."), value.item()]}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return {"__numpy__": [value.dtype.name, value.item()]}
    if isinstance(value, list | tuple) and kind in (list, tuple):
        items = [to_json(item, f"{place}[{i}]") for i, item in enumerate(value)]
        return items if kind is list else {"__tuple__": items}
    if isinstance(value, dict):
        items = [(_key(key, place), to_json(item, f"{place}[{key!r}]")) for key, item in value.items()]
        name = _NAMES.get(type(value), "__dict__")  # other subclasses of dict are read as dicts
        plain = all(isinstance(key, str) and key not in _KEYS for key in value)
        return dict(items) if plain and name == "__dict__" else {name: items}
    raise CheckpointError(
        f"{place}: a value of type {kind.__name__} cannot be saved: expected None, bool, int, float, str, a "
        "tensor without dimensions, a NumPy scalar, or lists, tuples and dicts of these"
    )


def _key(key: object, place: str) -> Any:
    """Returns a dict's key in JSON's types; ``place`` is where the dict was found, for error messages."""
    if isinstance(key, str):
        return str(key)
    if type(key) is tuple:
        return {"__tuple__": [_key(item, place) for item in key]}
    if isinstance(key, Tensor):  # a tensor is hashed by identity, so its copy would be another key
        raise CheckpointError(
            f"{place}: key {key!r} cannot be saved: use numbers or text instead of tensors as keys"
        )
    return to_json(key, f"{place}: key {key!r}")


def from_json(value: Any) -> Any:
    """Returns the original value from ``value``, the JSON form that :func:`to_json` returned."""
    match value:
        case {"__tuple__": items}:
            return tuple(from_json(item) for item in items)
        case {"__number__": [dtype, number]}:
            return torch.tensor(number, dtype=getattr(torch, dtype))
        case {"__numpy__": [dtype, number]}:
            return np.dtype(dtype).type(number)
        case {"__dict__": list(items)} | {"__counter__": list(items)} | {"__ordered__": list(items)}:
            (name,) = value
            return _DICTS[name]({from_json(key): from_json(item) for key, item in items})
        case dict():
            return {key: from_json(item) for key, item in value.items()}
        case list():
            return [from_json(item) for item in value]
    return value
