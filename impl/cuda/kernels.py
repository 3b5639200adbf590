"""Chooses CUDA kernels for codecs, bit-equal to :mod:`impl.codecs.reference`, and prepares their launches.

A codec encodes each row of a tensor (its last dimension) as bytes, called a frame.  :class:`Kernels` turns an operation
on tensors, such as encoding, into launches of kernels, and calls a function that runs the launches.  On a GPU this
function is :func:`impl.cuda.launch.on_device`.  Some tests run the same sources compiled for the host.

A codec that does not quantise only casts elements to a type.  For such codecs:

* If elements have this type already, one launch of ``copy_raw`` in ``raw.cu`` encodes them.
* One launch of ``sum_raw`` sums encoded elements.
* The reference backend does all other casts, and all decoding without a sum, each with one launch of torch.  It also
  takes frames that are not aligned to their elements.

A call is *plain* if its codec has integers of 4 or 8 bits and no rotation, and if it has no error feedback.  Plain
kernels are compiled separately for each number of bits and type.  All other calls use *general* kernels, which read the
codec's properties when they run.  Published formats, such as NVFP4, have their own kernels (``formats.cu``).

Which kernels encode depends on the size of the codec's blocks.  A block is a run of elements that share a scale.  The
sources of the kernels give the reasons:

===========================================  ==========================================================
elements of a block                          kernels, and how often they read each element from memory
===========================================  ==========================================================
at most 8,192, a multiple of 8 or whole row  ``encode_held`` if plain, else ``encode_general``: once
others with lcm(block, 8) at most 8,192      ``encode_staged``: once
all others                                   ``encode_extents``, then ``encode_given``: twice
===========================================  ==========================================================

Tests may switch kernels off by name (:data:`Part`).  If ``held`` or ``staged`` is off, the kernels in the table's next
row are used.  If ``plain`` is off, all calls use general kernels.  If ``fused`` is off, ``decode_sum_encode``, which
sums the frames of all senders and encodes the sum, takes two or more launches instead of one for codecs that quantise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Literal, TypeGuard

import numpy as np
import torch
from torch import Tensor

from impl.codecs.codec import (
    FORMATS,
    FRAME_ALIGNMENT,
    Blocked,
    BuiltIn,
    Codec,
    IntCodec,
    OwnCodec,
    Raw,
    has_kernels,
)
from impl.codecs.reference import DTYPES, Carried, Operations, Options, Repeat, key_of, merged_rows
from impl.codecs.rounding_noise import OCTET
from impl.cuda.launch import ARGUMENTS, Launch

THREADS: Final = 256
HELD: Final = 8_192  # most elements of a block in registers: 512 threads with two octets, or more threads
HELD_ALONE: Final = 4_096  # most elements of a block in registers with one octet a thread: 512 threads
STAGED: Final = 8_192  # most elements of a tile in shared memory, kStaged of quantize.cu
STAGED_BLOCKS: Final = 1_024  # most blocks of a tile, kStagedBlocks of quantize.cu
STAGED_TILE: Final = 2_048  # about the elements of a tile, where the block allows that
SCANNED: Final = 4_096  # elements that a thread block of encode_extents scans
LONGEST: Final = 2**31 - 1  # most elements of a row
# The number of thread blocks in a grid at which a launch aims: about 30 for each multiprocessor of a large device.  If
# the rows have more parts than this, a thread block works on several parts, one after the other.
SPREAD: Final = 4_096
MOST_LOOPS: Final = 16  # most parts over which a thread block loops
MOST_ROWS: Final = 65_535  # most thread blocks of a grid along y, and along z
TYPES: Final = {torch.float32: "Fp32", torch.bfloat16: "Bf16", torch.float16: "Fp16"}
# Numbers of the types in launches (``kind`` of PLACE).
KINDS: Final = {dtype: kind for kind, dtype in enumerate(TYPES)}
# How many sources (ranks that sent frames) a kernel loads before it adds them, by bits of a code.  With more sources,
# a multiprocessor would not have the registers for 1,024 threads.
AHEAD: Final = {4: 4, 8: 4}
AHEAD_FUSED: Final = {4: 4, 8: 2}  # fewer in fused kernels, which need registers to encode too
AHEAD_RAW: Final = {"Fp32": 2, "Bf16": 4, "Fp16": 4}  # by type of elements that are not quantised
DECODED: Final = 2  # octets that a thread of the plain decode kernel decodes
SUMMED: Final = 8  # octets that a thread of sum_bits reads, kOctets of raw.cu

Part = Literal["plain", "held", "staged", "fused"]
_ROUNDINGS: Final = ("false", "true")  # the kernels' template argument STOCHASTIC, by ``codec.stochastic``


class _Call:
    """Fills in the argument of a kernel, and computes the grid of its launch.

    A kernel works on the rows of tensors: on their last dimension.  Each row is cut into parts, and a thread block
    works on one part at a time.

    Args:
        spread: the number of thread blocks that a launch should have.  If there are many more parts than this number,
            and the kernel can loop, each thread block works on up to 16 parts of a row, one after the other.
        numel: the number of elements of a row.
        tensors: the tensors of the launch, by the names of their fields in the kernel's argument.  All dimensions but
            the last are the same for all tensors.
        codecs: codecs, by the names of their fields in the kernel's argument.
        options: the random bits of a stochastic codec, and error feedback.
        frames: (sources, ...), the encoded rows to sum; None if nothing is summed.  A source is a rank that has sent
            rows.  If ``frames`` is given, ``tensors["frames"]`` must be ``frames[0]``, the rows of the first source.

    Raises:
        ValueError: if a row is too long, if there are more rows than a grid covers, or if the leading dimensions cannot
            be merged to three.
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
            raise ValueError(
                f"a row has {numel} elements: the CUDA kernels take at most {LONGEST}; split it into shorter rows"
            )
        noise, carried = options
        placed = {**tensors, "error": carried.error} if carried is not None else dict(tensors)
        merged = merged_rows([*placed.values()], noise, 3, "CUDA")
        merged = [(1, [0] * (len(placed) + 1))] * (3 - len(merged)) + merged
        a, b, c = self.sizes = [size for size, _ in merged]
        if a * b > MOST_ROWS or c > MOST_ROWS:
            raise ValueError(
                f"there are {a * b} x {c} rows: the CUDA kernels take at most {MOST_ROWS} x {MOST_ROWS}; pass fewer "
                "rows at a time"
            )
        self.numel, self.spread, self.arguments = numel, spread, np.zeros(1, ARGUMENTS)
        self.set(numel=numel, middle=b, loops=1, carried=carried is not None)
        if frames is not None:
            self.set(sources=len(frames), source_stride=frames.stride(0) * frames.element_size())
        apart = 0 if frames is None or len(frames) == 1 else int(self.arguments["source_stride"][0])
        self.aligned = True  # whether all rows can be read in 16-byte vectors, and no octet spans two blocks
        for index, (name, tensor) in enumerate(placed.items()):
            strides, inner = [steps[index] for _, steps in merged], tensor.stride(-1) * tensor.element_size()
            starts = (tensor.data_ptr(), *strides, apart if name == "frames" else 0)
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
            self.set(decay=(carried.decay, 1.0 - carried.decay))  # each is rounded to fp32 once

    def set(self, **values: object) -> None:
        """Write each of the ``values`` to the field of the kernel's argument that has its name."""
        for name, value in values.items():
            self.arguments[name] = value

    def launch(
        self, file: str, kernel: str, parts: int, threads: int = THREADS, *, loops: bool = False
    ) -> Launch:
        """Returns a launch of ``kernel`` in the source ``file``, with ``threads`` threads in each thread block.

        Each row is cut into ``parts`` parts.  If ``loops`` is False, every part has a thread block of its own.  If
        ``loops`` is True and there are many parts, each thread block works on several parts, one after the other.
        """
        if loops:
            repeats = max(1, min(MOST_LOOPS, parts * math.prod(self.sizes) // self.spread))
            self.set(loops=repeats)
            parts = -(-parts // repeats)
        a, b, c = self.sizes
        return Launch(file, kernel, (parts, c, a * b), threads, self.arguments)

    def held(self, file: str, kernel: str, codec: Blocked, octets: int, *, loops: bool = True) -> Launch:
        """Returns a launch of ``kernel`` in ``file`` whose threads hold whole blocks of ``codec`` in registers.

        A block is a run of elements that share a scale.  Threads are divided into teams, whose size is a power of two.
        A team holds one block, and each of the team's threads holds ``octets`` times 8 elements.  If ``loops`` is True,
        a thread block may work on several parts of a row, one after the other.
        """
        block = codec.block_size(self.numel)
        shift = (-(-block // (octets * OCTET)) - 1).bit_length()  # a team has a power of two of threads
        team = 1 << shift
        threads = max(THREADS, team)
        self.set(team_shift=shift, exact=self.aligned and team * octets * OCTET == block)
        parts = -(-codec.blocks(self.numel) // (threads // team))
        return self.launch(file, kernel, parts, threads, loops=loops)

    def octets(self, file: str, kernel: str, per_thread: int = 1, *, loops: bool = False) -> Launch:
        """Returns a launch of ``kernel`` in ``file`` whose threads each work on ``per_thread`` times 8 elements.

        If ``loops`` is True, a thread block may work on several parts of a row, one after the other.
        """
        self.set(exact=self.aligned)
        return self.launch(file, kernel, -(-self.numel // (OCTET * THREADS * per_thread)), loops=loops)

    def extents(self, codec: Blocked, device: torch.device) -> Launch:
        """Returns the launch that finds the extent of each of the codec's blocks (elements that share a scale).

        The extent is the block's largest magnitude or, for codecs with offsets, its smallest and its largest element.
        The encoding that follows computes the scales from the extents.  The launch writes the extents to memory on
        ``device``; this object keeps that memory.
        """
        block, blocks = codec.block_size(self.numel), codec.blocks(self.numel)
        self._extremes = torch.zeros(2 * blocks * math.prod(self.sizes), dtype=torch.int32, device=device)
        parts, coding = -(-block // SCANNED), _coding(codec, self.numel)
        self.set(coding=coding, tile=SCANNED, parts=parts, extents=self._extremes.data_ptr())
        return self.launch("quantize.cu", f"encode_extents<{_any(codec)}>", blocks * parts)

    def format(self, operation: str, codec: OwnCodec, dtype: torch.dtype) -> Launch:
        """Returns the launch that encodes to a published format, such as NVFP4, or decodes from it.

        ``operation`` is ``encode`` or ``decode``, and ``dtype`` is the type from which elements are encoded, or to
        which they are decoded.
        """
        self.set(coding=_coding(codec, self.numel))
        name = FORMATS[codec.name].partition(":")[2]  # the class in Python and the type in C++ have this name
        return self.octets("formats.cu", f"{operation}_format<{name}, {TYPES[dtype]}>", loops=True)


class Kernels(Operations):
    """Runs the operations of codecs as CUDA kernels; each launch is carried out by the function ``run``.

    ``spread`` is the number of thread blocks that a launch should have (:class:`_Call`).  ``without`` names the kernels
    that a test switches off (:data:`Part`).
    """

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
        """Run ``launch``, and return a function that repeats the launch on other tensors of the same shapes and
        strides.

        ``tensors`` are the tensors of the launch, by the names of their fields in the kernel's argument.
        """
        self._run(launch, next(iter(tensors.values())).device)
        return partial(self._repeat, launch, [*tensors])

    def _repeat(self, last: Launch, places: Sequence[str], *tensors: Tensor) -> None:
        # Copy the argument, since other threads may repeat the same launch.  Copy it as integers, since NumPy takes
        # 27 us to copy a structure.
        arguments = last.arguments.view(np.int64).copy().view(ARGUMENTS)
        for place, tensor in zip(places, tensors, strict=True):
            arguments[place]["address"] = tensor.data_ptr()
        self._run(Launch(last.file, last.kernel, last.grid, last.threads, arguments), tensors[0].device)

    def _encode(self, codec: Codec, x: Tensor, frames: Tensor, options: Options) -> Repeat | None:
        carries = options.carried is not None
        if isinstance(codec, Raw) and not carries and (repeat := self._copy(codec, x, frames)):
            return repeat
        if not has_kernels(codec) or (isinstance(codec, OwnCodec) and carries):
            return super()._encode(codec, x, frames, options)
        tensors = {"values": x, "frames": frames}
        call = _Call(self._spread, x.shape[-1], tensors, {"coding": codec}, options=options)
        planned = self._encoding(call, codec, x, carries=carries)
        launches = [self._launch(launch, tensors) for launch in planned]
        # Two launches share extents, which must be zero before each use, so they cannot be repeated.
        return launches[0] if len(launches) == 1 else None

    def _decode(self, codec: Codec, frames: Tensor, out: Tensor) -> Repeat | None:
        return self._add_up("decode", codec, frames, out) or super()._decode(codec, frames, out)

    def _decode_sum(self, codec: Codec, frames: Tensor, out: Tensor) -> Repeat | None:
        if isinstance(codec, Raw):
            repeat = self._sum_elements((codec, None), frames, out, out.shape[-1])
        else:
            repeat = self._add_up("decode_sum", codec, frames, out)
        return repeat or super()._decode_sum(codec, frames, out)

    def _decode_mean(self, codec: Codec, frames: Tensor, out: Tensor, divisor: int) -> Repeat | None:
        if isinstance(codec, Raw) and (
            repeat := self._sum_elements((codec, None), frames, out, out.shape[-1], divisor=divisor)
        ):
            return repeat
        return super()._decode_mean(codec, frames, out, divisor)

    def _add_up(self, name: str, codec: Codec, frames: Tensor, out: Tensor) -> Repeat | None:
        """Decode ``frames`` (encoded rows) to ``out`` by one launch.

        ``name`` is ``decode`` or ``decode_sum``.  With ``decode_sum``, the first dimension of ``frames`` is that of the
        sources (the ranks that sent frames), and ``out`` gets the sum over the sources.  For a published format, such
        as NVFP4, ``decode`` is carried out as a sum over one source.

        Returns a function that repeats the launch.  Returns None, and does nothing, if the codec has no kernels.
        """
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

    def _fuses(self, first: BuiltIn, second: BuiltIn, numel: int, carried: Carried | None) -> bool:
        """Returns whether one launch can sum frames of codec ``first`` and encode the sum with codec ``second``.

        A frame is an encoded row of ``numel`` elements.  ``carried`` is the error feedback of the encoding: the errors
        of earlier encodings, which are added to the sum; None without error feedback.

        If neither codec quantises, one launch is enough without error feedback.  If only one codec quantises, one
        launch is not enough.  If both codecs quantise, one launch is enough if all of these conditions hold:

        - A block of the second codec has at most 4,096 elements, and is a multiple of 8 elements or the whole row
          (:func:`_holds`).
        - There is no error feedback, or the second codec does not rotate (multiply by a Hadamard matrix).
        - If the first codec rotates groups of more than 8 elements: a block of the second codec consists of whole
          groups, is the whole row, or has a number of elements that is a power of two.  Only then does each group lie
          in neighbouring threads.
        - Tests have not switched ``fused`` off.
        """
        if isinstance(first, Raw) or isinstance(second, Raw):
            return isinstance(first, Raw) and isinstance(second, Raw) and carried is None
        if not _holds(second, numel, HELD_ALONE) or (carried is not None and second.hadamard):
            return False
        if "fused" in self._without:
            return False
        block = second.block_size(numel)
        whole = first.hadamard <= OCTET or block % first.hadamard == 0
        return whole or block in (numel, block & -block)  # the whole row, or a power of two

    def _decode_sum_encode(
        self, hops: tuple[BuiltIn, BuiltIn], frames: Tensor, out: Tensor, numel: int, options: Options
    ) -> Repeat | None:
        (first, second), tensors = hops, {"frames": frames[0], "output": out}
        if isinstance(first, Raw) or isinstance(second, Raw):
            return self._sum_and_cast(hops, frames, out, numel)
        codecs = {"coding": first, "second": second}
        call = _Call(self._spread, numel, tensors, codecs, options=options, frames=frames)
        if plain := self._plain(first) and self._plain(second) and options.carried is None:
            sums = f"{first.bits}, {AHEAD_FUSED[first.bits]}"
            kernel = f"decode_sum_encode<{sums}, {second.bits}, {_ROUNDINGS[second.stochastic]}>"
        else:
            kernel = f"decode_sum_encode_general<{_any(first)}, {_any(second)}>"
        return self._launch(call.held("reduce.cu", kernel, second, 2 if plain else 1, loops=plain), tensors)

    # Elements that are not quantised, and bits

    def _copy(self, codec: Raw, x: Tensor, frames: Tensor) -> Repeat | None:
        """Copy the elements of ``x`` to ``frames`` (encoded rows), and write the frames' padding, by one launch.

        Returns a function that repeats the launch.  Returns None, and copies nothing, if ``x`` does not have the
        codec's type, or if the kernel does not take the shapes, strides or alignment of the tensors.
        """
        elements = _elements(codec, frames, x.shape[-1])
        if elements is None or x.dtype != elements.dtype:
            return None
        tensors = {"values": x, "frames": elements}
        if (call := self._call(x.shape[-1], tensors)) is None:
            return None
        call.set(coding=_coding(codec, x.shape[-1]))
        kind = "Fp32" if x.dtype == torch.float32 else "Bf16"  # the types of 16 bits are copied alike
        return self._launch(call.octets("raw.cu", f"copy_raw<{kind}>", loops=True), tensors)

    def _sum_elements(
        self, hops: tuple[Raw, Raw | None], frames: Tensor, out: Tensor, numel: int, *, divisor: int = 1
    ) -> Repeat | None:
        """Sum the frames of all sources, whose elements are not quantised, and write the sum to ``out``, by one launch.

        A frame is an encoded row, and a source is a rank that has sent frames.

        Args:
            hops: the codec of ``frames``, and the codec of ``out``.  If the second codec is None, ``out`` holds fp32
                elements.
            frames: (sources, ..., F) uint8, frames of F bytes.
            out: (..., F') uint8, frames of F' bytes; (..., numel) fp32 if there is no second codec.
            numel: the number of elements of a frame.
            divisor: the number by which the sum is divided.

        Returns:
            A function that repeats the launch.  If the kernel does not take the shapes, strides or alignment of the
            tensors, nothing is summed, and the result is None.
        """
        first, second = hops
        sources = _elements(first, frames, numel)
        sums = out if second is None else _elements(second, out, numel)
        if sources is None or sums is None:
            return None
        tensors = {"frames": sources[0], "output": sums}
        if (call := self._call(numel, tensors, sources)) is None:
            return None
        call.set(divisor=divisor)
        if second is not None:
            call.set(second=_coding(second, numel))
        kind = TYPES[sources.dtype]
        kernel = f"sum_raw<{kind}, {TYPES[sums.dtype]}, {AHEAD_RAW[kind]}>"
        return self._launch(call.octets("raw.cu", kernel, loops=True), tensors)

    def _sum_and_cast(
        self, hops: tuple[BuiltIn, BuiltIn], frames: Tensor, out: Tensor, numel: int
    ) -> Repeat | None:
        """Sum ``frames`` (sources, ..., F) over the sources, and encode the sum to the frames ``out`` (..., F').

        A frame is an encoded row, and a source is a rank that has sent frames.  ``hops`` has the codec of ``frames``
        and the codec of ``out``; both codecs only cast elements.  A frame has ``numel`` elements.

        If a kernel takes the shapes, strides and alignment of the tensors, one launch does both steps, and the result
        is a function that repeats the launch.  Otherwise torch sums and casts, and the result is None.
        """
        first, second = hops
        assert isinstance(first, Raw) and isinstance(second, Raw)  # noqa: S101, PT018  # _fuses() accepted them
        if (repeat := self._sum_elements((first, second), frames, out, numel)) is not None:
            return repeat
        total = torch.empty((*out.shape[:-1], numel), dtype=torch.float32, device=out.device)
        super()._decode_sum(first, frames, total)
        super()._encode(second, total, out, Options())
        return None

    def _call(self, numel: int, tensors: Mapping[str, Tensor], sources: Tensor | None = None) -> _Call | None:
        """Returns the argument of a kernel for elements that are not quantised, filled in for ``tensors``.

        ``tensors`` are the tensors of the launch, by the names of their fields in the argument, with rows of ``numel``
        elements.  ``sources`` are the elements (sources, ..., numel) that are summed; None if nothing is summed.

        Returns None for shapes and strides that the kernels do not take.  The caller then uses the reference backend,
        which takes all shapes and strides.
        """
        try:
            return _Call(self._spread, numel, tensors, {}, frames=sources)
        except ValueError:
            return None

    def sums_of_bits(self, values: Tensor) -> Tensor:
        """Returns checksums (n,) int64 of the bits of ``values`` (S,) fp32, computed by one launch.

        Each checksum covers a part of the elements, and any change of one element changes a checksum.  Checksums of
        different backends must not be compared (:meth:`Operations.sums_of_bits`).
        """
        blocks = -(-values.numel() // (OCTET * THREADS * SUMMED))
        sums = torch.empty(blocks * THREADS, dtype=torch.int64, device=values.device)
        key = key_of("sums_of_bits", values, sums)
        if blocks and not self._repeated(key, values, sums):
            tensors = {"values": values, "output": sums}
            call = _Call(self._spread, values.numel(), tensors, {})
            self._remember(key, self._launch(call.octets("raw.cu", "sum_bits", SUMMED), tensors))
        return sums

    def _encoding(
        self, call: _Call, codec: Blocked | OwnCodec, x: Tensor, *, carries: bool
    ) -> Iterator[Launch]:
        """Yield the launches that encode ``x``: one or two, as the table at the top of this file says.

        ``call`` has the argument of the kernels.  ``carries`` says whether the encoding has error feedback.
        """
        file = "quantize.cu"
        if isinstance(codec, OwnCodec):
            if codec.name == "nvfp4":  # the scale of a shard depends on the row's largest magnitude
                yield call.extents(IntCodec(8, "shard"), x.device)
            yield call.format("encode", codec, x.dtype)
            return
        block = codec.block_size(call.numel)
        whole = math.lcm(block, OCTET)  # elements of the fewest whole blocks that are whole octets
        held = _holds(codec, call.numel, HELD) and "held" not in self._without
        if held and not carries and self._plain(codec):
            kernel = f"encode_held<{TYPES[x.dtype]}, {codec.bits}, {_ROUNDINGS[codec.stochastic]}>"
            wide = x.dtype == torch.float32  # more than two octets of fp32 would not fit into the registers
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
        """Returns whether plain kernels, which are compiled for one number of bits and one type, can run ``codec``.

        They can if the codec has integers of 4 or 8 bits and no rotation, and tests have not switched ``plain`` off.
        """
        compiled = isinstance(codec, IntCodec) and codec.bits in AHEAD and not codec.hadamard
        return compiled and "plain" not in self._without


def _elements(codec: Raw, frames: Tensor, numel: int) -> Tensor | None:
    """Returns a view of ``frames`` (..., F) uint8 as elements (..., numel) of the type to which ``codec`` casts.

    Returns None if the frames are not contiguous, or not aligned to their elements.
    """
    dtype = DTYPES[codec.dtype]
    places = (frames.data_ptr(), frames.storage_offset(), *frames.stride()[:-1])
    if frames.stride(-1) != 1 or any(place % dtype.itemsize for place in places):
        return None
    return frames[..., : codec.code_bytes(numel)].view(dtype)


def _coding(codec: BuiltIn | OwnCodec, numel: int) -> tuple[int, ...]:
    """Returns the values of the fields of :data:`CODING`, in their order, for a row of ``numel`` elements.

    They tell a kernel how the row is encoded: where codes and scales end, the bits of a code, the block, and so on.
    """
    if isinstance(codec, OwnCodec):  # a published format
        return (0, 0, codec.own_bytes(numel), codec.frame_bytes(numel), 0, 0, 0, 0, 0, 0)
    if isinstance(codec, Raw):  # only the padding after the elements
        frame_bytes = codec.frame_bytes(numel)
        return (codec.code_bytes(numel), frame_bytes, frame_bytes, frame_bytes, 0, 0, 0, 0, 0, 0)
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
    """Returns whether kernels can hold one of the codec's blocks (elements that share a scale) in registers.

    A block must have at most ``most`` elements.  It must also be a multiple of 8 elements, or the whole row of
    ``numel`` elements.
    """
    block = codec.block_size(numel)
    return block <= most and (block % OCTET == 0 or block == numel)
