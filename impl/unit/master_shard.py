"""Holds a rank's shard of a unit: (S,) fp32 master weights, and the mean gradient with which the optimizer steps them.

A unit is a group of parameters that are gathered and reduced together.

Frozen weights may be held as the codes of a codec instead of in fp32.  An offloaded shard is in host memory, together
with its mean gradient.  It is encoded on the host, and the encoded shard, its frame, is copied to the device.

[Note: what users do to masters]
The masters that an optimizer holds are views of the shard, and users treat them like any parameter:

* ``p.data = values`` gives a master other memory.  :meth:`MasterShard.adopt` copies these values to the shard
  before a forward pass, and whenever the shard is read outside of passes.  Afterwards it makes the master a view of
  the shard again.  If somebody else holds the assigned memory too, the master keeps that memory instead, and the next
  call of :meth:`MasterShard.adopt` copies the values again.
* ``old = p.data; p.data = values`` keeps the master's old memory, which the user may assign again later.  From then on
  the old memory belongs to the user, so the shard moves to other memory before it takes the new values.
* ``p.data.copy_(values)`` writes to the shard, but torch's version counter does not count the write.  The next gather
  that encodes the master sends the new values.  However, copies of the old values may exist that a later pass reuses:
  hpZ's secondary shard, weights that stay gathered, and frames of offloaded masters.  Therefore checksums of the shard
  are taken when such a copy is made (:meth:`MasterShard.mark`), and compared before a forward pass reuses the copy.
* ``g = p.grad; optimizer.zero_grad()`` keeps a gradient.  The next gradient is then written to other memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch import Tensor, nn

from impl import ops
from impl.codecs.codec import Codec
from impl.codecs.rounding_noise import Noise
from impl.errors import ZeroError
from impl.plan.traffic import Placement
from impl.policy.shard_layout import Slot, UnitGeometry
from impl.transport.side_stream import Arrival
from impl.unit.context import MEMORY, UnitContext
from impl.unit.flat_buffer import handles

ALONE: Final = 2  # what handles() returns for memory that belongs to a single tensor


def shard_of(geometry: UnitGeometry, rank: int, values: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the shard (S,) fp32 of ``rank``, cut from whole parameters; padding is zero.

    ``values`` are the whole parameters of the unit, in the order of ``geometry.slots``.
    """
    shard = torch.zeros(geometry.shard, dtype=torch.float32, device=device)
    for slot, value in zip(geometry.slots, values, strict=True):
        start, end = geometry.part(slot, rank)
        if start < end:
            shard[start:end] = part_of(value, geometry, slot, rank)
    return shard


def part_of(value: Tensor, geometry: UnitGeometry, slot: Slot, rank: int) -> Tensor:
    """Return those elements (n,) of a parameter that are in the shard of ``rank``; n may be 0.

    ``value`` is the whole parameter, and ``slot`` its place in the layout ``geometry``.
    """
    first, end = geometry.overlap(slot, rank)
    return value.detach().reshape(-1)[first - slot.offset : end - slot.offset]


# A version of the weights: how many changes were reported to the engine, and how many writes torch has counted.
Version = tuple[int, int]


