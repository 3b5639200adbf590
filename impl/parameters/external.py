"""External parameters: those that a module uses although they are another module's.

Most need nothing: a parameter that is used while its unit is released is gathered where it is used.
Registering gathers it ahead of the module that uses it, and lets it go right after.
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
    """Say that ``module`` uses ``parameter``, which is another module's, in its forward pass.

    Its unit is gathered before each forward pass of ``module`` and released after it.  May be called before
    or after the model is sharded.  Raises ZeroError: when it is sharded, if the parameter is not one of it.
    """
    if (found := find(parameter)) is not None:
        register(module, found.unit)
    else:
        _registered.setdefault(module, []).append(parameter)


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let ``module.name(...)`` be a forward pass of ``module``, as a call of it is; as FSDP2's function does.

    Such entry points may call one another, and ``forward`` may call them.  Register after
    :func:`impl.zero.shard`, on all ranks; ``module`` is a sharded model, or one of its blocks.  Raises
    ZeroError: if it has no such method or is not sharded; on the first call, if it is a part of a block.
    """
    entry = getattr(module, name, None)
    if not callable(entry):
        raise ZeroError(f"{type(module).__name__} has no method {name!r}")
    found = next((one for parameter in module.parameters() if (one := find(parameter)) is not None), None)
    if found is None:
        raise ZeroError(f"{type(module).__name__} is not sharded: register {name!r} after shard()")
    setattr(module, name, functools.wraps(entry)(functools.partial(found.engine.hooks.run, module, entry)))


def external_to(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """What was registered for modules of ``model``, once."""
    for module in model.modules():
        for parameter in _registered.pop(module, ()):
            yield module, parameter
