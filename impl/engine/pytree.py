"""Tensors in what modules are given and return: tuples, lists, dicts, dataclasses, in one another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating-point tensors, in tuples, lists and dicts, in ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: cast_tensors(item, dtype) for name, item in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        return type(value)(cast_tensors(item, dtype) for item in value)
    return value


def memory_of(tensor: Tensor) -> int:
    """Address of the memory that ``tensor`` is a view of; 0 if it has none, or several: sparse, wrappers."""
    if tensor.layout is not torch.strided or (tensor.numel() and not tensor.data_ptr()):
        return 0
    return tensor.untyped_storage().data_ptr()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, dicts and dataclasses."""
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
            yield from tensors_in(getattr(value, field.name))
