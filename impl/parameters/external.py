"""Handles external parameters, which a module uses although another module holds them.

Most external parameters need no call.  If a forward pass uses a parameter while it is sharded, the parameter is
gathered at that moment, together with the other parameters of its unit (a group of parameters such as those of a
block), and stays gathered to the end of the forward pass.  If the parameter is registered
(:func:`register_external_parameter`), its unit is gathered before the module that uses the parameter runs, and freed
right afterwards.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, MutableMapping

from torch import nn

from impl.engine.engine import find
from impl.engine.outside_uses import register
from impl.errors import ZeroError

_registered: MutableMapping[nn.Module, list[nn.Parameter]] = weakref.WeakKeyDictionary()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that ``module`` uses another module's ``parameter`` in its forward pass.

    Before each forward pass of ``module``, the parameter is then gathered, together with all parameters of its unit (a
    group of parameters such as those of a block).  After the pass, their gathered values are freed.  The function may
    be called before or after the model is sharded.  If it was called before, and the model does not have the parameter,
    ``shard()`` raises a ZeroError.
    """
    if (owner := find(parameter)) is not None:
        register(module, owner.unit)
    else:
        _registered.setdefault(module, []).append(parameter)


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make ``module.name(...)`` count as a forward pass of ``module``, as FSDP2's function of this name does.

    Registered methods may call one another, and ``forward`` may call them.  Call this after
    :func:`impl.zero.shard`, on all ranks.

    Args:
        module: a sharded model, or one of its blocks.
        name: the name of the method.

    Raises:
        ZeroError: if the module has no such method, or is not sharded.  If the module is only a part of a block,
            the first call of the method raises the error.
    """
    entry = getattr(module, name, None)
    if not callable(entry):
        raise ZeroError(f"{type(module).__name__} has no method {name!r} to register: check the name")
    owner = next(filter(None, map(find, module.parameters())), None)
    if owner is None:
        raise ZeroError(f"{type(module).__name__} is not sharded: register {name!r} after shard()")
    setattr(module, name, functools.wraps(entry)(functools.partial(owner.engine.hooks.run, module, entry)))


def external_to(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield (module, parameter) for each external parameter that was registered for a module of ``model``.

    An external parameter is one that the module uses although another module holds it.  Only parameters that were
    registered before the model was sharded are yielded.  The registrations are forgotten, so that a second call yields
    nothing.
    """
    for module in model.modules():
        for parameter in _registered.pop(module, ()):
            yield module, parameter
