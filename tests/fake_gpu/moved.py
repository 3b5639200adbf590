"""Adds up the bytes that operations on a GPU read and write in its memory, on a fake GPU without values."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from impl.cuda.kernels import Kernels
from tests.fake_gpu.emulate import moves_nothing
from tests.fake_gpu.engine_runs import TENSORS

# Operations that overwrite their first argument without reading it.
_OVERWRITING: Final = ("copy_", "zero_", "fill_")


def _size(values: Iterable[object]) -> int:
    """The bytes of tensors of a GPU; elements that an expanded tensor repeats count once."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_cuda]
    return sum(
        tensor.itemsize * min(tensor.numel(), sum((n - 1) * step for n, step in zip(*shape, strict=True)) + 1)
        for tensor in tensors
        if tensor.numel() and (shape := (tensor.shape, tensor.stride()))
    )


class Moved(TorchDispatchMode):
    """Counts the bytes of torch's operations in ``nbytes``."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if moves_nothing(func):
            return outputs
        given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
        written = {one.name for one in func._schema.arguments if one.alias_info and one.alias_info.is_write}
        for name, value in given.items():
            reads = not (name in written and (name == "out" or func._schema.name.endswith(_OVERWRITING)))
            self.nbytes += (reads + (name in written)) * _size(tree_leaves(value))
        if not written:
            self.nbytes += _size(tree_leaves(outputs))
        return outputs


@contextlib.contextmanager
def counted() -> Iterator[Moved]:
    """Count the body's operations of torch, and of our kernels, each of which reads and writes its tensors once."""
    moved = Moved()

    def counting(places: tuple[int, ...], operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def call(self: Kernels, *args: Any, **kwargs: Any) -> Any:
            before = moved.nbytes
            result = operation(self, *args, **kwargs)
            if moved.nbytes == before:  # otherwise operations of torch have done the work
                moved.nbytes += _size(args[place] for place in places)
            return result

        return call

    with contextlib.ExitStack() as undo:
        for name, (reads, writes) in TENSORS.items():
            operation = counting((*reads, *writes), getattr(Kernels, name))
            undo.enter_context(mock.patch.object(Kernels, name, operation))
        undo.enter_context(moved)
        yield moved
