"""External parameters: those of another module than the one that uses them.

Most need nothing: a parameter that is used while its unit is released is gathered at its use.  Registering
gathers it ahead of the module that uses it, and releases it right after.
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

    Its unit is gathered before each forward pass of ``module`` and released after it.  May be called before
    or after the model is sharded.  Raises ZeroError: when it is sharded, if it lacks the parameter.
    """
    if (owner := find(parameter)) is not None:
        register(module, owner.unit)
    else:
        _registered.setdefault(module, []).append(parameter)


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make ``module.name(...)`` a forward pass of ``module``, like a call of it, as FSDP2's function does.

    Such entry points may call one another, and ``forward`` may call them.  Register after
    :func:`impl.zero.shard`, on all ranks; ``module`` is a sharded model, or one of its blocks.  Raises
    ZeroError: if it has no such method or is not sharded; on the first call, if it is a part of a block.
    """
    entry = getattr(module, name, None)
    if not callable(entry):
        raise ZeroError(f"{type(module).__name__} has no method {name!r}")
    owner = next(filter(None, map(find, module.parameters())), None)
    if owner is None:
        raise ZeroError(f"{type(module).__name__} is not sharded: register {name!r} after shard()")
    setattr(module, name, functools.wraps(entry)(functools.partial(owner.engine.hooks.run, module, entry)))


def external_to(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield, and forget, the modules of ``model`` with their registered parameters."""
    for module in model.modules():
        for parameter in _registered.pop(module, ()):
            yield module, parameter