class MasterShard:
    """Holds one rank's shard (S,) of a unit (parameters that are gathered together), and the shard's gradient.

    The optimizer steps the masters, which are views of the shard: one master for each optimizer group in the unit.

    Args:
        geometry: the unit's layout.
        context: what the units of the engine share, with the policy for this unit (``Policy.for_unit``).
        placement: whether the shard, and its frames (the encoded shard), are offloaded to host memory.
        shard: (S,) fp32, the initial weights.
    """

    def __init__(
        self, geometry: UnitGeometry, context: UnitContext, placement: Placement, shard: Tensor
    ) -> None:
        policy, mesh = context.policy, context.wire.mesh
        # ``crosses``: whether gathers copy from the host to the device
        self.placement, self.crosses = placement, placement.shard or placement.frames
        self._geometry, self._mesh, self._host, self._meter = geometry, mesh, context.host, context.meter
        self._clock = context.clock
        self.encode_as(policy.weights)
        self.changes = 0  # changes of the weights that were reported to the engine
        self._encoded: Tensor | None = None  # (F,) on the host: the frame of an offloaded master
        self._sent: Tensor | None = None  # (F,) the frame on the device, unless frames are offloaded too
        # For each of these two frames: the version of the master from which it was encoded, and the optimizer step from
        # which a stochastic codec's random bits were drawn.
        self._encoded_of: tuple[Version, int] | None = None
        self._sent_of: tuple[Version, int] | None = None
        self.arrival = Arrival()  # the end of the last gather's copies from the host
        # ``held`` is the masters (S,) fp32, or the frame (F,) uint8 of frozen weights that are held as codes.
        self.held, self.codes = shard.to(MEMORY if placement.shard else mesh.device), None
        if not geometry.trainable and policy.frozen is not None:
            codes = self._host.empty("frozen", self._frame_bytes, host=placement.shard)
            ops.encode(self._codec, self.held, codes, noise=self.noise(self._codec))
            self.held = self.codes = codes
        else:
            context.meter.add("masters", self.held.nbytes, host=placement.shard)
        # Pairs of an optimizer group's number and a leaf tensor: the part of the shard that belongs to the group.  All
        # ranks have equally many pairs; a leaf has no elements if the group has none in this rank's shard.
        self.masters: list[tuple[int, nn.Parameter]] = []
        # The same leaves, with their bounds (start, end) in the shard.
        self._spans: list[tuple[nn.Parameter, int, int]] = []
        for group, start, end in geometry.spans(mesh.rank) if geometry.trainable else ():
            master = nn.Parameter(self.held[start:end], requires_grad=True)
            self.masters.append((group, master))
            self._spans.append((master, start, end))
        # For each master, its part of the shard.  The master is a view of this part, unless a user assigned other data.
        self._own = [self.held[start:end] for _, start, end in self._spans]
        self._foreign = False  # whether a master lies in memory that a user has assigned and still holds
        self._sums: tuple[Version, Tensor] | None = None  # checksums of the shard, from mark()
        self._mean: Tensor | None = None  # (S,) fp32, the memory in which the masters' gradients lie
        self._landing: tuple[Arrival, Tensor] | None = None  # (S,) a mean that is being copied to the host
        # (S,) where a mean arrives if the masters have a gradient already, to which the mean is then added
        self._landed: Tensor | None = None
        self._anchor: Tensor | None = None  # (S,) the weights after the last outer step, with local steps

    # Weights

    @property
    def version(self) -> Version:
        """The version of the weights, a pair of numbers that changes with the weights.

        The first number counts the changes that were reported to the engine.  The second number is torch's version
        counter of the shard, which counts most writes.  A copy of the weights is current as long as the version is the
        one of which it was made.
        """
        return self.changes, self.held._version  # noqa: SLF001  # the public name warns

    @property
    def master(self) -> Tensor:
        """This rank's shard of the weights (S,) fp32, in host memory if the shard is offloaded.

        If frozen weights are held as codes of a codec, the result is a new tensor with the decoded values.
        """
        if self.codes is None:
            self.adopt()
            return self.held
        master = torch.empty(self._geometry.shard, dtype=torch.float32, device=self.codes.device)
        ops.decode(self._codec, self.codes, master)
        return master

    def keep_anchor(self) -> Tensor:
        """Make and return the anchor (S,) fp32 of local steps (DiLoCo): a copy of the shard's present values.

        The next outer step measures from the anchor how far the weights have moved.  Optimizer steps do not change the
        anchor.  Later calls of :meth:`load_part` change both shard and anchor.
        """
        with torch.inference_mode(mode=False):
            self._anchor = self.master.detach().clone()
        self._meter.add("outer", self._anchor.nbytes)
        return self._anchor

    def load_part(self, start: int, end: int, values: Tensor) -> None:
        """Overwrite elements [start, end) of the shard with ``values`` (end - start,) fp32.

        With local steps (DiLoCo), the same elements of the anchor (:meth:`keep_anchor`) are overwritten too.
        """
        master = self.master
        with torch.no_grad():
            master[start:end] = values
            if self._anchor is not None and self._anchor is not values:
                self._anchor[start:end] = values
            if self._foreign:
                for (parameter, _, _), own in zip(self._spans, self._own, strict=True):
                    parameter.data.copy_(own)
        if self.codes is not None and start < end:
            self.arrival.finish()  # the codes may still be read by a copy to the device
            ops.encode(self._codec, master, self.codes, noise=self.noise(self._codec))

    def load_codes(self, frame: Tensor) -> None:
        """Overwrite frozen weights that are held as codes of a codec, such as INT8.

        ``frame`` (F,) uint8 is an encoded shard with the same codec and the same number of elements as these weights.
        """
        assert self.codes is not None  # noqa: S101  # checkpoints have codes for no other unit
        self.arrival.finish()  # the codes may still be read by a copy to the device
        self.codes.copy_(frame)

    # Writes by users ([Note: what users do to masters])

    def adopt(self) -> None:
        """Copy to the shard the values of tensors that a user has assigned to the ``data`` of masters.

        Masters are the fp32 parameters that the optimizer steps, and normally views of the shard.  [Note: what users do
        to masters] says which memory the shard and the masters have afterwards.

        Raises:
            ZeroError: if the assigned tensor has another shape, type or device than the master.
        """
        self._foreign = False
        assigned = []
        for (master, _, _), own in zip(self._spans, self._own, strict=True):
            if not (
                master.data_ptr() == own.data_ptr()
                and master.shape == own.shape
                and master.dtype is own.dtype
                and master.is_contiguous()
            ):
                # A loop, since a comprehension costs a further call in each step.
                assigned.append((master, own))
        if not assigned:
            return
        for master, own in assigned:
            data = master.data
            if (data.shape, data.dtype, data.device) != (own.shape, own.dtype, own.device):
                raise ZeroError(
                    f"a master of unit {self._geometry.name!r} was given data of shape {tuple(data.shape)}, "
                    f"{data.dtype}, on {data.device}, in place of {tuple(own.shape)}, {own.dtype}, on "
                    f"{own.device}: assign a tensor of the master's shape, type and device to p.data, or write "
                    "p.copy_(values) under torch.no_grad()"
                )
            del data  # it would count as a handle of the memory
        # How many masters share a memory.
        sharing = Counter(_storage_of(master) for master, _, _ in self._spans)
        inside = _storage_of(self.held)
        kept = handles(self.held) > ALONE + len(self._own) + sharing[inside]  # a user did old = p.data
        if kept or any(_storage_of(master) == inside for master, _ in assigned):
            self._move()
            assigned = [(master, own) for (master, _, _), own in zip(self._spans, self._own, strict=True)]
        for master, own in assigned:
            # Through .data, so that torch does not count the write.  It has not counted the assignment either, and
            # the counts must be equal on all ranks.
            own.data.copy_(master.data)
        # Memory belongs to this master alone if torch counts no other references to it.  Memory that is not resizable
        # belongs to another library, such as NumPy, whose references torch does not count.
        alone = {
            _storage_of(master)
            for master, _ in assigned
            if handles(master) == ALONE - 1 + sharing[_storage_of(master)]
            and master.untyped_storage().resizable()
        }
        for master, own in assigned:
            if _storage_of(master) in alone:
                master.data = own
            else:
                self._foreign = True

    def _move(self) -> None:
        """Copy the shard to new memory, because the present memory of the shard belongs to a user from now on."""
        with torch.inference_mode(mode=False):  # the memory will outlive a pass in inference mode
            self.held.data = self.held.detach().clone()
            self._own = [self.held[start:end] for _, start, end in self._spans]

    def check_usable(self) -> None:
        """Raise a ZeroError if a user has frozen a master or has registered a gradient hook on a master.

        Masters are the fp32 parameters that the optimizer steps.  Autograd does not reach masters, so a hook on a
        master never runs.
        """
        for master, _, _ in self._spans:
            if not master.requires_grad:
                raise ZeroError(
                    f"a master of unit {self._geometry.name!r} was frozen, but the model's parameters in this unit "
                    "are trained: set requires_grad of the model's parameters before shard()"
                )
            if hooks := master._backward_hooks or master._post_accumulate_grad_hooks:  # noqa: SLF001
                hook = list(hooks.values())[-1]
                raise ZeroError(
                    f"a master of unit {self._geometry.name!r} has a gradient hook, "
                    f"{getattr(hook, '__qualname__', hook)}, which would never run, since autograd does not reach "
                    "masters: remove the hook, and change p.grad after the backward pass"
                )

    def mark(self) -> None:
        """Take checksums of the shard for a later :meth:`check_unwritten`; call it when a copy of the shard is made."""
        version = self.version
        if self._sums is None or self._sums[0] != version:
            self._sums = version, ops.sums_of_bits(self.held)

    def check_unwritten(self) -> None:
        """Raise a ZeroError if masters were written since :meth:`mark` without torch's version counter showing it.

        For a master ``p``, an fp32 parameter of the optimizer, ``p.data.copy_(values)`` is such a write.  Without this
        check, a later pass could compute with copies of the old values.
        """
        if self._sums is None or self._sums[0] != self.version:
            return  # the change is known, so no copy will be reused
        if not torch.equal(self._sums[1], ops.sums_of_bits(self.held)):
            raise ZeroError(
                f"masters of unit {self._geometry.name!r} were written through .data, which torch does not "
                "count, and copies of their old values are kept: call zero.weights_changed() on all ranks "
                "after such writes, or write under torch.no_grad() without .data"
            )

    # Frames

    def encode_as(self, codec: Codec) -> None:
        """Use ``codec`` to encode the shard from now on, and note how many bytes the encoded shard will have."""
        self._codec, self._frame_bytes = codec, codec.frame_bytes(self._geometry.shard)

    def write_frame(self, frame: Tensor) -> None:
        """Encode this rank's shard into ``frame`` (F,) uint8 on the device: the message of the gather's first exchange.

        An offloaded shard is encoded on the host, and then copied to the device.
        """
        if not self.placement.shard:
            if self.codes is None:
                ops.encode(self._codec, self.held, frame, noise=self.noise(self._codec))
            else:
                frame.copy_(self.codes)
            return
        source, name = self._kept_frame() if self.codes is None else self.codes, self._geometry.name
        if self.placement.frames:
            self._host.copy("to_device", source, frame, "weights", name)
            return
        if self._sent is None:
            self._sent = self._host.empty("frames", self._frame_bytes, host=False)
        if self._sent_of != self._encoded_of:
            self._host.copy("to_device", source, self._sent, "weights", name)
            self._sent_of = self._encoded_of
        frame.copy_(self._sent)

    def _kept_frame(self) -> Tensor:
        """Return this rank's offloaded shard in encoded form, (F,) uint8 in host memory.

        The encoded shard is kept for later calls.  The shard is encoded anew only if it has changed, or if a stochastic
        codec draws other random bits in this step.
        """
        varies = self._codec.stochastic and self._geometry.trainable
        now = (self.version, self._clock.step if varies else 0)
        if self._encoded is None:
            self._encoded = self._host.empty("frames", self._frame_bytes)
        if self._encoded_of != now:
            self.arrival.finish()  # the last copy from the frame to the device
            ops.encode(self._codec, self.held, self._encoded, noise=self.noise(self._codec))
            self._encoded_of = now
        return self._encoded

    def noise(self, codec: Codec) -> Noise | None:
        """Return the source of the random bits with which a stochastic ``codec`` rounds this rank's shard.

        Returns None if ``codec`` is not stochastic.
        """
        if not codec.stochastic:
            return None
        key = self._clock.weights(self._geometry.name, frozen=not self._geometry.trainable)
        return key.noise(self._geometry.bounds(self._mesh.rank)[0])

    # Gradients

    @property
    def fresh(self) -> bool:
        """Whether none of the masters (the fp32 parameters that the optimizer steps) has a gradient."""
        for _, master in self.masters:  # noqa: SIM110  # all() would cost a call for each master
            if master.grad is not None:
                return False
        return True

    def take(self, mean: Tensor) -> None:
        """Add ``mean`` (S,) fp32, on the device, to the masters' gradients.

        Masters are the fp32 parameters that the optimizer steps.  If the shard is offloaded, this method only starts to
        copy the mean to the host, and :meth:`land` adds it.
        """
        if not self.placement.shard:
            self._accumulate(mean)
            return
        staged = self._host.stage(self._geometry.shard)
        staged.copy_(mean)
        target = self.gradient()
        if not self.fresh:
            if self._landed is None:
                self._landed = self._host.empty("gradients", self._geometry.shard, torch.float32)
            target = self._landed
        arrival = self._host.download(staged, target, "gradients", self._geometry.name)
        self._landing = arrival, target

    def land(self) -> None:
        """Wait until the mean gradient has arrived in host memory, and add it to the masters' gradients.

        :meth:`take` has started to copy this mean gradient from the device.  Masters are the fp32 parameters that the
        optimizer steps.  Does nothing if no copy is under way.
        """
        if self._landing is not None:
            arrival, mean = self._landing
            arrival.finish()
            self._landing = None
            self._accumulate(mean)

    def _accumulate(self, mean: Tensor) -> None:
        """Add ``mean`` (S,) to the gradients of the masters, the fp32 parameters that the optimizer steps."""
        gradient = mean if mean is self._mean else self.gradient()
        kept = mean is not gradient and self._kept_by_user()
        for master, start, end in self._spans:
            if master.grad is not None:
                master.grad.add_(mean[start:end])
            elif kept:
                master.grad = mean[start:end].clone()
            else:
                master.grad = gradient[start:end]
                if mean is not gradient:
                    master.grad.copy_(mean[start:end])

    def gradient(self) -> Tensor:
        """Return the memory (S,) fp32 in which the masters' gradients lie; it is host memory if the shard is offloaded.

        The same memory is used in every step, with one exception.  After the gradients have been cleared, a user may
        still hold an earlier gradient in this memory.  The user then keeps this memory, and the method returns new
        memory.
        """
        host = self.placement.shard
        if self._mean is not None and handles(self._mean) > ALONE and self.fresh:
            self._meter.add("gradients", -self._mean.nbytes, host=host)
            self._mean = None
        if self._mean is None:
            numel = self._geometry.shard
            self._mean = self._host.empty("gradients", numel, torch.float32, host=host).zero_()
        return self._mean

    def _kept_by_user(self) -> bool:
        """Return whether a user holds the memory in which the masters' gradients are kept (:meth:`gradient`).

        Torch counts the references to this memory.  If there are more references than those of this object and of the
        masters' gradients, a user has one.
        """
        own = sum(self._is_own(master, start, end) for master, start, end in self._spans)
        return self._mean is not None and handles(self._mean) > ALONE + own

    def _is_own(self, master: nn.Parameter, start: int, end: int) -> bool:
        """Return whether ``master.grad`` is a view of elements [start, end) of the memory of :meth:`gradient`.

        ``master`` is an fp32 parameter that the optimizer steps.  Its gradient may also be a tensor that a user has
        assigned.
        """
        if self._mean is None or master.grad is None:
            return False
        return start == end or master.grad.data_ptr() == self._mean[start:end].data_ptr()

    def mean_gradient(self) -> Tensor | None:
        """Return the gradients of all masters as one tensor (S,) fp32: the mean over ranks, summed over micro-batches.

        Returns None if no master has a gradient.
        """
        if self.fresh:
            return None
        if all(self._is_own(*span) for span in self._spans):
            return self._mean
        whole = torch.zeros_like(self.held)
        for master, start, end in self._spans:  # a user has assigned some of the gradients
            if master.grad is not None:
                whole[start:end] = master.grad
        return whole

    def own_gradients(self) -> Iterator[Tensor]:
        """Yield those parts (n,) of the masters' gradients that this rank counts in a gradient norm.

        Masters are the fp32 parameters that the optimizer steps.

        If several groups of ranks hold copies of all states, several ranks hold the same shard.  Each of them counts a
        different part of it, so that the norm over all ranks counts each element once.

        With local steps (DiLoCo), each group has gradients of its own, and computes a norm over its own ranks only.
        There each rank counts its whole shard, since no other rank of its group holds the same shard.
        """
        apart = self._anchor is not None
        low, high = (0, self._geometry.shard) if apart else self._geometry.own_piece(self._mesh.rank)
        for master, start, end in self._spans:
            first, last = max(start, low), min(end, high)
            if master.grad is not None and first < last:
                yield master.grad[first - start : last - start]

    def load_gradient(self, start: int, end: int, values: Tensor) -> None:
        """Overwrite elements [start, end) of the mean gradient with ``values`` (end - start,) fp32.

        A master (an fp32 parameter that the optimizer steps) without a gradient first gets a gradient of zeros.
        """
        gradient = self.gradient()
        for master, first, last in self._spans:
            if master.grad is None:
                master.grad = gradient[first:last].zero_()
            low, high = max(start, first), min(end, last)
            if low < high:
                master.grad[low - first : high - first] = values[low - start : high - start]


def _storage_of(tensor: Tensor) -> int:
    """Return a number that identifies the storage of ``tensor``, also if the storage is empty.

    The address of the memory would not do, since it is 0 for all empty storages.
    """
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001
