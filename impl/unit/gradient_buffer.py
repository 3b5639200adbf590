"""Collects a unit's local gradients of one backward pass in one flat buffer (P,), ready to be sent."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from impl.comm.exchanges import Exchange
from impl.plan.shard_layout import UnitGeometry
from impl.unit.memory_pool import Meter, Pool


class GradientBuffer:
    """(padded,) gradients of one unit on this rank, while there are any.

    They lie in a buffer of the pool or, once a message was opened for them, in that message; of one rank,
    whose mean they are, where the mean lies.

    Args:
        dtype: of local gradients; what adds up over passes is at least fp32.
        meter: where messages that hold them are counted; the pool counts its own.

    Attributes:
        opened: the message in which they lie.
    """

    def __init__(self, geometry: UnitGeometry, dtype: torch.dtype, pool: Pool, meter: Meter) -> None:
        self._geometry, self._dtype, self._pool, self._meter = geometry, dtype, pool, meter
        self._gaps = geometry.gaps
        self._places = [  # shape, strides and offset of each member
            (slot.spec.shape, torch.empty(slot.spec.shape, device="meta").stride(), slot.offset)
            for slot in geometry.slots
        ]
        self._flat: Tensor | None = None  # (padded,)
        self._at_place = False  # whether that is not of the pool
        self._written: set[int] = set()  # members whose part of it holds something
        self.opened: Exchange | None = None

    @property
    def held(self) -> bool:
        """Whether some wait to be reduced."""
        return self._flat is not None

    def lie_in(self, message: Exchange) -> None:
        """Collect in the message that will carry them, from the first one on."""
        self.opened = message
        self._flat = message.send.view(-1).view(self._dtype)
        self._meter.add("local_gradients", self._flat.nbytes)

    def lie_at(self, place: Tensor) -> None:
        """Collect at ``place`` (padded,), which is somebody else's, from the first one on."""
        self._flat, self._at_place = place, True

    def add(self, index: int, leaf: nn.Parameter, *, accumulating: bool) -> None:
        """Move the gradient of ``leaf`` to the place of member ``index``; nothing need be cleared before.

        Args:
            index: of the member.
            leaf: whose gradient has just arrived.
            accumulating: whether those of other passes will be added.
        """
        flat = self._flat if self._flat is not None else self._take(accumulating=accumulating)
        shape, stride, offset = self._places[index]
        place = flat.as_strided(shape, stride, flat.storage_offset() + offset)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # a released leaf asks for no values here
            gradient = leaf.grad
            assert gradient is not None  # noqa: S101  # just accumulated
            if gradient.layout is not torch.strided:  # of an embedding it may be sparse; messages are dense
                gradient = gradient.to_dense()
            if index in self._written:
                place.add_(gradient)
            else:
                place.copy_(gradient)
                self._written.add(index)
            leaf.grad = None

    def whole(self) -> Tensor:
        """(padded,) all of them, with zeros in padding and where none arrived: other ranks may have one."""
        flat = self._flat if self._flat is not None else self._take(accumulating=False)
        for start, end in self._gaps:
            flat[start:end].zero_()
        for index, slot in enumerate(self._geometry.slots):
            if index not in self._written:
                flat[slot.offset : slot.end].zero_()
        return flat

    def forget(self) -> None:
        """They have been encoded, or belong to the message."""
        if self._flat is not None and self.opened is not None:
            self._meter.add("local_gradients", -self._flat.nbytes)
        elif self._flat is not None and not self._at_place:
            self._pool.give_back(self._flat)
        self._flat = self.opened = None
        self._at_place = False
        self._written.clear()

    def drop(self, *, post: bool) -> None:
        """Forget what was collected and not reduced.

        Args:
            post: whether to send an opened message, on which the other ranks count.
        """
        if self.opened is not None and post:
            self.opened.post()
            self.opened.wait()
            self.opened.close()
        self.forget()

    def _take(self, *, accumulating: bool) -> Tensor:
        """(padded,) of the pool; what no gradient was written to holds anything."""
        if accumulating and self._dtype.itemsize < torch.float32.itemsize:
            items = torch.float32.itemsize // self._dtype.itemsize
            self._flat = self._pool.take(self._geometry.padded * items).view(torch.float32)
        else:
            self._flat = self._pool.take(self._geometry.padded)
        return self._flat
