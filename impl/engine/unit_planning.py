"""Cuts a model, also on the meta device, into units: which parameters are gathered and reduced together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from impl.codecs.reference import DTYPES
from impl.errors import ZeroError
from impl.plan.policy import Policy
from impl.plan.shard_layout import PERSISTENT, ROOT, ParameterSpec, UnitGeometry
from impl.plan.topology import Topology
from impl.plan.unit_plan import Placed, geometries_of, members_of
from impl.unit.flat_buffer import Holder

GroupOf = Callable[[str, nn.Parameter], int]


class Draft(NamedTuple):
    """A unit before it is laid out: a module, and the parameters gathered for it, in slot order."""

    name: str
    module: nn.Module
    trainable: bool
    specs: Sequence[ParameterSpec]
    parameters: Sequence[nn.Parameter]
    holders: Sequence[Sequence[Holder]]


def find_blocks(model: nn.Module, *, most: int = 0) -> list[nn.Module]:
    """Children of the outermost ``ModuleList`` and ``Sequential`` containers, in model order.

    A block of more elements than ``most`` (0: no limit) is replaced by its parts, and they by theirs, until
    they fit or have none; so is the rest of the model.
    """
    blocks = list(dict.fromkeys(_contained(model)))
    if not most:
        return blocks
    inside = {parameter for block in blocks for parameter in block.parameters()}
    if sum(p.numel() for p in model.parameters() if p not in inside) > most:
        blocks = list(dict.fromkeys(_with_neighbours(model, frozenset(blocks))))
    return [part for block in blocks for part in _cut(block, most)]


def _contained(module: nn.Module) -> Iterator[nn.Module]:
    """Children of the outermost containers inside ``module`` that have parameters and may be called."""
    contains = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if contains and not isinstance(child, nn.ModuleList | nn.ModuleDict) and _has_parameters(child):
            yield child
        else:
            yield from _contained(child)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _with_neighbours(module: nn.Module, blocks: frozenset[nn.Module]) -> Iterator[nn.Module]:
    """The blocks, and beside them the largest modules that hold none, in model order."""
    for child in _called(module):
        if child in blocks or blocks.isdisjoint(child.modules()):
            yield child
        else:
            yield from _with_neighbours(child, blocks)


def _cut(module: nn.Module, most: int) -> list[nn.Module]:
    """The module, or its parts where it has more than ``most`` elements and parts that fit."""
    # Attention computes with its output projection's weight without calling it, so it stays whole.
    parts = [] if isinstance(module, nn.MultiheadAttention) else list(_called(module))
    if not parts or sum(parameter.numel() for parameter in module.parameters()) <= most:
        return [module]
    return [piece for part in parts for piece in _cut(part, most)]


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Children with parameters that are called themselves: elements of lists, not the lists."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child)
        elif _has_parameters(child):
            yield child


def check_shapes(model: nn.Module) -> None:
    """Refuse parameters and buffers of lazy modules that have no shape yet."""
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        if nn.parameter.is_lazy(value):
            raise ZeroError(
                f"{name!r} of a lazy module has no shape yet: call the model once on a batch before "
                "it is sharded"
            )


def drafts_of(
    model: nn.Module, blocks: Sequence[nn.Module] | None, group_of: GroupOf | None, policy: Policy
) -> list[Draft]:
    """Every parameter in exactly one draft: the root's if it is shared between blocks or outside them.

    Small parameters form a draft of their own, next to the root's, as far as ``persist_most`` allows.  A
    ZeroError refuses bad blocks or types, and units larger than ``largest_unit``.
    """
    check_shapes(model)
    if blocks is None:
        blocks = find_blocks(model, most=policy.memory.largest_unit)
    names = {module: name for name, module in model.named_modules()}
    owner: dict[nn.Module, nn.Module] = {}
    for block in blocks:
        if block not in names or block is model:
            raise ZeroError(f"block {type(block).__name__} is not a submodule of the model")
        if names[block] in (ROOT, PERSISTENT):
            raise ZeroError(f"a block is called {names[block]!r}, which means another unit here: rename it")
        for module in block.modules():
            if module in owner:
                raise ZeroError(f"blocks {names[owner[module]]!r} and {names[block]!r} overlap")
            owner[module] = block
    holders: dict[nn.Parameter, list[Holder]] = {}
    for module in names:
        for key, parameter in module._parameters.items():  # noqa: SLF001  # holders are needed, tied ones too
            if parameter is not None:
                holders.setdefault(parameter, []).append(Holder(module, key))
    modules = {ROOT: model, PERSISTENT: model, **{names[block]: block for block in blocks}}
    placed = []
    for parameter, places in holders.items():
        full = f"{names[places[0].module]}.{places[0].name}".removeprefix(".")
        if parameter.dtype not in (torch.float32, DTYPES[policy.compute]):
            raise ZeroError(
                f"parameter {full!r} is {parameter.dtype}, but the policy computes in {policy.compute}: give "
                "the model in that type or in fp32, or set the policy's compute"
            )
        homes = {names[owner.get(place.module, model)] for place in places}
        group = group_of(full, parameter) if group_of is not None else 0
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
            contents = "holds what lies outside all blocks" if unit.home == ROOT else f"is one {kind}"
            raise ZeroError(
                f"unit {unit.name!r} {contents}, with {numel:,} elements, but memory.largest_unit = {most:,} "
                f"(of a DeepSpeed configuration, stage3_max_live_parameters): it cannot be cut further; allow "
                f"{numel:,}"
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
    """The units that :func:`impl.zero.shard` would make, with its errors; the root's come first."""
    policy.check(topology)
    return geometries_of(drafts_of(model, blocks, group_of, policy), topology, policy)
