"""Placeholder: a parameter with a shape, a type and a device, whose values are sharded.

It stands where torch expects a parameter: each use that needs values asks its keeper, which returns them or
raises an error.  Gathered parameters are plain, so that computing pays nothing for this.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from impl.errors import ZeroError


class Keeper(Protocol):
    """Returns, or refuses, the values of a released parameter."""

    name: str

    def use(self, parameter: Placeholder, together: Sequence[Placeholder]) -> Tensor:
        """The tensor to compute with in its place; ``together`` are all released ones of the operation."""


# Keyed by identity; a keeper holds its parameters weakly, or it would live for ever.
_keepers: MutableMapping[Tensor, Keeper] = WeakTensorKeyDictionary()


_ATTRIBUTES: Final = (
    "shape dtype device layout ndim requires_grad is_leaf grad_fn is_meta is_cuda is_cpu is_mps is_sparse "
    "is_quantized is_nested itemsize nbytes _version"
)
_METHODS: Final = (
    "size dim numel nelement element_size is_floating_point is_complex __len__ __hash__ "
    "requires_grad_ _fix_weakref new_empty new_zeros new_ones new_full"
)
# Functions that need no values, or set a flag.
_HARMLESS: Final = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
        vars(torch._C.TensorBase)["requires_grad"].__set__,  # noqa: SLF001  # where the descriptor is
        torch.numel,
        torch.is_floating_point,
        torch.is_complex,
        torch.empty_like,
        torch.zeros_like,
        torch.ones_like,
        torch.full_like,
        torch.rand_like,
        torch.randn_like,
    ]
)


# Gathered values are contiguous; the one NaN in their place is not, so these answer from the shape.
_OF_LAYOUT: Final = frozenset([torch.Tensor.stride, torch.Tensor.is_contiguous])
_OF_GRADIENTS: Final = frozenset(
    [torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook]
)


class Placeholder(nn.Parameter):
    """A parameter without values; :func:`release` makes one of a plain parameter, in place."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` with the keepers' values."""
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # how torch's own subclasses do it
                return func(*args, **kwargs)
        if func in _OF_GRADIENTS:
            raise ZeroError(
                f"{func.__name__}() on parameter {_keepers[args[0]].name!r}, whose gradient is sharded: "
                "change the masters' (Zero.param_groups()) after the backward pass"
            )
        if func in _OF_LAYOUT:
            return func(torch.empty(args[0].shape, device="meta"), *args[1:], **kwargs)
        leaves, structure = tree_flatten((tuple(args), kwargs))
        together = [leaf for leaf in leaves if isinstance(leaf, Placeholder)]
        keepers = [_keepers[leaf] for leaf in together]  # restored ones lose theirs
        uses = zip(together, keepers, strict=True)
        values = {id(leaf): keeper.use(leaf, together) for leaf, keeper in uses}
        args, kwargs = tree_unflatten([values.get(id(leaf), leaf) for leaf in leaves], structure)
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder({_keepers[self].name!r}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()  # of its values, or the keeper's error


def values_of(parameter: Placeholder) -> Tensor:
    """The keeper's tensor to compute with in place of ``parameter``."""
    return _keepers[parameter].use(parameter, [parameter])


def keep(parameter: nn.Parameter, keeper: Keeper) -> None:
    """Hide the values of ``parameter``, by its class: from here on uses ask ``keeper``."""
    _keepers[parameter] = keeper
    parameter.__class__ = Placeholder


def release(parameter: nn.Parameter, keeper: Keeper) -> None:
    """Take the values of ``parameter`` away: from here on uses ask ``keeper``."""
    shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        # One NaN, expanded: reads past the keeper show NaN, and torch refuses writes.
        parameter.data = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
    keep(parameter, keeper)


def restore(parameter: nn.Parameter, values: Tensor) -> None:
    """Give ``parameter`` the memory of ``values``; it is a plain parameter again."""
    parameter.__class__ = nn.Parameter
    _keepers.pop(parameter, None)
    parameter.data = values


def keeper_of(parameter: Tensor) -> Keeper | None:
    """The keeper of ``parameter``'s values; None for a plain one."""
    return _keepers.get(parameter)
