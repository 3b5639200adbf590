"""Which parameters travel together: a model cut into units before anything is sharded.

Works on the meta device too, so that units can be planned for models larger than any machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from impl.geometry import FROZEN, PERSISTENT, ROOT, ParameterSpec, UnitGeometry, lay_out
from impl.policy import Policy
from impl.reference import DTYPES
from impl.topology import Topology
from impl.unit import Holder, ZeroError

GroupOf = Callable[[str, nn.Parameter], int]


@dataclass(slots=True)
class Draft:
    """A unit before it is laid out: a module, and the parameters that travel with it."""

    name: str
    module: nn.Module
    trainable: bool
    specs: list[ParameterSpec]
    parameters: list[nn.Parameter]
    holders: list[list[Holder]]


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Children of the outermost ``ModuleList`` and ``Sequential`` containers, in model order."""
    blocks: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            callable_child = not isinstance(child, nn.ModuleList | nn.ModuleDict)  # those are never called
            contained = isinstance(module, nn.ModuleList | nn.Sequential)
            if contained and callable_child and any(True for _ in child.parameters()):
                blocks.append(child)
            else:
                visit(child)

    visit(model)
    return list(dict.fromkeys(blocks))


def drafts_of(
    model: nn.Module, blocks: Sequence[nn.Module], group_of: GroupOf | None, policy: Policy
) -> list[Draft]:
    """Every parameter in exactly one draft; shared between blocks, or outside them: the root's.

    Those of fewer than ``persist_below`` elements form a draft of their own, the root's neighbour.

    Raises:
        ZeroError: for a block outside the model, inside another or with a reserved name, or a parameter
            that is neither in fp32 nor in the type that the policy computes in.
    """
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
    found: dict[nn.Parameter, tuple[str, list[Holder], set[nn.Module]]] = {}
    for module, name in names.items():
        for key, parameter in module._parameters.items():  # noqa: SLF001  # holders are needed, tied ones too
            if parameter is None:
                continue
            full = f"{name}.{key}" if name else key
            _, holders, homes = found.setdefault(parameter, (full, [], set()))
            holders.append(Holder(module, key))
            homes.add(owner.get(module, model))
    drafts: dict[tuple[str, bool], Draft] = {}
    places = [(ROOT, model), (PERSISTENT, model), *((names[block], block) for block in blocks)]
    for name, module in places:
        for trainable in (True, False):
            draft = Draft(name if trainable else name + FROZEN, module, trainable, [], [], [])
            drafts[name, trainable] = draft
    for parameter, (full, holders, homes) in found.items():
        if parameter.dtype not in (torch.float32, DTYPES[policy.compute]):
            raise ZeroError(
                f"parameter {full!r} is {parameter.dtype}, but the policy computes in {policy.compute}: give "
                "the model in that type or in fp32, or set the policy's compute"
            )
        home = names[next(iter(homes))] if len(homes) == 1 else ""
        if parameter.numel() < policy.memory.persist_below:
            home = PERSISTENT
        draft = drafts[home or ROOT, parameter.requires_grad]
        group = group_of(full, parameter) if group_of is not None else 0
        draft.specs.append(ParameterSpec(full, tuple(parameter.shape), group))
        draft.parameters.append(parameter)
        draft.holders.append(holders)
    for draft in drafts.values():  # slot order: geometry sorts by group, stably
        order = sorted(range(len(draft.specs)), key=lambda i: draft.specs[i].group)
        draft.specs = [draft.specs[i] for i in order]
        draft.parameters = [draft.parameters[i] for i in order]
        draft.holders = [draft.holders[i] for i in order]
    return [draft for draft in drafts.values() if sum(spec.numel for spec in draft.specs)]


def geometry_of(draft: Draft, topology: Topology, policy: Policy) -> UnitGeometry:
    """The layout of a unit.

    Raises:
        GeometryError: if it would be padded too much; not for persistent parameters, which are small.
    """
    small = draft.name.removesuffix(FROZEN) == PERSISTENT
    return lay_out(
        draft.name,
        draft.specs,
        grain=policy.grain,
        world=topology.world,
        max_padding=math.inf if small else policy.memory.max_padding,
        trainable=draft.trainable,
        group=policy.group_ranks(topology),
    )


def plan_units(
    model: nn.Module,
    topology: Topology,
    policy: Policy,
    *,
    blocks: Sequence[nn.Module] | None = None,
    group_of: GroupOf | None = None,
) -> list[UnitGeometry]:
    """The units that :func:`impl.zero.shard` would make; the root's come first.

    ``model`` may be on the meta device and larger than any machine at hand.

    Raises:
        PolicyError: if the policy does not fit the topology.
        GeometryError: if a unit would be padded too much.
        ZeroError: for blocks that overlap or are not in the model.
    """
    policy.check(topology)
    drafts = drafts_of(model, find_blocks(model) if blocks is None else blocks, group_of, policy)
    return [geometry_of(draft, topology, policy) for draft in drafts]
