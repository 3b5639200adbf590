"""Gathers and writes the values of whole parameters of one unit, outside of passes.

State dicts, GatheredParameters and the classes that read and write parameters by name use this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from impl.comm.all_gather import gather_whole
from impl.comm.wire import Wire
from impl.plan.traffic import Tag
from impl.policy.shard_layout import UnitGeometry
from impl.policy.topology import Axis
from impl.unit.flat_buffer import InUnit
from impl.unit.placeholder import Placeholder, release
from impl.unit.unit import Unit


class WholeValues:
    """Gathers and overwrites the values of one unit's parameters, and shows them to users in the model's modules.

    Overwriting values makes all copies of the weights stale, so that the next pass gathers them anew.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit, self._geometry, self._wire = unit, unit.geometry, unit.wire
        self._master_shard = unit.master_shard
        topology = unit.wire.mesh.topology
        axes, outside = topology.gather_axes(unit.policy.group_ranks(topology))
        self._axes = axes[outside:]  # the axes inside a state group, whose ranks together hold all shards
        self._tag = Tag("step", "state", unit.geometry.name)

    def masters(self) -> list[Tensor]:
        """Gather the masters (fp32 weights) of the unit's parameters, and return one fp32 tensor for each parameter.

        A tensor has the shape of its parameter.  The tensors are in the order of ``unit.members``, and are views of one
        new buffer.  All ranks must call this method.
        """
        master = self._master_shard.master
        if self._master_shard.placement.shard:
            master = torch.empty(self._geometry.shard, device=self._wire.mesh.device)
            self._unit.host.copy("to_device", self._master_shard.master, master, "state", self._geometry.name)
        whole = gather_whole(self._wire, self._axes, master, self._tag).view(-1)  # (P,)
        return [whole[slot.offset : slot.end].view(slot.spec.shape) for slot in self._geometry.slots]

    def gather_member(self, number: int, part: Tensor) -> Tensor:
        """Gather values of parameter ``number`` of the unit, such as its fp32 weights, from all ranks.

        The values may also be others, such as the mean gradient.  ``part`` (n,) fp32 are the values of the elements in
        this rank's shard; n may be 0.  Returns the values of all elements, fp32 in the shape of the parameter.
        """
        part = part.to(self._wire.mesh.device)
        return assemble(self._geometry, number, part, self._axes, wire=self._wire, tag=self._tag)

    def part(self, number: int) -> tuple[int, int]:
        """Return (start, end): elements [start, end) of this rank's shard belong to parameter ``number`` of the unit.

        If the shard has no elements of the parameter, start equals end.
        """
        return self._geometry.part(self._geometry.slots[number], self._wire.mesh.rank)

    def show(self, number: int, values: Tensor) -> nn.Parameter:
        """Put the whole ``values`` of parameter ``number`` into the model, where users can read and write them.

        Modules hold a placeholder, a parameter without values, while the unit is sharded.  This method turns the
        placeholder into a plain parameter with ``values``, which have the parameter's shape, and returns it.
        """
        unit, member = self._unit, self._unit.members[number]
        unit.wait()
        unit.hide()
        unit.flat.shown[number] = values
        unit.meter.add("gathered", values.nbytes)
        for leaf in (member.placeholder, member.parameter):  # a user may have kept the parameter from a pass
            leaf.__class__ = nn.Parameter
            leaf.data = values
        return member.placeholder

    def end_showing(self, number: int) -> None:
        """Undo :meth:`show`: turn the parameter into a placeholder again; its values are not written to the shards."""
        unit, member = self._unit, self._unit.members[number]
        member.place(member.placeholder)  # users may have replaced the placeholder, or its data
        values = unit.flat.shown.pop(number)
        member.placeholder.data = values
        unit.meter.add("gathered", -values.nbytes)
        member.parameter.data = member.no_values
        unit.flat.lay()
        # A graph that saved the placeholder must raise in backward, rather than compute without its values.
        torch.autograd.graph.increment_version(member.placeholder)
        release(member.placeholder, InUnit(unit.flat, self._geometry.slots[number].spec.name, number))
        if not unit.gathered:
            member.parameter.__class__ = Placeholder

    def write_part(self, number: int, part: Tensor) -> None:
        """Overwrite this rank's masters (fp32 weights) of parameter ``number`` with ``part`` (n,) fp32; n may be 0."""
        self._master_shard.load_part(*self.part(number), part)
        self._unit.weights_changed()

    def load_shard(self, values: Tensor) -> None:
        """Overwrite all masters (fp32 weights) of this rank's shard with ``values`` (S,) fp32."""
        self._master_shard.load_part(0, self._geometry.shard, values)
        self._unit.weights_changed()

    def load_codes(self, frame: Tensor) -> None:
        """Overwrite frozen weights that are held as codes of a codec, such as INT8.

        ``frame`` (F,) uint8 is an encoded shard with the same codec and the same number of elements as these weights.
        """
        self._master_shard.load_codes(frame)
        self._unit.weights_changed()


def assemble(
    geometry: UnitGeometry, number: int, part: Tensor, axes: Sequence[Axis], *, wire: Wire, tag: Tag
) -> Tensor:
    """Gather values of parameter ``number`` of a unit, such as its fp32 weights or its mean gradient, from all ranks.

    Args:
        geometry: the layout of the parameter's unit, the group of parameters that are gathered together.
        number: the index of the parameter in ``geometry.slots``.
        part: (n,) fp32, the values of the elements in this rank's shard; n may be 0.
        axes: the axes of ranks along which values are gathered; all ranks along these axes must call this function.
        wire: sends the messages.
        tag: the phase and purpose under which the wire counts the bytes.

    Returns:
        The values of all elements, fp32 in the shape of the parameter.
    """
    slot = geometry.slots[number]
    bounds = [geometry.overlap(slot, rank) for rank in range(geometry.shards)]
    longest = torch.zeros(max(end - first for first, end in bounds), device=part.device)
    longest[: part.numel()] = part
    rows = gather_whole(wire, axes, longest, tag)
    parts = [row[: end - first] for row, (first, end) in zip(rows, bounds, strict=True)]
    return torch.cat(parts).view(slot.spec.shape)
