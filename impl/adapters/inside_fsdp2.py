"""FSDP2 with our collectives: it gathers weights (qwZ) and scatters gradients (qgZ) through them.

By its ``set_custom_all_gather`` and ``set_custom_reduce_scatter``::

    for block in blocks:
        fully_shard(block, mesh=device_mesh)
    fully_shard(model, mesh=device_mesh)
    joined = InFSDP2(model, Wire(mesh), preset("qwz+qgz"))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.distributed.tensor import DTensor

from impl.adapters.joined import HostError, Joined, fsdp2_groups
from impl.adapters.traffic import GroupGeometry
from impl.codecs.reference import NAMES
from impl.comm.wire import Wire
from impl.plan.policy import Policy
from impl.plan.shard_layout import ROOT
from impl.plan.traffic import Phase, Tag
from impl.quantized_collectives import Gathering

_TINY: Final = 1e-6  # added to a norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does


class InFSDP2(Joined):
    """A model that ``fully_shard`` sharded, with its gathers and scatters carried.

    All ranks make it before the first forward pass.  Gathered weights and mean gradients are what FSDP2's
    own collectives bring, but for the codecs, and for the order of sums from three ranks on.

    ``model`` is the root, itself an ``FSDPModule`` over all ranks of ``wire.mesh``.  ``policy`` says codecs
    of weights and gradients, gather, reduce and chunks; all else is as it is by default.

    Raises HostError: for a model that is not sharded as a whole over all ranks in one dimension, or off the
    CPU; in the first pass, for modules that share one group.  PolicyError: for what FSDP2 cannot carry out.
    """

    units: Sequence[GroupGeometry]

    def __init__(self, model: nn.Module, wire: Wire, policy: Policy) -> None:
        super().__init__("fsdp2", wire, policy)
        self._check_sharded(model)
        modules: dict[str, Any] = dict(model.named_modules())
        blocks: list[Any] = [m for name, m in modules.items() if name and isinstance(m, FSDPModule)]
        self.units = groups = fsdp2_groups(model, blocks, wire.mesh.topology)
        self._model = model
        self.phase: Phase = "forward"
        for group in groups:
            module = modules["" if group.name == ROOT else group.name]
            module.set_custom_all_gather(_Gather(self, group))
            module.set_custom_reduce_scatter(_Scatter(self, group))
        # Prepended after FSDP2's own hook, so that it runs before it: the root's gather is tagged too.
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most ``max_norm``; all ranks must call it.

        Uses the wire, which ``torch.nn.utils.clip_grad_norm_`` does not.  Returns the norm before scaling.
        """
        gradients = [p.grad.to_local() for p in self._model.parameters() if isinstance(p.grad, DTensor)]
        total = torch.zeros(1, dtype=torch.float64)
        for gradient in gradients:
            total += gradient.double().square().sum()
        with self.wire.calling("clip_grad_norm_()"):
            norm = self.wire.all_gather_small(total).sum().sqrt()  # of (world, 1) fp64
        factor = (max_norm / (norm + _TINY)).clamp(max=1.0).float()
        for gradient in gradients:
            gradient.mul_(factor)
        return norm

    def _check_sharded(self, model: nn.Module) -> None:
        """Refuse a model that is not sharded as a whole over the wire's ranks, in one dimension."""
        if not isinstance(model, FSDPModule):
            kind = type(model).__name__
            raise HostError(f"{kind} is not sharded: call fully_shard() on it and its blocks first")
        world = self.wire.mesh.topology.world
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor):
                raise HostError(f"parameter {name!r} is not sharded: fully_shard() must not ignore it")
            shape = tuple(parameter.device_mesh.shape)
            if shape != (world,):
                raise HostError(
                    f"parameter {name!r} lies on a device mesh of {shape}, expected ({world},): "
                    "replicas (HSDP) and other axes are not carried"
                )
            self.check_ranks(parameter.device_mesh.mesh.tolist())

    def _enter(self, *_: Any) -> None:
        self.phase = "forward" if torch.is_grad_enabled() else "evaluate"

    def _leave(self, *_: Any) -> None:
        self.phase = "backward"

    def check(self, group: GroupGeometry, verb: str, numel: int, dtype: torch.dtype, ranks: int) -> None:
        """Refuse a message whose ranks, type or size are not the group's."""
        world, prefix = self.wire.mesh.topology.world, f"FSDP2 {verb} {group.name!r}"
        if ranks != world:
            raise HostError(f"{prefix} over {ranks} of {world} ranks: use reshard_after_forward=True")
        if dtype not in NAMES:
            raise HostError(f"{prefix} in {dtype}; expected {', '.join(NAMES.values())}")
        if verb == "gathers" and numel != group.shard:
            raise HostError(
                f"{prefix} of {numel} elements a rank, its parameters make {group.shard}: "
                "call fully_shard() on one module at a time, without a placement of your own"
            )


class _Pending(dist.Work):
    """A gather under way, as FSDP2 waits for it."""

    def __init__(self, gathering: Gathering) -> None:
        super().__init__()
        self._gathering: Gathering | None = gathering

    def wait(self, timeout: Any = None) -> bool:
        """Carry the gather to its end; the wire's own timeout holds."""
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            gathering.finish()
        return True


class _OfGroup(DefaultAllocMixin):
    """One parameter group's collective; each has a buffer of its own."""

    def __init__(self, joined: InFSDP2, group: GroupGeometry) -> None:
        self._joined, self._group = joined, group


class _Gather(_OfGroup, AllGather):
    """FSDP2's all-gather of one parameter group; always asynchronous, to overlap computation."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """Gather ``input_tensor`` (S,), which may lie in ``output_tensor`` (world * S,)."""
        joined, name = self._joined, self._group.name
        joined.check(self._group, "gathers", input_tensor.numel(), input_tensor.dtype, group.size())
        wire, policy, tag = joined.wire, joined.policy, Tag(joined.phase, "weights", name)
        axes, ring = policy.gather_axes(wire.mesh.topology)[0], policy.gather == "flat"
        return _Pending(
            Gathering(wire, policy.weights, axes, input_tensor, output_tensor, tag=tag, ring=ring)
        )


class _Scatter(_OfGroup, ReduceScatter):
    """FSDP2's reduce-scatter of one parameter group; done when it returns, as FSDP2 on a CPU expects."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor`` (world * S,) to this rank's part ``output_tensor`` (S,)."""
        joined, name = self._joined, self._group.name
        joined.check(self._group, "reduces", output_tensor.numel(), input_tensor.dtype, group.size())
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise HostError(f"FSDP2 reduces {name!r} by {op}; expected a mean or a sum")
        reduction = joined._reduction(name, output_tensor.numel())  # noqa: SLF001  # its own
        reduction.start(input_tensor)
        mean = reduction.finish()  # (S,) fp32
        if (observer := joined.wire.observer) is not None:
            observer.averaged(name, joined.wire.mesh.rank * mean.numel(), mean)
        output_tensor.copy_(mean if op == dist.ReduceOp.AVG else mean.mul_(group.size()))
