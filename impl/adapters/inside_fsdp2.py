"""Gathers FSDP2's weights (qwZ) and reduces its gradients (qgZ) with this project's collectives.

FSDP2 accepts replacements for its collectives through ``set_custom_all_gather`` and ``set_custom_reduce_scatter``.
FSDP2's schedule, the optimizer and the training loop stay as they are::

    for block in blocks:
        fully_shard(block, mesh=device_mesh)
    fully_shard(model, mesh=device_mesh)
    joined = fsdp2(model, "qwz+qgz")
    ...
    print(joined.ledger)

[Note: streams of FSDP2]
With NCCL, a stream of the GPU waits for messages, and the CPU does not.  The table says which stream is current when
FSDP2 calls a collective, and how FSDP2 waits for the result:

==============================  =========================  ==========================================================
call                            current stream             how FSDP2 waits for the result
==============================  =========================  ==========================================================
all-gather, ``async_op=False``  FSDP2's all-gather stream  it records an event after the call; the computation's
                                                           stream waits for the event
all-gather, ``async_op=True``   the computation's stream   it calls ``wait()`` of the ``Work`` that the call returns
reduce-scatter                  FSDP2's reduce-scatter     it records an event after the call
                                stream
==============================  =========================  ==========================================================

- All-gather with ``async_op=False``, and reduce-scatter: encoding, all hops (exchanges) and decoding are enqueued on
  the current stream.  The call returns None.  If it returned a ``Work``, FSDP2 would free the gathered buffer at
  another time than with its own collectives.
- All-gather with ``async_op=True``: encoding and the first hop are enqueued on the computation's stream, on which FSDP2
  also copies this rank's shard to the gathered buffer.  The later hops and decoding are enqueued on a side stream,
  which belongs to the wire (the class that sends all messages).  Therefore they overlap with the computation.

The encoded messages are in the wire's buffers.  Before a stream uses one of these buffers again, the stream waits until
the buffer's last use has ended.  The gathered buffer and the mean gradient belong to FSDP2, which keeps them until the
events in the table have passed.

With gloo, the CPU waits for messages and no stream does.  The same holds on GPUs with transport ``staged``, by which
messages go through host memory.  An all-gather then always returns a ``Work``, even if ``async_op`` is False.  FSDP2
calls ``wait()`` of this ``Work`` when it needs the weights; until then the CPU can do other work while the messages are
under way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.distributed.tensor import DTensor

from impl.adapters.joined import Joined, fsdp2_groups
from impl.adapters.traffic import GroupGeometry, HostError, check_host, predict_hosted
from impl.codecs.reference import NAMES
from impl.comm.ledger import Ledger
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.plan.hops import gather_hops
from impl.plan.traffic import Event, LedgerKey, Phase, Sent, Tag
from impl.policy.policy import Policy
from impl.policy.presets import preset
from impl.policy.shard_layout import ROOT
from impl.policy.topology import Topology
from impl.quantized_collectives import Gathering

_TINY: Final = 1e-6  # added to a norm before dividing by it, as in torch.nn.utils.clip_grad_norm_
_adapted: Final[WeakSet[nn.Module]] = WeakSet()  # models that fsdp2() was called with


def fsdp2(
    model: nn.Module, policy: Policy | str = "qwz+qgz", *, mesh: Mesh | Topology | None = None
) -> InFSDP2:
    """Make FSDP2 use this project's quantised collectives for a model that ``fully_shard`` has sharded.

    All ranks of the model's device mesh must call this once, before the first forward pass and after the last call of
    ``fully_shard``.  The training loop does not change.  The adapter works on CPUs with gloo and on GPUs with NCCL,
    with or without FSDP2's mixed precision, and whether or not weights stay gathered after forward.

    Args:
        model: the root module.  ``fully_shard`` must have sharded the root and its blocks over one dimension of a
            device mesh.
        policy: a policy, or the name of a preset.  It may set ``weights``, ``gradients``, ``gather``, ``reduce`` and
            ``chunks``; :class:`InFSDP2` says which values the other fields must have.
        mesh: a topology, or a mesh over the same ranks, that says which ranks share a node.  By default, torchrun's
            ``LOCAL_WORLD_SIZE`` is the number of ranks on a node.

    Returns:
        The adapter.  Its attribute ``ledger`` counts the bytes that this rank sends, by purpose and link, and prints as
        a table.  Its method ``predict()`` computes the same bytes from the policy, and ``clip_grad_norm_()`` clips
        gradients.

    Raises:
        HostError: in these cases:

            - the model is not sharded as a whole, over all ranks and in one dimension;
            - ``mesh`` is a :class:`Mesh` with other ranks than the model's device mesh;
            - ``mesh`` is a topology or None, and this function was called with the model before.
        PolicyError: if FSDP2 cannot carry out the policy; the message names the field or the codec.
        MeshError: if ``mesh`` is a topology with another number of ranks than the model's device mesh, or if ``mesh``
            is None and :meth:`Mesh.of` cannot find out which ranks share a node.
    """
    policy = preset(policy) if isinstance(policy, str) else policy
    check_host("fsdp2", policy)
    if not isinstance(mesh, Mesh):
        device_mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
        if device_mesh is None:
            raise _not_sharded(model)
        if model in _adapted:
            raise HostError(
                f"fsdp2() was called before with this {type(model).__name__}, and the ledger of the first adapter "
                "would count no further messages: use the adapter that the first call returned"
            )
        mesh = Mesh.of(device_mesh) if mesh is None else Mesh.create(mesh, group=device_mesh)
    adapter = InFSDP2(model, Wire(mesh), policy)
    _adapted.add(model)
    return adapter


class InFSDP2(Joined):
    """Gathers the weights and reduces the gradients of a model that ``fully_shard`` has sharded.

    All ranks must create an InFSDP2 before the first forward pass.  Gathered weights and mean gradients are the same as
    with FSDP2's own collectives, except for the errors of the codecs.  With three or more ranks, the gradients may also
    be summed in another order than by FSDP2.

    Args:
        model: the root module, itself an ``FSDPModule``, sharded over all ranks of ``wire.mesh``.
        wire: sends the messages; its mesh must be on the model's device.
        policy: a policy that may set ``weights``, ``gradients``, ``gather``, ``reduce`` and ``chunks``.  It may set
            ``align`` and ``memory.max_padding`` too, but they change nothing here.  All other fields must have the
            values of ``BASES["fsdp2"]`` in :mod:`impl.adapters.traffic`.

    Raises:
        HostError: if the model is not sharded as a whole over all ranks in one dimension, or is on another device than
            the wire.  The first pass raises this error too, if several modules share one parameter group.
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
        topology = wire.mesh.topology
        hops = [*policy.gather_axes(topology)[0], *(axis for axis, _ in policy.reduce_axes(topology))]
        wire.make_groups(hops)  # here, since in a pass some ranks may wait for messages already
        for group in groups:
            module = modules["" if group.name == ROOT else group.name]
            module.set_custom_all_gather(_Gather(self, group))
            module.set_custom_reduce_scatter(_Scatter(self, group))
        # Prepended, so that the hook runs before FSDP2's own, and the root's gather has the right phase too.
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave)

    @property
    def ledger(self) -> Ledger:
        """The bytes and messages that this rank has sent for the model; the ledger prints as a table."""
        return self.wire.ledger

    def predict(self, events: Iterable[Event], *, kept: Collection[str] = (ROOT,)) -> dict[LedgerKey, Sent]:
        """Predict how many bytes and messages this rank sends, without sending them.

        ``events`` are the passes and steps in their order, such as ``["forward", "backward", "step"]``.  ``kept`` are
        the names of the parameter groups that FSDP2 keeps gathered from forward to backward
        (``reshard_after_forward=False``).  See :func:`predict_hosted`.

        The keys of the result are those of the ledger: phase, purpose, unit (here a parameter group), hop and link.
        """
        layout = self.policy, self.wire.mesh.topology, self.units
        return predict_hosted("fsdp2", *layout, rank=self.wire.mesh.rank, events=events, kept=kept)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most ``max_norm``; all ranks must call it.

        Unlike ``torch.nn.utils.clip_grad_norm_``, this method sends its messages over the wire, so the ledger
        counts them.  Returns the norm before scaling, () fp64.
        """
        gradients = [p.grad.to_local() for p in self._model.parameters() if isinstance(p.grad, DTensor)]
        total = torch.zeros(1, dtype=torch.float64, device=self.wire.mesh.device)
        for gradient in gradients:
            total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        with self.wire.calling("clip_grad_norm_()"):
            norm = self.wire.all_gather_small(total).sum().sqrt()  # of (world, 1) fp64
        factor = (max_norm / (norm + _TINY)).clamp(max=1.0).float()
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))  # FSDP2 may keep gradients on the host
        return norm

    def _check_sharded(self, model: nn.Module) -> None:
        """Raise HostError unless the whole model is sharded over the wire's ranks in one dimension."""
        if not isinstance(model, FSDPModule):
            raise _not_sharded(model)
        world, device = self.wire.mesh.topology.world, self.wire.mesh.device
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor):
                raise HostError(
                    f"parameter {name!r} is not sharded: call fully_shard() without ignored_params"
                )
            if parameter.device_mesh.device_type != device.type:
                raise HostError(
                    f"parameter {name!r} is sharded over a device mesh of type {parameter.device_mesh.device_type!r}, "
                    f"but the wire is on {device}: make the wire's mesh from the device mesh, for example with "
                    "zeropp.mesh(group=device_mesh)"
                )
            shape = tuple(parameter.device_mesh.shape)
            if shape != (world,):
                raise HostError(
                    f"parameter {name!r} is sharded over a device mesh of shape {shape}, expected ({world},): "
                    "shard it along one dimension, since replicas (HSDP) and other axes are not supported"
                )
            self.check_ranks(parameter.device_mesh.mesh.tolist())

    def _enter(self, *_: Any) -> None:
        self.phase = "forward" if torch.is_grad_enabled() else "evaluate"

    def _leave(self, *_: Any) -> None:
        self.phase = "backward"

    def check(self, group: GroupGeometry, verb: str, numel: int, dtype: torch.dtype, ranks: int) -> None:
        """Raise HostError if FSDP2 calls a collective of ``group`` in a way that the adapter does not support.

        Args:
            group: the parameter group.
            verb: the collective: ``gathers`` for an all-gather, ``reduces`` for a reduce-scatter.
            numel: the number of elements of one rank's part; checked for ``gathers`` only.
            dtype: the type of the elements.
            ranks: the number of ranks over which FSDP2 calls the collective.
        """
        world, prefix = self.wire.mesh.topology.world, f"FSDP2 {verb} {group.name!r}"
        if ranks != world:
            raise HostError(
                f"{prefix} over only {ranks} of {world} ranks: pass reshard_after_forward=True to fully_shard()"
            )
        if dtype not in NAMES:
            raise HostError(
                f"{prefix} in {dtype}: set the types of the MixedPrecisionPolicy to one of {', '.join(NAMES.values())}"
            )
        if verb == "gathers" and numel != group.shard:
            raise HostError(
                f"{prefix} with {numel} elements a rank, but this module's parameters have {group.shard} a rank: "
                "call fully_shard() on one module at a time, without shard_placement_fn"
            )


