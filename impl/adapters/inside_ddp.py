"""Reduces DDP's gradients with this project's collectives, through DDP's communication hook.

Gradients are averaged as under a policy of stage 0, in which nothing is sharded.  They are first reduced, in one or
more hops (exchanges between nodes or inside a node), so that each rank has the mean of one piece of the gradients.
Then all ranks gather the means of all pieces.  :mod:`impl.adapters.traffic` predicts how many bytes are sent.  The
model stays an ordinary ``DistributedDataParallel``, and the training loop does not change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from impl.adapters.joined import Joined
from impl.adapters.traffic import HostError
from impl.comm.reduce_scatter import Reduction
from impl.comm.wire import Wire
from impl.engine.unit_planning import plan_units
from impl.policy.policy import Policy
from impl.policy.shard_layout import Slot, UnitGeometry


@dataclass(slots=True)
class _Unit:
    """The gradients of one unit (parameters whose gradients are sent together).

    The gradients are copied from DDP's buckets to ``flat``, reduced there, and copied back to the buckets.
    """

    geometry: UnitGeometry
    flat: Tensor  # (padded,) fp32; the padding is always zero
    # Views of gradients in DDP's buckets, to which the means are written.
    back: list[tuple[Tensor, Slot]] = field(default_factory=list)


class InDDP(Joined):
    """Reduces the gradients of a DDP model with this project's collectives.

    Every rank must create an InDDP before the first backward pass, and keep a reference to it.

    Gradients are sent in units, so the bytes do not depend on DDP's buckets.  A unit is the parameters of one block (a
    repeated part of the model); the parameters outside all blocks are one more unit.  DDP passes its buckets to this
    adapter's communication hook, in the same order on all ranks.  The hook copies the gradients of each bucket into the
    units.

    A reduction consists of one or more exchanges, called hops.  When a unit has all its gradients, its reduction starts
    with the first hop, and the reductions of earlier units go on to their next hops.  After the last bucket, the hook
    waits for all reductions.

    Args:
        model: a model in DDP over all ranks of ``wire.mesh``.
        wire: sends the messages; its mesh must be on the CPU.
        policy: a policy of stage 0, which may set ``gradients``, ``reduce``, ``chunks``, ``align`` and
            ``memory.max_padding``; all other fields must have the values of ``BASES["ddp"]`` in
            :mod:`impl.adapters.traffic`.

    Raises:
        HostError: if ``wire.mesh`` has other ranks than DDP, or is not on the CPU.
        PolicyError: if DDP cannot carry out the policy.
        GeometryError: if a unit would need more padding than the policy's ``memory.max_padding`` allows.
    """

    def __init__(self, model: DistributedDataParallel, wire: Wire, policy: Policy) -> None:
        super().__init__("ddp", wire, policy)
        self.check_ranks(dist.get_process_group_ranks(model.process_group))
        self.units = plan_units(model.module, wire.mesh.topology, policy)
        self._model = model
        parameters = dict(model.module.named_parameters())
        self._units = [_Unit(unit, torch.zeros(unit.padded)) for unit in self.units if unit.trainable]
        self._places = {
            parameters[slot.spec.name]: (unit, slot) for unit in self._units for slot in unit.geometry.slots
        }
        self._under_way: list[tuple[_Unit, Reduction]] = []
        self._futures: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        model.register_comm_hook(None, self._taker())

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most ``max_norm``; returns the norm before scaling.

        Every rank has all gradients, so this sends no message.
        """
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def _taker(self) -> Callable[[Any, Any], Any]:
        """Returns the communication hook, a function that DDP calls with each bucket of gradients.

        The hook refers to this object weakly.  Python's garbage collector does not see DDP's reference to the hook, so
        a strong reference would keep this object alive for ever.
        """
        reference = weakref.ref(self)

        # The function has no annotations, since DDP would compare them with its own types.
        def take(_, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            joined = reference()
            if joined is None:
                raise HostError(
                    "DDP reduces gradients, but the InDDP of its model was deleted: keep a reference to the InDDP"
                )
            return joined._take(bucket)  # noqa: SLF001  # the hook belongs to this class

        return take

    def _take(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Copy this rank's gradients from one of DDP's buckets into the units, and start reductions.

        The reduction of a unit starts as soon as the unit has all its gradients.

        Returns a future, which is completed after the last bucket of the backward pass.  The value of the future is the
        bucket's buffer, which then holds the mean gradients.

        Raises HostError: if the gradients are sparse.
        """
        if bucket.buffer().is_sparse:
            raise HostError(
                "gradients in DDP are sparse, which is not supported: set sparse=False in embeddings"
            )
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            unit, slot = self._places[parameter]
            unit.flat[slot.offset : slot.end].view(slot.spec.shape).copy_(gradient)
            unit.back.append((gradient, slot))
            if len(unit.back) == len(unit.geometry.slots):
                for _, under_way in self._under_way:
                    under_way.post_next_hop()
                reduction = self._reduction(unit.geometry.name, unit.geometry.piece)
                reduction.start(unit.flat)
                self._under_way.append((unit, reduction))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._futures.append((future, bucket.buffer()))
        if bucket.is_last():
            self._finish()
        return future

    def _finish(self) -> None:
        """Wait for all reductions, write the mean gradients to DDP's buckets, and complete the buckets' futures.

        Called after the last bucket of a backward pass.
        """
        for unit in self._units:
            if len(unit.back) != len(unit.geometry.slots):
                raise HostError(
                    f"DDP reduced only {len(unit.back)} of {len(unit.geometry.slots)} gradients of unit "
                    f"{unit.geometry.name!r}: before you create InDDP, call requires_grad_(False) on the parameters "
                    "that DDP does not reduce"
                )
        for unit, under_way in self._under_way:
            mean = under_way.finish()  # (padded,) fp32
            if self.wire.observer is not None:
                first, end = unit.geometry.received_piece(self.wire.mesh.rank)
                self.wire.observer.averaged(unit.geometry.name, first, mean[first:end])
            for gradient, slot in unit.back:
                gradient.copy_(mean[slot.offset : slot.end].view(slot.spec.shape))
            unit.back.clear()
        self._under_way.clear()
        for future, buffer in self._futures:
            future.set_result(buffer)
        self._futures.clear()
