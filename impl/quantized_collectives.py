"""Offers a quantised all-gather and reduce-scatter as plain functions, for code that does not use the engine.

The functions can be called from FSDP, from a DDP communication hook, or from a script::

    mesh = zeropp.mesh(nodes=2, ranks_per_node=4)
    weights = zeropp.quantized_all_gather(shard, "int8:2048", mesh)              # qwZ
    mean = zeropp.quantized_reduce_scatter(gradient, ("int4:256", "int4:256"), mesh)  # qgZ

All ranks of the mesh must make the same calls, with equal shapes and options.  The mesh may also be torch's
``DeviceMesh``, a process group or a topology.  A :class:`~impl.comm.wire.Wire` sends the messages, and counts their
bytes in its ledger.  Pass one wire to all calls to reuse its buffers and shared memory, and to read the ledger.
Without a wire, each call makes a new wire.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from impl import ops
from impl.codecs.codec import Codec, common_grain, parse
from impl.codecs.reference import NAMES
from impl.codecs.rounding_noise import Key, Noise, shard_stride
from impl.comm.all_gather import FrameGather, by_axes
from impl.comm.mesh import AnyMesh, Mesh
from impl.comm.reduce_scatter import reduction_of
from impl.comm.wire import Wire, wire_of
from impl.plan.hops import Hop, gather_hops
from impl.plan.traffic import Tag
from impl.policy.policy import Gather, Policy, Reduce

CodecOrText = Codec | str


def quantized_all_gather(
    x: Tensor,
    codec: CodecOrText,
    mesh: AnyMesh,
    *,
    gather: Gather = "hierarchical",
    wire: Wire | None = None,
    key: Key | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """All-gather ``x``: every rank encodes its ``x`` once, and all ranks decode the same bits.

    Args:
        x: (...) fp32, bf16 or fp16 on the mesh's device, in any layout.  No gradient flows back to it.
        codec: the codec of the values, e.g. ``int8:2048``.
        mesh: the ranks that take part, in any form that :meth:`Mesh.of` accepts.
        gather: ``hierarchical`` sends every rank's values once to each other node, and then passes them on inside that
            node.  ``flat`` is the backend's own all-gather over all ranks, usually a ring.
        wire: the wire that sends the messages; by default a new wire.
        key: the seed of a stochastic codec's random bits.  Pass a key with another ``step`` in each call.
        out: (world, ...) contiguous, the tensor to write to; by default a new tensor.  It may share memory
            with ``x``.

    Returns:
        (world, ...) of the type of ``x``: all ranks' values in rank order.

    Raises:
        ValueError: in each of these cases:

            - ``x`` is sparse, a tensor subclass, of another type, or on another device than the mesh;
            - ``codec`` names no codec, or rounds stochastically and ``key`` is None;
            - ``gather`` names a user's own class;
            - ``out`` has another shape, type or device than the result, is not contiguous, is negated lazily
              (``is_neg()``), or requires gradients.
        WireError: if ``wire`` is over another mesh.
    """
    mesh = Mesh.of(mesh)
    flat, numel, world = _flat(x, mesh), x.numel(), mesh.topology.world
    (codec,) = _checked([codec], key)
    hops = gather_hops(Policy(weights=codec, gather=gather), mesh.topology, numel)
    if not hops:
        raise ValueError(
            f"gather={gather!r} names a method of your own, which needs zeropp.shard(): pass 'hierarchical' or 'flat'"
        )
    wire = wire_of(mesh, wire)
    if out is None:
        out = flat.new_empty((world, *x.shape))
    else:
        _check_plain("out", out, mesh)
        if out.shape != (world, *x.shape) or out.dtype != x.dtype or not out.is_contiguous() or out.is_neg():
            minus = ", and torch negates it lazily (is_neg()): pass another tensor" if out.is_neg() else ""
            raise ValueError(
                f"out must be a contiguous tensor of shape {(world, *x.shape)} and {x.dtype}, got "
                f"{tuple(out.shape)} {out.dtype} with strides {out.stride()}{minus}"
            )
        if out.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "out requires gradients, but autograd would not see the write: pass out.detach()"
            )
        if flat.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
            flat = flat.clone()  # otherwise a part of ``x`` could be overwritten before it is encoded
    if numel == 0:
        return out
    noise = key.noise(mesh.rank * shard_stride(numel)) if key is not None and codec.stochastic else None
    whole, tag = out.detach().view(-1), Tag("forward", "weights")
    with wire.calling("quantized_all_gather()"):
        Gathering(wire, hops, flat, whole, tag=tag, noise=noise).finish()
    return out


class Gathering:
    """All-gathers one encoded shard of each rank, in two parts, so that the caller can compute in between.

    The constructor posts the first messages.  :meth:`finish` waits for all messages, and decodes the shards.

    Args:
        wire: sends the messages.
        hops: the steps of the all-gather, such as one between nodes and one inside nodes, as
            :func:`impl.plan.hops.gather_hops` returns them for a policy without hpZ.
        shard: (S,) this rank's values.
        whole: (ranks * S,) receives all shards, in rank order.
        tag: the phase and purpose under which the wire counts the bytes.
        noise: the random bits of a stochastic codec.
    """

    def __init__(
        self,
        wire: Wire,
        hops: Sequence[Hop],
        shard: Tensor,
        whole: Tensor,
        *,
        tag: Tag,
        noise: Noise | None = None,
    ) -> None:
        self._codec = hops[0].codec
        self._into = whole.view(torch.uint8) if hops[0].sends_elements(NAMES.get(whole.dtype)) else None
        self._target = by_axes(whole, [hop.axis for hop in hops[::-1]], shard.numel())
        self._gather = FrameGather(wire, hops)
        self._gather.start(
            tag, lambda hop, message: ops.encode(hop.codec, shard, message, noise=noise), self._into
        )

    def finish(self) -> None:
        """Wait until all ranks' shards have arrived, and decode them into ``whole``."""
        frames = self._gather.finish()
        if self._into is None or frames.data_ptr() != self._into.data_ptr():
            ops.decode(self._codec, frames.view(*self._target.shape[:-1], -1), self._target)
        self._gather.close()


