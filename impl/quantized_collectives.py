"""Quantised all-gather and reduce-scatter as functions, for code without our engine: FSDP, a hook, a script::

    mesh = Mesh.create(Topology(nodes=2, ranks_per_node=4))
    weights = quantized_all_gather(shard, "int8:2048", mesh)              # qwZ
    mean = quantized_reduce_scatter(gradient, ("int4:256", "int4:256"), mesh)  # qgZ

All ranks of the mesh, which may be torch's ``DeviceMesh``, must call them with equal shapes and options.  A
:class:`~impl.comm.wire.Wire` that is passed keeps its buffers, its shared memory and its ledger from call to
call; without one each call has its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from impl import ops
from impl.codecs.codec import Codec, common_grain, parse
from impl.codecs.reference import NAMES
from impl.codecs.rounding_noise import Key, Noise, shard_stride
from impl.comm.all_gather import FrameGather, are_elements, by_axes
from impl.comm.mesh import Mesh
from impl.comm.reduce_scatter import Reduction, Ring
from impl.comm.wire import Wire, wire_of
from impl.plan.policy import Gather, Policy, Reduce
from impl.plan.shard_layout import chunked
from impl.plan.topology import Axis
from impl.plan.traffic import Tag

CodecOrText = Codec | str


def quantized_all_gather(
    x: Tensor,
    codec: CodecOrText,
    mesh: Mesh | DeviceMesh,
    *,
    gather: Gather = "hierarchical",
    wire: Wire | None = None,
    key: Key | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """All ranks' ``x``, encoded once by its owner and decoded to the same bits everywhere.

    Args:
        x: (...) fp32, bf16 or fp16 on the mesh's device, in any layout; gradients do not flow back to it.
        codec: of the values, e.g. ``int8:2048``.
        mesh: the ranks.
        gather: ``hierarchical`` crosses each link between nodes once; ``flat`` is the library's ring.
        wire: what sends.
        key: of a stochastic codec's random bits; change its step from call to call.
        out: contiguous, to write to; a new tensor by default.  It may share memory with ``x``.

    Returns (world, ...) of ``x``'s type, in rank order.  Raises ValueError: for a sparse tensor, a tensor
    subclass, another type or device, a text that is no codec, a stochastic one without a key, or an ``out``
    that does not fit.
    """
    mesh = Mesh.of(mesh)
    flat, numel, world = _flat(x, mesh), x.numel(), mesh.topology.world
    (codec,) = _checked([codec], key)
    axes, _ = Policy(weights=codec, gather=gather).gather_axes(mesh.topology)
    wire = wire_of(mesh, wire)
    if out is None:
        out = flat.new_empty((world, *x.shape))
    else:
        _check_plain("out", out, mesh)
        if out.shape != (world, *x.shape) or out.dtype != x.dtype or not out.is_contiguous() or out.is_neg():
            minus = ", negated (resolve_neg() makes it plain)" if out.is_neg() else ""
            raise ValueError(
                f"out holds {(world, *x.shape)} {x.dtype} side by side, got {tuple(out.shape)} {out.dtype} "
                f"with strides {out.stride()}{minus}"
            )
        if out.requires_grad and torch.is_grad_enabled():
            raise ValueError("out requires gradients, which would miss the write: pass out.detach()")
        if flat.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
            flat = flat.clone()  # else a part of ``x`` could be overwritten before it is encoded
    if numel == 0:
        return out
    noise = key.noise(mesh.rank * shard_stride(numel)) if key is not None and codec.stochastic else None
    whole, tag = out.detach().view(-1), Tag("forward", "weights")
    with wire.calling("quantized_all_gather()"):
        Gathering(wire, codec, axes, flat, whole, tag=tag, ring=gather == "flat", noise=noise).finish()
    return out


class Gathering:
    """An all-gather of one shard (S,) of every rank, encoded by its owner; the constructor starts it.

    ``whole`` (ranks * S,) receives all shards, in rank order; ``axes`` are those of the hops, in their order;
    ``ring`` uses the library's all-gather over the whole world.
    """

    def __init__(
        self,
        wire: Wire,
        codec: Codec,
        axes: Sequence[Axis],
        shard: Tensor,
        whole: Tensor,
        *,
        tag: Tag,
        ring: bool,
        noise: Noise | None = None,
    ) -> None:
        numel = shard.numel()
        self._codec = codec
        self._into = whole.view(torch.uint8) if are_elements(codec, whole.dtype, numel) else None
        self._target = by_axes(whole, axes[::-1], numel)
        self._hops = FrameGather(wire, axes, codec.frame_bytes(numel), ring=ring)
        ops.encode(codec, shard, self._hops.open(tag, self._into), noise=noise)
        self._hops.post()

    def finish(self) -> None:
        """Wait for all shards, and decode them."""
        frames = self._hops.finish()
        if self._into is None or frames.data_ptr() != self._into.data_ptr():
            ops.decode(self._codec, frames, self._target)
        self._hops.close()


def quantized_reduce_scatter(
    x: Tensor,
    codecs: CodecOrText | Sequence[CodecOrText],
    mesh: Mesh | DeviceMesh,
    *,
    reduce: Reduce = "two_hop",
    chunks: int = 1,
    wire: Wire | None = None,
    key: Key | None = None,
) -> Tensor:
    """This rank's part of the mean of all ranks' ``x``, accumulated in fp32.

    Args:
        x: (world * n, ...) fp32, bf16 or fp16 on the mesh's device, in any layout; gradients do not flow
            back to it.
        codecs: of the hop inside nodes and of that between them; one for both, or for the only one.
        mesh: the ranks.
        reduce: ``two_hop``, ``one_hop`` or ``ring``, as in :class:`~impl.plan.policy.Policy`.
        chunks: pieces whose two hops overlap.
        wire: what sends.
        key: of stochastic codecs' random bits; change its step from call to call.

    Returns (n, ...) fp32.  Raises ValueError: as :func:`quantized_all_gather`, for a first dimension that the
    world does not divide, and another number of codecs.  PolicyError: for what cannot be carried out.
    """
    mesh = Mesh.of(mesh)
    pair = [codecs] * 2 if isinstance(codecs, str) or not isinstance(codecs, Sequence) else codecs
    if len(pair) != 2:
        raise ValueError(f"codecs: one, or one for each of two hops, got {len(pair)}")
    flat, gradients = _flat(x, mesh), _checked(pair, key)
    world = mesh.topology.world
    if x.dim() == 0 or x.shape[0] % world:
        raise ValueError(
            f"{world} ranks cannot share {tuple(x.shape)}: its first dimension must be divisible"
        )
    policy = Policy(gradients=(gradients[0], gradients[1]), reduce=reduce, chunks=chunks)
    shape = (x.shape[0] // world, *x.shape[1:])
    shard = math.prod(shape)
    if shard == 0:
        return torch.zeros(shape, device=flat.device)
    kind, wire = Ring if reduce == "ring" else Reduction, wire_of(mesh, wire)
    reduction = kind(
        wire=wire,
        hops=policy.reduce_axes(mesh.topology),
        tag=Tag("backward", "gradients"),
        piece=shard,
        chunks=chunked(shard, chunks, common_grain(*policy.gradients)),
    )
    key = None if key is None else dataclasses.replace(key, source=mesh.rank)
    with wire.calling("quantized_reduce_scatter()"):
        reduction.start(flat, key=key)
        return reduction.finish().view(shape)


def _checked(codecs: Sequence[CodecOrText], key: Key | None) -> list[Codec]:
    """``codecs`` as values that the random bits of ``key`` suffice for."""
    parsed = [codec if isinstance(codec, Codec) else parse(codec) for codec in codecs]
    for codec in parsed:
        if codec.stochastic and key is None:
            raise ValueError(f"{codec} rounds stochastically: it needs a key")
    return parsed


def _flat(x: Tensor, mesh: Mesh) -> Tensor:
    """(numel,) the values of ``x`` in row-major order, side by side in memory; copied if they are not yet."""
    _check_plain("x", x, mesh)
    if x.dtype not in NAMES:
        raise ValueError(f"quantised collectives take {', '.join(NAMES.values())}, got {x.dtype}")
    return x.detach().resolve_neg().contiguous().view(-1)  # kernels read memory, not torch's bit for -x


def _check_plain(name: str, x: Tensor, mesh: Mesh) -> None:
    """Refuse what is not a dense tensor of torch's own class on the device of ``mesh``."""
    if type(x) not in (Tensor, nn.Parameter):
        kind = type(x).__name__
        raise ValueError(f"{name} is a {kind}, expected a plain torch.Tensor, as to_local() of a DTensor is")
    if x.layout != torch.strided or x.is_nested:
        layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise ValueError(
            f"{name} is a {layout} tensor: pass a dense one, as {name}.to_dense() is of a sparse one"
        )
    if mesh.device not in (x.device, torch.device(x.device.type)):
        raise ValueError(f"{name} is on {x.device}, and the mesh is on {mesh.device}: move it there")
