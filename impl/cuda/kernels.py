"""Codecs on CUDA: which kernel encodes and decodes what, bit-equal to :mod:`impl.codecs.reference`.

:class:`Kernels` turns an operation on tensors into launches, and hands them to whatever runs them: a
device (:func:`impl.cuda.launch.on_device`), or a host that runs the same sources, in tests.  Every codec
with scales has kernels.  Raw codecs are casts, which torch does at the speed of memory: they use the
reference.

Which kernel (the sources say why).  *Plain* are integers of 4 and 8 bits without rotation and error
feedback, nearest or stochastic: their kernels are compiled for codec and type.  All else is asked of
general kernels at launch.

===================================  =============================================================
block                                encode
===================================  =============================================================
multiple of 8, or the row; to 8,192  ``encode_held``, not plain ``encode_general``: one read
other, lcm(block, 8) to 8,192        ``encode_staged``: one read
all else                             ``encode_extents``, ``encode_given``: two launches, two reads
===================================  =============================================================

``decode`` and ``decode_sum`` are plain, ``decode_general`` and ``decode_sum_general`` the others.
``decode_sum_encode`` is one launch (plain to plain, or its general version) where the second codec's block
is a multiple of 8, or the row, up to 4,096 elements, and unless it rotates and carries error, or the first
codec rotates groups that its blocks cut.  Otherwise it is ``decode_sum`` into fp32, then ``encode``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeGuard, get_args

import numpy as np
import torch
from torch import Tensor

from impl.codecs import reference
from impl.codecs.codec import FRAME_ALIGNMENT, Blocked, Codec, IntCodec, padded_bytes
from impl.codecs.reference import Carried
from impl.codecs.rounding_noise import OCTET, Noise
from impl.cuda.launch import ARGUMENTS, Launch, on_device

THREADS: Final = 256
HELD: Final = 8_192  # elements of a block in registers: 512 threads of two octets, or more
HELD_ALONE: Final = 4_096  # 512 threads of one octet
STAGED: Final = 8_192  # elements of a tile in shared memory, kStaged of quantize.cu
STAGED_BLOCKS: Final = 1_024  # kStagedBlocks
STAGED_TILE: Final = 2_048  # a tile is about this where the block allows
SCANNED: Final = 4_096  # elements that a thread block of encode_extents scans
LONGEST: Final = 2**31 - 1  # elements of a row
SPREAD: Final = 4_096  # thread blocks, some thirty for each multiprocessor of a large device
MOST_LOOPS: Final = 16  # parts that a thread block does
MOST_PARTS: Final = 2**31 - 1  # thread blocks along x
MOST_ROWS: Final = 65_535  # along y, and along z
TYPES: Final = {torch.float32: "Fp32", torch.bfloat16: "Bf16", torch.float16: "Fp16"}
KINDS: Final = {dtype: kind for kind, dtype in enumerate(TYPES)}  # as launches say them
AHEAD: Final = {4: 8, 8: 4}  # sources under way at a time, by width: 32 bytes of codes a thread
DECODED: Final = 2  # octets a thread of the plain decode

_ANY: Final = ("Scheme<0>", "Floats<0>")
_SUMS: Final = tuple(f"{bits}, {ahead}" for bits, ahead in AHEAD.items())
_ROUNDINGS: Final = ("false", "true")  # nearest, stochastic
VARIANTS: Final[dict[str, tuple[str, ...]]] = {  # every kernel that can be asked for
    "quantize.cu": (
        *(f"encode_held<{t}, {s}, {r}>" for t in TYPES.values() for s in AHEAD for r in _ROUNDINGS),
        *(f"encode_general<{s}, {octets}>" for s in _ANY for octets in (1, 2)),
        *(f"encode_{how}<{s}>" for how in ("staged", "extents", "given") for s in _ANY),
    ),
    "dequantize.cu": (
        *(f"decode<{t}, {s}>" for t in TYPES.values() for s in AHEAD),
        *(f"decode_sum<{s}>" for s in _SUMS),
        *(f"{kernel}_general<{s}>" for kernel in ("decode", "decode_sum") for s in _ANY),
    ),
    "reduce.cu": (
        *(f"decode_sum_encode<{f}, {s}, {r}>" for f in _SUMS for s in AHEAD for r in _ROUNDINGS),
        *(f"decode_sum_encode_general<{f}, {s}>" for f in _ANY for s in _ANY),
    ),
}


@dataclass(frozen=True, slots=True)
class _Rows:
    """Leading dimensions of several tensors, merged to three.

    Attributes:
        sizes: (a, b, c).
        strides: for each tensor, its three strides in bytes; for noise, in octets.
    """

    sizes: tuple[int, int, int]
    strides: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, *tensors: Tensor, noise: Noise | None = None) -> _Rows:
        """Rows of tensors with equal leading dimensions, and of their noise; the last dimension is left out.

        Raises:
            ValueError: if three strides cannot describe them, or a grid cannot hold them.
        """
        shape = tensors[0].shape[:-1]
        steps = [[t.stride(dim) * t.element_size() for t in tensors] for dim in range(len(shape))]
        if noise is not None:
            for step, stride in zip(steps, noise.strides, strict=True):
                step.append(stride // OCTET)
        merged: list[tuple[int, list[int]]] = []
        for size, step in zip(shape, steps, strict=True):
            if size == 1:
                continue
            if merged and merged[-1][1] == [size * s for s in step]:
                merged[-1] = (merged[-1][0] * size, step)
            else:
                merged.append((size, step))
        count = len(tensors) + (noise is not None)
        padded = [(1, [0] * count)] * (3 - len(merged)) + merged
        if len(padded) > 3:
            random = "" if noise is None else f" and noise with {noise.strides}"
            raise ValueError(
                f"leading dimensions {tuple(shape)} with strides {[t.stride() for t in tensors]}{random}: "
                "the CUDA kernels take 3, and these do not merge to so few"
            )
        a, b, c = (size for size, _ in padded)
        if a * b > MOST_ROWS or c > MOST_ROWS:
            raise ValueError(f"{a * b} x {c} rows: a grid holds {MOST_ROWS} each way")
        strides = [(padded[0][1][i], padded[1][1][i], padded[2][1][i]) for i in range(count)]
        return cls((a, b, c), tuple(strides))


class _Call:
    """The argument of a kernel while it is filled in, and the rows that its grid covers.

    Raises:
        ValueError: for rows that are too long.
    """

    def __init__(self, numel: int, rows: _Rows, spread: int) -> None:
        if numel > LONGEST:
            raise ValueError(f"{numel} elements a row: the CUDA kernels take {LONGEST}")
        self.numel = numel
        self.rows = rows
        self.spread = spread
        self.aligned = True  # all that was placed
        self.arguments = np.zeros(1, ARGUMENTS)
        self.set(numel=numel, middle=rows.sizes[1], loops=1)

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
        self.aligned = self.aligned and vectors
        self.arguments[name] = (tensor.data_ptr(), strides, inner, vectors, KINDS.get(tensor.dtype, 0))

    def code(self, name: str, codec: Blocked) -> None:
        """Say how the row is coded."""
        block, codes_end = _block(codec, self.numel), codec.code_bytes(self.numel)
        scheme = (
            (codec.bits, codec.asymmetric)
            if isinstance(codec, IntCodec)
            else (codec.mantissa, codec.scale == "e8m0")
        )
        self.arguments[name] = (
            codes_end,
            padded_bytes(codes_end),
            padded_bytes(codes_end) + codec.scale_bytes(self.numel),
            codec.frame_bytes(self.numel),
            *scheme,
            block,
            codec.blocks(self.numel),
            codec.hadamard,
            block.bit_length() - 1 if block & (block - 1) == 0 else -1,
        )

    def randomise(self, noise: Noise) -> None:
        """Say which random bits the rows have; their strides are the last of the rows'."""
        self.arguments["noise"] = (noise.start // OCTET, self.rows.strides[-1], noise.words, 1, 0)

    def carry(self, carried: Carried, index: int) -> None:
        """Say where the carried error lies, the ``index``-th of the rows."""
        self.place("error", carried.error, index)
        self.arguments["decay"] = (carried.decay, 1.0 - carried.decay)  # each rounded to fp32, once
        self.set(carried=1)

    def launch(self, file: str, kernel: str, parts: int, threads: int = THREADS) -> Launch:
        """The launch of ``parts`` thread blocks a row.

        Raises:
            ValueError: if a grid cannot hold them.
        """
        if parts > MOST_PARTS:
            raise ValueError(f"{kernel}: {parts} thread blocks a row, a grid holds {MOST_PARTS}")
        a, b, c = self.rows.sizes
        return Launch(file, kernel, (parts, c, a * b), threads, self.arguments)

    def looping(self, file: str, kernel: str, parts: int, threads: int = THREADS) -> Launch:
        """The same for a kernel whose thread blocks may do several parts, one after the other."""
        loops = max(1, min(MOST_LOOPS, parts * math.prod(self.rows.sizes) // self.spread))
        self.set(loops=loops)
        return self.launch(file, kernel, -(-parts // loops), threads)

    def held(self, file: str, kernel: str, codec: Blocked, octets: int, *, loops: bool = True) -> Launch:
        """The launch of a kernel whose teams hold a block of ``codec``, ``octets`` octets a thread."""
        team, block = 1, _block(codec, self.numel)
        while team * octets * OCTET < block:
            team *= 2
        threads = max(THREADS, team)
        exact = self.aligned and team * octets * OCTET == block
        self.set(team_shift=team.bit_length() - 1, exact=exact)
        parts = -(-codec.blocks(self.numel) // (threads // team))
        return (self.looping if loops else self.launch)(file, kernel, parts, threads)

    def octets(self, file: str, kernel: str, each: int = 1, *, loops: bool = False) -> Launch:
        """The launch of a kernel with ``each`` octets a thread."""
        parts = -(-self.numel // (OCTET * THREADS * each))
        self.set(exact=self.aligned)
        return (self.looping if loops else self.launch)(file, kernel, parts)


class Kernels:
    """The operations of :mod:`impl.codecs.reference`, with its shapes and checks, as launches.

    Every operation raises ValueError if its sizes, types, devices or strides are not possible.

    Args:
        run: carries a launch out for tensors on a device.
        spread: thread blocks that a launch has before they begin to do several parts each.
    """

    def __init__(self, run: Callable[[Launch, torch.device], None], spread: int = SPREAD) -> None:
        self._run = run
        self._spread = spread

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
        """Write the frames (..., F) uint8 of ``x`` (..., S); see :func:`impl.codecs.reference.encode`."""
        if not _has_kernels(codec):
            reference.encode(codec, x, frames, noise=noise, carried=carried)
            return
        reference.check(codec, x, frames)
        noise = _checked(codec, x.shape, noise, carried)
        tensors = [x, frames] if carried is None else [x, frames, carried.error]
        _check(codec, x, frames, *tensors[2:])
        if x.numel() == 0:
            return
        call = _Call(x.shape[-1], _Rows.of(*tensors, noise=noise), self._spread)
        call.place("values", x, 0)
        call.place("frames", frames, 1)
        call.code("coding", codec)
        if noise is not None:
            call.randomise(noise)
        if carried is not None:
            call.carry(carried, 2)
        for launch in _encoding(call, codec, x, plain=_is_plain(codec) and carried is None):
            self._run(launch, x.device)

    def decode(self, codec: Codec, frames: Tensor, out: Tensor) -> None:
        """Write the elements (..., S) of ``frames`` (..., F); see :func:`impl.codecs.reference.decode`."""
        if not _has_kernels(codec):
            reference.decode(codec, frames, out)
            return
        reference.check(codec, out, frames)
        _check(codec, out, frames)
        if out.numel() == 0:
            return
        call = _Call(out.shape[-1], _Rows.of(out, frames), self._spread)
        call.place("values", out, 0)
        call.place("frames", frames, 1)
        call.code("coding", codec)
        if _is_plain(codec):
            kernel = f"decode<{TYPES[out.dtype]}, {codec.bits}>"
            self._run(call.octets("dequantize.cu", kernel, DECODED, loops=True), out.device)
        else:
            self._run(call.octets("dequantize.cu", f"decode_general<{_any(codec)}>"), out.device)

    def decode_sum(self, codec: Codec, frames: Tensor, out: Tensor) -> None:
        """Write the fp32 sum (..., S) over the first dimension; see
        :func:`impl.codecs.reference.decode_sum`.
        """
        if not _has_kernels(codec):
            reference.decode_sum(codec, frames, out)
            return
        reference.check_sum(codec, frames, out)
        _check(codec, out, frames)
        if out.numel() == 0:
            return
        call = _Call(out.shape[-1], _Rows.of(out, frames[0]), self._spread)
        call.place("values", out, 0)
        call.place("frames", frames, 1, sources=len(frames))
        call.code("coding", codec)
        plain = _is_plain(codec)
        kernel = f"decode_sum<{_ahead(codec)}>" if plain else f"decode_sum_general<{_any(codec)}>"
        self._run(call.octets("dequantize.cu", kernel, loops=plain), out.device)

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
        """Write the frames of the sum; see :func:`impl.codecs.reference.decode_sum_encode`."""
        if (
            not (_has_kernels(first) and _has_kernels(second))
            or not _fuses(first, second, numel, carries=carried is not None)
            or out.numel() == 0
        ):
            held = torch.empty((*out.shape[:-1], numel), dtype=torch.float32, device=out.device)
            self.decode_sum(first, frames, held)
            self.encode(second, held, out, noise=noise, carried=carried)
            return
        shape = torch.Size([*out.shape[:-1], numel])
        summed = torch.empty(shape, device="meta")
        reference.check_sum(first, frames, summed)
        reference.check(second, summed, out)
        noise = _checked(second, shape, noise, carried)
        errors = [] if carried is None else [carried.error]
        _check(first, None, frames)
        _check(second, None, out, frames, *errors)
        call = _Call(numel, _Rows.of(frames[0], out, *errors, noise=noise), self._spread)
        call.place("frames", frames, 0, sources=len(frames))
        call.place("output", out, 1)
        call.code("coding", first)
        call.code("second", second)
        if noise is not None:
            call.randomise(noise)
        if carried is not None:
            call.carry(carried, 2)
        plain = _is_plain(first) and _is_plain(second) and carried is None
        if plain:
            kernel = f"decode_sum_encode<{_ahead(first)}, {second.bits}, {_rounding(second)}>"
        else:
            kernel = f"decode_sum_encode_general<{_any(first)}, {_any(second)}>"
        self._run(call.held("reduce.cu", kernel, second, 1, loops=plain), out.device)


def _encoding(call: _Call, codec: Blocked, x: Tensor, *, plain: bool) -> Iterator[Launch]:
    """The launches that encode ``x``, as the table at the top says."""
    block, blocks, file = _block(codec, call.numel), codec.blocks(call.numel), "quantize.cu"
    whole = math.lcm(block, OCTET)  # whole blocks and whole octets
    if plain and _holds(codec, call.numel, HELD):
        kernel = f"encode_held<{TYPES[x.dtype]}, {codec.bits}, {_rounding(codec)}>"
        yield call.held(file, kernel, codec, 2 if x.dtype == torch.float32 else 4)
    elif _holds(codec, call.numel, HELD):
        octets = 1 if block <= HELD_ALONE else 2
        yield call.held(file, f"encode_general<{_any(codec)}, {octets}>", codec, octets)
    elif whole <= STAGED:
        tile = whole * max(1, min(STAGED_TILE, STAGED_BLOCKS * block) // whole)
        call.set(tile=tile)
        yield call.launch(file, f"encode_staged<{_any(codec)}>", -(-call.numel // tile))
    else:
        count = 2 * blocks * math.prod(call.rows.sizes)
        extents = torch.zeros(count, dtype=torch.int32, device=x.device)
        parts = -(-block // SCANNED)
        call.set(tile=SCANNED, parts=parts, extents=extents.data_ptr())
        yield call.launch(file, f"encode_extents<{_any(codec)}>", blocks * parts)
        yield call.octets(file, f"encode_given<{_any(codec)}>")


def _has_kernels(codec: Codec) -> TypeGuard[Blocked]:
    return isinstance(codec, get_args(Blocked))


def _block(codec: Blocked, numel: int) -> int:
    """Elements that share a scale; a block beyond the row is the row."""
    return numel if codec.block == "shard" else min(codec.block, numel)


def _is_plain(codec: Blocked) -> bool:
    """Whether kernels were compiled for it."""
    return isinstance(codec, IntCodec) and codec.bits in AHEAD and not codec.hadamard


def _ahead(codec: Blocked) -> str:
    return f"{codec.bits}, {AHEAD[codec.bits]}"


def _any(codec: Blocked) -> str:
    return "Scheme<0>" if isinstance(codec, IntCodec) else "Floats<0>"


def _rounding(codec: Blocked) -> str:
    return _ROUNDINGS[codec.stochastic]


def _holds(codec: Blocked, numel: int, most: int) -> bool:
    """Whether a block is whole octets, or the whole row, of at most ``most`` elements."""
    block = _block(codec, numel)
    return block <= most and (block % OCTET == 0 or block == numel)


def _fuses(first: Codec, second: Blocked, numel: int, *, carries: bool) -> bool:
    """Whether one launch sums and encodes.

    Threads that rotate back together must be neighbours where the second codec's blocks are encoded too:
    they are, unless those blocks cut the groups at other places than their halves.
    """
    if not _holds(second, numel, HELD_ALONE) or (carries and second.hadamard):
        return False
    block = _block(second, numel)
    powers = block & (block - 1) == 0
    return first.hadamard <= OCTET or block % first.hadamard == 0 or block == numel or powers


def _checked(codec: Blocked, shape: torch.Size, noise: Noise | None, carried: Carried | None) -> Noise | None:
    """The noise that ``codec`` needs, checked as the reference does, and the carried error."""
    reference.check_noise(codec, shape[:-1], noise)
    if carried is not None:
        reference.check_carried(codec, shape, carried)
    return noise if codec.stochastic else None


def _check(codec: Blocked, x: Tensor | None, frames: Tensor, *others: Tensor) -> None:
    """What the kernels need beyond the reference's checks."""
    for each in (frames, *(other for other in others if other.dtype == torch.uint8)):
        if each.shape[-1] > 1 and each.stride(-1) != 1:
            raise ValueError(f"{codec}: a frame's bytes are contiguous, got strides {each.stride()}")
    devices = {each.device for each in (frames, *others, *([] if x is None else [x]))}
    if len(devices) > 1:
        raise ValueError(f"{codec}: elements and frames on {sorted(map(str, devices))}")


_DEVICE: Final = Kernels(on_device)
supports, encode, decode = _DEVICE.supports, _DEVICE.encode, _DEVICE.decode
decode_sum, decode_sum_encode = _DEVICE.decode_sum, _DEVICE.decode_sum_encode
