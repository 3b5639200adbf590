"""Our collectives inside other engines: FSDP2 and DDP keep their training loop, we carry their messages.

FSDP2 gathers weights (qwZ) and scatters gradients (qgZ) through the protocols of
``set_custom_all_gather`` and ``set_custom_reduce_scatter``; DDP averages gradients through its
communication hook, as a policy of stage 0 does: reduced in hops, then the mean gathered.  Everything
goes through one :class:`~impl.comm.wire.Wire`, and :mod:`impl.adapters.traffic` predicts its ledger::

    for block in blocks:
        fully_shard(block, mesh=device_mesh)
    fully_shard(model, mesh=device_mesh)
    joined = join_fsdp2(model, Wire(mesh), preset("qwz+qgz"))

What a host sends by itself is not ours and in no ledger: DDP's one broadcast of weights when it is made
and of its buckets' order after the first step, and buffers unless ``broadcast_buffers=False``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from impl import ops
from impl.adapters.traffic import (
    GroupGeometry,
    Host,
    check_host,
    chunks_of,
    predict_ddp,
    predict_fsdp2,
)
from impl.codecs.reference import NAMES
from impl.comm.collectives import (
    Reduction,
    Replication,
    Steps,
    Transfer,
    as_frames,
    gather_frames,
    gathered,
    placed,
    reduced,
    replicated,
)
from impl.comm.wire import Tag, Wire
from impl.engine.unit_planning import find_blocks, plan_units
from impl.plan.geometry import ROOT, ParameterSpec, Slot, UnitGeometry
from impl.plan.policy import Policy
from impl.plan.topology import Topology
from impl.plan.traffic import Event, LedgerKey, Phase, Sent

_TINY: Final = 1e-6  # added to a norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does


class HostError(RuntimeError):
    """A host asks for what our collectives cannot do; the message names the numbers."""


def join_fsdp2(model: nn.Module, wire: Wire, policy: Policy) -> InFSDP2:
    """Carry the gathers and scatters of a model that ``fully_shard`` has sharded; all ranks must call it.

    Call it on the root, before the first forward pass.  Gathered weights and mean gradients are what
    FSDP2's own collectives bring, but for the codecs, and for the order of sums from three ranks on.

    Args:
        model: the root, itself an ``FSDPModule`` over all ranks of ``wire.mesh``.
        wire: what sends.
        policy: codecs of weights and gradients, gather, reduce and chunks; all else as it is by default.

    Raises:
        HostError: for a model that is not sharded as a whole, a device mesh that is not all ranks in one
            dimension, or a mesh that is not on the CPU; in the first pass, for modules that share one
            parameter group.
        PolicyError: for a policy that FSDP2 cannot carry out (:func:`~impl.adapters.traffic.check_host`).
    """
    _check("fsdp2", wire, policy)
    if not isinstance(model, FSDPModule):
        raise HostError(
            f"{type(model).__name__} is not sharded: call fully_shard() on it and its blocks first"
        )
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise HostError(f"parameter {name!r} is not sharded: fully_shard() must not ignore it")
        shape, world = parameter.device_mesh.shape, wire.mesh.topology.world
        if tuple(shape) != (world,):
            raise HostError(
                f"parameter {name!r} lies on a device mesh of {tuple(shape)}, expected ({world},): replicas "
                "(HSDP) and other axes are not carried"
            )
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = fsdp2_groups(model, [module for module in modules if module is not model], wire.mesh.topology)
    return InFSDP2(model, modules, groups, wire, policy)


def join_ddp(model: DistributedDataParallel, wire: Wire, policy: Policy) -> InDDP:
    """Carry the gradients of ``model``; all ranks must call it, before the first backward pass.

    DDP's buckets decide when gradients arrive; what travels together are the units of a policy of stage 0,
    one a block of the model, so that bytes do not depend on buckets.

    Args:
        model: in DDP over all ranks of ``wire.mesh``.
        wire: what sends.
        policy: of stage 0: codecs of gradients, reduce and chunks; all else as in
            :data:`~impl.adapters.traffic.BASES`.

    Raises:
        HostError: for a mesh that is not on the CPU.
        PolicyError, GeometryError: for a policy that DDP cannot carry out, or that does not fit the model.
    """
    _check("ddp", wire, policy)
    units = plan_units(model.module, wire.mesh.topology, policy)
    return InDDP(model, units, wire, policy)


def fsdp2_groups(model: nn.Module, blocks: Iterable[nn.Module], topology: Topology) -> list[GroupGeometry]:
    """What FSDP2 gathers together: each of ``blocks``, and the rest with ``model``, the root, first.

    ``model`` may be sharded, or not yet, or on the meta device.

    Args:
        model: the root.
        blocks: modules on which ``fully_shard`` is called by themselves; they may lie in one another.
        topology: its ranks share each parameter.

    Raises:
        HostError: for a parameter without dimensions, which FSDP2 cannot cut.
    """
    names = {module: name for name, module in model.named_modules()}
    owners = [model, *blocks]
    groups = []
    for owner in owners:
        inside = {module for other in owners if other is not owner for module in _below(other, owner)}
        found: dict[nn.Parameter, str] = {}
        for module in owner.modules():
            if module in inside:
                continue
            for key, parameter in module.named_parameters(recurse=False):
                name = names[module]
                found.setdefault(parameter, f"{name}.{key}" if name else key)
        for parameter, name in found.items():
            if parameter.dim() == 0:
                raise HostError(f"FSDP2 cannot cut parameter {name!r}: it has no dimension")
        specs = tuple(ParameterSpec(name, tuple(parameter.shape)) for parameter, name in found.items())
        trained = tuple(parameter.requires_grad for parameter in found)
        groups.append(GroupGeometry(names[owner] or ROOT, specs, trained, topology.world))
    return [group for group in groups if group.parameters]


def hosted_units(
    host: Host, model: nn.Module, topology: Topology, policy: Policy
) -> list[GroupGeometry] | list[UnitGeometry]:
    """What travels together of an unwrapped model, on the meta device too; the blocks are our engine's.

    Raises:
        PolicyError, GeometryError, HostError: as :func:`join_fsdp2` and :func:`join_ddp`.
    """
    check_host(host, policy)
    if host == "fsdp2":
        return fsdp2_groups(model, find_blocks(model), topology)
    return plan_units(model, topology, policy)


def _below(other: nn.Module, owner: nn.Module) -> set[nn.Module]:
    """Modules of ``other`` if it lies inside ``owner``, so that they are not the owner's."""
    return set(other.modules()) if other in set(owner.modules()) else set()


