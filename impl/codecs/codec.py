"""Describes codecs: how each codec encodes a tensor, how many bytes that takes, and how large the error can be.

A codec is an immutable object with a text form, which suites use and :func:`parse` reads:

- ``fp32``, ``bf16``, ``fp16``: a cast (:class:`Raw`).  Messages that are not quantised use one of these codecs.
- ``int8:2048``, ``int4:256:asym``, ``int4:256:clip``, ``int4:shard``: integers (:class:`IntCodec`).  The number after
  the colon is the block size: how many elements share a scale.
- ``fp8e4m3:128``, ``mxfp8``, ``mxfp4``: small floats (:class:`FloatCodec`).
- Integers and small floats may be followed by ``:hadamard32``, a rotation before quantising, and by ``:stochastic``,
  which selects stochastic rounding.
- ``nf4`` and other published formats, and a user's ``module:object`` (:class:`OwnCodec`).
- ``lossless:zstd``, ``lossless:zlib:bf16``: codecs whose number of bytes depends on the values.  Policies refuse them;
  they serve to measure how far tensors can be compressed (:mod:`impl.codecs.lossless`).

An encoded shard is a *frame*.  It has three parts: the codes; a scale for each block; and, for codecs with offsets
(``:asym``), an offset for each block, which is the block's smallest value.  The frame of a cast has codes only.  The
codes are padded to a multiple of 16 bytes, and so are the scales and offsets together.
docs/reference/wire_format.md gives the bytes and the arithmetic.  This file imports no torch.
"""

from __future__ import annotations

import importlib.util
import math
import operator
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, TypeGuard

from impl import named_object
from impl.codecs import own_object
from impl.codecs.own_object import CodecError as CodecError  # noqa: PLC0414  # read from here
from impl.codecs.own_object import Law as Law  # noqa: PLC0414
from impl.codecs.own_object import OwnObject
from impl.errors import raising
from impl.named_object import is_name

FRAME_ALIGNMENT: Final = 16  # bytes; a 16-byte vector load never straddles two frames
SCALE_BYTES: Final = 4  # fp32
ITEM_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2}
SMALLEST_NORMAL: Final = 2.0**-126  # of fp32; no scale is smaller, so that x / scale is finite
# By type, the relative error of rounding a normal number and the absolute error of rounding a subnormal one:
# half a unit in the last place, and half the smallest subnormal.
HALF_ULP: Final = {"fp32": (2.0**-24, 2.0**-150), "bf16": (2.0**-8, 2.0**-134), "fp16": (2.0**-11, 2.0**-25)}
LARGEST: Final = {"fp32": (2 - 2.0**-23) * 2.0**127, "bf16": (2 - 2.0**-7) * 2.0**127, "fp16": 65504.0}

MX_BLOCK: Final = 32  # OCP Microscaling Formats 1.0, section 5.2
MOST_HADAMARD: Final = 256
MOST_BLOCK: Final = 2**31 - 1  # kernels count the elements of a block in 32 bits

Dtype = Literal["fp32", "bf16", "fp16"]
Block = int | Literal["shard"]
Element = Literal["e4m3", "e5m2", "e2m1"]
Scale = Literal["fp32", "e8m0"]
Sums = Literal["fp32", "fp16"]  # type in which decoded messages are added up


