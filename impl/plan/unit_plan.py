"""Decides which parameters of a model form a unit, that is, are gathered and reduced together.

The decision needs names and shapes alone, and no torch.  :mod:`impl.engine.unit_planning` finds names, shapes and
blocks in a module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from impl.plan.local_steps import fragments_of
from impl.policy.policy import MemoryLimits, Policy
from impl.policy.shard_layout import FROZEN, PERSISTENT, ROOT, ParameterSpec, UnitGeometry, lay_out
from impl.policy.topology import Topology


class Placed(NamedTuple):
    """A parameter and its block."""

    spec: ParameterSpec
    block: str  # name of the block; "" for a parameter outside all blocks, or shared by several
    trainable: bool = True


class Contents(Protocol):
    """The properties of a unit on which its layout depends."""

    @property
    def name(self) -> str:
        """The unit's name."""

    @property
    def trainable(self) -> bool:
        """Whether the unit's parameters have gradients."""

    @property
    def specs(self) -> Sequence[ParameterSpec]:
        """The unit's parameters, in slot order."""


class Members(NamedTuple):
    """A unit before it is laid out."""

    name: str
    home: str  # name of its block, :data:`PERSISTENT` or :data:`ROOT`
    trainable: bool
    specs: Sequence[ParameterSpec]  # in slot order
    places: Sequence[int]  # the index of each of these parameters in the model's order


def members_of(parameters: Sequence[Placed], blocks: Sequence[str], limits: MemoryLimits) -> list[Members]:
    """Assign every parameter to exactly one unit, and return the units.

    Parameters outside all blocks, or shared by several, belong to the root's unit.  Parameters with fewer than
    ``limits.persist_below`` elements form a persistent unit, up to ``limits.persist_most`` elements in all.
    """
    entries: dict[tuple[str, bool], list[int]] = {
        (name, trainable): [] for name in (ROOT, PERSISTENT, *blocks) for trainable in (True, False)
    }
    persist = 0
    for index, (spec, block, trainable) in enumerate(parameters):
        home = block or ROOT
        if spec.numel < limits.persist_below and persist + spec.numel <= limits.persist_most:
            home, persist = PERSISTENT, persist + spec.numel
        entries[home, trainable].append(index)
    held = [key for key, inside in entries.items() if any(parameters[index].spec.numel for index in inside)]
    for key, inside in entries.items():  # parameters without elements join a unit with elements
        host = next((other for other in held if other[1] == key[1]), None)
        if host is not None and key not in held:
            entries[host] += inside
    units = []
    for home, trainable in held:
        places = sorted(entries[home, trainable], key=lambda index: parameters[index].spec.group)
        name = home if trainable else home + FROZEN
        units.append(Members(name, home, trainable, [parameters[index].spec for index in places], places))
    return units


def geometries_of(units: Sequence[Contents], topology: Topology, policy: Policy) -> list[UnitGeometry]:
    """Lay out all units, and return their layouts in the same order.

    Raises:
        PaddingError: if a unit has more padding than the policy's ``max_padding`` allows; the message names
            the unit with the largest share.
        PolicyError: if the policy has more fragments (``local_fragments``) than units to deal into them.
    """

    def laid_out(unit: Contents, max_padding: float) -> UnitGeometry:
        shapes = [spec.shape for spec in unit.specs]
        shaped = [phase.by_shape(shapes, topology.world) for phase in policy.phases]
        return lay_out(
            unit.name,
            unit.specs,
            grain=math.lcm(*(phase.grain for phase in shaped)),
            world=topology.world,
            max_padding=max_padding,
            trainable=unit.trainable,
            group=policy.group_ranks(topology),
            grain_in_words=(shaped[0] if len(shaped) == 1 else policy).grain_in_words,
        )

    geometries = [laid_out(unit, math.inf) for unit in units]
    judged = [pair for pair in zip(geometries, units, strict=True) if not pair[0].persistent]
    if judged:
        _, worst = max(judged, key=lambda pair: pair[0].padded / pair[0].numel)
        laid_out(worst, policy.memory.max_padding)
    fragments_of(policy, geometries)
    return geometries


def plan_units(
    parameters: Sequence[Placed], blocks: Sequence[str], topology: Topology, policy: Policy
) -> list[UnitGeometry]:
    """Plan the units of a model from its parameters, in the model's order, and the names of its blocks.

    The units of the root come first.  Blocks are not divided to respect ``memory.largest_unit``, because that needs
    the module.

    Raises:
        PolicyError, GeometryError: as :func:`impl.zero.shard`.
    """
    policy.check(topology)
    return geometries_of(members_of(parameters, blocks, policy.memory), topology, policy)