def _not_sharded(model: nn.Module) -> HostError:
    return HostError(f"{type(model).__name__} is not sharded: call fully_shard() on it and its blocks first")


class _Pending(dist.Work):
    """The ``Work`` of an all-gather that is under way.

    FSDP2 waits for the all-gather by calling ``wait()``.  The first call of ``wait()`` finishes the all-gather by
    calling ``finish``.
    """

    def __init__(self, finish: Callable[[], object]) -> None:
        super().__init__()
        self._finish: Callable[[], object] | None = finish

    def wait(self, timeout: Any = None) -> bool:
        """Finish the all-gather, unless an earlier call has finished it, and return True.

        ``timeout`` is ignored, since the wire has its own timeout.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True


class _OfGroup(DefaultAllocMixin):
    """Base class of the collectives that FSDP2 calls for one parameter group.

    These collectives allocate their buffers as torch does, by torch's class ``DefaultAllocMixin``.
    """

    def __init__(self, joined: InFSDP2, group: GroupGeometry) -> None:
        self._joined, self._group = joined, group


class _Gather(_OfGroup, AllGather):
    """The all-gather that FSDP2 calls for one parameter group; see [Note: streams of FSDP2]."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather the ``input_tensor`` (S,) of every rank to ``output_tensor`` (world * S,).

        ``input_tensor`` is this rank's shard of S elements, and may be a view of a part of ``output_tensor``.  Only the
        size of ``group`` is used, to check it: messages go over the adapter's wire.

        Returns:
            None if ``async_op`` is False and a stream of the GPU waits for messages (NCCL).  Otherwise a ``Work``;
            FSDP2 calls its method ``wait()`` before it uses the output.
        """
        joined, wire = self._joined, self._joined.wire
        joined.check(self._group, "gathers", input_tensor.numel(), input_tensor.dtype, group.size())
        if wire.gathers is None:  # the host waits for messages
            return _Pending(self._started(output_tensor, input_tensor).finish)
        if not async_op:
            with wire.on_current_stream():
                self._started(output_tensor, input_tensor).finish()
            return None
        gathering = self._started(output_tensor, input_tensor)
        with wire.beside(wire.gathers, posted=True) as arrival:
            gathering.finish()
        return _Pending(partial(wire.join, arrival))

    def _started(self, output_tensor: Tensor, input_tensor: Tensor) -> Gathering:
        """Start an all-gather of every rank's shard ``input_tensor`` to ``output_tensor``, and return it.

        This encodes the rank's shard and posts the first hop, which is the first exchange of the all-gather.
        """
        wire, policy = self._joined.wire, self._joined.policy
        tag = Tag(self._joined.phase, "weights", self._group.name)
        hops = gather_hops(policy, wire.mesh.topology, input_tensor.numel())
        return Gathering(wire, hops, input_tensor, output_tensor, tag=tag)


class _Scatter(_OfGroup, ReduceScatter):
    """The reduce-scatter that FSDP2 calls for one parameter group, always with ``async_op=False``."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor`` (world * S,) over all ranks, and write this rank's part to ``output_tensor`` (S,).

        ``op`` says whether the result is the sum or the mean over all ranks.  Of ``group`` only the size is used.

        Raises HostError: for any other ``op``, or if FSDP2 calls this in a way that the adapter does not support.
        """
        joined, name = self._joined, self._group.name
        joined.check(self._group, "reduces", output_tensor.numel(), input_tensor.dtype, group.size())
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise HostError(
                f"FSDP2 reduces {name!r} with {op}, but only AVG and SUM are supported: do not call "
                "set_gradient_divide_factor()"
            )
        reduction = joined._reduction(name, output_tensor.numel())  # noqa: SLF001  # a part of its adapter
        out = output_tensor if output_tensor.dtype is torch.float32 else None
        with joined.wire.on_current_stream():
            reduction.start(input_tensor, out=out)
            mean = reduction.finish()  # (S,) fp32
            if (observer := joined.wire.observer) is not None:
                observer.averaged(name, joined.wire.mesh.rank * mean.numel(), mean)
            if op == dist.ReduceOp.SUM:
                mean.mul_(group.size())
            if out is None:
                output_tensor.copy_(mean)
