"""Codecs on CUDA: which kernel encodes and decodes what, bit-equal to :mod:`impl.reference`.

:class:`Kernels` turns an operation on tensors into launches, and hands them to whatever runs them: a
device (:func:`impl.cuda.launch.on_device`), or a host that runs the same sources, in tests.  Raw
codecs are casts, which torch does at the speed of memory: they use the reference.

Which kernel (the sources say why):

=====================================  =======================================================
block                                  encode
=====================================  =======================================================
multiple of 8, or the row; to 16,384   ``encode_held``: one launch, one read
other, lcm(block, 8) to 8,192          ``encode_staged``: one launch, one read
all else                               ``encode_extents``, ``encode_given``: two reads
=====================================  =======================================================

``decode_sum_encode`` is one launch where the second codec's block is a multiple of 8, or the row, up to
8,192 elements; otherwise ``decode_sum`` into fp32 and ``encode``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeGuard

import numpy as np
import torch
from torch import Tensor

from impl import reference
from impl.codec import FRAME_ALIGNMENT, Codec, IntCodec, padded_bytes
from impl.cuda.launch import ARGUMENTS, Launch, on_device
from impl.noise import Noise
from impl.reference import Carried

OCTET: Final = 8
THREADS: Final = 256
HELD: Final = 16_384  # elements of a block in registers: 512 threads of four octets
HELD_ALONE: Final = 8_192  # 1024 threads of one octet
STAGED: Final = 8_192  # elements of a tile in shared memory, kStaged of quantize.cu
STAGED_BLOCKS: Final = 1_024  # kStagedBlocks
STAGED_TILE: Final = 2_048  # a tile is about this where the block allows
SCANNED: Final = 4_096  # elements that a thread block of encode_extents scans
MOST_PARTS: Final = 2**31 - 1  # thread blocks along x
MOST_ROWS: Final = 65_535  # along y, and along z
KNOWN_BITS: Final = (4, 8)  # compiled in; 0 stands for all others, said by the launch
TYPES: Final = {torch.float32: "Fp32", torch.bfloat16: "Bf16", torch.float16: "Fp16"}

_BITS: Final = (0, *KNOWN_BITS)
VARIANTS: Final[dict[str, tuple[str, ...]]] = {  # every kernel that can be asked for
    "quantize.cu": (
        *(f"encode_held<{t}, {b}, {octets}>" for t in TYPES.values() for b in _BITS for octets in (1, 4)),
        *(f"encode_{how}<{t}>" for how in ("staged", "extents", "given") for t in TYPES.values()),
    ),
    "dequantize.cu": (
        *(f"decode<{t}, {b}>" for t in TYPES.values() for b in _BITS),
        *(f"decode_sum<{b}>" for b in _BITS),
    ),
    "reduce.cu": tuple(f"decode_sum_encode<{first}, {second}>" for first in _BITS for second in _BITS),
}


@dataclass(frozen=True, slots=True)
class _Rows:
    """Leading dimensions of several tensors, merged to three.

    Attributes:
        sizes: (a, b, c).
        strides: for each tensor, its three strides in bytes.
    """

    sizes: tuple[int, int, int]
    strides: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, *tensors: Tensor) -> _Rows:
        """Rows of tensors with equal leading dimensions; the last dimension is left out.

        Raises:
            ValueError: if three strides cannot describe them, or a grid cannot hold them.
        """
        shape = tensors[0].shape[:-1]
        steps = [[t.stride(dim) * t.element_size() for t in tensors] for dim in range(len(shape))]
        merged: list[tuple[int, list[int]]] = []
        for size, step in zip(shape, steps, strict=True):
            if size == 1:
                continue
            if merged and merged[-1][1] == [size * s for s in step]:
                merged[-1] = (merged[-1][0] * size, step)
            else:
                merged.append((size, step))
        padded = [(1, [0] * len(tensors))] * (3 - len(merged)) + merged
        if len(padded) > 3:
            raise ValueError(
                f"leading dimensions {tuple(shape)} with strides {[t.stride() for t in tensors]}: "
                "the CUDA kernels take 3, and these do not merge to so few"
            )
        a, b, c = (size for size, _ in padded)
        if a * b > MOST_ROWS or c > MOST_ROWS:
            raise ValueError(f"{a * b} x {c} rows: a grid holds {MOST_ROWS} each way")
        strides = [(padded[0][1][i], padded[1][1][i], padded[2][1][i]) for i in range(len(tensors))]
        return cls((a, b, c), tuple(strides))


class _Call:
    """The argument of a kernel while it is filled in, and the rows that its grid covers."""

    def __init__(self, numel: int, rows: _Rows) -> None:
        self.numel = numel
        self.rows = rows
        self.arguments = np.zeros(1, ARGUMENTS)
        self.set(numel=numel, middle=rows.sizes[1])

    def set(self, **values: int) -> None:
        """Write plain fields."""
        for name, value in values.items():
            self.arguments[name] = value

    def place(self, name: str, tensor: Tensor, index: int, sources: int = 0) -> None:
        """Say where ``tensor`` lies, the ``index``-th of the rows; ``sources`` stand before the rows."""
        strides, item = self.rows.strides[index], tensor.element_size()
        starts = [tensor.data_ptr(), *strides]
        if sources:
            self.set(sources=sources, source_stride=tensor.stride(0))
            starts.append(tensor.stride(0) if sources > 1 else 0)
        inner = tensor.stride(-1) * item
        vectors = inner == item and all(start % FRAME_ALIGNMENT == 0 for start in starts)
        self.arguments[name] = (tensor.data_ptr(), strides, inner, vectors)

    def code(self, name: str, codec: IntCodec) -> None:
        """Say how the row is coded."""
        block, codes_end = _block(codec, self.numel), codec.code_bytes(self.numel)
        shift = block.bit_length() - 1 if block & (block - 1) == 0 else -1
        self.arguments[name] = (
            codec.bits,
            codec.asymmetric,
            block,
            shift,
            codec.blocks(self.numel),
            codes_end,
            padded_bytes(codes_end),
            codec.frame_bytes(self.numel),
        )

    def launch(self, file: str, kernel: str, parts: int, threads: int = THREADS) -> Launch:
        """The launch of ``parts`` thread blocks a row.

        Raises:
            ValueError: if a grid cannot hold them.
        """
        if parts > MOST_PARTS:
            raise ValueError(f"{kernel}: {parts} thread blocks a row, a grid holds {MOST_PARTS}")
        a, b, c = self.rows.sizes
        return Launch(file, kernel, (parts, c, a * b), threads, self.arguments)

    def held(self, file: str, kernel: str, codec: IntCodec, octets: int) -> Launch:
        """The launch of a kernel whose teams hold a block of ``codec``, ``octets`` octets a thread."""
        team = 1
        while team * octets * OCTET < _block(codec, self.numel):
            team *= 2
        threads = max(THREADS, team)
        self.set(team_shift=team.bit_length() - 1)
        return self.launch(file, kernel, -(-codec.blocks(self.numel) // (threads // team)), threads)

    def octets(self, file: str, kernel: str) -> Launch:
        """The launch of a kernel with an octet a thread."""
        return self.launch(file, kernel, -(-self.numel // (OCTET * THREADS)))


class Kernels:
    """The operations of :mod:`impl.reference`, with its shapes and checks, as launches.

    Every operation raises ValueError if its sizes, types, devices or strides are not possible.

    Args:
        run: carries a launch out for tensors on a device.
    """

    def __init__(self, run: Callable[[Launch, torch.device], None]) -> None:
        self._run = run

    def supports(self, codec: Codec) -> bool:
        """Whether it has kernels for ``codec``; the reference serves the others."""
        return _has_kernels(codec)

    def encode(
        self,
        codec: Codec,
        x: Tensor,
        frames: Tensor,
        *,
        noise: Noise | None = None,
        carried: Carried | None = None,
    ) -> None:
        """Write the frames (..., F) uint8 of ``x`` (..., S); see :func:`impl.reference.encode`."""
        if not _has_kernels(codec) or carried is not None:
            reference.encode(codec, x, frames, noise=noise, carried=carried)
            return
        reference.check(codec, x, frames)
        _check(codec, x, frames)
        if x.numel() == 0:
            return
        call = _Call(x.shape[-1], _Rows.of(x, frames))
        call.place("values", x, 0)
        call.place("frames", frames, 1)
        call.code("coding", codec)
        block, blocks, kind = _block(codec, call.numel), codec.blocks(call.numel), TYPES[x.dtype]
        whole = math.lcm(block, OCTET)  # whole blocks and whole octets
        if _holds(codec, call.numel, HELD):
            octets = 1 if block <= HELD_ALONE else 4
            kernel = f"encode_held<{kind}, {_known(codec)}, {octets}>"
            self._run(call.held("quantize.cu", kernel, codec, octets), x.device)
        elif whole <= STAGED:
            tile = whole * max(1, min(STAGED_TILE, STAGED_BLOCKS * block) // whole)
            call.set(tile=tile)
            parts = -(-call.numel // tile)
            self._run(call.launch("quantize.cu", f"encode_staged<{kind}>", parts), x.device)
        else:
            count = 2 * blocks * math.prod(call.rows.sizes)
            extents = torch.zeros(count, dtype=torch.int32, device=x.device)
            parts = -(-block // SCANNED)
            call.set(tile=SCANNED, parts=parts, extents=extents.data_ptr())
            self._run(call.launch("quantize.cu", f"encode_extents<{kind}>", blocks * parts), x.device)
            self._run(call.octets("quantize.cu", f"encode_given<{kind}>"), x.device)

    def decode(self, codec: Codec, frames: Tensor, out: Tensor) -> None:
        """Write the elements (..., S) of ``frames`` (..., F); see :func:`impl.reference.decode`."""
        if not _has_kernels(codec):
            reference.decode(codec, frames, out)
            return
        reference.check(codec, out, frames)
        _check(codec, out, frames)
        if out.numel() == 0:
            return
        call = _Call(out.shape[-1], _Rows.of(out, frames))
        call.place("values", out, 0)
        call.place("frames", frames, 1)
        call.code("coding", codec)
        self._run(call.octets("dequantize.cu", f"decode<{TYPES[out.dtype]}, {_known(codec)}>"), out.device)

    def decode_sum(self, codec: Codec, frames: Tensor, out: Tensor) -> None:
        """Write the fp32 sum (..., S) over the first dimension; see :func:`impl.reference.decode_sum`."""
        if not _has_kernels(codec):
            reference.decode_sum(codec, frames, out)
            return
        reference.check(codec, out, frames[0])
        _check(codec, out, frames)
        if out.dtype != torch.float32:
            raise ValueError(f"{codec}: a sum is fp32, got {out.dtype}")
        if out.numel() == 0:
            return
        call = _Call(out.shape[-1], _Rows.of(out, frames[0]))
        call.place("values", out, 0)
        call.place("frames", frames, 1, sources=len(frames))
        call.code("coding", codec)
        self._run(call.octets("dequantize.cu", f"decode_sum<{_known(codec)}>"), out.device)

    def decode_sum_encode(
        self,
        first: Codec,
        second: Codec,
        frames: Tensor,
        out: Tensor,
        numel: int,
        *,
        noise: Noise | None = None,
        carried: Carried | None = None,
    ) -> None:
        """Write the frames of the sum; see :func:`impl.reference.decode_sum_encode`."""
        if (
            not (_has_kernels(first) and _has_kernels(second))
            or carried is not None
            or not _holds(second, numel, HELD_ALONE)
            or out.numel() == 0
        ):
            held = torch.empty((*out.shape[:-1], numel), dtype=torch.float32, device=out.device)
            self.decode_sum(first, frames, held)
            self.encode(second, held, out, noise=noise, carried=carried)
            return
        shape = (*out.shape[:-1], numel)
        reference.check(first, torch.empty(shape, device="meta"), frames[0])
        reference.check(second, torch.empty(shape, device="meta"), out)
        _check(first, None, frames)
        _check(second, None, out, frames)
        call = _Call(numel, _Rows.of(frames[0], out))
        call.place("frames", frames, 0, sources=len(frames))
        call.place("output", out, 1)
        call.code("coding", first)
        call.code("second", second)
        kernel = f"decode_sum_encode<{_known(first)}, {_known(second)}>"
        self._run(call.held("reduce.cu", kernel, second, 1), out.device)


def _has_kernels(codec: Codec) -> TypeGuard[IntCodec]:
    return isinstance(codec, IntCodec) and not codec.hadamard and not codec.stochastic


def _block(codec: IntCodec, numel: int) -> int:
    """Elements that share a scale; a block beyond the row is the row."""
    return numel if codec.block == "shard" else min(codec.block, numel)


def _known(codec: IntCodec) -> int:
    """The width that the kernel was compiled for, 0 for any."""
    return codec.bits if codec.bits in KNOWN_BITS else 0


def _holds(codec: IntCodec, numel: int, most: int) -> bool:
    """Whether a block is whole octets, or the whole row, of at most ``most`` elements."""
    block = _block(codec, numel)
    return block <= most and (block % OCTET == 0 or block == numel)


def _check(codec: IntCodec, x: Tensor | None, *frames: Tensor) -> None:
    """What the kernels need beyond the reference's checks."""
    for each in frames:
        if each.shape[-1] > 1 and each.stride(-1) != 1:
            raise ValueError(f"{codec}: a frame's bytes are contiguous, got strides {each.stride()}")
    if x is not None and x.dtype not in TYPES:
        raise ValueError(f"{codec}: elements are fp32, bf16 or fp16, got {x.dtype}")
    devices = {each.device for each in (*frames, *([] if x is None else [x]))}
    if len(devices) > 1:
        raise ValueError(f"{codec}: elements and frames on {sorted(map(str, devices))}")


_DEVICE: Final = Kernels(on_device)
supports, encode, decode = _DEVICE.supports, _DEVICE.encode, _DEVICE.decode
decode_sum, decode_sum_encode = _DEVICE.decode_sum, _DEVICE.decode_sum_encode