class InFSDP2:
    """FSDP2 with our collectives on one rank; made by :func:`join_fsdp2`.

    Attributes:
        units: its parameter groups.
        wire: with the ledger.
        policy: what is sent.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[FSDPModule],
        groups: Sequence[GroupGeometry],
        wire: Wire,
        policy: Policy,
    ) -> None:
        self.wire, self.policy, self.units = wire, policy, list(groups)
        self._model = model
        self._phase: Phase = "forward"
        names = {module: name or ROOT for name, module in model.named_modules()}
        of_name = {group.name: group for group in groups}
        self._reserve()
        for module in modules:
            assert isinstance(module, nn.Module)  # noqa: S101  # every FSDPModule is one
            group = of_name.get(names[module])
            if group is not None:
                module.set_custom_all_gather(_Gather(self, group))
                module.set_custom_reduce_scatter(_Scatter(self, group))
        # Prepended after FSDP2's own hook, so that it runs before it: the root's gather is tagged too.
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave)

    def predict(self, events: Iterable[Event]) -> dict[LedgerKey, Sent]:
        """What this rank sends in the passes of ``events``."""
        mesh = self.wire.mesh
        return predict_fsdp2(self.policy, mesh.topology, self.units, mesh.rank, events)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most ``max_norm``; all ranks must call it.

        ``torch.nn.utils.clip_grad_norm_`` would send its sums past the wire.

        Returns:
            () fp64 norm before scaling.
        """
        found = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        gradients = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in found]
        total = torch.zeros((), dtype=torch.float64)
        for gradient in gradients:
            total += gradient.double().square().sum()
        norm = self.wire.all_gather_small(total.view(1)).sum().sqrt()  # of (world, 1) fp64
        factor = (max_norm / (norm + _TINY)).clamp(max=1.0).float()
        for gradient in gradients:
            gradient.mul_(factor)
        return norm

    def describe(self) -> dict[str, Any]:
        """Algorithms, transports and kernels that ran, for the record."""
        return {"gather": self.policy.gather, **_described("fsdp2", self.wire, self.policy)}

    def _enter(self, *_: Any) -> None:
        self._phase = "forward" if torch.is_grad_enabled() else "evaluate"

    def _leave(self, *_: Any) -> None:
        self._phase = "backward"

    def _reserve(self) -> None:
        """Make room in shared memory for the largest messages, so that each arena is made once."""
        topology = self.wire.mesh.topology
        held = max(self.policy.weights.frame_bytes(group.shard) for group in self.units)
        for axis in self.policy.gather_axes(topology)[0]:
            self.wire.reserve(axis, held)
            held *= axis.size
        _reserve_reduction(self.wire, self.policy, max(group.piece for group in self.units))

    def gathering(self, group: GroupGeometry, shard: Tensor, whole: Tensor) -> Steps[None]:
        """Gather ``shard`` (S,) of all ranks into ``whole`` (world * S,), in rank order."""
        policy, numel = self.policy, shard.numel()
        axes, _ = policy.gather_axes(self.wire.mesh.topology)
        nbytes = policy.weights.frame_bytes(numel)

        def write(frame: Tensor) -> None:
            ops.encode(policy.weights, shard, frame)

        into = as_frames(policy.weights, whole, numel)
        tag = Tag(self._phase, "weights", group.name)
        ring = policy.gather == "flat"
        exchange = yield from gather_frames(self.wire, axes, write, nbytes, tag, ring=ring, destination=into)
        frames = gathered(exchange, axes, nbytes)
        if into is None or frames.data_ptr() != into.data_ptr():
            ops.decode(policy.weights, frames, placed(whole, axes[::-1], numel))
        exchange.close()

    def check(self, group: GroupGeometry, what: str, numel: int, dtype: torch.dtype, ranks: int) -> None:
        """Refuse a message that is not the group's.

        Raises:
            HostError: naming the group and what does not fit.
        """
        world, expected = self.wire.mesh.topology.world, group.shard
        if ranks != world:
            raise HostError(
                f"FSDP2 {what} {group.name!r} over {ranks} ranks, the mesh has {world}: groups after forward "
                "are not carried; use reshard_after_forward=True"
            )
        if dtype not in NAMES:
            raise HostError(f"FSDP2 {what} {group.name!r} in {dtype}; expected {', '.join(NAMES.values())}")
        if what == "gathers" and numel != expected:
            raise HostError(
                f"FSDP2 gathers {numel} elements of each rank for {group.name!r}, its parameters make "
                f"{expected}: call fully_shard() on one module at a time, without a placement of your own"
            )


