"""Codecs as values: what a tensor looks like on the wire, its size, and its error contract.

Pure: no torch.  A codec is a frozen value with a text form that suites use and that prints back:
``fp32``, ``bf16``, ``fp16``, ``int8:2048``, ``int4:256:asym``, ``int4:shard``.  "No quantisation"
is the codec :class:`Raw`, so the engine has no branch for it.  The arithmetic is in
``reference.py``.

Frame of ``numel`` elements (docs/frame.md)::

    codes   ceil(numel * bits / 8) bytes, element 0 in the lowest bits, little-endian
    pad     to 16 bytes
    scales  4 bytes each, fp32, one per block; then, asymmetric only, one fp32 offset per block
    pad     to 16 bytes

Symmetric scale: ``absmax / (2^(b-1) - 1)``, so that the bound is half a step everywhere and
quantising twice changes nothing (facts B7 lists what the other rule costs).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final, Literal

FRAME_ALIGNMENT: Final = 16  # bytes; a 16-byte vector load never straddles two frames
SCALE_BYTES: Final = 4  # fp32
ITEM_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2}
SMALLEST_NORMAL: Final = 2.0**-126  # of fp32; scales are floored here so that x / scale is finite
# Half a unit in the last place, relative, and half the smallest subnormal, absolute.
HALF_ULP: Final = {
    "fp32": (2.0**-24, 2.0**-150),
    "bf16": (2.0**-8, 2.0**-134),
    "fp16": (2.0**-11, 2.0**-25),
}
LARGEST: Final = {"fp32": (2 - 2.0**-23) * 2.0**127, "bf16": (2 - 2.0**-7) * 2.0**127, "fp16": 65504.0}

Dtype = Literal["fp32", "bf16", "fp16"]
Block = int | Literal["shard"]


class CodecError(ValueError):
    """A codec's text or its numbers are not possible; the message names them."""


class Law(enum.Enum):
    """A property that a codec promises; the tests run exactly the declared ones."""

    BOUND = "the error of each element is within error_bound of its block"
    ZERO = "zeros decode to zeros"
    IDEMPOTENT = "encoding what was decoded gives the same codes"
    SIGN = "encoding -x decodes to minus what x decodes to"
    POWER_OF_TWO = "scaling by a power of two commutes, away from the ends of the range"
    NONFINITE = "a block with a NaN or an infinity decodes to NaN, or to itself"


