"""Divides a model into units, which are groups of parameters that are gathered and reduced together.

The division needs shapes and types only, so the model may be on the meta device.  :func:`find_blocks` finds the blocks,
which are repeated parts of the model; each becomes a unit.  :func:`drafts_of` assigns each parameter to a unit, and
:func:`geometries_of` lays the units out in shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from impl.codecs.reference import DTYPES
from impl.errors import ZeroError
from impl.plan.unit_plan import Placed, geometries_of, members_of
from impl.policy.policy import Policy
from impl.policy.shard_layout import PERSISTENT, ROOT, ParameterSpec, UnitGeometry
from impl.policy.topology import Topology
from impl.unit.flat_buffer import Holder

GroupOf = Callable[[str, nn.Parameter], int]


class Draft(NamedTuple):
    """A unit before its memory layout is computed: a module, and the parameters that are gathered for this module.

    A unit is a group of parameters that are gathered and reduced together.  The parameters are in the order that they
    have in the unit's memory.
    """

    name: str
    module: nn.Module  # the module for whose passes the unit is gathered
    trainable: bool
    specs: Sequence[ParameterSpec]  # name, shape and optimizer group of each parameter
    parameters: Sequence[nn.Parameter]
    holders: Sequence[Sequence[Holder]]  # for each parameter, the modules that hold it


def find_blocks(model: nn.Module, *, most: int = 0) -> list[nn.Module]:
    """Return the blocks of a model, in model order.

    The blocks are the modules in the outermost ``ModuleList`` and ``Sequential`` containers, if they have parameters.
    A ``ModuleList`` or ``ModuleDict`` in such a container is never called itself, so the blocks inside it are returned
    in its place.

    Args:
        model: the model.
        most: the largest number of parameter elements in a block; 0 for no limit.  A larger block is replaced by its
            children, and a larger child by its own children, until each has at most ``most`` elements or cannot be
            divided.  An ``nn.MultiheadAttention`` is not divided.

            The limit holds also for parameters outside of all blocks.  If these parameters have more than ``most``
            elements in total, the largest modules that contain no block become blocks too, and are divided in the same
            way.
    """
    blocks = list(dict.fromkeys(_contained(model)))
    if not most:
        return blocks
    inside = {parameter for block in blocks for parameter in block.parameters()}
    if sum(p.numel() for p in model.parameters() if p not in inside) > most:
        blocks = list(dict.fromkeys(_with_neighbours(model, frozenset(blocks))))
    return [part for block in blocks for part in _cut(block, most)]


def _contained(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks inside ``module``: the modules in its outermost ``ModuleList`` and ``Sequential`` containers.

    Modules without parameters are left out.  If a container has a ``ModuleList`` or ``ModuleDict`` in it, the blocks
    inside this inner list or dict are yielded in its place.
    """
    contains = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if contains and not isinstance(child, nn.ModuleList | nn.ModuleDict) and _has_parameters(child):
            yield child
        else:
            yield from _contained(child)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _with_neighbours(module: nn.Module, blocks: frozenset[nn.Module]) -> Iterator[nn.Module]:
    """Yield, in model order, the ``blocks`` inside ``module``, and the largest other modules that contain no block.

    These other modules are inside ``module``, have parameters and are in no block.
    """
    for child in _called(module):
        if child in blocks or blocks.isdisjoint(child.modules()):
            yield child
        else:
            yield from _with_neighbours(child, blocks)


