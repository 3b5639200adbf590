"""Sends the tensors of a user's own reduction or gather along the axes of the mesh.

A :class:`MethodWire` is what a method (:mod:`impl.unit.own_reduction`, :mod:`impl.unit.own_gather`) gets in place of
the engine's wire: it takes and returns tensors instead of bytes.  Its messages go through the engine's wire, so that
the ledger counts every byte, the link is shaped, and a rank that does not take part is reported within the wire's
time-out.

All ranks must send the same messages in the same order: tensors of equal shapes and types along equal axes.  Each
message is padded with zeros to a multiple of 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from impl.codecs.codec import padded_bytes
from impl.comm.exchanges import Exchange
from impl.comm.wire import Wire
from impl.plan.traffic import Tag
from impl.policy.own_method import MessageKind, axis_of
from impl.policy.topology import Topology


class Sent:
    """A message under way.  :meth:`wait` returns what this rank has received."""

    def __init__(
        self, wire: MethodWire, exchange: Exchange | None, shape: tuple[int, ...], like: Tensor
    ) -> None:
        self._wire, self._exchange, self._shape, self._like = wire, exchange, shape, like
        self._received: Tensor | None = None if exchange is not None else like.new_zeros(shape)

    def wait(self) -> Tensor:
        """Wait for the message, and return what was received; may be called again.

        The result is in memory that belongs to the caller.

        Returns:
            For ``all_gather`` (ranks, *shape), a row for each rank of the axis; for ``all_to_all`` (ranks, *shape), the
            row that each rank has sent to this one; for ``shift`` the tensor of the rank before.
        """
        if self._received is None:
            assert self._exchange is not None  # noqa: S101  # kept until the message is received
            rows, row = self._exchange.wait(), self._like.element_size()
            for size in self._shape[1:]:
                row *= size
            plain = rows[:, :row].clone(memory_format=torch.contiguous_format)
            self._exchange.close()
            self._received = plain.view(-1).view(self._like.dtype).view(self._shape)
            self._exchange = None
            self._wire.under_way.remove(self)
        return self._received


class Shifted(Sent):
    """A message under way around a ring."""

    def wait(self) -> Tensor:
        """See :meth:`Sent.wait`."""
        return super().wait()[0]


class MethodWire:
    """The wire of one unit's method on one rank.

    An axis is given by its name: ``world``, all ranks; ``local``, the ranks of this rank's node; ``node``, one rank of
    each node, with the same index there as this rank has on its own.

    At most 16 messages of all units may be under way at once along an axis inside a node (transport ``shm``).
    """

    def __init__(self, wire: Wire, tag: Tag, dtype: torch.dtype = torch.float32) -> None:
        self._wire = wire
        self.tag = tag  # the purpose under which messages are booked; the engine sets it
        self.dtype = dtype  # the type of gathered weights; means of gradients are fp32
        self.topology: Topology = wire.mesh.topology
        self.rank: int = wire.mesh.rank
        self.device: torch.device = wire.mesh.device
        self.under_way: list[Sent] = []  # messages for which the method has not waited
        topology = self.topology
        wire.make_groups((topology.world_axis, topology.node_axis, topology.local_axis))

    def size(self, axis: str = "world") -> int:
        """Return the number of ranks along ``axis``."""
        return axis_of(self.topology, axis).size

    def index(self, axis: str = "world") -> int:
        """Return this rank's number among the ranks along ``axis``."""
        return axis_of(self.topology, axis).digit(self.rank)

    def all_gather(self, tensor: Tensor, axis: str = "world") -> Sent:
        """Send ``tensor``, of any shape and type, to all ranks along ``axis``."""
        size = self.size(axis)
        return self._post("all_gather", axis, tensor.reshape(1, *tensor.shape), (size, *tensor.shape))

    def all_to_all(self, tensor: Tensor, axis: str = "world") -> Sent:
        """Send row ``i`` of ``tensor`` (ranks, ...) to rank ``i`` of ``axis``.

        Raises:
            ValueError: if the tensor does not have one row for each rank of the axis.
        """
        if tensor.dim() < 1 or len(tensor) != self.size(axis):
            raise ValueError(
                f"all_to_all() along {axis!r} got a tensor of shape {tuple(tensor.shape)}, expected "
                f"{self.size(axis)} rows: one for each rank"
            )
        return self._post("all_to_all", axis, tensor, tuple(tensor.shape))

    def shift(self, tensor: Tensor, axis: str = "world") -> Sent:
        """Send ``tensor`` to the next rank along ``axis``, and the last rank's to the first."""
        row = tensor.reshape(1, *tensor.shape)
        return self._post("shift", axis, row, tuple(row.shape), Shifted)

    def drain(self) -> None:
        """Wait for all messages under way, and drop what they bring."""
        for sent in tuple(self.under_way):
            sent.wait()

    def _post(
        self, kind: MessageKind, axis: str, rows: Tensor, received: tuple[int, ...], handle: type[Sent] = Sent
    ) -> Sent:
        """Post ``rows`` (n, ...), one message each; ``received`` is the shape of what arrives."""
        rows = rows.detach()
        if not rows.numel():
            return handle(self, None, received, rows)
        flat = rows.contiguous().view(-1).view(torch.uint8).view(len(rows), -1)  # (n, bytes)
        nbytes = flat.shape[1]
        along, padded = axis_of(self.topology, axis), padded_bytes(nbytes)
        operation = {
            "all_gather": self._wire.all_gather,
            "all_to_all": self._wire.all_to_all,
            "shift": self._wire.shift,
        }
        exchange = operation[kind](along, padded, self.tag)
        send = exchange.send.view(len(rows), padded)
        send[:, :nbytes].copy_(flat)
        send[:, nbytes:].zero_()
        exchange.post()
        sent = handle(self, exchange, received, rows)
        self.under_way.append(sent)
        return sent
