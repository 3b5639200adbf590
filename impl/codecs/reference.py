"""Implements encoding and decoding in plain PyTorch; all other backends must give the same results, bit for bit.

:class:`Operations` checks its arguments and runs four operations: ``encode``, ``decode``, ``decode_sum`` (decode and
sum) and ``decode_sum_encode`` (decode, sum, and encode the sum).  The C++ and CUDA backends inherit from it.

Shapes: S elements of a shard are encoded to a frame ``(F,)`` uint8 with ``F = codec.frame_bytes(S)``.  Leading
dimensions are batches of frames.  They may have any strides, so transposed frames need not be copied.

Arithmetic: computation is in fp32, except for sums with ``sums="fp16"``.  Elements are divided by the scale, and not
multiplied by its reciprocal.  Quotients are rounded to nearest, ties to even, or with the random bits of
:mod:`impl.codecs.rounding_noise`.  A sum adds the decoded frames in ascending order of their sources, the ranks that
sent them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from impl.codecs import own_rows
from impl.codecs.codec import (
    FRAME_ALIGNMENT,
    ITEM_BYTES,
    LARGEST,
    SCALE_BYTES,
    SMALLEST_NORMAL,
    Blocked,
    BuiltIn,
    Codec,
    FloatCodec,
    OwnCodec,
    Raw,
    Sums,
)
from impl.codecs.rounding_noise import BITS, MULTIPLIERS, OCTET, ROUNDS, WEYL, Noise

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SUMMED_ROW: Final = 1024  # 8-byte numbers in a row when bits are summed by rows and columns
_MOST_SEEN: Final = 4096  # most operations that are remembered; a unit needs about six
Repeat = Callable[[Tensor, Tensor], None]  # repeats an operation on tensors of the same layout, unchecked


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """The state of error feedback: the error of one encoding, which is added to the elements of the next encoding.

    Instead of the elements ``x``, ``h = x + error`` is encoded.  If the frames decode to ``d`` in fp32, the new error
    is ``decay * error + (1 - decay) * (h - d)``, computed in fp32 with one rounding for each operation.  Where the new
    error is not finite, it is replaced by 0, so that an overflow is not carried from step to step.  Finally the new
    error is limited to the range of the type of ``error``, and cast to this type.
    """

    error: Tensor  # (..., S) fp32, bf16 or fp16, shaped like the encoded elements; updated in place
    decay: float = 0.0  # 0 for classic error feedback, 0.8 for LoCo's moving average (2407.04480)

    def keep(self, with_error: Tensor, decoded: Tensor) -> None:
        """Compute the error of an encoding, and write it to ``error`` for the next encoding.

        Args:
            with_error: (..., S) fp32, what was encoded: the elements plus the old error.  This tensor is overwritten.
            decoded: (..., S) fp32, the values to which the frames decode.
        """
        fresh = with_error.sub_(decoded).mul_(1.0 - self.decay)
        error = self.error.float().mul_(self.decay).add_(fresh)
        largest = LARGEST[NAMES[self.error.dtype]]
        self.error.copy_(torch.where(error.isfinite(), error, 0.0).clamp_(-largest, largest))


class Options(NamedTuple):
    """The options of an encoding: the random bits for stochastic rounding, and the state of error feedback."""

    noise: Noise | None = None
    carried: Carried | None = None


class Operations:
    """Checks and runs a backend's operations on frames; this class itself is the backend in plain PyTorch.

    A frame is an encoded row of elements.  The operations encode, decode and sum frames.

    A backend with kernels is a subclass.  The subclass overrides ``_encode``, ``_decode`` and ``_decode_sum`` for the
    codecs that it has kernels for, and ``_decode_sum_encode`` for the pairs of codecs for which its ``_fuses`` returns
    True.  These methods are called with tensors that have been checked and are not empty.

    Each of these methods may return a function that repeats the operation on other tensors.  When the operation is
    called again with tensors of the same layout, only this function runs, which saves checks and preparation.
    """

    name = "reference"  # name of the backend in records

    def __init__(self) -> None:
        # Keys contain the ids of codecs, so the codecs are kept alive in the values.
        self._repeats: dict[tuple[Hashable, ...] | None, tuple[Repeat, Sequence[Codec]]] = {}

    def encode(
        self,
        codec: Codec,
        x: Tensor,
        frames: Tensor,
        *,
        noise: Noise | None = None,
        carried: Carried | None = None,
    ) -> None:
        """Encode ``x`` (..., S) fp32, bf16 or fp16 to ``frames`` (..., F) uint8; a frame's padding is set to 0.

        Args:
            codec: the codec.
            x: the elements.
            frames: the tensor that is written.
            noise: the random bits of a codec that rounds stochastically; other codecs ignore it.
            carried: error feedback.  Its error is added to ``x`` before the encoding, and updated afterwards.

        Raises:
            ValueError: if the type, shape or strides of a tensor are not allowed, if frames overlap in memory, if the
                codec rounds stochastically and ``noise`` is missing or has other dimensions than ``x``, if the tensors
                are on several devices, or if the backend cannot read the strides.
        """
        key = key_of("encode", x, frames, codec) if noise is None and carried is None else None
        if self._repeated(key, x, frames):
            return
        _check(codec, x.shape, x.dtype, frames, x)
        _check_written(codec, frames)
        _check_noise(codec, x.shape, noise)
        if x.numel() > 0:
            options = Options(noise if codec.stochastic else None, carried)
            self._remember(key, self._encode(codec, x, frames, options), codec)

    def decode(self, codec: Codec, frames: Tensor, out: Tensor) -> None:
        """Decode ``frames`` (..., F) uint8 to ``out`` (..., S) fp32, bf16 or fp16.

        Raises ValueError: if the tensors do not fit, as in :meth:`encode`.
        """
        key = key_of("decode", frames, out, codec)
        if self._repeated(key, frames, out):
            return
        _check(codec, out.shape, out.dtype, frames, out)
        _check_written(codec, out)
        if out.numel() > 0:
            self._remember(key, self._decode(codec, frames, out), codec)

    def decode_sum(
        self, codec: Codec, frames: Tensor, out: Tensor, *, sums: Sums = "fp32", divisor: int = 1
    ) -> None:
        """Decode ``frames`` (sources, ..., F) uint8, and write their sum over the sources to ``out`` (..., S) fp32.

        A source is a rank that has sent frames.  The frames are added in ascending order of their sources, and the sum
        is divided by ``divisor``.

        With ``sums="fp16"``, as in DeepSpeed, each decoded element and each partial sum is rounded to fp16, and becomes
        infinite beyond 65504.  The partial sums then begin with 0, so that the sum of a single -0 is +0.

        Raises ValueError: if the tensors do not fit, as in :meth:`encode`, or if ``out`` is not fp32.
        """
        key = key_of(("decode_sum", divisor), frames, out, codec) if sums == "fp32" else None
        if self._repeated(key, frames, out):
            return
        if out.dtype != torch.float32:
            raise ValueError(
                f"{codec}: sums are written as fp32, got a tensor of {out.dtype}: pass an fp32 tensor"
            )
        _check(codec, out.shape, out.dtype, frames[0], out)
        _check_written(codec, out)
        if out.numel() > 0:
            if sums == "fp16":
                self._sum_halves(codec, frames, out)
                out.div_(divisor)
            elif divisor == 1:
                self._remember(key, self._decode_sum(codec, frames, out), codec)
            else:
                self._remember(key, self._decode_mean(codec, frames, out, divisor), codec)

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
        sums: Sums = "fp32",
    ) -> None:
        """Decode ``frames``, sum them over their sources, and encode the sum to ``out``.

        A reduction in two hops (exchanges between ranks) does this between its hops: a source is a rank that has sent
        frames in the first hop.

        Args:
            first: the codec of ``frames``.
            second: the codec of ``out``.
            frames: (sources, ..., F) uint8, frames of F bytes.
            out: (..., F') uint8, frames of F' bytes.
            numel: the number of elements of one frame.
            noise: the random bits of ``second``, if it rounds stochastically.
            carried: the error feedback of ``second``.
            sums: the type of partial sums, as in :meth:`decode_sum`.

        Raises:
            ValueError: if the tensors do not fit, as in :meth:`encode`.
        """
        plain = noise is None and carried is None and sums == "fp32"
        key = key_of(numel, frames, out, first, second) if plain else None
        if self._repeated(key, frames, out):
            return
        shape = torch.Size((*out.shape[:-1], numel))
        if not (
            sums == "fp32"
            and isinstance(first, BuiltIn)
            and isinstance(second, BuiltIn)
            and self._fuses(first, second, numel, carried)
        ):
            total = torch.empty(shape, dtype=torch.float32, device=out.device)
            self.decode_sum(first, frames, total, sums=sums)
            self.encode(second, total, out, noise=noise, carried=carried)
            return
        _check(first, shape, torch.float32, frames[0], out)
        _check(second, shape, torch.float32, out, out)
        _check_written(second, out)
        _check_noise(second, shape, noise)
        if out.numel() > 0:
            options = Options(noise if second.stochastic else None, carried)
            repeat = self._decode_sum_encode((first, second), frames, out, numel, options)
            self._remember(key, repeat, first, second)

    def sums_of_bits(self, values: Tensor) -> Tensor:
        """Returns checksums (n,) int64 of the bits of ``values`` (S,) fp32, contiguous.

        A caller compares the checksums before and after some code to find out whether the code wrote to ``values``.
        The same backend must compute the checksums before and after, since each backend computes different checksums.

        This backend reads the memory as a matrix of 8-byte integers with :data:`SUMMED_ROW` columns.  The checksums are
        the sums of the rows and the sums of the columns, followed by the elements that fill no row.  A change of one
        integer changes the sum of its row and the sum of its column.  Several changes go unnoticed only if they cancel
        in every row and every column.  The memory is read twice, once by rows and once by columns, at the speed of a
        copy.
        """
        numbers = values.detach()[: values.numel() // 2 * 2].view(torch.int64)
        rows = numbers[: numbers.numel() // SUMMED_ROW * SUMMED_ROW].view(-1, SUMMED_ROW)
        # At most 2 * SUMMED_ROW elements are left, which are kept as they are.
        rest = values.detach()[2 * rows.numel() :].view(torch.int32)
        return torch.cat([rows.sum(1), rows.sum(0), rest])

    def _sum_halves(self, codec: Codec, frames: Tensor, out: Tensor) -> None:
        """Decode ``frames``, add them up in fp16, and write the sum to ``out`` (..., S) fp32.

        Frames are added in ascending order of their sources.  Backends with a kernel for this override the method.
        """
        total = torch.zeros(out.shape, dtype=torch.float16, device=out.device)
        for source in frames:
            self.decode(codec, source, out)
            total += out.half()
        out.copy_(total)

    def _repeated(self, key: tuple[Hashable, ...] | None, first: Tensor, second: Tensor) -> bool:
        if (repeat := self._repeats.get(key)) is not None:
            repeat[0](first, second)
        return repeat is not None

    def _remember(self, key: tuple[Hashable, ...] | None, repeat: Repeat | None, *codecs: Codec) -> None:
        if key is not None and repeat is not None:
            if len(self._repeats) >= _MOST_SEEN:
                self._repeats.clear()
            self._repeats[key] = repeat, codecs

    def _fuses(self, first: BuiltIn, second: BuiltIn, numel: int, carried: Carried | None) -> bool:
        """Returns whether this backend's ``_decode_sum_encode`` can decode with ``first`` and encode with ``second``.

        The answer may depend on ``numel``, the number of elements of a frame, and on the error feedback ``carried``.
        If the answer is False, ``decode_sum`` and ``encode`` are called instead, one after the other.
        """
        return False

    def _encode(self, codec: Codec, x: Tensor, frames: Tensor, options: Options) -> Repeat | None:
        noise, carried = options
        if carried is not None:
            with_error = x.float() + carried.error.float()
            self._encode(codec, with_error, frames, Options(noise))
            decoded = torch.empty_like(with_error)
            self._decode(codec, frames, decoded)
            carried.keep(with_error, decoded)
        elif isinstance(codec, OwnCodec):
            own_rows.encode(codec, x, frames, noise)
        elif isinstance(codec, Raw):
            nbytes = codec.code_bytes(x.shape[-1])
            frames[..., :nbytes] = x.to(DTYPES[codec.dtype]).contiguous().view(torch.uint8)
            frames[..., nbytes:] = 0
        else:
            _encode_blocks(codec, x, frames, noise)
        return None

    def _decode(self, codec: Codec, frames: Tensor, out: Tensor) -> Repeat | None:
        if isinstance(codec, OwnCodec):
            own_rows.decode(codec, frames, out)
        else:
            out.copy_(_decoded(codec, frames, out.shape[-1], LARGEST[NAMES[out.dtype]]))
        return None

    def _decode_sum(self, codec: Codec, frames: Tensor, out: Tensor) -> Repeat | None:
        if isinstance(codec, OwnCodec):
            own_rows.decode_sum(codec, frames, out)
            return None
        self._decode(codec, frames[0], out)
        for source in frames[1:]:
            out.add_(_decoded(codec, source, out.shape[-1], LARGEST["fp32"]))
        return None

    def _decode_mean(self, codec: Codec, frames: Tensor, out: Tensor, divisor: int) -> Repeat | None:
        repeat = self._decode_sum(codec, frames, out)
        out.div_(divisor)
        return None if repeat is None else partial(_sum_and_divide, repeat, divisor)

    def _decode_sum_encode(
        self, hops: tuple[BuiltIn, BuiltIn], frames: Tensor, out: Tensor, numel: int, options: Options
    ) -> Repeat | None:
        raise NotImplementedError


REFERENCE: Final = Operations()
encode, decode = REFERENCE.encode, REFERENCE.decode
decode_sum, decode_sum_encode = REFERENCE.decode_sum, REFERENCE.decode_sum_encode


def _sum_and_divide(repeat: Repeat, divisor: int, frames: Tensor, out: Tensor) -> None:
    repeat(frames, out)
    out.div_(divisor)


def key_of(operation: Hashable, first: Tensor, second: Tensor, *codecs: Codec) -> tuple[Hashable, ...] | None:
    """Returns the key under which an operation on two tensors is remembered, so that it can be repeated unchecked.

    The key contains the operation, the codecs, and the shape, strides, type, device, and address modulo 16 bytes of
    both tensors.  If an operation has been checked for two tensors, it needs no checks for two other tensors with the
    same key.  Only operations without noise and error feedback are remembered.

    Returns None if a tensor has no memory, or is negated lazily by torch.  Such tensors must be checked each time, even
    if the operation has accepted other tensors of the same layout.
    """
    addresses = _address(first), _address(second)
    if 0 in addresses or first.is_neg() or second.is_neg():
        return None
    return (
        operation,
        *map(id, codecs),  # hashing a codec takes longer than the rest
        *(first.shape, first.stride(), first.dtype, first.device, addresses[0] % FRAME_ALIGNMENT),
        *(second.shape, second.stride(), second.dtype, second.device, addresses[1] % FRAME_ALIGNMENT),
    )


def _address(x: Tensor) -> int:
    """Returns the address of the first element of ``x`` in memory; 0 if ``x`` has no memory.

    Raises ValueError: if the tensor is not dense, for example sparse.
    """
    try:
        return x.data_ptr()
    except RuntimeError:  # includes NotImplementedError
        kind = str(x.layout).removeprefix("torch.") if x.layout != torch.strided else type(x).__name__
        raise ValueError(
            f"codecs read and write dense tensors with memory, got {kind}: pass a dense tensor"
        ) from None


def _check(codec: Codec, shape: torch.Size, kind: torch.dtype, frames: Tensor, other: Tensor) -> None:
    """Raise ValueError if ``codec`` cannot encode elements to ``frames``, or decode ``frames`` to elements.

    The elements must be fp32, bf16 or fp16.  The frames must be uint8, contiguous, and of the codec's size.  ``frames``
    and ``other`` must be dense tensors with memory on the same device, and must not be negated lazily by torch.

    Args:
        codec: the codec.
        shape: the shape of the elements, (..., S).
        kind: the type of the elements.
        frames: (..., F), read or written.
        other: the second tensor of the operation, which usually holds the elements.
    """
    if kind not in NAMES or not shape:
        raise ValueError(
            f"{codec}: expected elements (..., S) in fp32, bf16 or fp16, got {tuple(shape)} {kind}"
        )
    expected = (*shape[:-1], codec.frame_bytes(shape[-1]))
    contiguous = expected[-1] == 0 or frames.stride()[-1:] == (1,)
    if frames.dtype != torch.uint8 or frames.shape != expected or not contiguous:
        got = f"{tuple(frames.shape)} {frames.dtype} with strides {frames.stride()}"
        raise ValueError(
            f"{codec}: elements of shape {tuple(shape)} need contiguous uint8 frames of shape {expected}, got {got}"
        )
    if frames.device != other.device:
        raise ValueError(
            f"{codec}: tensors are on {frames.device} and {other.device}: move them to one device"
        )
    for tensor in (frames, other):
        if tensor.numel() and not _address(tensor):
            raise ValueError(
                f"{codec}: a {type(tensor).__name__} has no memory (it was freed, or wraps other tensors): pass a "
                "torch.Tensor with its own storage"
            )
        if tensor.is_neg():  # kernels read memory and do not see torch's lazy negation
            raise ValueError(f"{codec}: torch negates this tensor lazily: pass tensor.resolve_neg()")


def _check_written(codec: Codec, target: Tensor) -> None:
    """Raise ValueError if elements of ``target``, which is about to be written, overlap in memory."""
    shape, strides = tuple(target.shape), target.stride()
    if any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True)):
        raise ValueError(
            f"{codec}: cannot write {shape} with strides {strides}, whose elements overlap: pass a contiguous tensor"
        )


def _check_noise(codec: Codec, shape: torch.Size, noise: Noise | None) -> None:
    """Raise ValueError if ``codec`` rounds stochastically, and ``noise`` is missing or has the wrong strides.

    Elements of ``shape`` (..., S) need a noise with one stride for each dimension but the last.
    """
    if codec.stochastic and (noise is None or len(noise.strides) != len(shape) - 1):
        got = "none" if noise is None else f"noise with strides {noise.strides}"
        raise ValueError(
            f"{codec} rounds stochastically: elements of shape {tuple(shape)} need noise with {len(shape) - 1} strides "
            f"(one for each dimension but the last), got {got}"
        )


def rotated(codec: Codec, x: Tensor) -> Tensor:
    """Returns the values (..., S) fp32 that ``codec`` quantises: ``x`` (..., S), or ``x`` rotated if the codec rotates.

    The rotation turns each group of ``n = codec.hadamard`` consecutive elements into ``H x / n``, where ``H`` is the
    Hadamard matrix in Sylvester's order.  Elements at the end of a row that fill no group stay as they are.
    """
    values = x.float().contiguous()
    return _rotate(values.clone(), codec.hadamard) if codec.hadamard else values


def merged_rows(
    tensors: Sequence[Tensor], noise: Noise | None, most: int, backend: str
) -> list[tuple[int, list[int]]]:
    """Merge the leading dimensions of ``tensors`` into as few dimensions as the strides allow.

    Kernels take a limited number of dimensions.  All tensors have the same leading dimensions.  For example, the
    leading dimensions of a contiguous fp32 tensor of shape (2, 3, 8) are merged to a single dimension of 6 rows, which
    are 32 bytes apart.

    Returns:
        (size, steps) for each merged dimension.  ``steps`` has one number for each tensor: the distance in bytes from
        one row to the next.  If ``noise`` is not None, a last number follows: the distance in elements from the noise
        of one row to the noise of the next.

    Raises ValueError: if more than ``most`` dimensions are left, the limit of the kernels of ``backend``.
    """
    steps_of = [[stride * x.element_size() for stride in x.stride()[:-1]] for x in tensors]
    if noise is not None:
        steps_of.append([*noise.strides])
    shape = tensors[0].shape[:-1]
    merged: list[tuple[int, list[int]]] = []
    for size, *steps in zip(shape, *steps_of, strict=True):
        if merged and merged[-1][1] == [size * step for step in steps]:
            merged[-1] = (merged[-1][0] * size, steps)
        elif size > 1:
            merged.append((size, steps))
    if len(merged) > most:
        random = "" if noise is None else f" and noise with {noise.strides}"
        raise ValueError(
            f"tensors of leading dimensions {tuple(shape)} with strides {[x.stride() for x in tensors]}{random}: "
            f"the {backend} kernels take at most {most} leading dimensions, and with these strides the dimensions "
            "cannot be merged to so few; pass contiguous tensors"
        )
    return merged


def random_bits(noise: Noise, lead: torch.Size, numel: int, device: torch.device) -> Tensor:
    """Returns 16 random bits for each element of a tensor, as numbers from 0 to 65535, (*lead, numel) int64.

    ``lead`` is the shape of the tensor without its last dimension, which has ``numel`` elements.  ``noise.strides`` has
    one entry for each dimension of ``lead``.  :mod:`impl.codecs.rounding_noise` defines the bits.
    """
    starts = torch.full(lead, noise.start, dtype=torch.int64, device=device)
    for dim, stride in enumerate(noise.strides):
        steps = torch.arange(lead[dim], device=device) * stride
        starts += steps.view(-1, *[1] * (len(lead) - dim - 1))
    octets = (starts // OCTET).unsqueeze(-1) + torch.arange(-(-numel // OCTET), device=device)
    mask = 0xFFFFFFFF
    a, b = octets & mask, octets >> 32
    c, d = (torch.full_like(a, word) for word in noise.philox[:2])
    left, right = noise.philox[2:]
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c  # 64-bit products; int64 keeps all bits
        a, b = (second >> 32) & mask ^ b ^ left, second & mask
        c, d = (first >> 32) & mask ^ d ^ right, first & mask
        left, right = (left + WEYL[0]) & mask, (right + WEYL[1]) & mask
    outputs = torch.stack([a, b, c, d], dim=-1)  # (..., octets, 4)
    halves = torch.stack([outputs & 0xFFFF, outputs >> BITS], dim=-1)
    return halves.reshape(*lead, -1)[..., :numel]


def _decoded(codec: BuiltIn, frames: Tensor, numel: int, largest: float) -> Tensor:
    """Decodes ``frames`` (..., F) uint8 to elements (..., numel) fp32, limited to [-``largest``, ``largest``].

    A frame is one encoded row of F bytes.  If the codec is a cast, the elements are returned in the type of the cast
    instead, and are not limited.
    """
    if not isinstance(codec, Raw):
        return _decode_blocks(codec, frames, numel, largest)
    codes = frames[..., : codec.code_bytes(numel)]
    if any(offset % ITEM_BYTES[codec.dtype] for offset in (codes.storage_offset(), *codes.stride()[:-1])):
        codes = codes.clone(memory_format=torch.contiguous_format)  # torch does not view misaligned bytes
    return codes.view(DTYPES[codec.dtype])


def _blocked(codec: Blocked, x: Tensor) -> Tensor:
    """Returns a copy of ``x`` (..., S) that is cut into the codec's blocks, (..., blocks, block) fp32.

    A short last block is filled up with the row's last element, which does not change the block's extremes.
    """
    numel, block = x.shape[-1], codec.block_size(x.shape[-1])
    blocks = codec.blocks(numel)
    full = x.new_empty((*x.shape[:-1], blocks * block), dtype=torch.float32)
    full[..., :numel] = x
    if numel < blocks * block:
        full[..., numel:] = x[..., -1:].float()
    return full.view(*x.shape[:-1], blocks, block)


def _rotate(values: Tensor, size: int, *, back: bool = False) -> Tensor:
    """Rotate ``values`` (..., S) fp32, contiguous, in place, and return them; with ``back=True``, undo the rotation.

    Each group of ``size`` elements is rotated.  In both directions the values are first divided by ``size``, so that no
    sum overflows.  Then, for the distances 1, 2, 4, ..., each pair (a, b) of elements at this distance is replaced by
    (a + b, a - b).  With ``back=True`` the results are multiplied by ``size``.
    """
    whole = values.shape[-1] // size * size
    groups = values[..., :whole].view(*values.shape[:-1], -1, size)
    groups.mul_(1.0 / size)
    distance = 1
    while distance < size:
        pairs = groups.view(*groups.shape[:-1], size // (2 * distance), 2, distance)
        a, b = pairs[..., 0, :].clone(), pairs[..., 1, :].clone()
        torch.add(a, b, out=pairs[..., 0, :])
        torch.sub(a, b, out=pairs[..., 1, :])
        distance *= 2
    if back:
        groups.mul_(size)
    return values


def _encode_blocks(codec: Blocked, x: Tensor, frames: Tensor, noise: Noise | None) -> None:
    numel = x.shape[-1]
    codes_end, scales_at = codec.code_bytes(numel), codec.scales_at(numel)
    shift = None  # random numbers, one of which is added to each quotient before the quotient is rounded
    if codec.stochastic:
        assert noise is not None  # noqa: S101  # checked
        bits = random_bits(noise, x.shape[:-1], numel, x.device).float()
        shift = _blocked(codec, bits * 2.0**-16 - (0.5 - 2.0**-17))
    values = _blocked(codec, rotated(codec, x) if codec.hadamard else x)  # (..., blocks, block)
    low, high = values.aminmax(dim=-1, keepdim=True)  # both propagate NaN
    broken = ~(torch.isfinite(low) & torch.isfinite(high))
    if codec.asymmetric:
        # Which of -0 and +0 is the minimum depends on the order of comparisons, so +0 is stored.
        low = (low + 0.0).masked_fill(broken, 0.0)
        top = torch.full_like(low, codec.largest)
        # ``high - low`` may overflow.  So the scale is the difference of two quotients, and the elements and the
        # smallest element are halved before they are subtracted.
        scale = torch.clamp(high / top - low / top, min=SMALLEST_NORMAL)
        values = values.mul_(0.5).sub_(low * 0.5).div_(scale * 0.5)
    else:
        absmax = torch.maximum(-low, high)
        scale = torch.clamp(absmax / torch.full_like(absmax, codec.steps), min=SMALLEST_NORMAL)
        scale = of_e8m0(to_e8m0(scale)) if codec.scale == "e8m0" else scale
        values = values.div_(scale)
    codes = _codes(codec, values, shift)
    if broken.any():  # a block with a NaN or an infinity must not decode to finite values
        scale = scale.masked_fill(broken, math.nan)
        codes.masked_fill_(broken, 0)
    pack(codes.view(*x.shape[:-1], -1)[..., :numel], codec.bits, frames[..., :codes_end])
    frames[..., codes_end:scales_at] = 0
    stored = scale.squeeze(-1).contiguous()
    parts = [to_e8m0(stored) if codec.scale == "e8m0" else stored]
    if codec.asymmetric:
        parts.append(low.squeeze(-1).contiguous())
    end = scales_at
    for part in parts:
        raw = part.view(torch.uint8)
        frames[..., end : end + raw.shape[-1]] = raw
        end += raw.shape[-1]
    frames[..., end:] = 0


def _codes(codec: Blocked, quotients: Tensor, shift: Tensor | None) -> Tensor:
    """Returns the codes (...) uint8 of ``quotients`` (...) fp32, which are elements divided by their block's scale.

    A code is in the lowest ``codec.bits`` bits of its byte.  If the codec rounds stochastically, ``shift`` (...) has a
    random number for each quotient, which is added before the quotient is rounded to nearest.  For all other codecs,
    ``shift`` is None.
    """
    if isinstance(codec, FloatCodec):
        return _float_codes(codec, quotients, shift)
    if shift is not None:
        quotients.add_(shift)
    first = 0 if codec.asymmetric else -codec.steps
    # NaN occurs only in blocks that are not finite; the caller replaces their codes.
    codes = quotients.round_().clamp_(first, codec.largest).nan_to_num_(0.0)
    return codes.to(torch.uint8) if codec.asymmetric else codes.to(torch.int8).view(torch.uint8)


def _float_codes(codec: FloatCodec, v: Tensor, shift: Tensor | None) -> Tensor:
    """Returns the codes (...) uint8 of quotients ``v`` (...) fp32 in the codec's small float type, such as e4m3.

    A quotient is an element divided by its block's scale.  Its code has the sign, the exponent and the mantissa of the
    small float to which the quotient is rounded.  Without ``shift``, this is the nearest small float.

    For stochastic rounding, ``shift`` (...) has a random number for each quotient.  The number is multiplied by the
    distance between neighbouring small floats of the quotient's exponent, and added to the quotient.  The sum is then
    rounded to nearest.  For example, small floats of e4m3 between 1 and 2 are 1/8 apart, so the number 0.4 adds 0.05.
    """
    bits = v.contiguous().view(torch.int32)
    exponent = ((bits >> 23) & 0xFF).clamp_(min=codec.smallest_exponent + 127, max=254)
    quantum = ((exponent - codec.mantissa) << 23).view(torch.float32)
    steps = v / quantum
    if shift is not None:
        steps = steps + shift
    size = steps.round_().mul_(quantum).abs().clamp_(max=codec.largest)  # exact
    code = torch.searchsorted(_levels(codec, size.device), size.nan_to_num(0.0))  # NaN: as in _codes
    sign = ((bits >> 31) & 1) << (codec.bits - 1)
    return (code | sign).to(torch.uint8)


def to_e8m0(scale: Tensor) -> Tensor:
    """Returns the E8M0 form of fp32 scales: exponents in uint8, where 255 is NaN.

    Scales are rounded up to powers of two, so that no element saturates.
    """
    exponents = ((scale.view(torch.int32) + 0x7FFFFF) >> 23) & 0xFF
    return torch.where(scale.isnan(), 255, exponents).to(torch.uint8)


def of_e8m0(exponents: Tensor) -> Tensor:
    """Returns the fp32 scales of E8M0 exponents in uint8; 255 becomes NaN."""
    return torch.where(exponents == 255, math.nan, (exponents.to(torch.int32) << 23).view(torch.float32))


def _decode_blocks(codec: Blocked, frames: Tensor, numel: int, largest: float) -> Tensor:
    """Decodes encoded rows to elements (..., numel) fp32, clamped to [-``largest``, ``largest``].

    ``frames`` (..., F) uint8 are the encoded rows.  Each has the codes of its ``numel`` elements, the scales of its
    blocks and, for codecs with offsets, the offsets of its blocks.
    """
    lead, scales_at = frames.shape[:-1], codec.scales_at(numel)
    blocks, block = codec.blocks(numel), codec.block_size(numel)
    codes, half = unpack(frames[..., : codec.code_bytes(numel)], codec.bits, numel), 1 << (codec.bits - 1)
    values = torch.zeros((*lead, blocks * block), dtype=torch.float32, device=frames.device)
    if isinstance(codec, FloatCodec):
        sizes = _levels(codec, codes.device)[(codes & (half - 1)).long()]
        values[..., :numel] = torch.where(codes >= half, -sizes, sizes)
    elif codec.asymmetric:
        values[..., :numel] = codes
    else:
        values[..., :numel] = (codes.bitwise_xor_(half) - half).view(torch.int8)  # sign extension
    values = values.view(*lead, blocks, block)
    if codec.scale == "e8m0":
        scale = of_e8m0(frames[..., scales_at : scales_at + blocks]).unsqueeze(-1)
    else:
        scale = _floats(frames, scales_at, blocks)
    if codec.asymmetric:  # in halves, since q * scale may overflow although the sum does not
        low = _floats(frames, scales_at + SCALE_BYTES * blocks, blocks)
        values.mul_(scale * 0.5).add_(low * 0.5).mul_(2.0)
    else:
        values.mul_(scale)
    values = values.view(*lead, -1)[..., :numel]
    if codec.hadamard:
        top = LARGEST["fp32"]  # an infinity would become NaN in the butterflies' differences
        values = _rotate(values.clamp(-top, top).contiguous(), codec.hadamard, back=True)
    return values.clamp_(-largest, largest)


def _levels(codec: FloatCodec, device: torch.device) -> Tensor:
    levels = float_levels(codec.bits, codec.mantissa, codec.smallest_exponent)
    return torch.tensor(levels, dtype=torch.float32, device=device)


def float_levels(bits: int, mantissa: int, least: int) -> list[float]:
    """Returns the non-negative values of a small float type, in ascending order of their codes.

    A value has ``bits`` bits: the sign, the exponent, and ``mantissa`` bits of mantissa.  ``least`` is the exponent of
    the smallest normal value.  Codes that stand for NaN or infinity in a format, such as e4m3's last code, also get a
    finite value here.
    """
    size = 1 << mantissa
    return [
        (code % size + size * (code >= size)) * 2.0 ** (max(code // size, 1) - 1 + least - mantissa)
        for code in range(1 << (bits - 1))
    ]


def _floats(frames: Tensor, start: int, count: int) -> Tensor:
    """Returns the ``count`` fp32 numbers that begin at byte ``start`` of each encoded row, as (..., count, 1).

    ``frames`` (..., F) uint8 are the encoded rows.  The numbers are, for example, the scales of a row's blocks.
    """
    stored = frames[..., start : start + SCALE_BYTES * count]
    aligned = stored.clone(memory_format=torch.contiguous_format)  # a frame may be misaligned for fp32
    return aligned.view(torch.float32).unsqueeze(-1)


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Pack ``codes`` (..., S) uint8 into ``out`` (..., bytes) uint8, with ``bits`` bits for each code.

    Only the lowest ``bits`` bits of a code are written; its other bits are ignored.  The codes of a row follow one
    another in a little-endian bit stream: the first code is in the lowest bits of the first byte.
    """
    if bits == 8:
        out.copy_(codes)
        return
    group = 8 // math.gcd(8, bits)  # fewest codes that fill whole bytes
    rows = _in_groups(codes & ((1 << bits) - 1), group)
    stream = codes.new_zeros((group * bits // 8, *rows.shape[1:]))
    for index, row in enumerate(rows):
        byte, shift = divmod(index * bits, 8)
        stream[byte] |= row << shift
        if shift + bits > 8:
            stream[byte + 1] |= row >> (8 - shift)
    out.copy_(stream.movedim(0, -1).flatten(-2)[..., : out.shape[-1]])


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Returns the first ``numel`` codes, (..., numel) uint8, that :func:`pack` has written to ``packed``.

    ``packed`` (..., bytes) uint8 is a little-endian bit stream, in which each code has ``bits`` bits.
    """
    if bits == 8:
        return packed.clone()
    group = 8 // math.gcd(8, bits)
    stream = _in_groups(packed, group * bits // 8)
    codes = packed.new_empty((group, *stream.shape[1:]))
    for index, row in enumerate(codes):
        byte, shift = divmod(index * bits, 8)
        torch.bitwise_right_shift(stream[byte], shift, out=row)
        if shift + bits > 8:
            row.bitwise_or_(stream[byte + 1] << (8 - shift))
    return codes.bitwise_and_((1 << bits) - 1).movedim(0, -1).flatten(-2)[..., :numel]


def _in_groups(row: Tensor, size: int) -> Tensor:
    """Cut rows (..., n) into groups of ``size`` elements, and return a tensor (size, ..., groups).

    Element [i, ..., g] of the result is element i of group g.  The last group is filled up with zeros.
    """
    full = torch.nn.functional.pad(row, (0, -row.shape[-1] % size))
    return full.view(*row.shape[:-1], full.shape[-1] // size, size).movedim(-1, 0).contiguous()
