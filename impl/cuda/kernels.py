"""Codecs on CUDA: the choice of kernels, bit-equal to :mod:`impl.codecs.reference`.

:class:`Kernels` turns an operation on tensors into launches, and hands them to whatever runs them: a
device (:func:`impl.cuda.launch.on_device`), or a host that runs the same sources, in tests.  Raw codecs are
casts, which the reference does.

Which kernel (the sources give the reasons).  *Plain* are integers of 4 and 8 bits without rotation and error
feedback: their kernels are compiled for codec and type.  General kernels read the codec at launch.

===================================  =============================================================
block                                encode
===================================  =============================================================
multiple of 8, or the row; to 8,192  ``encode_held``, not plain ``encode_general``: one read
other, lcm(block, 8) to 8,192        ``encode_staged``: one read
all else                             ``encode_extents``, ``encode_given``: two launches, two reads
===================================  =============================================================

Without a :data:`Part` the next row of the table, the general kernel, or two launches serve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Literal, TypeGuard

import numpy as np
import torch
from torch import Tensor

from impl.codecs.codec import FORMATS, FRAME_ALIGNMENT, Blocked, Codec, IntCodec, OwnCodec, has_kernels
from impl.codecs.reference import Carried, Operations, Options, Repeat, merged_rows
from impl.codecs.rounding_noise import OCTET
from impl.cuda.launch import ARGUMENTS, Launch

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
MOST_ROWS: Final = 65_535  # along y, and along z
TYPES: Final = {torch.float32: "Fp32", torch.bfloat16: "Bf16", torch.float16: "Fp16"}
KINDS: Final = {dtype: kind for kind, dtype in enumerate(TYPES)}  # as launches say them
# Sources loaded ahead, by width: more would need more registers than 1,024 threads of a multiprocessor have.
AHEAD: Final = {4: 4, 8: 4}
AHEAD_FUSED: Final = {4: 4, 8: 2}  # fewer, since they encode too
DECODED: Final = 2  # octets a thread of the plain decode

Part = Literal["plain", "held", "staged", "fused"]
_ROUNDINGS: Final = ("false", "true")  # nearest, stochastic


class _Call:
    """The argument of a kernel while it is filled in, and the rows that its grid covers.

    ``tensors``, of equal leading dimensions, and ``codecs`` are by the name of the argument's field;
    ``frames`` are those of several sources, the first of which is in ``tensors``.
    """

    def __init__(
        self,
        spread: int,
        numel: int,
        tensors: Mapping[str, Tensor],
        codecs: Mapping[str, Blocked | OwnCodec],
        *,
        options: Options = Options(),  # noqa: B008  # immutable
        frames: Tensor | None = None,
    ) -> None:
        if numel > LONGEST:
            raise ValueError(f"{numel} elements a row: the CUDA kernels take {LONGEST}")
        noise, carried = options
        placed = {**tensors, "error": carried.error} if carried is not None else dict(tensors)
        merged = merged_rows([*placed.values()], noise, 3, "CUDA")
        merged = [(1, [0] * (len(placed) + 1))] * (3 - len(merged)) + merged
        a, b, c = self.sizes = [size for size, _ in merged]
        if a * b > MOST_ROWS or c > MOST_ROWS:
            raise ValueError(f"{a * b} x {c} rows: a grid holds {MOST_ROWS} each way")
        self.numel, self.spread, self.arguments = numel, spread, np.zeros(1, ARGUMENTS)
        self.set(numel=numel, middle=b, loops=1, carried=carried is not None)
        if frames is not None:
            self.set(sources=len(frames), source_stride=frames.stride(0))
        source_stride = frames.stride(0) if frames is not None and len(frames) > 1 else 0
        self.aligned = True  # all tensors to vectors, and blocks to octets
        for index, (name, tensor) in enumerate(placed.items()):
            strides, inner = [steps[index] for _, steps in merged], tensor.stride(-1) * tensor.element_size()
            starts = (tensor.data_ptr(), *strides, source_stride if name == "frames" else 0)
            vectors = inner == tensor.element_size() and all(n % FRAME_ALIGNMENT == 0 for n in starts)
            self.aligned = self.aligned and vectors
            self.arguments[name] = (tensor.data_ptr(), strides, inner, vectors, KINDS.get(tensor.dtype, 0))
        for name, codec in codecs.items():
            self.arguments[name] = _coding(codec, numel)
            if not isinstance(codec, OwnCodec):
                inside = codec.block_size(numel) % OCTET == 0 or codec.blocks(numel) == 1
                self.aligned = self.aligned and inside
        if noise is not None:
            octets = [steps[-1] // OCTET for _, steps in merged]
            self.set(noise=(noise.start // OCTET, octets, noise.philox, 1, 0))
        if carried is not None:
            self.set(decay=(carried.decay, 1.0 - carried.decay))  # each rounded to fp32, once

    def set(self, **values: object) -> None:
        """Write fields."""
        for name, value in values.items():
            self.arguments[name] = value

    def launch(
        self, file: str, kernel: str, parts: int, threads: int = THREADS, *, loops: bool = False
    ) -> Launch:
        """The launch of ``parts`` thread blocks a row, which may do several, one after the other."""
        if loops:
            repeats = max(1, min(MOST_LOOPS, parts * math.prod(self.sizes) // self.spread))
            self.set(loops=repeats)
            parts = -(-parts // repeats)
        a, b, c = self.sizes
        return Launch(file, kernel, (parts, c, a * b), threads, self.arguments)

    def held(self, file: str, kernel: str, codec: Blocked, octets: int, *, loops: bool = True) -> Launch:
        """The launch of a kernel whose teams hold a block of ``codec``, ``octets`` octets a thread."""
        block = codec.block_size(self.numel)
        shift = (-(-block // (octets * OCTET)) - 1).bit_length()  # of a team, the least power of two
        team = 1 << shift
        threads = max(THREADS, team)
        self.set(team_shift=shift, exact=self.aligned and team * octets * OCTET == block)
        parts = -(-codec.blocks(self.numel) // (threads // team))
        return self.launch(file, kernel, parts, threads, loops=loops)

    def octets(self, file: str, kernel: str, per_thread: int = 1, *, loops: bool = False) -> Launch:
        """The launch of a kernel with ``per_thread`` octets a thread."""
        self.set(exact=self.aligned)
        return self.launch(file, kernel, -(-self.numel // (OCTET * THREADS * per_thread)), loops=loops)

    def extents(self, codec: Blocked, device: torch.device) -> Launch:
        """The launch that finds the extremes of each block, in memory that lives as long as this."""
        block, blocks = codec.block_size(self.numel), codec.blocks(self.numel)
        self._extremes = torch.zeros(2 * blocks * math.prod(self.sizes), dtype=torch.int32, device=device)
        parts, coding = -(-block // SCANNED), _coding(codec, self.numel)
        self.set(coding=coding, tile=SCANNED, parts=parts, extents=self._extremes.data_ptr())
        return self.launch("quantize.cu", f"encode_extents<{_any(codec)}>", blocks * parts)

    def format(self, operation: str, codec: OwnCodec, dtype: torch.dtype) -> Launch:
        """The launch that encodes a published format from ``dtype``, or decodes it to that."""
        self.set(coding=_coding(codec, self.numel))
        name = FORMATS[codec.name].partition(":")[2]  # of a class here, and of a type in C++
        return self.octets("formats.cu", f"{operation}_format<{name}, {TYPES[dtype]}>", loops=True)


class Kernels(Operations):
    """The operations as launches, run by ``run``; more than ``spread`` thread blocks loop over parts."""

    name = "cuda"

    def __init__(
        self,
        run: Callable[[Launch, torch.device], None],
        spread: int = SPREAD,
        *,
        without: Collection[Part] = (),
    ) -> None:
        super().__init__()
        self._run, self._spread, self._without = run, spread, frozenset(without)

    def _launch(self, launch: Launch, tensors: Mapping[str, Tensor]) -> Repeat:
        """Run ``launch`` on ``tensors`` by field; returns a function that runs it again."""
        self._run(launch, tensors["frames"].device)
        return partial(self._repeat, launch, [*tensors])

    def _repeat(self, last: Launch, places: Sequence[str], *tensors: Tensor) -> None:
        # A copy, since others may launch the same; as integers, since NumPy copies structures in 27 us.
        arguments = last.arguments.view(np.int64).copy().view(ARGUMENTS)
        for place, tensor in zip(places, tensors, strict=True):
            arguments[place]["address"] = tensor.data_ptr()
        self._run(Launch(last.file, last.kernel, last.grid, last.threads, arguments), tensors[0].device)

    def _encode(self, codec: Codec, x: Tensor, frames: Tensor, options: Options) -> Repeat | None:
        carries = options.carried is not None
        if not has_kernels(codec) or (isinstance(codec, OwnCodec) and carries):
            return super()._encode(codec, x, frames, options)
        tensors = {"values": x, "frames": frames}
        call = _Call(self._spread, x.shape[-1], tensors, {"coding": codec}, options=options)
        planned = self._encoding(call, codec, x, carries=carries)
        launches = [self._launch(launch, tensors) for launch in planned]
        return launches[0] if len(launches) == 1 else None  # two have extents between them, zeroed anew

    def _decode(self, codec: Codec, frames: Tensor, out: Tensor) -> Repeat | None:
        return self._add_up("decode", codec, frames, out) or super()._decode(codec, frames, out)

    def _decode_sum(self, codec: Codec, frames: Tensor, out: Tensor) -> Repeat | None:
        return self._add_up("decode_sum", codec, frames, out) or super()._decode_sum(codec, frames, out)

    def _add_up(self, name: str, codec: Codec, frames: Tensor, out: Tensor) -> Repeat | None:
        """Decode ``frames``, or sum them; None without a kernel.  Kernels of formats always sum."""
        if not has_kernels(codec):
            return None
        sources = frames if name == "decode_sum" else frames[None] if isinstance(codec, OwnCodec) else None
        tensors = {"frames": frames[0] if name == "decode_sum" else frames, "values": out}
        call = _Call(self._spread, out.shape[-1], tensors, {"coding": codec}, frames=sources)
        file = "dequantize.cu"
        if isinstance(codec, OwnCodec):
            launch = call.format("decode", codec, out.dtype)
        elif not self._plain(codec):
            launch = call.octets(file, f"{name}_general<{_any(codec)}>")
        elif name == "decode":
            launch = call.octets(file, f"decode<{TYPES[out.dtype]}, {codec.bits}>", DECODED, loops=True)
        else:
            launch = call.octets(file, f"decode_sum<{codec.bits}, {AHEAD[codec.bits]}>", loops=True)
        return self._launch(launch, tensors)

    def _fuses(self, first: Blocked, second: Blocked, numel: int, carried: Carried | None) -> bool:
        """Whether one launch sums and encodes.

        Threads that rotate back together must be neighbours where the second codec's blocks are encoded too:
        they are, unless those blocks cut the groups at other places than their halves.
        """
        if not _holds(second, numel, HELD_ALONE) or (carried is not None and second.hadamard):
            return False
        if "fused" in self._without:
            return False
        block = second.block_size(numel)
        whole = first.hadamard <= OCTET or block % first.hadamard == 0
        return whole or block in (numel, block & -block)  # a power of two

    def _decode_sum_encode(
        self, hops: tuple[Blocked, Blocked], frames: Tensor, out: Tensor, numel: int, options: Options
    ) -> Repeat:
        (first, second), tensors = hops, {"frames": frames[0], "output": out}
        codecs = {"coding": first, "second": second}
        call = _Call(self._spread, numel, tensors, codecs, options=options, frames=frames)
        if plain := self._plain(first) and self._plain(second) and options.carried is None:
            sums = f"{first.bits}, {AHEAD_FUSED[first.bits]}"
            kernel = f"decode_sum_encode<{sums}, {second.bits}, {_ROUNDINGS[second.stochastic]}>"
        else:
            kernel = f"decode_sum_encode_general<{_any(first)}, {_any(second)}>"
        return self._launch(call.held("reduce.cu", kernel, second, 1, loops=plain), tensors)

    def _encoding(
        self, call: _Call, codec: Blocked | OwnCodec, x: Tensor, *, carries: bool
    ) -> Iterator[Launch]:
        """The launches that encode ``x``, as the table at the top says."""
        file = "quantize.cu"
        if isinstance(codec, OwnCodec):
            if codec.name == "nvfp4":  # its scale depends on the row's largest magnitude
                yield call.extents(IntCodec(8, "shard"), x.device)
            yield call.format("encode", codec, x.dtype)
            return
        block = codec.block_size(call.numel)
        whole = math.lcm(block, OCTET)  # whole blocks and whole octets
        held = _holds(codec, call.numel, HELD) and "held" not in self._without
        if held and not carries and self._plain(codec):
            kernel = f"encode_held<{TYPES[x.dtype]}, {codec.bits}, {_ROUNDINGS[codec.stochastic]}>"
            wide = x.dtype == torch.float32  # more octets would not fit the registers
            yield call.held(file, kernel, codec, 2 if wide else 4)
        elif held:
            octets = 1 if block <= HELD_ALONE else 2
            yield call.held(file, f"encode_general<{_any(codec)}, {octets}>", codec, octets)
        elif whole <= STAGED and "staged" not in self._without:
            tile = whole * max(1, min(STAGED_TILE, STAGED_BLOCKS * block) // whole)
            call.set(tile=tile)
            yield call.launch(file, f"encode_staged<{_any(codec)}>", -(-call.numel // tile))
        else:
            yield call.extents(codec, x.device)
            yield call.octets(file, f"encode_given<{_any(codec)}>")

    def _plain(self, codec: Blocked) -> TypeGuard[IntCodec]:
        """Whether a kernel compiled for it exists and may be used."""
        compiled = isinstance(codec, IntCodec) and codec.bits in AHEAD and not codec.hadamard
        return compiled and "plain" not in self._without


def _coding(codec: Blocked | OwnCodec, numel: int) -> tuple[int, ...]:
    """How a row is coded: the fields of CODING."""
    if isinstance(codec, OwnCodec):  # a published format
        return (0, 0, codec.own_bytes(numel), codec.frame_bytes(numel), 0, 0, 0, 0, 0, 0)
    block, scales_at = codec.block_size(numel), codec.scales_at(numel)
    if isinstance(codec, IntCodec):
        scheme = (codec.bits, 2 if codec.clipped else int(codec.asymmetric))
    else:
        scheme = (codec.mantissa, codec.scale == "e8m0")
    return (
        codec.code_bytes(numel),
        scales_at,
        scales_at + codec.scale_bytes(numel),
        codec.frame_bytes(numel),
        *scheme,
        block,
        codec.blocks(numel),
        codec.hadamard,
        31 if codec.blocks(numel) == 1 else block.bit_length() - 1 if block & (block - 1) == 0 else -1,
    )


def _any(codec: Blocked) -> str:
    return "Scheme<0>" if isinstance(codec, IntCodec) else "Floats<0>"


def _holds(codec: Blocked, numel: int, most: int) -> bool:
    """Whether a block is whole octets, or the whole row, of at most ``most`` elements."""
    block = codec.block_size(numel)
    return block <= most and (block % OCTET == 0 or block == numel)
