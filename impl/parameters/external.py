"""External parameters: those that a module uses although they are another module's.

Most need nothing: a parameter that is used while its unit is released is gathered where it is used.
Registering gathers it ahead of the module that uses it, and lets it go right after.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping

from torch import nn

from impl.engine.optimizer_hooks import find

_registered: MutableMapping[nn.Module, list[nn.Parameter]] = weakref.WeakKeyDictionary()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that ``module`` uses ``parameter``, which is another module's, in its forward pass.

    Its unit is gathered before each forward pass of ``module`` and released after it.  May be called before
    the model is sharded (in constructors), or after.

    Args:
        module: that uses it.
        parameter: of any shape.

    Raises:
        ZeroError: when the model is sharded, if the parameter is not one of it.
    """
    found = find(parameter)
    if found is not None:
        found.engine.register_external(module, found.unit)
    else:
        _registered.setdefault(module, []).append(parameter)


def external_to(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """What was registered for modules of ``model``, once."""
    for module in model.modules():
        for parameter in _registered.pop(module, ()):
            yield module, parameter
