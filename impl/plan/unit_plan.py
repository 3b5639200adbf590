"""Decides which parameters of a model form a unit, that is, are gathered and reduced together.

The decision needs only the names and shapes of parameters and the names of blocks, and no torch.
:mod:`impl.engine.unit_planning` finds these names and shapes in a module.
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
    """A parameter, the name of its block, and whether the parameter is trained."""

    spec: ParameterSpec
    # Name of the block; "" for a parameter outside all blocks, and for one that a block shares with other modules.
    block: str
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
        """The unit's parameters, in the order in which they lie in the unit's flat buffer."""


class Members(NamedTuple):
    """The parameters of one unit, before their places in the unit's flat buffer (its gathered weights) are decided."""

    name: str
    home: str  # name of the unit's block, :data:`PERSISTENT` or :data:`ROOT`
    trainable: bool
    specs: Sequence[ParameterSpec]  # in the order in which they lie in the flat buffer
    places: Sequence[int]  # for each entry of ``specs``, the index of the parameter in model order


def members_of(parameters: Sequence[Placed], blocks: Sequence[str], limits: MemoryLimits) -> list[Members]:
    """Assign the ``parameters`` of a model to units, and return the units.

    ``parameters`` are in model order, and ``blocks`` are the names of the blocks.  The order of the returned units is:
    root, persistent, blocks.

    - A parameter with a ``block`` belongs to the unit of this block.
    - A parameter whose ``block`` is empty belongs to the unit of the root.
    - A parameter with fewer than ``limits.persist_below`` elements belongs to the persistent unit instead, as long as
      persistent parameters have at most ``limits.persist_most`` elements in all.
    - Frozen parameters form separate units: a block with trained and frozen parameters has two units.
    - A unit without elements is left out.  Its trained parameters join the first trained unit that has elements, and
      its frozen parameters the first frozen unit that has elements.  If there is no such unit, they are in no unit.
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
    """Return the layouts of all ``units``, in the same order.

    A layout says where each parameter, each rank's shard and the padding lie in a unit's flat buffer.

    Raises:
        PaddingError: if a unit has more padding than ``memory.max_padding`` allows.  The message names the unit with
            the largest share of padding.  Persistent units may have any padding.
        PolicyError: if the policy divides the units into more fragments (``local_fragments``) than the model has
            trained units.
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
    """Return the layouts of the units of a model, in the order root, persistent, blocks.

    ``parameters`` are the parameters of the model in model order, and ``blocks`` are the names of its blocks.  Unlike
    :func:`impl.zero.shard`, this function does not divide blocks that exceed ``memory.largest_unit``, because dividing
    a block needs the module.

    Raises:
        PolicyError: if the policy does not fit the topology, or has more fragments than the model has trained units.
        GeometryError: if a unit cannot be laid out, for example because it needs too much padding.
    """
    policy.check(topology)
    return geometries_of(members_of(parameters, blocks, policy.memory), topology, policy)
