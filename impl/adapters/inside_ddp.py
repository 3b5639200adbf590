"""DDP with our collectives: its communication hook averages gradients as a policy of stage 0 does.

They are reduced in hops, then the mean is gathered; :mod:`impl.adapters.traffic` predicts the bytes.
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

from impl.adapters.joined import HostError, Joined
from impl.comm.reduce_scatter import Reduction
from impl.comm.wire import Wire
from impl.engine.unit_planning import plan_units
from impl.plan.policy import Policy
from impl.plan.shard_layout import Slot, UnitGeometry


@dataclass(slots=True)
class _Unit:
    """One unit's gradients on their way from DDP's buckets and back."""

    geometry: UnitGeometry
    flat: Tensor  # (padded,) fp32; padding stays zero
    back: list[tuple[Tensor, Slot]] = field(default_factory=list)  # gradients in DDP's buckets


class InDDP(Joined):
    """DDP with its gradients carried; all ranks must make it, before the first backward pass, and keep it.

    Gradients travel in the units of a policy of stage 0, one a block, so that bytes do not depend on DDP's
    buckets.  Buckets fill units, in one order on all ranks; a full unit's reduction starts at once and
    posts its next hop whenever another starts; the last bucket waits for all.

    ``model`` is in DDP over all ranks of ``wire.mesh``.  ``policy``, of stage 0, sets codecs of gradients,
    reduce and chunks; all else is as in :data:`~impl.adapters.traffic.BASES`.

    Raises HostError: for a mesh of other ranks than DDP's, or off the CPU.  PolicyError, GeometryError: for a
    policy that DDP cannot carry out, or that does not fit the model.
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
        """Scale all gradients, which each rank has, to a norm of at most ``max_norm``; returns the norm."""
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def _taker(self) -> Callable[[Any, Any], Any]:
        """The hook: DDP keeps it where Python's garbage collector cannot look, so it holds us weakly."""
        reference = weakref.ref(self)

        # Without annotations, which DDP would compare with its own types.
        def take(_, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            joined = reference()
            if joined is None:
                raise HostError("DDP reduces gradients, but the InDDP of its model is gone: keep it")
            return joined._take(bucket)  # noqa: SLF001  # its own hook

        return take

    def _take(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Take a bucket of local gradients; the future's value is its buffer, once it holds the mean."""
        if bucket.buffer().is_sparse:
            raise HostError("DDP brings sparse gradients: of an embedding expected sparse=False")
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
        """After the last bucket: wait for all reductions and write the means back."""
        for unit in self._units:
            if len(unit.back) != len(unit.geometry.slots):
                raise HostError(
                    f"DDP brought {len(unit.back)} of {len(unit.geometry.slots)} gradients of unit "
                    f"{unit.geometry.name!r}: none may be frozen or ignored after InDDP took it"
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
