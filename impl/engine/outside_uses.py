"""Handles uses of weights that the hooks on modules do not see: by other modules, and in autograd's graph.

[Note: saved tensors]
A unit is a group of parameters.  Hooks on modules gather units and free them again, but these hooks miss some
uses of weights: for example when a block is applied twice in a row, when a block returns an object that hides its
output tensors, or when a weight is detached.  A saved-tensor hook of autograd handles the missed uses.  A unit's
gathered weights are in its flat buffer (P,).  When autograd saves a tensor that lies in a flat buffer, the hook does
not keep the tensor's memory.  The hook keeps only the place of the tensor in the buffer
(:data:`~impl.unit.flat_buffer.View`), and the version of the weights.  When backward needs the tensor, a second hook
gathers the unit if the unit is not gathered already.  A use that the hooks on modules have missed thus costs time, but
is never an error.

Torch calls only the saved-tensor hooks that were entered last.  During a call of the model or of a block, these are the
engine's hooks.  If the user has entered hooks earlier, the engine calls them in place of torch:

- The engine's hooks pass every tensor that is not a weight on to the user's hooks.
- They do not pass weights on, since the user's ``save_on_cpu()`` would then copy the whole model.
- If the user has no hooks, the engine's hooks check that saved tensors are not changed in place.  Torch makes this
  check itself only if there are no hooks at all.

If the user enters hooks inside of a block's forward pass, torch calls these hooks instead of the engine's, for weights
too.  The unit's memory is then kept as long as the user's hooks hold views of it.
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
    """Register hooks that gather ``unit`` before each forward pass of ``module``, and free its weights after the pass.

    A unit is a group of parameters that are gathered together; ``module`` uses some of these parameters, although
    another module holds them.  If the unit is gathered already when a pass begins, or is being gathered, the hooks do
    nothing in this pass.
    """
    gathered: list[bool] = []  # for each running call, the innermost last: whether it has gathered the unit

    def before(*_: Any) -> None:
        # A recomputed block gathers when it uses a weight.
        gathered.append(not recomputing() and not unit.in_use)
        if gathered[-1]:
            unit.gather_outside()

    def after(_: nn.Module, __: Any, output: Any) -> None:
        if gathered and gathered.pop():  # the list is empty if a hook before ours has failed
            unit.end_use_outside({memory_of(tensor) for tensor in tensors_in(output)})

    module.register_forward_pre_hook(before)  # runs after the engine's own hook
    module.register_forward_hook(after, always_call=True)


# What autograd keeps in place of a saved tensor: a function that returns the tensor, and the function's arguments.
# A forward pass makes one for each tensor that it saves; a dataclass would take five times as long as a tuple.
Packed = tuple[Any, ...]
# A function that decides what autograd keeps in place of a saved tensor whose memory the engine knows.  It is called
# with the tensor, and with what SavedTensors' ``places`` has for the memory's address, such as the index of a unit.
# It returns what autograd keeps, or None to save the tensor like any other.
Special = Callable[[Tensor, Any], Packed | None]
_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # a pair of hooks: pack and unpack


def weights_in(units: Sequence[Unit]) -> Special:
    """Return a function that decides what autograd keeps when it saves a tensor that may be a view of weights.

    The function's arguments are the tensor, and the index of the unit whose weights were last gathered at the tensor's
    address.  Its result depends on the tensor:

    - A view of weights that are gathered now: autograd keeps no memory, but only the unit (group of parameters), the
      version of its weights, and the view's shape, strides and offset.  Backward gathers the weights again if
      necessary.
    - A view of such weights that has another type, or that torch conjugates or negates when it is read: autograd keeps
      a copy.
    - Any other tensor: the function returns None, and autograd saves the tensor as usual.
    """

    def pack(tensor: Tensor, index: int) -> Packed | None:
        unit = units[index]
        if not unit.gathered or unit.flat.address != memory_of(tensor):
            return None
        if tensor.dtype != unit.flat.dtype or tensor.is_conj() or tensor.is_neg():
            # as_strided() cannot restore a view in another type, or a view that is conjugated or negated when read.
            return _as_it_was, tensor.detach().clone(), 0
        view = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return _gathered_again, unit, view, unit.master_shard.version

    return pack


def _gathered_again(unit: Unit, view: View, version: Version) -> Tensor:
    """Return a view of ``unit``'s weights that autograd has saved; gather the weights first if necessary.

    A unit is a group of parameters, whose gathered weights are in one flat buffer.  ``view`` is the shape, strides and
    offset of the saved tensor in the unit's flat buffer.  ``version`` is the version that the weights had when autograd
    saved the tensor.

    Raises:
        ZeroError: if the weights have changed since then.
    """
    if version != unit.master_shard.version:
        raise ZeroError(
            f"the weights of unit {unit.geometry.name!r} changed between its forward and its backward pass: "
            "step optimizers and write weights after backward()"
        )
    unit.all_gather("backward")  # does nothing if they are gathered
    return unit.flat.attach().as_strided(*view)


def _as_it_was(tensor: Tensor, version: int) -> Tensor:
    """Return the saved ``tensor``; raise a ZeroError if the tensor was changed in place after autograd saved it.

    ``version`` is torch's version counter of the tensor at the time when autograd saved it.  The check is made here,
    because torch itself makes it only if no saved-tensor hooks are installed.
    """
    if tensor._version != version:  # noqa: SLF001
        raise ZeroError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified by an inplace "
            "operation: change a clone of it instead"
        )
    return tensor


class _Constant:
    """Stands for a tensor that autograd has saved and that needs no gradient, such as a view of a module's buffer.

    ``packed`` is a function that returns the tensor, and the function's arguments.  Before the buffer is overwritten,
    :meth:`SavedTensors.spare` replaces the tensor in ``packed`` by a copy.
    """

    __slots__ = ("__weakref__", "packed")

    def __init__(self, packed: Packed) -> None:
        self.packed = packed

    def unpack(self) -> Tensor:
        return _unpack(self.packed)


def _unpack(packed: Packed) -> Tensor:
    tensor: Tensor = packed[0](*packed[1:])
    return tensor


# Marks, in SavedTensors.calls, a call that has not put the engine's hooks on torch's stack.
NOTHING: Final = object()


def _module(hook: Callable[..., Any]) -> str | None:
    return getattr(hook, "__module__", None)


class SavedTensors:
    """Installs the engine's saved-tensor hooks, and decides what autograd keeps; see [Note: saved tensors].

    The list ``calls`` has one entry for each running call of a hooked module.  When a module's call begins, a hook on
    the module appends the entry ``NOTHING``, which says that this call has not installed the saved-tensor hooks.  The
    hook may then call :meth:`take_over`, which installs them.  When the module's call ends, a second hook calls
    :meth:`leave`.

    A GatheredParameters context has an object of this class too.  Entering the context counts as the beginning of a
    call, and leaving it as the end.

    Args:
        special: a function that decides what autograd keeps in place of a saved tensor.  It is called only for a tensor
            whose memory begins at an address in ``places``.  Its arguments are the tensor, and the value that
            ``places`` has for the address.  It returns None to save the tensor as usual.
        places: maps addresses of memory to values for ``special``, such as the index of the unit (group of parameters)
            whose weights lie there.
    """

    def __init__(self, special: Special, places: Mapping[int, Any]) -> None:
        self._special, self._places = special, places
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._users: _Hooks | None = None  # the user's hooks that the engine's hide
        # One entry for each running call of a hooked module, the innermost last.  It is NOTHING until the call puts the
        # engine's hooks on torch's stack, and then the value that ``_users`` had before, which leave() restores.
        self.calls: list[Any] = []
        self._constants = weakref.WeakSet[_Constant]()  # the constants that autograd's graphs hold

    @property
    def active(self) -> bool:
        """Whether a call of a hooked module is running."""
        return bool(self.calls)

    def take_over(self, *, needed: bool = True) -> None:
        """Put the engine's hooks on top of torch's stack of saved-tensor hooks, until the innermost module call ends.

        Nothing is done in two cases:

        - Saved tensors reach the engine's hooks already.
        - The call is in a region of ``torch.utils.checkpoint``.  The region's own hooks must see all saved tensors,
          weights included: they number the tensors of the forward pass, to find them again in the recomputation.

        Args:
            needed: whether to raise an error if saved-tensor hooks are disabled in torch.  If False, the method does
                nothing in this case.

        Raises:
            ZeroError: if saved-tensor hooks are disabled and ``needed`` is True.
        """
        # The result is None if there are no hooks, although torch does not declare this.
        top: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001
        if self._hears(top) or (top is not None and _module(top[0]) == checkpoint.__name__):
            return
        disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()  # noqa: SLF001
        if disabled is not None:
            if not needed:
                return
            raise ZeroError(
                f"saved-tensor hooks are disabled ({disabled}), but a sharded model needs them to gather weights "
                "again in backward: call the model outside of disable_saved_tensors_hooks(), or under torch.no_grad()"
            )
        self._hooks.__enter__()
        self.calls[-1], self._users = self._users, top

    def _hears(self, top: _Hooks | None) -> bool:
        """Return whether the tensors that autograd saves reach this engine's hooks.

        ``top`` is the pair of hooks on top of torch's stack; None if the stack is empty.  Torch calls only this pair.
        The result is True in two cases:

        - ``top`` is this engine's pair of hooks.
        - ``top`` and all hooks between ``top`` and this engine's are hooks of other engines, which pass tensors on.
        """
        while top is not None:
            owner = getattr(top[0], "__self__", None)
            if owner is self:
                return True
            top = owner._users if isinstance(owner, SavedTensors) else None  # noqa: SLF001
        return False

    def leave(self) -> None:
        """End the innermost running call of a hooked module.

        If the engine's hooks were put on torch's stack for this module call (:meth:`take_over`), they are removed.
        """
        if self.calls and (users := self.calls.pop()) is not NOTHING:
            self._hooks.__exit__()
            self._users = users

    def leave_all(self) -> None:
        """End all running calls of hooked modules (:attr:`calls`), because an error has interrupted these calls."""
        while self.calls:
            self.leave()

    def spare(self, memories: Collection[int]) -> None:
        """Replace saved tensors by copies, before their memory is overwritten.

        Call this, for example, before a buffer gets new values.  Autograd's graphs then keep the values that their
        forward passes used.  A saved tensor is replaced if it needs no gradient, and if its memory begins at one of the
        addresses ``memories``.
        """
        copies: dict[tuple[Any, ...], Tensor] = {}

        def copied(tensor: Tensor) -> Tensor:
            address = memory_of(tensor)
            if address not in memories:
                return tensor
            place = address, tensor.storage_offset(), tensor.shape, tensor.stride()
            view = *place, tensor.dtype, tensor.is_conj(), tensor.is_neg()
            if view not in copies:
                with torch.inference_mode(mode=False):  # the copies will outlive a pass in inference mode
                    copies[view] = tensor.detach().clone()
            return copies[view]

        for constant in self._constants:
            unpack, *kept = constant.packed
            if unpack is not _as_it_was:  # kept[0] is what the user's hook returned
                constant.packed = unpack, *(tree_map_only(Tensor, copied, each) for each in kept)
            elif kept[0]._version == kept[1]:  # noqa: SLF001  # a change by the user must raise in backward
                copy = copied(kept[0])
                constant.packed = unpack, copy, copy._version  # noqa: SLF001

    def _pack(self, tensor: Tensor) -> Packed:
        """Return what autograd keeps in place of ``tensor``: a function that returns the tensor, and its arguments.

        Autograd calls this method for each tensor that it saves.
        """
        if type(tensor) is Placeholder:  # an autograd.Function saved its argument without computing with it
            tensor = values_of(tensor)
        place = self._places.get(memory_of(tensor))
        if place is not None and (packed := self._special(tensor, place)) is not None:
            return packed
        if (users := self._users) is not None:
            packed = users[1], users[0](tensor)
        else:
            # Detached, since an output that is kept with its graph would keep itself alive.
            packed = _as_it_was, tensor.detach(), tensor._version  # noqa: SLF001
        if tensor.requires_grad:
            return packed
        constant = _Constant(packed)
        self._constants.add(constant)
        return (constant.unpack,)


def memory_of(tensor: Tensor) -> int:
    """Return the address of the storage in which ``tensor`` lies.  All views of one tensor have the same address.

    Returns 0 for a tensor without such memory: a sparse tensor, a tensor on the meta device, or one of a wrapper class.
    """
    if tensor.layout is not torch.strided or (tensor.numel() and not tensor.data_ptr()):
        return 0
    return tensor.untyped_storage().data_ptr()
