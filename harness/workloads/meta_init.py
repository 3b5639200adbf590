"""Builds models on the meta device, for their shapes alone, and skips their initialisation.

On the meta device torch's random initialisers run as Python operations that import its compiler: 4 s, for
values that do not exist.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_FILLS: Final = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


class _Unfilled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that skips in-place initialisers of meta tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what torch wraps for its compiler imports it

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _FILLS and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def unfilled() -> Iterator[None]:
    """Inside, tensors and modules are created on the meta device, without initialisation."""
    with torch.device("meta"), _Unfilled():  # type: ignore[no-untyped-call]
        yield
