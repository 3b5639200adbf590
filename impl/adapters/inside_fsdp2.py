"""Gathers FSDP2's weights (qwZ) and reduces its gradients (qgZ) with this project's collectives.

The collectives are set by FSDP2's ``set_custom_all_gather`` and ``set_custom_reduce_scatter``.  FSDP2's schedule,
the optimizer and the training loop stay as they are::

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

from impl.adapters.joined import Joined, fsdp2_groups
from impl.adapters.traffic import GroupGeometry, HostError
from impl.codecs.reference import NAMES
from impl.comm.wire import Wire
from impl.plan.hops import gather_hops
from impl.plan.policy import Policy
from impl.plan.shard_layout import ROOT
from impl.plan.traffic import Phase, Tag
from impl.quantized_collectives import Gathering

_TINY: Final = 1e-6  # added to a norm before dividing by it, as in torch.nn.utils.clip_grad_norm_


class InFSDP2(Joined):
    """Gathers the weights and reduces the gradients of a model that ``fully_shard`` has sharded.

    All ranks must create it before the first forward pass.  Gathered weights and mean gradients equal those of
    FSDP2's own collectives, except for the codecs and, with three or more ranks, for the order of sums.

    Args:
        model: the root, itself an ``FSDPModule``, sharded over all ranks of ``wire.mesh``.
        wire: the transport, on the CPU.
        policy: a policy that may set ``weights``, ``gradients``, ``gather``, ``reduce`` and ``chunks``; the other
            fields must be as in :data:`~impl.adapters.traffic.BASES`, except those that lay out units, which
            FSDP2 does not use.

    Raises:
        HostError: if the model is not sharded as a whole over all ranks in one dimension, or if the mesh is not
            on the CPU; also in the first pass, if several modules share one parameter group.
        PolicyError: if FSDP2 cannot carry out the policy.
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
        # Prepended, so that the hook runs before FSDP2's own, and the root's gather has the right phase too.
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most ``max_norm``; all ranks must call it.

        Unlike ``torch.nn.utils.clip_grad_norm_``, this method sends its messages over the wire, so the ledger
        counts them.  Returns the norm before scaling.
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
        """Raise HostError unless the whole model is sharded over the wire's ranks in one dimension."""
        if not isinstance(model, FSDPModule):
            kind = type(model).__name__
            raise HostError(f"{kind} is not sharded: call fully_shard() on it and its blocks first")
        world = self.wire.mesh.topology.world
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor):
                raise HostError(
                    f"parameter {name!r} is not sharded: call fully_shard() without ignored_params"
                )
            shape = tuple(parameter.device_mesh.shape)
            if shape != (world,):
                raise HostError(
                    f"parameter {name!r} is sharded over a device mesh of shape {shape}, expected ({world},): "
                    "replicas (HSDP) and other axes are not supported"
                )
            self.check_ranks(parameter.device_mesh.mesh.tolist())

    def _enter(self, *_: Any) -> None:
        self.phase = "forward" if torch.is_grad_enabled() else "evaluate"

    def _leave(self, *_: Any) -> None:
        self.phase = "backward"

    def check(self, group: GroupGeometry, verb: str, numel: int, dtype: torch.dtype, ranks: int) -> None:
        """Raise HostError for a collective whose ranks, type or size are not those of the group."""
        world, prefix = self.wire.mesh.topology.world, f"FSDP2 {verb} {group.name!r}"
        if ranks != world:
            raise HostError(f"{prefix} over {ranks} of {world} ranks: use reshard_after_forward=True")
        if dtype not in NAMES:
            raise HostError(f"{prefix} in {dtype}: use one of {', '.join(NAMES.values())}")
        if verb == "gathers" and numel != group.shard:
            raise HostError(
                f"{prefix} with {numel} elements a rank, but its parameters have {group.shard}: "
                "call fully_shard() on one module at a time, without shard_placement_fn"
            )


class _Pending(dist.Work):
    """Wraps a gather under way as a ``Work``, on which FSDP2 waits."""

    def __init__(self, gathering: Gathering) -> None:
        super().__init__()
        self._gathering: Gathering | None = gathering

    def wait(self, timeout: Any = None) -> bool:
        """Finish the gather.  ``timeout`` is ignored, since the wire has a timeout of its own."""
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            gathering.finish()
        return True


class _OfGroup(DefaultAllocMixin):
    """The common part of the collectives of one parameter group; torch's mixin allocates their buffers."""

    def __init__(self, joined: InFSDP2, group: GroupGeometry) -> None:
        self._joined, self._group = joined, group


class _Gather(_OfGroup, AllGather):
    """FSDP2's all-gather of one parameter group; it is always asynchronous, to overlap computation."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """Gather ``input_tensor`` (S,) to ``output_tensor`` (world * S,); the input may be a part of the output."""
        joined, name = self._joined, self._group.name
        joined.check(self._group, "gathers", input_tensor.numel(), input_tensor.dtype, group.size())
        wire, policy, tag = joined.wire, joined.policy, Tag(joined.phase, "weights", name)
        hops = gather_hops(policy, wire.mesh.topology, input_tensor.numel())
        return _Pending(Gathering(wire, hops, input_tensor, output_tensor, tag=tag))


class _Scatter(_OfGroup, ReduceScatter):
    """FSDP2's reduce-scatter of one parameter group; it is synchronous, as FSDP2 expects on a CPU."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor`` (world * S,) to this rank's part, ``output_tensor`` (S,)."""
        joined, name = self._joined, self._group.name
        joined.check(self._group, "reduces", output_tensor.numel(), input_tensor.dtype, group.size())
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise HostError(f"FSDP2 reduces {name!r} with {op}: only AVG and SUM are supported")
        reduction = joined._reduction(name, output_tensor.numel())  # noqa: SLF001  # a part of its adapter
        reduction.start(input_tensor)
        mean = reduction.finish()  # (S,) fp32
        if (observer := joined.wire.observer) is not None:
            observer.averaged(name, joined.wire.mesh.rank * mean.numel(), mean)
        output_tensor.copy_(mean if op == dist.ReduceOp.AVG else mean.mul_(group.size()))