def padded_bytes(n: int) -> int:
    """Returns ``n`` bytes rounded up to a multiple of 16, the alignment of frames."""
    return -(-n // FRAME_ALIGNMENT) * FRAME_ALIGNMENT


class _Framed:
    """Base class of all codecs: computes the size of a frame, which is one encoded row of elements.

    The methods of this class describe a frame without scales, as casts have it.  :class:`_Scaled`, the base class of
    codecs with scales, overrides the methods that return something about scales.
    """

    __slots__ = ()

    bits: int
    hadamard: int = 0
    stochastic: bool = False

    def blocks(self, numel: int) -> int:
        """Returns the number of blocks (groups of elements that share a scale) in a row; 0 for codecs without scales.

        ``numel`` is the number of elements in the row.
        """
        return 0

    def scale_bytes(self, numel: int) -> int:
        """Returns how many bytes the scales of ``numel`` elements take in a frame; 0 for codecs without scales."""
        return 0

    def code_bytes(self, numel: int) -> int:
        """Returns how many bytes the packed codes of ``numel`` elements take, before padding."""
        return -(-numel * self.bits // 8)

    def scales_at(self, numel: int) -> int:
        """Returns the offset of the scales in a frame of ``numel`` elements, in bytes from the frame's beginning."""
        return padded_bytes(self.code_bytes(numel))

    def frame_bytes(self, numel: int) -> int:
        """Returns how many bytes the frame of ``numel`` elements takes: codes, scales, offsets and padding."""
        return self.scales_at(numel) + padded_bytes(self.scale_bytes(numel))


@dataclass(frozen=True, slots=True)
class Raw(_Framed):
    """Casts elements to the floating-point type ``dtype``; such a codec has no scales."""

    dtype: Dtype
    block: ClassVar[int] = 1  # a cast has no scales, so elements share none
    laws: ClassVar[frozenset[Law]] = frozenset(Law) - {Law.UNBIASED}  # the laws that the codec promises

    def __str__(self) -> str:
        return self.dtype

    @property
    def grain(self) -> int:
        """The number of elements in 16 bytes; a shard must have a multiple of this number of elements."""
        return FRAME_ALIGNMENT // ITEM_BYTES[self.dtype]

    @property
    def bits(self) -> int:  # type: ignore[override]  # frozen: never written
        """The number of bits that an encoded element takes."""
        return 8 * ITEM_BYTES[self.dtype]

    def error_bound(self, low: float, high: float, out: Dtype = "fp32") -> float:
        """Returns an upper bound of |decoded - x| for finite x in [low, high] that are decoded to type ``out``."""
        return _rounding(low, high, self.dtype) + _rounding(low, high, out)


class _Scaled(_Framed):
    """Base class of the codecs that store a scale for each block; :class:`IntCodec` explains the attributes."""

    __slots__ = ()

    block: Block
    largest: float
    asymmetric: bool = False
    clipped: bool = False
    scale: Scale = "fp32"

    @property
    def steps(self) -> float:
        """The number by which a block's range is divided to get the block's scale.

        A block is a group of elements that share a scale.  Its range is the largest magnitude of its elements or, for
        codecs with offsets, their maximum minus their minimum.
        """
        return self.largest + self.clipped

    @property
    def grain(self) -> int:
        """The grain: a shard must have a multiple of this number of elements.

        No block may span two shards, so the grain is the number of elements in a block.  If the block is the whole
        shard, the grain is the number of elements that are rotated together; without a rotation the grain is then 1.
        """
        return max(1, self.hadamard) if self.block == "shard" else self.block

    @property
    def laws(self) -> frozenset[Law]:
        """The properties that the codec promises, such as that zeros decode to zeros (:class:`Law`)."""
        broken = set() if self.stochastic else {Law.UNBIASED}
        if self.stochastic or self.asymmetric or self.clipped:
            broken |= {Law.IDEMPOTENT, Law.SIGN}
        elif self.hadamard:
            broken |= {Law.IDEMPOTENT}
        return frozenset(Law) - broken

    def block_size(self, numel: int) -> int:
        """Returns how many elements share a scale in a row of ``numel`` elements.

        This is the codec's block size, or ``numel`` if the row is shorter than a block or the block is ``shard``.
        """
        return numel if self.block == "shard" else min(self.block, numel)

    def blocks(self, numel: int) -> int:
        """Returns the number of blocks, and so of scales, for ``numel`` elements; the last block may be short."""
        return -(-numel // self.block_size(numel)) if numel else 0

    def scale_bytes(self, numel: int) -> int:
        """Returns how many bytes the scales of ``numel`` elements take, before padding.

        If the codec stores an offset (the smallest element) for each block, the bytes of the offsets are included.
        """
        width = 1 if self.scale == "e8m0" else SCALE_BYTES
        return self.blocks(numel) * width * (2 if self.asymmetric else 1)

    def _check(self, head: str) -> None:
        """Raise CodecError unless ``block`` and ``hadamard`` have allowed values.

        ``block`` is ``shard``, or a number of elements from 1 to MOST_BLOCK.  ``hadamard`` is 0 for no rotation, or a
        power of two from 2 to MOST_HADAMARD that divides the block.

        ``head`` names the codec's type in the message, such as ``int8``.
        """
        block, hadamard = self.block, self.hadamard
        if block != "shard" and not 1 <= block <= MOST_BLOCK:
            raise CodecError(f"{head}:{block}: a block must have 1 to {MOST_BLOCK} elements, or be 'shard'")
        if hadamard and (hadamard & (hadamard - 1) or not 2 <= hadamard <= MOST_HADAMARD):
            raise CodecError(f"{head}: hadamard{hadamard} is not a power of two from 2 to {MOST_HADAMARD}")
        if hadamard and block != "shard" and block % hadamard:
            raise CodecError(f"{head}:{block}: the block must be a multiple of hadamard{hadamard}")

    def _options(self) -> str:
        rotation = f":hadamard{self.hadamard}" if self.hadamard else ""
        return rotation + (":stochastic" if self.stochastic else "")

    def _bound(self, step: float, low: float, high: float, out: Dtype) -> float:
        """Returns an upper bound of |decoded - x| for a block whose values, after the rotation, are in [low, high].

        ``step`` is the largest distance between the values of neighbouring codes.  The error has three parts: rounding
        to a code, the arithmetic in fp32, and rounding the decoded element to type ``out``.
        """
        error = step * (1 if self.stochastic else 0.5) * (1 + 2.0**-15)
        if self.asymmetric:
            error += 4 * _rounding(low, high, "fp32")
        if self.hadamard == 0:
            return error + _rounding(low, high, out)
        top = max(abs(low), abs(high)) * self.hadamard  # largest |x| whose rotated values are in [low, high]
        stages = 2 * (self.hadamard.bit_length() + 1)  # roundings in fp32, in the rotations there and back
        error = self.hadamard * (error + stages * (top * 2.0**-24 + 2.0**-150))
        return error + _rounding(-top - error, top + error, out)


@dataclass(frozen=True, slots=True)
class IntCodec(_Scaled):
    """Quantises blocks of elements to integers of 2 to 8 bits, with an fp32 scale for each block.

    The scale is the distance between the values of neighbouring codes.  It has three forms:

    - By default it is ``absmax / largest code``, where absmax is the block's largest magnitude.  If decoded values are
      quantised again, they get the same codes, unless the codec rotates or rounds stochastically.
    - If ``clipped`` is True, it is ``2 absmax / 2^bits``, as in DeepSpeed.  This is smaller than the default, but
      values near ``+absmax`` are cut off at the largest code.
    - If ``asymmetric`` is True, it is ``(maximum - minimum) / largest code``.  Each block then also stores its minimum,
      the offset.

    Raises CodecError: in these cases:

    - ``bits`` is not 2 to 8, or ``block`` or ``hadamard`` has an impossible size;
    - ``clipped`` is combined with ``asymmetric``, whose codes have no sign;
    - ``clipped`` is combined with ``stochastic``: the mean of stochastic rounding is the exact value, and clipping
      would change this mean.
    """

    bits: int  # 2 to 8
    block: Block  # elements that share a scale; "shard": all elements (the baseline without blocks in the ZeRO++ paper)
    asymmetric: bool = False  # whether each block also stores an offset, its smallest value
    hadamard: int = 0  # elements rotated together, a power of two that divides the block; 0: no rotation
    stochastic: bool = False  # whether to round up or down at random, so that the mean is the value
    clipped: bool = False  # whether symmetric codes use all 2^bits codes and clip the largest positive values

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise CodecError(f"int{self.bits}: integer codecs have 2 to 8 bits")
        if self.clipped and (self.asymmetric or self.stochastic):
            other = "asym" if self.asymmetric else "stochastic"
            raise CodecError(
                f"int{self.bits}: clip needs symmetric codes that are rounded to nearest: remove clip or {other}"
            )
        self._check(f"int{self.bits}")

    def __str__(self) -> str:
        scheme = ":asym" if self.asymmetric else ":clip" if self.clipped else ""
        return f"int{self.bits}:{self.block}{scheme}{self._options()}"

    @property
    def largest(self) -> int:  # type: ignore[override]
        """The largest code, such as 127 for symmetric codes of 8 bits, and 255 for codes with an offset."""
        return (1 << (self.bits if self.asymmetric else self.bits - 1)) - 1

    def error_bound(self, low: float, high: float, out: Dtype = "fp32") -> float:
        """Returns an upper bound of |decoded - x| for every element x of a block of finite elements.

        If the codec does not rotate, the elements x must be in [low, high].  If the codec rotates, the rotated elements
        must be in [low, high].  Decoding undoes the rotation, so the bound holds for the elements x before the
        rotation.  ``out`` is the type to which elements are decoded.
        """
        top = max(abs(low), abs(high)) / self.steps
        scale = high / self.largest - low / self.largest if self.asymmetric else top
        scale = max(scale, SMALLEST_NORMAL)
        cut = self.clipped and high > 0  # a clipped value may be off by a whole scale, not by half a scale
        return self._bound(2 * scale if cut else scale, low, high, out)


@dataclass(frozen=True, slots=True)
class FloatCodec(_Scaled):
    """Quantises blocks of elements to floats of 8 or 4 bits, with a scale for each block.

    No code stands for infinity.  An E8M0 scale is the exponent of a power of two.  The exponent is rounded up, so that
    no element divided by its scale exceeds the largest float.

    Raises CodecError: if no known format combines ``element`` with ``scale``, if an MX block does not have 32 elements,
    or if a block or a rotation has an impossible size.
    """

    element: Element  # ``e4m3`` (largest 448), ``e5m2`` (57344), ``e2m1`` (6)
    block: Block
    scale: Scale = "fp32"  # or ``e8m0``: a power of two in one byte, for 32 elements, as in OCP's MX formats
    hadamard: int = 0
    stochastic: bool = False
    # Four properties of the element type, filled in by __post_init__: its number of bits, the number of bits in its
    # mantissa, the exponent of its smallest normal number, and its largest number.
    bits: int = field(init=False, repr=False, compare=False)
    mantissa: int = field(init=False, repr=False, compare=False)
    smallest_exponent: int = field(init=False, repr=False, compare=False)
    largest: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = (self.element, self.scale) in _HEADS.values()
        if not known or (self.scale == "e8m0" and self.block != MX_BLOCK):
            form = f"{self.element} with a scale in {self.scale} for {self.block} elements"
            raise CodecError(
                f"there is no codec {form}: use {', '.join(_HEADS)}, where MX formats have blocks of {MX_BLOCK} "
                "elements"
            )
        self._check(self._head)
        for name, value in zip(
            ("bits", "mantissa", "smallest_exponent", "largest"), _FLOATS[self.element], strict=True
        ):
            object.__setattr__(self, name, value)

    @property
    def _head(self) -> str:
        return next(head for head, kind in _HEADS.items() if kind == (self.element, self.scale))

    def __str__(self) -> str:
        return self._head + ("" if self.scale == "e8m0" else f":{self.block}") + self._options()

    def error_bound(self, low: float, high: float, out: Dtype = "fp32") -> float:
        """Returns an upper bound of |decoded - x| for every element x of a block of finite elements.

        If the codec does not rotate, the elements x must be in [low, high].  If the codec rotates, the rotated elements
        must be in [low, high].  Decoding undoes the rotation, so the bound holds for the elements x before the
        rotation.  ``out`` is the type to which elements are decoded.
        """
        scale = max(max(abs(low), abs(high)) / self.largest, SMALLEST_NORMAL)
        if self.scale == "e8m0":
            scale = 2.0 ** math.ceil(math.log2(scale) - 1e-9)
        top = min(max(abs(low), abs(high)) / scale, self.largest)
        exponent = max(math.frexp(top * (1 + 2.0**-15))[1] - 1, self.smallest_exponent)
        return self._bound(scale * 2.0 ** (exponent - self.mantissa), low, high, out)


# By element type: bits, bits of the mantissa, smallest normal exponent, largest number (OCP MX 1.0, tables 1, 3).
_FLOATS: Final = {"e4m3": (8, 3, -6, 448.0), "e5m2": (8, 2, -14, 57344.0), "e2m1": (4, 1, 0, 6.0)}
_HEADS: Final[dict[str, tuple[Element, Scale]]] = {
    "fp8e4m3": ("e4m3", "fp32"),
    "fp8e5m2": ("e5m2", "fp32"),
    "mxfp8": ("e4m3", "e8m0"),
    "mxfp8e5m2": ("e5m2", "e8m0"),
    "mxfp4": ("e2m1", "e8m0"),
}


# The published formats by name, with their classes, in the order in which impl/cpu/formats.hpp numbers them.
FORMATS: Final = {
    name.lower(): f"impl.codecs.published_formats:{name}"
    for name in ("NVFP4", "MXFP6E2M3", "MXFP6E3M2", "NF4", "Spike2", "Spike3", "Sign1", "BF16SR")
}

# Codecs that lose nothing, or nothing beyond a cast to bf16.  The number of their bytes depends on the values, so no
# policy can send them.
LOSSLESS: Final = {
    "lossless:zstd": "impl.codecs.lossless:Zstd",
    "lossless:zstd:bf16": "impl.codecs.lossless:ZstdBf16",
    "lossless:zlib": "impl.codecs.lossless:Zlib",
    "lossless:zlib:bf16": "impl.codecs.lossless:ZlibBf16",
}
_OURS: Final = FORMATS | LOSSLESS


def has_zstd() -> bool:
    """Returns whether the package zstandard is installed, which ``lossless:zstd`` needs."""
    return importlib.util.find_spec("zstandard") is not None


@dataclass(frozen=True, slots=True)
class OwnCodec(_Framed):
    """A codec whose methods belong to an object: a user's codec, a published format, or one of :data:`LOSSLESS`.

    A frame has the bytes that the codec's object writes, padded with zeros to a multiple of 16 bytes.  ``name`` is
    ``module:object``, or the name of a format such as ``nf4``.  The object is imported on first use, so that the record
    of a measurement which names the codec can be read on a machine without the module.  If ``instance`` is given,
    nothing is imported, and ``name`` is only a label.
    """

    name: str
    instance: OwnObject | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def published(self) -> bool:
        """Whether the codec is a published format (one of ``FORMATS``), for which backends have kernels."""
        return self.instance is None and self.name in FORMATS

    @property
    def definition(self) -> OwnObject:
        """The attributes and methods of the codec's object; the object is imported if necessary.

        Raises CodecError: if the object cannot be imported, if an attribute that codecs must have is missing or wrong,
        or if ``lossless:zstd`` is used without the package zstandard.
        """
        if self.name in _OURS:
            if self.name.startswith("lossless:zstd") and not has_zstd():
                way_out = (
                    f"run pip install 'zeropp-bench[lossless]', or use {self.name.replace('zstd', 'zlib')}"
                )
                raise CodecError(
                    f"{self.name} needs the package zstandard, which is not installed: {way_out}"
                )
            return self.instance or own_object.import_definition(_OURS[self.name], ours=True)
        return self.instance or own_object.import_definition(self.name)

    @property
    def readable(self) -> bool:
        """Whether the codec's attributes can be read without an import that is forbidden.

        To read the attributes of a user's codec, the user's module must be imported.  Inside the context
        :func:`impl.named_object.forbidden` this import is forbidden, and the value is False.  The value is True if the
        import is allowed, or if no import of a user's module is needed.
        """
        return self.instance is not None or self.name in _OURS or named_object.allowed()

    @property
    def claimed(self) -> BuiltIn | None:
        """The built-in codec that this codec claims to equal bit for bit; None if it makes no such claim."""
        text = self.definition.codec
        try:
            return None if text is None else built_in(str(text))
        except CodecError as error:
            raise CodecError(f"{self.name}: its attribute 'codec' is wrong: {error}") from None

    @property
    def _contract(self) -> BuiltIn | OwnObject:
        """The object from which this codec's sizes, laws and error bound are read.

        If this codec claims to equal a built-in codec bit for bit, this is the built-in codec.  Otherwise it is
        :attr:`definition`.
        """
        return self.claimed or self.definition

    @property
    def block(self) -> Block:
        """The number of elements that share a scale; ``shard`` if all elements of a shard do."""
        return self._contract.block

    @property
    def grain(self) -> int:
        """The grain: a shard must have a multiple of this number of elements."""
        return self._contract.grain

    @property
    def laws(self) -> frozenset[Law]:
        """The properties that the codec promises, such as that zeros decode to zeros (:class:`Law`)."""
        return self._contract.laws

    @property
    def stochastic(self) -> bool:  # type: ignore[override]  # frozen: never written
        """Whether the codec rounds stochastically, so that its ``encode`` takes random bits."""
        return bool(self._contract.stochastic)

    def own_bytes(self, numel: int) -> int:
        """Returns how many bytes the codec's object writes for ``numel`` elements, before padding.

        Raises CodecError: if the object's ``frame_bytes`` raises, or does not return a whole number.
        """
        contract = self._contract
        with raising(CodecError, f"{self.name}: frame_bytes({numel}):"):
            return operator.index(contract.frame_bytes(numel))  # type: ignore[misc]  # checked when read

    def frame_bytes(self, numel: int) -> int:
        """Returns how many bytes the frame of ``numel`` elements takes, with padding."""
        return padded_bytes(self.own_bytes(numel))

    def error_bound(self, low: float, high: float, out: Dtype = "fp32") -> float:
        """Returns the upper bound of |decoded - x| that the codec promises for a block with values x in [low, high].

        ``out`` is the type to which elements are decoded.  Returns infinity if the codec promises no bound.
        """
        bound = self._contract.error_bound if self.laws & {Law.BOUND, Law.UNBIASED} else None
        return math.inf if bound is None else float(bound(low, high, out))


def user_codec(source: Any, name: str | None = None) -> OwnCodec:
    """Returns the codec that ``source``, a user's object or class, defines (docs/reference/codecs.md).

    ``name`` is how error messages refer to the codec; the default is the module and name of the object's class.  All
    ranks must give the same name.

    Raises CodecError: if an attribute is missing or wrong; the message names the attribute.
    """
    kind = source if isinstance(source, type) else type(source)
    name = name or f"{kind.__module__}:{kind.__qualname__}"
    codec = OwnCodec(name, own_object.definition_of(name, source))
    _ = codec.claimed  # an invalid claim raises here, not later
    return codec


Blocked = IntCodec | FloatCodec  # codecs with scales
BuiltIn = Raw | Blocked
Codec = BuiltIn | OwnCodec


def has_kernels(codec: Codec) -> TypeGuard[Blocked | OwnCodec]:
    """Returns whether the CPU and CUDA backends have kernels that encode with ``codec``.

    They have kernels for codecs with scales and for published formats.  They have none for casts, users' codecs and
    lossless codecs.
    """
    return codec.published if isinstance(codec, OwnCodec) else not isinstance(codec, Raw)


FP32: Final = Raw("fp32")
BF16: Final = Raw("bf16")
FP16: Final = Raw("fp16")


def _rounding(low: float, high: float, dtype: Dtype) -> float:
    """Returns an upper bound of the error of rounding a number in [low, high] to type ``dtype``."""
    relative, absolute = HALF_ULP[dtype]
    return max(abs(low), abs(high)) * relative + absolute


_TEXT: Final = re.compile(
    r"(fp32|bf16|fp16)"
    r"|(?:(?:int(\d{1,9})|(fp8e4m3|fp8e5m2)):(shard|\d{1,20})|(mxfp8|mxfp8e5m2|mxfp4))"
    r"(?::(asym|clip))?(?::hadamard([1-9]\d{0,9}))?(:stochastic)?"
)
_HEAD: Final = re.compile(r"(fp32|bf16|fp16|int\d+|fp8\w*|mxfp\w*)(:|$)")  # such texts never name a module
_ALLOWED: Final = (
    "expected fp32, bf16 or fp16; or int<2..8>:<block or 'shard'>[:asym or :clip], fp8e4m3:<block>, "
    "fp8e5m2:<block>, mxfp8, mxfp8e5m2 or mxfp4, then [:hadamard<n>][:stochastic], e.g. int8:2048; or "
    f"{', '.join(FORMATS)}; or, for measurements only, {', '.join(LOSSLESS)}; "
    "a codec of your own is named as module:object, such as mykernels:Int4"
)


def parse(text: str) -> Codec:
    """Return the codec that ``text`` names, such as ``int8:2048``; ``str()`` of the codec returns the text again.

    A text of the form ``module:object`` names a user's codec, which is imported on first use.

    Raises CodecError: if the text names no codec; the message lists the allowed forms.
    """
    if not isinstance(text, str):
        raise CodecError(f"codec {text!r} is a {type(text).__name__}: {_ALLOWED}")
    stripped = text.strip()
    if stripped in _OURS or (not _HEAD.match(stripped) and is_name(stripped)):
        return OwnCodec(stripped)
    match = _TEXT.fullmatch(stripped)
    raw, bits, head, size, mx, scheme, hadamard, random = match.groups() if match else [None] * 8
    block: Block = "shard" if size == "shard" else int(size or MX_BLOCK)
    options = int(hadamard or 0), bool(random)
    try:
        if raw:
            return Raw(raw)  # type: ignore[arg-type]  # the pattern has no other
        if bits:
            return IntCodec(int(bits), block, scheme == "asym", *options, scheme == "clip")
        if (kind := _HEADS.get(head or mx or "")) and not scheme:
            return FloatCodec(kind[0], block, kind[1], *options)
    except CodecError as error:
        raise CodecError(f"codec {text!r}: {error}") from None
    raise CodecError(f"codec {text!r}: {_ALLOWED}")


def built_in(text: str) -> BuiltIn:
    """Return the built-in codec (a cast, integers or small floats) that ``text`` names.

    Raises CodecError: if the text names no codec, or a user's codec, a published format or a lossless codec.
    """
    codec = parse(text)
    if isinstance(codec, OwnCodec):
        raise CodecError(
            f"codec {text!r} is not built in: use a cast, integers or small floats, such as int8:2048"
        )
    return codec


def common_grain(*codecs: Codec) -> int:
    """Returns the least common multiple of 32 and the grains of ``codecs``.

    A codec can encode a shard only if the number of the shard's elements is a multiple of the codec's grain.  If this
    number is a multiple of the result, each of ``codecs`` can encode the shard.
    """
    return math.lcm(32, *(codec.grain for codec in codecs))  # 32 codes of 4 bits fill a 16-byte vector
