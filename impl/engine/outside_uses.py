"""Uses of weights that escape the events of modules: by other modules, and by what autograd saves.

[Note: saved tensors]
Events of modules say when a unit is gathered and resharded, but a use of weights can escape them: a block
applied twice in a row, outputs that hide tensors, a detached copy.  So during a forward pass a tensor in a
unit's flat buffer (P,) is saved as its :data:`~impl.unit.flat_buffer.View` and the version of the weights;
unpacking it in backward gathers the unit if need be: a missed event costs time, never a crash.

Torch calls only the saved-tensor hooks that were entered last.  Around a call of the model or of a block the
engine's hide the user's, and so hand them every tensor that is not a weight.  Weights stay the engine's: what
``save_on_cpu()`` keeps of them would be a copy of the whole model.  Where the user has no hooks, the engine's
check for changes in place, as torch does only without hooks.  Hooks that the user enters inside of a block's
forward pass are called instead of the engine's, for weights too; a unit's memory stays while they keep views.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils._pytree import tree_map_only

from impl.errors import ZeroError
from impl.pytree import tensors_in
from impl.unit.context import recomputing
from impl.unit.flat_buffer import View
from impl.unit.master_shard import Version
from impl.unit.placeholder import Placeholder, values_of
from impl.unit.unit import Unit


def register(module: nn.Module, unit: Unit) -> None:
    """Gather ``unit`` ahead of each forward pass of ``module``, and reshard it after."""
    gathered: list[bool] = []  # by call under way, the innermost last

    def before(*_: Any) -> None:
        gathered.append(not recomputing() and not unit.in_use)  # a block that runs again gathers by use
        if gathered[-1]:
            unit.gather_outside()

    def after(_: nn.Module, __: Any, output: Any) -> None:
        if gathered and gathered.pop():  # none if an earlier hook failed
            unit.end_use_outside({memory_of(tensor) for tensor in tensors_in(output)})

    module.register_forward_pre_hook(before)  # after the engine's own
    module.register_forward_hook(after, always_call=True)


# What autograd keeps in place of a saved tensor: a function, which returns the tensor, and its arguments.
# Plain tuples, one for every tensor that a forward pass saves: a dataclass takes five times as long to make.
Packed = tuple[Any, ...]
# Packs a tensor in memory that is looked up by address; None if it is to be saved as any other tensor.
Special = Callable[[Tensor, Any], Packed | None]
_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # that pack and unpack


def weights_in(units: Sequence[Unit]) -> Special:
    """Pack a view of the flat buffer of a unit, given by index, as its place there."""

    def pack(tensor: Tensor, index: int) -> Packed | None:
        unit = units[index]
        if not unit.gathered or unit.flat.address != memory_of(tensor):
            return None
        if tensor.dtype != unit.flat.dtype or tensor.is_conj() or tensor.is_neg():
            return _as_it_was, tensor.detach().clone(), 0  # seen as complex numbers, or negated when read
        view = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return _gathered_again, unit, view, unit.master_shard.version

    return pack


def _gathered_again(unit: Unit, view: View, version: Version) -> Tensor:
    """The view of the unit's weights, of this version, which are gathered if need be."""
    if version != unit.master_shard.version:
        raise ZeroError(
            f"the weights of unit {unit.geometry.name!r} changed between its forward and its backward pass"
        )
    unit.all_gather("backward")  # unless gathered
    return unit.flat.attach().as_strided(*view)


def _as_it_was(tensor: Tensor, version: int) -> Tensor:
    """The saved tensor, unless it was changed in place, which torch checks only without hooks."""
    if tensor._version != version:  # noqa: SLF001
        raise ZeroError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified by an inplace "
            "operation"
        )
    return tensor


class _Constant:
    """A saved tensor that has no gradient, and so may be a view of a buffer; ``packed`` as any other."""

    __slots__ = ("__weakref__", "packed")

    def __init__(self, packed: Packed) -> None:
        self.packed = packed

    def unpack(self) -> Tensor:
        return _unpack(self.packed)


def _unpack(packed: Packed) -> Tensor:
    tensor: Tensor = packed[0](*packed[1:])
    return tensor


NOTHING: Final = object()  # in place of hooks, or None, where a call has not taken over


def _module(hook: Callable[..., Any]) -> str | None:
    return getattr(hook, "__module__", None)


