"""Implements published formats, such as NVFP4, in torch, as the reference that kernels must equal bit for bit.

Each class has the same attributes as a user's codec (:class:`impl.codecs.own_object.OwnObject`).  A frame, the
bytes of one encoded row, has three parts: the codes, with element 0 in the lowest bits; the extra bytes of each block,
such as its scale; and the extra bytes of the whole row, such as NVFP4's fp32 scale.
"""

from __future__ import annotations

import itertools
import math
from typing import ClassVar, Final

import torch
from torch import Tensor

from impl.codecs.codec import HALF_ULP, LARGEST, SMALLEST_NORMAL
from impl.codecs.reference import float_levels, of_e8m0, pack, random_bits, to_e8m0, unpack
from impl.codecs.rounding_noise import Noise

_ROOM: Final = 1 + 2.0**-15  # factor of error bounds that covers the rounding of fp32 divisions and products
# The 16 values of NF4: 2305.14314, appendix E.
_NF4: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip


class _Format:
    """Base class of the published formats: cuts a row into blocks, packs codes, and lays out the frame."""

    device = "any"
    kinds: ClassVar = ["fp32"]
    laws: ClassVar = ["bound", "zero", "nonfinite"]
    bits: int  # bits of a code
    size: int  # elements of a block
    beside: int  # bytes of a block in addition to its codes
    whole = 0  # bytes of a row in addition to those of its blocks

    @property
    def block(self) -> int | str:
        """The number of elements in a block, or ``shard`` if a scale belongs to the whole shard."""
        return self.size

    def _parts(self, numel: int) -> list[int]:
        """Returns how many bytes each part of a frame of ``numel`` elements has.

        The parts are the codes, the extra bytes of all blocks, and the extra bytes of the row.
        """
        return [-(-numel * self.bits // 8), -(-numel // self.size) * self.beside, self.whole]

    def frame_bytes(self, numel: int) -> int:
        """Returns how many bytes the frame of ``numel`` elements takes."""
        return sum(self._parts(numel))

    def encode(self, x: Tensor, frame: Tensor) -> None:
        """Encode ``x`` (S,) fp32 to ``frame`` (F,) uint8; a short last block is filled up with the last element."""
        numel = x.numel()
        values = torch.cat([x, x[-1:].expand(-numel % self.size)]).view(-1, self.size)
        codes, *others = self._codes(values)
        packed, *places = torch.split(frame, self._parts(numel))
        pack(codes.view(-1)[:numel], self.bits, packed)
        for place, other in zip(places, others, strict=True):
            place.copy_(other.reshape(-1))

    def decode(self, frame: Tensor, out: Tensor) -> None:
        """Decode ``frame`` (F,) uint8 to ``out`` (S,) fp32."""
        numel = out.numel()
        packed, beside, whole = torch.split(frame, self._parts(numel))
        codes = frame.new_zeros(-(-numel // self.size), self.size)
        codes.view(-1)[:numel] = unpack(packed, self.bits, numel)
        values = self._values(codes, beside.view(len(codes), self.beside), whole)
        out.copy_(values.reshape(-1)[:numel].clamp(-LARGEST["fp32"], LARGEST["fp32"]))

    def error_bound(self, low: float, high: float, out: str) -> float:
        """Returns an upper bound of |decoded - x| for every element x of a block.

        The block's elements must be finite and in [low, high].  ``out`` is the type to which elements are decoded.
        """
        top = max(abs(low), abs(high))
        relative, absolute = HALF_ULP[out]
        return self._bound(low, high, top) + 2 * (top * relative + absolute)

    def _bound(self, low: float, high: float, top: float) -> float:
        """Returns an upper bound of |decoded - x| in fp32, before decoded values are rounded to another type.

        The block's values are in [low, high], and ``top`` is max(|low|, |high|).
        """
        raise NotImplementedError

    def _codes(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode ``values`` (n, size) fp32, a row of n blocks.

        Returns three tensors of uint8: the codes (n, size), the extra bytes of each block (n, beside), and the
        extra bytes of the row (whole,).
        """
        raise NotImplementedError

    def _values(self, codes: Tensor, beside: Tensor, whole: Tensor) -> Tensor:
        """Returns the decoded elements (n, size) fp32 from ``codes`` (n, size), ``beside`` (n, beside) and ``whole``.

        The three arguments are the tensors that :meth:`_codes` returns.
        """
        raise NotImplementedError


def _bytes(values: Tensor) -> Tensor:
    """Returns the bytes (n, k * itemsize) uint8 of elements (n, k)."""
    return values.contiguous().view(torch.uint8)


def _as(beside: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a copy of the bytes ``beside`` (n, k * itemsize) uint8, read as elements (n, k) of type ``dtype``."""
    return beside.clone(memory_format=torch.contiguous_format).view(dtype)


class _Table(_Format):
    """Base class of formats that encode an element, divided by its block's scale, as the nearest entry of a table.

    The scale is the block's largest magnitude divided by the table's largest entry.  ``beside`` is the number of bytes
    in which a format stores the scale: with ``beside = 4`` the scale is stored as fp32, and with ``beside = 1`` it is
    rounded up to a power of two (E8M0).  :class:`NVFP4` has other scales.
    """

    table: tuple[float, ...]  # the entries in ascending order; the code of the smallest is 0

    def nearest(self, quotients: Tensor) -> Tensor:
        """Returns the codes (n, size) uint8 of the table's entries that are nearest to ``quotients`` (n, size).

        A quotient is an element divided by its block's scale.  A code is the index of an entry in the table.  If two
        entries are equally near, the code is chosen that differs from the code of 0.0 by an even number.  For example,
        if 0.0 has code 7, code 9 is chosen rather than code 8.
        """
        table = torch.tensor(self.table, device=quotients.device)
        upper = torch.searchsorted(table, quotients.contiguous()).clamp_(1, len(self.table) - 1)
        below, above = quotients - table[upper - 1], table[upper] - quotients
        even = (upper - self.table.index(0.0)) % 2 == 0
        up = (above < below) | ((above == below) & even)
        return (upper - 1 + up.long()).to(torch.uint8)

    def entries(self, codes: Tensor) -> Tensor:
        """Returns the entry of the table for each of ``codes`` (n, size), in fp32."""
        return torch.tensor(self.table, device=codes.device)[codes.long()]

    def _bound(self, low: float, high: float, top: float) -> float:
        """Returns an upper bound of |decoded - x| in fp32 for a block with values in [low, high].

        The bound is half of the largest distance between neighbouring entries of the table, times the largest scale
        that such a block can have.
        """
        scale = max(top / self.table[-1], SMALLEST_NORMAL)
        if self.beside == 1:
            scale = 2.0 ** math.ceil(math.log2(scale) - 1e-9)
        return max(b - a for a, b in itertools.pairwise(self.table)) / 2 * scale * _ROOM

    def _codes(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        top = values.abs().amax(dim=1, keepdim=True)
        broken = ~torch.isfinite(top)
        scale = (top / self.table[-1]).clamp_(min=SMALLEST_NORMAL).masked_fill_(broken, math.nan)
        beside = to_e8m0(scale) if self.beside == 1 else _bytes(scale)
        codes = self.nearest((values / self._scale(beside)).masked_fill(broken, 0.0))
        return codes, beside, values.new_empty(0)

    def _values(self, codes: Tensor, beside: Tensor, whole: Tensor) -> Tensor:
        return self.entries(codes) * self._scale(beside)

    def _scale(self, beside: Tensor) -> Tensor:
        """Returns the scale (n, 1) fp32 of each block; it is NaN if a value of the block is not finite.

        ``beside`` (n, beside) uint8 has the stored scales.
        """
        return of_e8m0(beside) if self.beside == 1 else _as(beside, torch.float32)


def _float_table(bits: int, mantissa: int, least: int) -> tuple[float, ...]:
    """Returns all values of a small float type without infinities, in ascending order, with one zero.

    A value has ``bits`` bits: the sign, the exponent, and ``mantissa`` bits of mantissa.  ``least`` is the exponent of
    the smallest normal value.
    """
    zero, *positive = float_levels(bits, mantissa, least)
    return (*(-v for v in reversed(positive)), zero, *positive)


class NF4(_Table):
    """NF4: 16 quantiles of a normal distribution, times the largest magnitude of a block (QLoRA, 2305.14314)."""

    bits, size, beside, table = 4, 64, 4, _NF4
    laws: ClassVar = ["bound", "zero", "nonfinite", "power_of_two", "idempotent"]


class _Microscaled(_Table):
    """Base class of formats whose elements are small floats, and whose scale is a power of two for each block of 32.

    The scale is rounded up, so that no element divided by its scale exceeds the largest float.
    """

    size, beside = 32, 1
    laws: ClassVar = ["bound", "zero", "nonfinite", "sign", "power_of_two", "idempotent"]


class MXFP6E2M3(_Microscaled):
    """MXFP6 with E2M3 elements and an E8M0 scale for each block (OCP Microscaling 1.0)."""

    bits, table = 6, _float_table(6, 3, 0)


class MXFP6E3M2(_Microscaled):
    """MXFP6 with E3M2 elements and an E8M0 scale for each block (OCP Microscaling 1.0)."""

    bits, table = 6, _float_table(6, 2, -2)


class NVFP4(_Table):
    """NVIDIA's NVFP4: E2M1 elements, an E4M3 scale for each block of 16, and an fp32 scale for the shard.

    A block's scale is rounded to nearest.  If it is rounded down, the block's largest elements are cut off at the
    largest E2M1 number.
    """

    bits, size, beside, whole = 4, 16, 1, 4
    table = _float_table(4, 1, 0)
    laws: ClassVar = ["bound", "zero", "nonfinite", "sign"]
    block = "shard"  # all elements of a shard share the fp32 scale

    def _bound(self, low: float, high: float, top: float) -> float:
        """Returns an upper bound of |decoded - x| in fp32 for a shard whose largest magnitude is ``top``.

        The bound is half of the largest step between two neighbouring E2M1 numbers, times the largest scale.  The
        largest step is from 4 to 6, so half of it is 1.  The largest scale is ``top / 6``; rounding the scale to E4M3
        makes it larger by up to 1/16 of its value.
        """
        return max(17 / 16 * top / 6, SMALLEST_NORMAL) * (1 + 2.0**-9) * _ROOM

    def _codes(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        top = values.abs().amax(dim=1, keepdim=True)
        whole = (top.amax() / (6 * 448)).clamp(min=SMALLEST_NORMAL).view(1)
        finite = torch.isfinite(whole)
        whole = whole.masked_fill(~finite, math.nan)
        scale = (top / 6 / whole).clamp(max=448.0).nan_to_num_(0.0).to(torch.float8_e4m3fn)
        wide = scale.float()
        quotients = torch.where(wide > 0, values / (wide * whole), 0.0).nan_to_num_(0.0)
        return self.nearest(quotients), scale.view(torch.uint8), whole.view(torch.uint8)

    def _values(self, codes: Tensor, beside: Tensor, whole: Tensor) -> Tensor:
        return self.entries(codes) * (_as(beside, torch.float8_e4m3fn).float() * _as(whole, torch.float32))


def _bf16(values: Tensor) -> Tensor:
    """Casts finite values to bf16; values beyond the largest bf16 number become this number."""
    return values.clamp(-LARGEST["bf16"], LARGEST["bf16"]).to(torch.bfloat16)


class _Spikes(_Format):
    """Spike reserving (2508.03760): keeps a block's two spikes, its smallest and its largest element, in bf16.

    The remaining elements are quantised in equal steps, from the smallest to the largest of the remaining elements:
    code k stands for ``smallest + k * step``.  A block has 10 extra bytes: two bytes with the indices of the spikes in
    the block, and four numbers in bf16, which are the two spikes, ``smallest`` and ``step``.
    """

    size, beside = 128, 10

    def _bound(self, low: float, high: float, top: float) -> float:
        """Returns an upper bound of |decoded - x| in fp32.

        The range from ``low`` to ``high`` is divided into equal steps.  The bound is half a step, plus the errors of
        rounding the step, the smallest element and the spikes to bf16.
        """
        # Below the smallest normal number bf16 has coarse steps.
        ends = (top + 2 * (high / 2 - low / 2)) * 2.0**-8 + 2 * SMALLEST_NORMAL
        return (high / 2 - low / 2) / ((1 << self.bits) - 1) * _ROOM + 2 * ends

    def _codes(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        steps = (1 << self.bits) - 1
        broken = ~torch.isfinite(values).all(dim=1, keepdim=True)
        values = values.masked_fill(broken, 0.0)
        places = torch.stack([values.argmin(dim=1), values.argmax(dim=1)], dim=1)  # (n, 2)
        spikes = _bf16(values.gather(1, places))
        rest = values.clone().scatter_(1, places, math.nan)
        empty = torch.isnan(rest).all(dim=1, keepdim=True)
        low = torch.where(rest.isnan(), math.inf, rest).amin(dim=1, keepdim=True).masked_fill_(empty, 0.0)
        high = torch.where(rest.isnan(), -math.inf, rest).amax(dim=1, keepdim=True).masked_fill_(empty, 0.0)
        # Whether -0 or +0 is an extreme depends on the order of comparisons, so -0 becomes +0.
        low, high = _bf16(low + 0.0), high + 0.0
        step = _bf16((high / steps - low.float() / steps).clamp_(min=0.0))
        quotients = (rest / 2 - low.float() / 2) / (step.float() / 2).clamp(min=SMALLEST_NORMAL)
        codes = quotients.nan_to_num_(0.0).round_().clamp_(0, steps).to(torch.uint8)
        ends = torch.cat([spikes, low, step], dim=1).masked_fill(broken, math.nan)
        return codes, torch.cat([places.to(torch.uint8), _bytes(ends)], dim=1), values.new_empty(0)

    def _values(self, codes: Tensor, beside: Tensor, whole: Tensor) -> Tensor:
        ends = _as(beside[:, 2:], torch.bfloat16).float()  # (n, 4)
        # Halves are added and then doubled, since the range may overflow.
        values = (codes.float() * (ends[:, 3:] / 2) + ends[:, 2:3] / 2) * 2
        places = beside[:, :2].long() % self.size  # a corrupt frame may have places outside the block
        return values.scatter_(1, places, ends[:, :2])


class Spike2(_Spikes):
    """Spike reserving (:class:`_Spikes`) with codes of 2 bits."""

    bits = 2


class Spike3(_Spikes):
    """Spike reserving (:class:`_Spikes`) with codes of 3 bits."""

    bits = 3


class Sign1(_Format):
    """The sign of each element, times the mean magnitude of the block (1-bit SGD).

    A zero decodes to the positive mean; in a block of zeros the mean is 0.
    """

    bits, size, beside = 1, 128, 4

    def _bound(self, low: float, high: float, top: float) -> float:
        """Returns an upper bound of |decoded - x| in fp32: ``top``, the largest magnitude of the block.

        Every element decodes to plus or minus the mean magnitude, which is at most ``top``.
        """
        return top * _ROOM

    def _codes(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sums = values.double().abs()
        while sums.shape[1] > 1:  # a tree of sums, since kernels can add in this order too
            half = sums.shape[1] // 2
            sums = sums[:, :half] + sums[:, half:]
        mean = (sums / self.size).float()
        mean = mean.masked_fill(~torch.isfinite(mean), math.nan)
        return (values < 0).to(torch.uint8), _bytes(mean), values.new_empty(0)

    def _values(self, codes: Tensor, beside: Tensor, whole: Tensor) -> Tensor:
        return (1.0 - 2.0 * codes) * _as(beside, torch.float32)


class BF16SR(_Format):
    """Bf16 by stochastic rounding, as in torchcomms: 16 random bits are added to the bits that are cut off."""

    laws: ClassVar = ["bound", "zero", "nonfinite", "unbiased"]
    bits, size, beside = 16, 1, 0
    stochastic = True

    def _bound(self, low: float, high: float, top: float) -> float:
        """Returns an upper bound of |decoded - x| in fp32 for values of magnitude ``top`` or less.

        The bound is a whole step of bf16 at ``top``.  This is twice the largest error of rounding to nearest.
        """
        relative, absolute = HALF_ULP["bf16"]
        return 2 * (top * relative + absolute)

    def encode(self, x: Tensor, frame: Tensor, noise: Noise) -> None:  # type: ignore[override]
        """Encode ``x`` (S,) fp32 to ``frame`` (F,) uint8, with the random bits ``noise``."""
        largest = LARGEST["bf16"]
        finite = torch.isfinite(x)
        bits = torch.where(finite, x.clamp(-largest, largest), x).view(torch.int32).to(torch.int64)
        added = (bits + random_bits(noise, x.shape[:-1], x.numel(), x.device)) >> 16
        broken = (bits >> 16).masked_fill(x.isnan(), 0x7FC0)  # one NaN; torch's casts give different ones
        frame.copy_(torch.where(finite, added, broken).to(torch.int16).view(torch.uint8))

    def decode(self, frame: Tensor, out: Tensor) -> None:
        """Decode ``frame`` (F,) uint8 to ``out`` (S,) fp32."""
        out.copy_(_as(frame, torch.bfloat16))