def quantized_reduce_scatter(
    x: Tensor,
    codecs: CodecOrText | Sequence[CodecOrText],
    mesh: AnyMesh,
    *,
    reduce: Reduce = "two_hop",
    chunks: int = 1,
    wire: Wire | None = None,
    key: Key | None = None,
) -> Tensor:
    """Reduce-scatter ``x``: return this rank's part of the mean over all ranks, accumulated in fp32.

    Args:
        x: (world * n, ...) fp32, bf16 or fp16 on the mesh's device, in any layout.  No gradient flows back
            to it.
        codecs: a pair: first the codec of the hop inside nodes, then the codec of the hop between nodes.  A single
            codec is used for both hops, or for the only hop of ``one_hop`` and ``ring``.
        mesh: the ranks that take part, in any form that :meth:`Mesh.of` accepts.
        reduce: ``two_hop``, ``one_hop`` or ``ring``, as in :class:`~impl.policy.policy.Policy`.
        chunks: the number of chunks into which each rank's part is cut.  While one chunk is sent between nodes,
            the next chunk is sent inside them.
        wire: the wire that sends the messages; by default a new wire.
        key: the seed of stochastic codecs' random bits.  Pass a key with another ``step`` in each call.

    Returns:
        (n, ...) fp32: rows ``rank * n`` to ``(rank + 1) * n`` of the mean.

    Raises:
        ValueError: in each of these cases:

            - ``x`` or a codec is refused for a reason that :func:`quantized_all_gather` lists;
            - the number of ranks does not divide the first dimension of ``x``;
            - ``codecs`` is a sequence of another length than 2.
        PolicyError: if this ``reduce`` does not allow these ``codecs`` or ``chunks``.
        WireError: if ``wire`` is over another mesh.
    """
    mesh = Mesh.of(mesh)
    pair = [codecs] * 2 if isinstance(codecs, str) or not isinstance(codecs, Sequence) else codecs
    if len(pair) != 2:
        raise ValueError(f"codecs has {len(pair)} entries: pass one codec, or one for each of the two hops")
    flat, gradients = _flat(x, mesh), _checked(pair, key)
    world = mesh.topology.world
    if x.dim() == 0 or x.shape[0] % world:
        raise ValueError(
            f"x of shape {tuple(x.shape)} cannot be cut for {world} ranks: its first dimension must be a "
            f"multiple of {world}"
        )
    policy = Policy(gradients=(gradients[0], gradients[1]), reduce=reduce, chunks=chunks)
    shape = (x.shape[0] // world, *x.shape[1:])
    shard = math.prod(shape)
    if shard == 0:
        return torch.zeros(shape, device=flat.device)
    wire, tag = wire_of(mesh, wire), Tag("backward", "gradients")
    reduction = reduction_of(policy, wire, tag, shard, common_grain(*policy.gradients))
    key = None if key is None else dataclasses.replace(key, source=mesh.rank)
    with wire.calling("quantized_reduce_scatter()"):
        reduction.start(flat, key=key)
        return reduction.finish().view(shape)


def _checked(codecs: Sequence[CodecOrText], key: Key | None) -> list[Codec]:
    """Return a list of the given codecs; a codec that is given as text is parsed.

    Raises:
        ValueError: if a text names no codec.  Also if a codec is stochastic and ``key`` is None, since the random bits
            come from the key.
    """
    parsed = [codec if isinstance(codec, Codec) else parse(codec) for codec in codecs]
    for codec in parsed:
        if codec.stochastic and key is None:
            raise ValueError(f"{codec} rounds stochastically and needs random bits: pass key=")
    return parsed


def _flat(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the values of ``x`` in row-major order as a contiguous tensor (numel,), which may share memory with ``x``.

    The values are copied only if ``x`` is not contiguous, or if torch negates it lazily (``x.is_neg()``).

    Raises:
        ValueError: if ``x`` is not fp32, bf16 or fp16, or is not a dense tensor on the device of ``mesh``.
    """
    _check_plain("x", x, mesh)
    if x.dtype not in NAMES:
        raise ValueError(
            f"quantised collectives take {', '.join(NAMES.values())}, got {x.dtype}: convert x first"
        )
    # Kernels read memory, and do not know of torch's bit that marks a view as negated.
    return x.detach().resolve_neg().contiguous().view(-1)


def _check_plain(name: str, x: Tensor, mesh: Mesh) -> None:
    """Raise a ValueError unless ``x`` is a dense ``torch.Tensor`` or ``nn.Parameter`` on the device of ``mesh``.

    ``name`` is the name of ``x`` in the message.  Other subclasses of ``torch.Tensor`` are refused.
    """
    if type(x) not in (Tensor, nn.Parameter):
        kind = type(x).__name__
        raise ValueError(f"{name} is a {kind}: pass a plain torch.Tensor, such as to_local() of a DTensor")
    if x.layout != torch.strided or x.is_nested:
        layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise ValueError(
            f"{name} is a {layout} tensor, not a dense one: convert it first, a sparse tensor with {name}.to_dense()"
        )
    if mesh.device not in (x.device, torch.device(x.device.type)):
        raise ValueError(f"{name} is on {x.device}, but the mesh is on {mesh.device}: move {name} there")