class SavedTensors:
    """Hooks of autograd's saving of tensors: ``special`` packs those in memory at the addresses ``places``.

    Each call of a module appends ``NOTHING`` to ``calls``, may :meth:`take_over`, ends with :meth:`leave`.
    """

    def __init__(self, special: Special, places: Mapping[int, Any]) -> None:
        self._special, self._places = special, places
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._users: _Hooks | None = None  # that ours hide
        self.calls: list[Any] = []  # under way, the innermost last: ``_users`` before that took over
        self._constants = weakref.WeakSet[_Constant]()  # those that graphs keep

    @property
    def active(self) -> bool:
        """Whether a call is under way."""
        return bool(self.calls)

    def take_over(self, *, needed: bool = True) -> None:
        """For the innermost call, put the hooks on top of torch's stack, whose top alone is called.

        Nothing is done where they are there already, nor in a region of ``torch.utils.checkpoint``: its hooks
        keep no tensor, but number all that are saved, weights too, to find them again when the region is
        computed anew.  Where hooks are disabled, raises a ZeroError if these are ``needed``.
        """
        # None without hooks, which torch does not declare.
        top: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001
        if self._hears(top) or (top is not None and _module(top[0]) == checkpoint.__name__):
            return
        disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()  # noqa: SLF001
        if disabled is not None:
            if not needed:
                return
            raise ZeroError(
                f"saved-tensor hooks are disabled ({disabled}), but a sharded model gathers weights again in "
                "backward by them: call it outside of disable_saved_tensors_hooks(), or under torch.no_grad()"
            )
        self._hooks.__enter__()
        self.calls[-1], self._users = self._users, top

    def _hears(self, top: _Hooks | None) -> bool:
        """Whether these hooks are on top, or hidden by those of other engines, which hand tensors on."""
        while top is not None:
            owner = getattr(top[0], "__self__", None)
            if owner is self:
                return True
            top = owner._users if isinstance(owner, SavedTensors) else None  # noqa: SLF001
        return False

    def leave(self) -> None:
        """The innermost call ends."""
        if self.calls and (users := self.calls.pop()) is not NOTHING:
            self._hooks.__exit__()
            self._users = users

    def leave_all(self) -> None:
        """All calls were interrupted."""
        while self.calls:
            self.leave()

    def spare(self, memories: Collection[int]) -> None:
        """Let graphs keep copies of the constants in memory at these addresses, which will be overwritten."""
        copies: dict[tuple[Any, ...], Tensor] = {}

        def copied(tensor: Tensor) -> Tensor:
            address = memory_of(tensor)
            if address not in memories:
                return tensor
            place = address, tensor.storage_offset(), tensor.shape, tensor.stride()
            view = *place, tensor.dtype, tensor.is_conj(), tensor.is_neg()
            if view not in copies:
                with torch.inference_mode(mode=False):  # they outlive a pass in inference mode
                    copies[view] = tensor.detach().clone()
            return copies[view]

        for constant in self._constants:
            unpack, *kept = constant.packed
            if unpack is not _as_it_was:  # the object of the user's hook
                constant.packed = unpack, *(tree_map_only(Tensor, copied, each) for each in kept)
            elif kept[0]._version == kept[1]:  # noqa: SLF001  # else the user's change is an error of backward
                copy = copied(kept[0])
                constant.packed = unpack, copy, copy._version  # noqa: SLF001

    def _pack(self, tensor: Tensor) -> Packed:
        """What autograd keeps in place of a saved tensor."""
        if type(tensor) is Placeholder:  # an argument of an autograd.Function, which asks for no values
            tensor = values_of(tensor)
        place = self._places.get(memory_of(tensor))
        if place is not None and (packed := self._special(tensor, place)) is not None:
            return packed
        if (users := self._users) is not None:
            packed = users[1], users[0](tensor)
        else:
            # Detached, since an output kept with its graph would keep itself.
            packed = _as_it_was, tensor.detach(), tensor._version  # noqa: SLF001
        if tensor.requires_grad:
            return packed
        constant = _Constant(packed)
        self._constants.add(constant)
        return (constant.unpack,)


def memory_of(tensor: Tensor) -> int:
    """Address of the memory of ``tensor``; 0 if it has none, or several: sparse, wrappers."""
    if tensor.layout is not torch.strided or (tensor.numel() and not tensor.data_ptr()):
        return 0
    return tensor.untyped_storage().data_ptr()