def padded_bytes(n: int) -> int:
    """``n`` bytes rounded up to the alignment of a frame."""
    return -(-n // FRAME_ALIGNMENT) * FRAME_ALIGNMENT


@dataclass(frozen=True, slots=True)
class Raw:
    """Elements cast to a floating-point type, no scales.

    Attributes:
        dtype: the type on the wire.
    """

    dtype: Dtype

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise CodecError(f"raw codec {self.dtype!r}: expected one of {', '.join(ITEM_BYTES)}")

    def __str__(self) -> str:
        return self.dtype

    @property
    def grain(self) -> int:
        """Elements that a shard must be a multiple of."""
        return FRAME_ALIGNMENT // ITEM_BYTES[self.dtype]

    @property
    def bits(self) -> int:
        """Bits per element on the wire, without scales."""
        return 8 * ITEM_BYTES[self.dtype]

    @property
    def laws(self) -> frozenset[Law]:
        """What it promises."""
        return frozenset(Law)

    def blocks(self, numel: int) -> int:
        """Number of scales: none."""
        return 0

    def code_bytes(self, numel: int) -> int:
        """Bytes of the elements."""
        return numel * ITEM_BYTES[self.dtype]

    def frame_bytes(self, numel: int) -> int:
        """Bytes of the frame of ``numel`` elements."""
        return padded_bytes(self.code_bytes(numel))

    def error_bound(self, low: float, high: float, out: Dtype = "fp32") -> float:
        """Largest |decoded - x| for finite x in [low, high] decoded to ``out``."""
        return _rounding(low, high, self.dtype) + _rounding(low, high, out)


@dataclass(frozen=True, slots=True)
class IntCodec:
    """Block-quantised integers of 2 to 8 bits with an fp32 scale per block, nearest-even.

    Symmetric: ``q = clamp(rne(x / s), -m, m)`` with ``m = 2^(b-1) - 1`` and
    ``s = max(absmax / m, 2^-126)``; decoded ``q * s``.
    Asymmetric: ``s = max(high / n - low / n, 2^-126)`` with ``n = 2^b - 1``,
    ``q = clamp(rne((x - low) / s), 0, n)``; decoded ``low + q * s``.
    Decoding saturates at the output type's largest finite value.  A block that holds a
    non-finite value has scale NaN and decodes to NaN: an overflow is never silently zero.

    Attributes:
        bits: 2 to 8.
        block: elements that share a scale, or ``"shard"``: one scale for the whole shard (the
            paper's non-blocked baseline).
        asymmetric: store an offset beside the scale.

    Raises:
        CodecError: for bits outside 2..8 or a block below 1.
    """

    bits: int
    block: Block
    asymmetric: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise CodecError(f"int{self.bits}: integer codecs have 2 to 8 bits")
        if self.block != "shard" and self.block < 1:
            raise CodecError(f"int{self.bits}:{self.block}: a block has at least 1 element")

    def __str__(self) -> str:
        return f"int{self.bits}:{self.block}" + (":asym" if self.asymmetric else "")

    @property
    def grain(self) -> int:
        """Elements that a shard must be a multiple of, so that no block straddles two shards."""
        return 1 if self.block == "shard" else self.block

    @property
    def laws(self) -> frozenset[Law]:
        """What it promises: an offset costs sign symmetry and exact idempotence."""
        if self.asymmetric:
            return frozenset({Law.BOUND, Law.ZERO, Law.POWER_OF_TWO, Law.NONFINITE})
        return frozenset(Law)

    def blocks(self, numel: int) -> int:
        """Number of scales for ``numel`` elements; the last block may be short."""
        if numel == 0:
            return 0
        return 1 if self.block == "shard" else -(-numel // self.block)

    def code_bytes(self, numel: int) -> int:
        """Bytes of the packed codes, before padding."""
        return -(-numel * self.bits // 8)

    def frame_bytes(self, numel: int) -> int:
        """Bytes of the frame of ``numel`` elements: codes, scales and padding."""
        per_block = SCALE_BYTES * (2 if self.asymmetric else 1)
        return padded_bytes(self.code_bytes(numel)) + padded_bytes(per_block * self.blocks(numel))

    def error_bound(self, low: float, high: float, out: Dtype = "fp32") -> float:
        """Largest |decoded - x| for a block of finite values in [low, high] decoded to ``out``.

        ``scale / 2 * (1 + 2^-15)`` plus half an ulp of the output; asymmetric also half an ulp
        of the offset's magnitude, since ``low + q * s`` rounds twice.
        """
        absmax = max(abs(low), abs(high))
        if self.asymmetric:
            steps: int = (1 << self.bits) - 1
            scale = max(high / steps - low / steps, SMALLEST_NORMAL)
            return scale / 2 * (1 + 2.0**-15) + 4 * _rounding(low, high, "fp32") + _rounding(low, high, out)
        scale = max(absmax / ((1 << (self.bits - 1)) - 1), SMALLEST_NORMAL)
        return scale / 2 * (1 + 2.0**-15) + _rounding(low, high, out)


Codec = Raw | IntCodec

FP32: Final = Raw("fp32")
BF16: Final = Raw("bf16")
FP16: Final = Raw("fp16")


def _rounding(low: float, high: float, dtype: Dtype) -> float:
    """Half an ulp of ``dtype`` at the largest magnitude in [low, high]."""
    relative, absolute = HALF_ULP[dtype]
    return max(abs(low), abs(high)) * relative + absolute


def parse(text: str) -> Codec:
    """Read a codec's text form; ``str(parse(text)) == text`` for canonical text.

    Raises:
        CodecError: naming the text and what is allowed.
    """
    head, *rest = text.strip().split(":")
    allowed = "expected fp32, bf16, fp16 or int<2..8>:<block or 'shard'>[:asym], e.g. int8:2048"
    if head in ITEM_BYTES:
        if rest:
            raise CodecError(f"codec {text!r}: {head} takes no options; {allowed}")
        return Raw(head)  # type: ignore[arg-type]  # checked against ITEM_BYTES
    if not (head.startswith("int") and head[3:].isdecimal() and rest):
        raise CodecError(f"codec {text!r}: {allowed}")
    block_text, *options = rest
    if block_text != "shard" and not block_text.isdecimal():
        raise CodecError(f"codec {text!r}: block {block_text!r} is not a number; {allowed}")
    if options not in ([], ["asym"]):
        raise CodecError(f"codec {text!r}: unknown option {':'.join(options)!r}; {allowed}")
    block: Block = "shard" if block_text == "shard" else int(block_text)
    return IntCodec(int(head[3:]), block, bool(options))


def common_grain(*codecs: Codec) -> int:
    """Elements that a shard must be a multiple of to suit all ``codecs``.

    At least 32: then even 4-bit codes of a shard are whole 16-byte vectors, and raw fp16 ones too.
    """
    return math.lcm(32, *(codec.grain for codec in codecs))
