"""Finds and casts the tensors in nested tuples, lists, dicts and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with all its floating-point tensors cast to ``dtype``; containers keep their types.

    A container in which no tensor is cast is returned itself, not as a copy.  A container in which a tensor is cast is
    copied shallowly; neither its constructor nor its ``__post_init__`` is called.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if isinstance(value, MutableMapping):
        old = dict(value)
    elif isinstance(value, tuple | list):
        old = dict(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field.name for field in dataclasses.fields(value))
        old = {name: getattr(value, name) for name in fields if hasattr(value, name)}
    else:
        return value
    items = {key: cast_tensors(item, dtype) for key, item in old.items()}
    changed = {key: item for key, item in items.items() if item is not old[key]}
    if not changed:
        return value
    if isinstance(value, tuple):
        return tuple.__new__(type(value), items.values())  # a named tuple's constructor takes single items
    new = copy.copy(value)
    for key, item in changed.items():
        if isinstance(new, MutableMapping | list):
            new[key] = item
        else:
            object.__setattr__(new, key, item)  # also works for a frozen dataclass
    return new


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))  # a field may have no value yet