class _Pending(dist.Work):
    """A gather under way, as FSDP2 waits for it."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__()
        self._transfer = transfer

    def wait(self, timeout: Any = None) -> bool:
        """Carry the gather to its end; the wire's own timeout holds."""
        self._transfer.wait()
        return True


class _Gather(AllGather):
    """FSDP2's all-gather of one parameter group.

    The work is handed back also where FSDP2 would block, so that the gather for the next block's backward
    travels while this block computes; all ranks post and wait in FSDP2's one order.
    """

    def __init__(self, joined: InFSDP2, group: GroupGeometry) -> None:
        self._joined, self._group = joined, group

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of its own for each gather."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work:
        """Gather ``input_tensor`` (S,), which may lie in ``output_tensor`` (world * S,)."""
        self._joined.check(self._group, "gathers", input_tensor.numel(), input_tensor.dtype, group.size())
        return _Pending(Transfer(self._joined.gathering(self._group, input_tensor, output_tensor)))


class _Scatter(ReduceScatter):
    """FSDP2's reduce-scatter of one parameter group; done when it returns, as FSDP2 on a CPU expects."""

    def __init__(self, joined: InFSDP2, group: GroupGeometry) -> None:
        self._joined, self._group = joined, group

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of its own for each reduction."""
        return torch.empty(*size, dtype=dtype, device=device)

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
        how = _reduction(joined.wire, joined.policy, name, output_tensor.numel())

        def run() -> Steps[None]:
            mean = yield from reduced(how, joined.policy.reduce, input_tensor)  # (S,) fp32
            output_tensor.copy_(mean if op == dist.ReduceOp.AVG else mean.mul_(group.size()))

        Transfer(run()).wait()


@dataclass(slots=True)
class _Unit:
    """One unit's gradients on their way from DDP's buckets and back."""

    geometry: UnitGeometry
    flat: Tensor  # (padded,) fp32; padding stays zero
    back: list[tuple[Tensor, Slot]] = field(default_factory=list)  # gradients in DDP's buckets


class InDDP:
    """DDP with our collectives on one rank; made by :func:`join_ddp`.

    Buckets fill units; a full unit's reduction starts at once and moves on whenever the next one starts;
    the last bucket waits for all.  Buckets come in one order on all ranks, so units do too.

    Attributes:
        units: what travels together.
        wire: with the ledger.
        policy: what is sent.
    """

    def __init__(
        self, model: DistributedDataParallel, units: Sequence[UnitGeometry], wire: Wire, policy: Policy
    ) -> None:
        self.wire, self.policy, self.units = wire, policy, list(units)
        self._model = model
        self._reserve()
        parameters = dict(model.module.named_parameters())
        self._units = [_Unit(unit, torch.zeros(unit.padded)) for unit in units if unit.trainable]
        self._places = {
            parameters[slot.spec.name]: (unit, slot) for unit in self._units for slot in unit.geometry.slots
        }
        self._transfers: list[Transfer] = []
        self._futures: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        take = self._taker()
        model.register_comm_hook(None, take)

    def predict(self, events: Iterable[Event]) -> dict[LedgerKey, Sent]:
        """What this rank sends in the passes of ``events``."""
        mesh = self.wire.mesh
        return predict_ddp(self.policy, mesh.topology, self.units, mesh.rank, events)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their 2-norm is at most ``max_norm``; every rank has all of them.

        Returns:
            () norm before scaling.
        """
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def describe(self) -> dict[str, Any]:
        """Algorithms, transports and kernels that ran, for the record."""
        return {"gather": "none", **_described("ddp", self.wire, self.policy)}

    def _taker(self) -> Callable[[Any, Any], Any]:
        """The hook: DDP keeps it where Python's garbage collector cannot look, so it holds us weakly.

        Without annotations, which DDP would compare with its own types.
        """
        reference = weakref.ref(self)

        def take(_, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            joined = reference()
            if joined is None:
                raise HostError("DDP reduces gradients, but what join_ddp() returned is gone: keep it")
            return joined._take(bucket)  # noqa: SLF001  # its own hook

        return take

    def _take(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """A bucket's local gradients are there; the future's value is its buffer, once it holds the mean."""
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            unit, slot = self._places[parameter]
            unit.flat[slot.offset : slot.end].view(slot.spec.shape).copy_(gradient)
            unit.back.append((gradient, slot))
            if len(unit.back) == len(unit.geometry.slots):
                self._start(unit)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._futures.append((future, bucket.buffer()))
        if bucket.is_last():
            self._finish()
        return future

    def _start(self, unit: _Unit) -> None:
        """Post the first message of a unit; the units under way go on by one."""
        for transfer in self._transfers:
            transfer.proceed()
        self._transfers = [transfer for transfer in self._transfers if not transfer.complete]
        self._transfers.append(Transfer(self._averaging(unit)))

    def _averaging(self, unit: _Unit) -> Steps[None]:
        wire, policy, geometry = self.wire, self.policy, unit.geometry
        how = _reduction(wire, policy, geometry.name, geometry.piece)
        axes, codec = policy.replica_axes(wire.mesh.topology)
        how = replace(how, goes_on=bool(axes))
        mean = yield from reduced(how, policy.reduce, unit.flat)  # (piece,) fp32
        if axes:  # one rank has the whole mean
            back = Replication(axes=axes, strides=[axis.stride for axis in axes], codec=codec)
            mean = yield from replicated(wire, back, how.tag, mean)  # (padded,) fp32
        for gradient, slot in unit.back:
            gradient.copy_(mean[slot.offset : slot.end].view(slot.spec.shape))

    def _finish(self) -> None:
        """The last bucket is there: wait for everything and hand it back."""
        for unit in self._units:
            if len(unit.back) != len(unit.geometry.slots):
                raise HostError(
                    f"DDP brought {len(unit.back)} of {len(unit.geometry.slots)} gradients of unit "
                    f"{unit.geometry.name!r}: none may be frozen or ignored after join_ddp()"
                )
        for transfer in self._transfers:
            transfer.wait()
        self._transfers.clear()
        for unit in self._units:
            unit.back.clear()
        for future, buffer in self._futures:
            future.set_result(buffer)
        self._futures.clear()

    def _reserve(self) -> None:
        """Make room in shared memory for the largest messages, so that each arena is made once."""
        piece = max((unit.piece for unit in self.units if unit.trainable), default=0)
        axes, codec = self.policy.replica_axes(self.wire.mesh.topology)
        held = codec.frame_bytes(piece)
        for axis in axes:
            self.wire.reserve(axis, held)
            held *= axis.size
        _reserve_reduction(self.wire, self.policy, piece)


def _check(host: Host, wire: Wire, policy: Policy) -> None:
    """Refuse what no host can do, before anything is changed."""
    check_host(host, policy)
    policy.check(wire.mesh.topology)
    if wire.mesh.device.type != "cpu":
        raise HostError(
            f"our collectives inside {host} are carried on the CPU, the mesh is on {wire.mesh.device}"
        )
    ops.prepare(wire.mesh.device)


def _reduction(wire: Wire, policy: Policy, name: str, piece: int) -> Reduction:
    return Reduction(
        wire=wire,
        hops=policy.reduce_axes(wire.mesh.topology),
        tag=Tag("backward", "gradients", name),
        chunks=chunks_of(policy, piece),
        stays=True,
    )


def _reserve_reduction(wire: Wire, policy: Policy, piece: int) -> None:
    slices = wire.mesh.topology.world
    for axis, codec in policy.reduce_axes(wire.mesh.topology):
        largest = max(codec.frame_bytes(end - start) for start, end in chunks_of(policy, piece))
        wire.reserve(axis, slices * largest)
        slices //= axis.size


def _described(host: Host, wire: Wire, policy: Policy) -> dict[str, Any]:
    warning = ops.warning_of(wire.mesh.device)
    return {
        "host": host,
        "reduce": policy.reduce,
        "transports": wire.describe(),
        "kernels": ops.backend_of(wire.mesh.device),
        **({} if warning is None else {"kernels_warning": warning}),
    }