def _cut(module: nn.Module, most: int) -> list[nn.Module]:
    """Return a list with ``module`` itself or, if its parameters have more than ``most`` elements, with its parts.

    The parts are the module's children that have parameters.  A child with more than ``most`` elements is divided in
    the same way.  A module without such children is not divided, and neither is an ``nn.MultiheadAttention``.
    """
    # MultiheadAttention uses the weight of its output projection without calling this module, so it stays whole.
    parts = [] if isinstance(module, nn.MultiheadAttention) else list(_called(module))
    if not parts or sum(parameter.numel() for parameter in module.parameters()) <= most:
        return [module]
    return [piece for part in parts for piece in _cut(part, most)]


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of ``module`` that have parameters and can be called.

    A ``ModuleList`` or ``ModuleDict`` is never called itself, so no hook before its forward pass could gather its
    parameters.  The modules in it are yielded in its place.
    """
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child)
        elif _has_parameters(child):
            yield child


def check_shapes(model: nn.Module) -> None:
    """Raise a ZeroError if a parameter or buffer of a lazy module has no shape yet."""
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        if nn.parameter.is_lazy(value):
            raise ZeroError(
                f"{name!r} of a lazy module has no shape yet: call the model once on a batch before shard()"
            )


def drafts_of(
    model: nn.Module, blocks: Sequence[nn.Module] | None, group_of: GroupOf | None, policy: Policy
) -> list[Draft]:
    """Assign every parameter of the model to exactly one unit, and return a :class:`Draft` of each unit.

    A unit is a group of parameters that are gathered and reduced together.  The rules are:

    - A parameter that only one block holds belongs to the unit of this block.
    - All other parameters belong to the root's unit: those outside of all blocks, and those that a block shares with
      another block or with a module outside of all blocks.
    - A parameter with fewer elements than the policy's ``persist_below`` is persistent: it belongs to a unit that stays
      gathered between uses, and not to the unit of its block or of the root.  Parameters are considered in model order.
      If a parameter would bring all persistent parameters to more than ``persist_most`` elements, it is not persistent.
    - Trained and frozen parameters are in separate units.  A block with both has two units, and so have the root and
      the persistent parameters.

    Args:
        model: the model.
        blocks: the modules that become units; None for those that :func:`find_blocks` finds.
        group_of: a function of a parameter's name and the parameter, which returns the number of the parameter's
            optimizer group; None to put all parameters into group 0.
        policy: the policy, which has the limits and the compute type.

    Raises:
        ZeroError: in each of these cases:

            - a block is no submodule of the model, overlaps another block, or has a name that the engine uses itself;
            - a parameter is neither fp32 nor of the policy's compute type;
            - a parameter or buffer of a lazy module has no shape yet;
            - ``group_of`` returns anything but a whole number;
            - a unit whose parameters are not persistent has more elements than ``largest_unit``.
    """
    check_shapes(model)
    if blocks is None:
        blocks = find_blocks(model, most=policy.memory.largest_unit)
    names = {module: name for name, module in model.named_modules()}
    owner: dict[nn.Module, nn.Module] = {}
    for block in blocks:
        if block not in names or block is model:
            raise ZeroError(
                f"blocks= has a {type(block).__name__} that is not a submodule of the model: pass submodules only"
            )
        if names[block] in (ROOT, PERSISTENT):
            raise ZeroError(
                f"a block is called {names[block]!r}, a name that the engine uses for another unit: rename the block"
            )
        for module in block.modules():
            if module in owner:
                raise ZeroError(
                    f"blocks {names[owner[module]]!r} and {names[block]!r} overlap: leave one of them out of blocks="
                )
            owner[module] = block
    holders: dict[nn.Parameter, list[Holder]] = {}
    for module in names:
        # named_parameters() would name a tied parameter once, but all its holders are needed.
        for key, parameter in module._parameters.items():  # noqa: SLF001
            if parameter is not None:
                holders.setdefault(parameter, []).append(Holder(module, key))
    modules = {ROOT: model, PERSISTENT: model, **{names[block]: block for block in blocks}}
    placed = []
    for parameter, places in holders.items():
        full = f"{names[places[0].module]}.{places[0].name}".removeprefix(".")
        if parameter.dtype not in (torch.float32, DTYPES[policy.compute]):
            raise ZeroError(
                f"parameter {full!r} is {parameter.dtype}, but the policy computes in {policy.compute}: convert "
                "the model to that type or to fp32, or set the policy's compute"
            )
        homes = {names[owner.get(place.module, model)] for place in places}
        group = group_of(full, parameter) if group_of is not None else 0
        if not hasattr(group, "__index__"):  # whole numbers have it, also those of NumPy
            raise ZeroError(
                f"group_of= returned {group!r} for parameter {full!r}: return the number of the parameter's optimizer "
                "group, such as 0 or 1"
            )
        spec = ParameterSpec(full, tuple(parameter.shape), group)
        placed.append(Placed(spec, homes.pop() if len(homes) == 1 else "", parameter.requires_grad))
    parameters, holding, most = list(holders), list(holders.values()), policy.memory.largest_unit
    drafts = []
    for unit in members_of(placed, [names[block] for block in blocks], policy.memory):
        module = modules[unit.home]
        drafts.append(
            Draft(
                unit.name, module, unit.trainable, unit.specs,
                [parameters[place] for place in unit.places], [holding[place] for place in unit.places],
            )
        )  # fmt: skip
        numel = sum(spec.numel for spec in unit.specs)
        if most and numel > most and unit.home != PERSISTENT:
            kind = type(module).__name__
            contents = "holds the parameters outside all blocks" if unit.home == ROOT else f"is one {kind}"
            raise ZeroError(
                f"unit {unit.name!r} {contents} and has {numel:,} elements, but memory.largest_unit = {most:,} (in "
                "a DeepSpeed configuration, stage3_max_live_parameters), and it cannot be divided further: set "
                f"the limit to at least {numel:,}"
            )
    return drafts


def plan_units(
    model: nn.Module,
    topology: Topology,
    policy: Policy,
    *,
    blocks: Sequence[nn.Module] | None = None,
    group_of: GroupOf | None = None,
) -> list[UnitGeometry]:
    """Return the layouts of the units that :func:`impl.zero.shard` makes from the same arguments, in the same order.

    A unit is a group of parameters that are gathered and reduced together.  Its layout says where each parameter and
    each rank's shard lie in the unit's memory.  Nothing is sent, and the model is not changed.

    Raises the same errors as ``shard()`` if model, policy and topology do not fit together.
    """
    policy.check(topology)
    return geometries_of(drafts_of(model, blocks, group_of, policy), topology, policy)
