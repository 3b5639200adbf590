"""Sends the tensors of a user's own reduction or gather along the axes of the mesh.

A *method* is a user's class that reduces gradients or gathers weights in its own way (:mod:`impl.unit.own_reduction`,
:mod:`impl.unit.own_gather`).  The method gets a :class:`MethodWire`, which takes and returns tensors.  The messages go
through the engine's wire, which takes and returns bytes.  Therefore the ledger counts every byte, a pacer (which models
a slow link) delays these messages too, and a rank that does not take part is reported within the wire's time-out.

All ranks must send the same messages in the same order: tensors of equal shapes and types along equal axes.  Each
message is padded with zeros to a multiple of 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from impl.codecs.codec import padded_bytes
from impl.comm.exchanges import Exchange
from impl.comm.method_calls import communicating
from impl.comm.wire import Wire
from impl.plan.traffic import Tag
from impl.policy.own_method import MessageKind, axis_of
from impl.policy.topology import Topology


class Sent:
    """A message under way to other ranks; :meth:`wait` returns what this rank receives in the same exchange."""

    def __init__(
        self, wire: MethodWire, exchange: Exchange | None, shape: tuple[int, ...], like: Tensor
    ) -> None:
        self._wire, self._exchange, self._shape, self._like = wire, exchange, shape, like
        self._received: Tensor | None = None if exchange is not None else like.new_zeros(shape)

    def wait(self) -> Tensor:
        """Wait for the other ranks' messages, and return what this rank has received.

        The result is in memory that belongs to the caller.  A second call returns the same tensor.

        Returns:
            After ``all_gather`` of a tensor of shape ``shape``: (ranks, *shape), the tensor of each rank of the axis.
            After ``all_to_all`` of a tensor (ranks, ...): a tensor of the same shape, in which row i is the row that
            rank i of the axis has sent to this rank.  After ``shift``: the tensor of the previous rank.
        """
        if self._received is None:
            assert self._exchange is not None  # noqa: S101  # kept until the message is received
            with communicating():
                rows = self._exchange.wait()
            row = self._like.element_size()
            for size in self._shape[1:]:
                row *= size
            plain = rows[:, :row].clone(memory_format=torch.contiguous_format)
            self._exchange.close()
            self._received = plain.view(-1).view(self._like.dtype).view(self._shape)
            self._exchange = None
            self._wire.under_way.remove(self)
        return self._received


class Shifted(Sent):
    """A message under way to the next rank of a ring; see :meth:`MethodWire.shift`."""

    def wait(self) -> Tensor:
        """Wait for the message of the previous rank of the ring, and return it.

        The result has the shape and type of the tensor that this rank sends, and its memory belongs to the caller.
        """
        return super().wait()[0]


class MethodWire:
    """Sends and receives tensors for a *method*, a user's class that reduces or gathers one unit in its own way.

    On each rank, each unit has a MethodWire of its own.

    An axis is given by its name: ``world`` has all ranks, ``local`` has the ranks of this rank's node, and ``node`` has
    the ranks with this rank's local index, one on each node.  With 2 nodes of 4 ranks, the axis ``node`` of rank 5 has
    ranks 1 and 5.

    With transport ``shm``, the units of a rank may together have at most 16 messages under way along an axis inside a
    node.
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
        """Return the number of ranks along ``axis``, which is ``world``, ``node`` or ``local``."""
        return axis_of(self.topology, axis).size

    def index(self, axis: str = "world") -> int:
        """Return this rank's index along ``axis``, from 0 to ``size(axis) - 1``."""
        return axis_of(self.topology, axis).digit(self.rank)

    def all_gather(self, tensor: Tensor, axis: str = "world") -> Sent:
        """Send ``tensor``, of any shape and type, to all ranks along ``axis``.

        :meth:`Sent.wait` of the result returns the tensors of all these ranks.
        """
        size = self.size(axis)
        return self._post("all_gather", axis, tensor.reshape(1, *tensor.shape), (size, *tensor.shape))

    def all_to_all(self, tensor: Tensor, axis: str = "world") -> Sent:
        """Send row ``i`` of ``tensor`` (ranks, ...) to rank ``i`` of ``axis``.

        :meth:`Sent.wait` of the result returns the rows that these ranks have sent to this rank.

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
        """Send ``tensor`` to the next rank along ``axis``; the last rank sends its tensor to the first rank.

        :meth:`Sent.wait` of the result returns the tensor of the previous rank.
        """
        row = tensor.reshape(1, *tensor.shape)
        return self._post("shift", axis, row, tuple(row.shape), Shifted)

    def drain(self) -> None:
        """Wait for all messages under way, and discard what is received."""
        for sent in tuple(self.under_way):
            sent.wait()

    @communicating()
    def _post(
        self, kind: MessageKind, axis: str, rows: Tensor, received: tuple[int, ...], handle: type[Sent] = Sent
    ) -> Sent:
        """Post an exchange of this ``kind`` in which this rank sends ``rows`` (n, ...), and return its :class:`Sent`.

        In an all-to-all there is a row for each rank of the axis.  In other exchanges there is a single row, which goes
        to every receiver.  ``received`` is the shape of what this rank receives, and ``handle`` is the class of the
        result: :class:`Sent` or a subclass.
        """
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
