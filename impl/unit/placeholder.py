"""Defines the placeholder: a parameter that has a shape, a type and a device, but no values.

Modules hold placeholders while the values of their parameters are sharded.  Each placeholder has a *keeper*, an object
that provides the placeholder's values.  If an operation gets a placeholder as argument, the keeper is asked for the
values; it gathers and returns them, or raises an error.  Gathered parameters are plain ``nn.Parameter`` objects, so
that computing with them calls no keeper and costs nothing.
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
    """Provides the values of one placeholder, a parameter without values, to operations that need the values.

    If the values cannot be used at the moment, the keeper raises an error.
    """

    name: str  # the name of the parameter, for errors

    def use(self, parameter: Placeholder, together: Sequence[Placeholder]) -> Tensor:
        """Return the tensor that an operation is to use in place of ``parameter``, or raise an error.

        A placeholder is a parameter without values.  ``together`` are all placeholders among the arguments of this
        operation, ``parameter`` included.
        """


# Maps each placeholder, by identity, to its keeper.  A keeper must hold its placeholder weakly; otherwise neither of
# the two would ever be freed.
_keepers: MutableMapping[Tensor, Keeper] = WeakTensorKeyDictionary()


_ATTRIBUTES: Final = (
    "shape dtype device layout ndim requires_grad is_leaf grad_fn is_meta is_cuda is_cpu is_mps is_sparse "
    "is_quantized is_nested itemsize nbytes _version"
)
_METHODS: Final = (
    "size dim numel nelement element_size is_floating_point is_complex __len__ __hash__ "
    "requires_grad_ _fix_weakref new_empty new_zeros new_ones new_full"
)
# Functions that need no values of their arguments, or only set a flag.
_HARMLESS: Final = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
        vars(torch._C.TensorBase)["requires_grad"].__set__,  # noqa: SLF001  # this class has the descriptor
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


# These functions are answered for a contiguous tensor of the parameter's shape, because gathered values are contiguous.
# The data of a placeholder is not contiguous: it is one NaN, expanded to the shape.
_OF_LAYOUT: Final = frozenset([torch.Tensor.stride, torch.Tensor.is_contiguous])
_OF_GRADIENTS: Final = frozenset(
    [torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook]
)


class Placeholder(nn.Parameter):
    """A parameter without values; :func:`release` turns a plain parameter into a placeholder, in place.

    Each placeholder has a *keeper*, an object that provides the values to operations that need them, or raises an
    error.

    If the keeper raises a ZeroError, an operation raises it too, with one exception: ``detach()`` returns a new
    placeholder, and every use of the new placeholder raises the error.  The exception is for torch's ``state_dict()``,
    which first calls ``detach()`` for every parameter, and only then runs the hook that replaces the results by values.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call ``func`` with values in place of the placeholders among its arguments; their keepers provide the values.

        Functions that need no values, such as ``shape``, are called with the placeholders themselves.

        Raises:
            ZeroError: if a keeper raises it, or if ``func`` registers a hook on the gradient.
        """
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # torch's own subclasses use it too
                return func(*args, **kwargs)
        if func in _OF_GRADIENTS:
            raise ZeroError(
                f"{func.__name__}() was called on parameter {_keepers[args[0]].name!r}, whose gradient is sharded: "
                "change the gradients of the masters (Zero.param_groups()) after the backward pass instead"
            )
        if func in _OF_LAYOUT:
            return func(torch.empty(args[0].shape, device="meta"), *args[1:], **kwargs)
        leaves, structure = tree_flatten((tuple(args), kwargs))
        together = [leaf for leaf in leaves if isinstance(leaf, Placeholder)]
        # All keepers are looked up first: the first keeper may restore other parameters, which then have no keeper.
        keepers = [_keepers[leaf] for leaf in together]
        uses = zip(together, keepers, strict=True)
        try:
            values = {id(leaf): keeper.use(leaf, together) for leaf, keeper in uses}
        except ZeroError as refusal:
            if func is not torch.Tensor.detach:
                raise
            return _detached(args[0], refusal)
        args, kwargs = tree_unflatten([values.get(id(leaf), leaf) for leaf in leaves], structure)
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder({_keepers[self].name!r}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()  # which asks the keeper for the values


class _Detached:
    """Keeper of a placeholder that never gets values: every use raises a ZeroError with the text ``refusal``.

    A keeper is the object that an operation asks for a placeholder's values.  If the values of a placeholder cannot be
    used at the moment, ``detach()`` returns a new placeholder, with this keeper.  ``refusal`` is the error message of
    the original's keeper, which says why.
    """

    def __init__(self, name: str, refusal: str) -> None:
        self.name, self._refusal = name, refusal

    def use(self, parameter: Placeholder, together: Sequence[Placeholder]) -> Tensor:
        """Raise a ZeroError with the message that the constructor was given."""
        raise ZeroError(self._refusal)


def _detached(parameter: Placeholder, refusal: ZeroError) -> nn.Parameter:
    """Return a new placeholder with the shape, type and device of ``parameter``.

    A placeholder is a parameter without values.  The new placeholder takes no part in autograd.  Every use of it raises
    a ZeroError with the text of ``refusal``.
    """
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        leaf = nn.Parameter(parameter.data, requires_grad=False)
    keep(leaf, _Detached(_keepers[parameter].name, str(refusal)))
    return leaf


def values_of(parameter: Placeholder) -> Tensor:
    """Return the values of ``parameter`` from its keeper, which gathers them if needed, or raise the keeper's error."""
    return _keepers[parameter].use(parameter, [parameter])


def keep(parameter: nn.Parameter, keeper: Keeper) -> None:
    """Make ``parameter`` a :class:`Placeholder` whose values ``keeper`` provides; ``parameter.data`` stays as it is."""
    _keepers[parameter] = keeper
    parameter.__class__ = Placeholder


def release(parameter: nn.Parameter, keeper: Keeper) -> None:
    """Make ``parameter`` a :class:`Placeholder`, and free the memory of its present values.

    From now on, ``keeper`` provides the values to operations that need them.
    """
    shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        # One NaN, expanded to the shape: code that does not ask the keeper reads NaN, and torch refuses writes.
        parameter.data = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
    keep(parameter, keeper)


def restore(parameter: nn.Parameter, values: Tensor) -> None:
    """Make ``parameter`` a plain parameter again, with ``values`` as its data."""
    parameter.__class__ = nn.Parameter
    _keepers.pop(parameter, None)
    parameter.data = values


def keeper_of(parameter: Tensor) -> Keeper | None:
    """Return the keeper of a placeholder, which provides its values; None if ``parameter`` is no placeholder."""
    return _keepers.get(parameter)
