"""Codecs as values: what a tensor looks like on the wire, its size, and its error contract.

No torch.  A codec is a frozen value with a text form that suites use and that prints back:
``fp32``, ``bf16``, ``fp16``; ``int8:2048``, ``int4:256:asym``, ``int4:256:clip``, ``int4:shard``;
``fp8e4m3:128``, ``mxfp8``, ``mxfp4``; then ``:hadamard32`` and ``:stochastic``; a user's ``module:object``.
"No quantisation" is the codec :class:`Raw`: the engine has no branch for it.

A frame is the codes, then a scale a block, then, with offsets, an offset a block; codes and the rest are
each padded to 16 bytes.  docs/reference/wire_format.md gives the bytes and the arithmetic.
"""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, TypeGuard

from impl.codecs import own_object
from impl.codecs.own_object import CodecError as CodecError  # noqa: PLC0414  # read from here
from impl.codecs.own_object import Law as Law  # noqa: PLC0414
from impl.codecs.own_object import OwnObject
from impl.errors import raising
from impl.named_object import is_name

FRAME_ALIGNMENT: Final = 16  # bytes; a 16-byte vector load never straddles two frames
SCALE_BYTES: Final = 4  # fp32
ITEM_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2}
SMALLEST_NORMAL: Final = 2.0**-126  # of fp32; scales are floored here so that x / scale is finite
# Half a unit in the last place, relative, and half the smallest subnormal, absolute.
HALF_ULP: Final = {"fp32": (2.0**-24, 2.0**-150), "bf16": (2.0**-8, 2.0**-134), "fp16": (2.0**-11, 2.0**-25)}
LARGEST: Final = {"fp32": (2 - 2.0**-23) * 2.0**127, "bf16": (2 - 2.0**-7) * 2.0**127, "fp16": 65504.0}

MX_BLOCK: Final = 32  # OCP Microscaling Formats 1.0, section 5.2
MOST_HADAMARD: Final = 256
MOST_BLOCK: Final = 2**31 - 1  # kernels count the elements of a block in 32 bits

Dtype = Literal["fp32", "bf16", "fp16"]
Block = int | Literal["shard"]
Element = Literal["e4m3", "e5m2", "e2m1"]
Scale = Literal["fp32", "e8m0"]
Sums = Literal["fp32", "fp16"]  # in which decoded sources are added up


def padded_bytes(n: int) -> int:
    """``n`` bytes rounded up to the alignment of a frame."""
    return -(-n // FRAME_ALIGNMENT) * FRAME_ALIGNMENT


class _Framed:
    """Sizes of frames without scales."""

    __slots__ = ()

    bits: int
    hadamard: int = 0
    stochastic: bool = False

    def blocks(self, numel: int) -> int:
        """Number of scales for ``numel`` elements; the last block may be short."""
        return 0

    def scale_bytes(self, numel: int) -> int:
        """Bytes of scales and offsets, before padding."""
        return 0

    def code_bytes(self, numel: int) -> int:
        """Bytes of the packed codes, before padding."""
        return -(-numel * self.bits // 8)

    def scales_at(self, numel: int) -> int:
        """Byte of the frame at which the scales start."""
        return padded_bytes(self.code_bytes(numel))

    def frame_bytes(self, numel: int) -> int:
        """Bytes of the frame of ``numel`` elements: codes, scales and padding."""
        return self.scales_at(numel) + padded_bytes(self.scale_bytes(numel))


@dataclass(frozen=True, slots=True)
class Raw(_Framed):
    """Elements cast to a floating-point type, ``dtype``, no scales."""

    dtype: Dtype
    block: ClassVar[int] = 1  # elements that share a scale
    laws: ClassVar[frozenset[Law]] = frozenset(Law) - {Law.UNBIASED}  # its promises

    def __str__(self) -> str:
        return self.dtype

    @property
    def grain(self) -> int:
        """Elements that a shard must be a multiple of."""
        return FRAME_ALIGNMENT // ITEM_BYTES[self.dtype]

    @property
    def bits(self) -> int:  # type: ignore[override]  # frozen: never written
        """Bits per element on the wire."""
        return 8 * ITEM_BYTES[self.dtype]

    def error_bound(self, low: float, high: float, out: Dtype = "fp32") -> float:
        """Largest |decoded - x| for finite x in [low, high] decoded to ``out``."""
        return _rounding(low, high, self.dtype) + _rounding(low, high, out)


class _Scaled(_Framed):
    """Common part of codecs with a scale per block; :class:`IntCodec` explains the attributes."""

    __slots__ = ()

    block: Block
    largest: float
    asymmetric: bool = False
    clipped: bool = False
    scale: Scale = "fp32"

    @property
    def steps(self) -> float:
        """A block's range in units of its scale: its largest magnitude, or the distance of its extremes."""
        return self.largest + self.clipped

    @property
    def grain(self) -> int:
        """Elements that a shard must be a multiple of, so that no block straddles two shards."""
        return max(1, self.hadamard) if self.block == "shard" else self.block

    @property
    def laws(self) -> frozenset[Law]:
        """The laws that it promises."""
        broken = set() if self.stochastic else {Law.UNBIASED}
        if self.stochastic or self.asymmetric or self.clipped:
            broken |= {Law.IDEMPOTENT, Law.SIGN}
        elif self.hadamard:
            broken |= {Law.IDEMPOTENT}
        return frozenset(Law) - broken

    def block_size(self, numel: int) -> int:
        """Elements that share a scale in a row of ``numel``; a block beyond the row is the row."""
        return numel if self.block == "shard" else min(self.block, numel)

    def blocks(self, numel: int) -> int:
        """Number of scales for ``numel`` elements; the last block may be short."""
        return -(-numel // self.block_size(numel)) if numel else 0

    def scale_bytes(self, numel: int) -> int:
        """Bytes of scales and offsets, before padding."""
        width = 1 if self.scale == "e8m0" else SCALE_BYTES
        return self.blocks(numel) * width * (2 if self.asymmetric else 1)

    def _check(self, head: str) -> None:
        """Refuse an impossible block or rotation."""
        block, hadamard = self.block, self.hadamard
        if block != "shard" and not 1 <= block <= MOST_BLOCK:
            raise CodecError(f"{head}:{block}: a block has 1 to {MOST_BLOCK} elements")
        if hadamard and (hadamard & (hadamard - 1) or not 2 <= hadamard <= MOST_HADAMARD):
            raise CodecError(f"{head}: hadamard{hadamard} is no power of two from 2 to {MOST_HADAMARD}")
        if hadamard and block != "shard" and block % hadamard:
            raise CodecError(f"{head}:{block}: hadamard{hadamard} does not divide the block")

    def _options(self) -> str:
        rotation = f":hadamard{self.hadamard}" if self.hadamard else ""
        return rotation + (":stochastic" if self.stochastic else "")

    def _bound(self, step: float, low: float, high: float, out: Dtype) -> float:
        """The bound of an element from the largest step between codes, and from the output's rounding."""
        error = step * (1 if self.stochastic else 0.5) * (1 + 2.0**-15)
        if self.asymmetric:
            error += 4 * _rounding(low, high, "fp32")
        if self.hadamard == 0:
            return error + _rounding(low, high, out)
        top = max(abs(low), abs(high)) * self.hadamard  # of an element that was rotated to at most absmax
        stages = 2 * (self.hadamard.bit_length() + 1)  # of both rotations, each of which rounds in fp32
        error = self.hadamard * (error + stages * (top * 2.0**-24 + 2.0**-150))
        return error + _rounding(-top - error, top + error, out)


@dataclass(frozen=True, slots=True)
class IntCodec(_Scaled):
    """Block-quantised integers of 2 to 8 bits with an fp32 scale per block.

    Symmetric codes have the scale ``absmax / largest code``, so that quantising twice changes nothing; or,
    ``clipped``, DeepSpeed's ``2 absmax / 2^bits``, whose steps are smaller and whose positive top is cut.

    Raises CodecError: for bits outside 2..8, an impossible block or rotation, or a clipped top with an offset
    or random rounding, whose mean it would change.
    """

    bits: int  # 2 to 8
    block: Block  # elements that share a scale; "shard": all of them (the paper's non-blocked baseline)
    asymmetric: bool = False  # store an offset beside the scale
    hadamard: int = 0  # elements rotated together, a power of two that divides the block; 0 for none
    stochastic: bool = False  # round up or down at random, so that the mean is the value
    clipped: bool = False  # of symmetric codes: use all 2^bits of them, and clip the positive top

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise CodecError(f"int{self.bits}: integer codecs have 2 to 8 bits")
        if self.clipped and (self.asymmetric or self.stochastic):
            other = "asym" if self.asymmetric else "stochastic"
            raise CodecError(
                f"int{self.bits}: clip cuts the top of symmetric codes, rounded to nearest; not with {other}"
            )
        self._check(f"int{self.bits}")

    def __str__(self) -> str:
        scheme = ":asym" if self.asymmetric else ":clip" if self.clipped else ""
        return f"int{self.bits}:{self.block}{scheme}{self._options()}"

    @property
    def largest(self) -> int:  # type: ignore[override]
        """Largest code."""
        return (1 << (self.bits if self.asymmetric else self.bits - 1)) - 1

    def error_bound(self, low: float, high: float, out: Dtype = "fp32") -> float:
        """Largest |decoded - x| for a block, rotated, of finite values in [low, high] decoded to ``out``."""
        top = max(abs(low), abs(high)) / self.steps
        scale = high / self.largest - low / self.largest if self.asymmetric else top
        scale = max(scale, SMALLEST_NORMAL)
        cut = self.clipped and high > 0  # the top may be off by a whole scale, not half of one
        return self._bound(2 * scale if cut else scale, low, high, out)


@dataclass(frozen=True, slots=True)
class FloatCodec(_Scaled):
    """Block-quantised floats of 8 or 4 bits with a scale per block, saturating, without infinities.

    An E8M0 scale is rounded up to a power of two, so that no value saturates.  A CodecError refuses an
    impossible block or rotation, and an MX block other than 32.
    """

    element: Element  # ``e4m3`` (largest 448), ``e5m2`` (57344), ``e2m1`` (6)
    block: Block
    scale: Scale = "fp32"  # or ``e8m0``: a power of two in a byte, as in OCP's MX formats, of 32 elements
    hadamard: int = 0
    stochastic: bool = False
    # Of an element: bits, bits of its mantissa, exponent of the smallest normal one, largest one.
    bits: int = field(init=False, repr=False, compare=False)
    mantissa: int = field(init=False, repr=False, compare=False)
    smallest_exponent: int = field(init=False, repr=False, compare=False)
    largest: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = (self.element, self.scale) in _HEADS.values()
        if not known or (self.scale == "e8m0" and self.block != MX_BLOCK):
            form = f"{self.element} with a scale in {self.scale} for {self.block} elements"
            raise CodecError(f"{form}: expected {', '.join(_HEADS)}, of which MX have {MX_BLOCK}")
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
        """As :meth:`IntCodec.error_bound`."""
        scale = max(max(abs(low), abs(high)) / self.largest, SMALLEST_NORMAL)
        if self.scale == "e8m0":
            scale = 2.0 ** math.ceil(math.log2(scale) - 1e-9)
        top = min(max(abs(low), abs(high)) / scale, self.largest)
        exponent = max(math.frexp(top * (1 + 2.0**-15))[1] - 1, self.smallest_exponent)
        return self._bound(scale * 2.0 ** (exponent - self.mantissa), low, high, out)


# Bits, bits of mantissa, smallest normal exponent, largest element (OCP MX 1.0, tables 1 and 3).
_FLOATS: Final = {"e4m3": (8, 3, -6, 448.0), "e5m2": (8, 2, -14, 57344.0), "e2m1": (4, 1, 0, 6.0)}
_HEADS: Final[dict[str, tuple[Element, Scale]]] = {
    "fp8e4m3": ("e4m3", "fp32"),
    "fp8e5m2": ("e5m2", "fp32"),
    "mxfp8": ("e4m3", "e8m0"),
    "mxfp8e5m2": ("e5m2", "e8m0"),
    "mxfp4": ("e2m1", "e8m0"),
}


# Published formats, in the order of impl/cpu/formats.hpp, and their classes.
FORMATS: Final = {
    name.lower(): f"impl.codecs.published_formats:{name}"
    for name in ("NVFP4", "MXFP6E2M3", "MXFP6E3M2", "NF4", "Spike2", "Spike3", "Sign1", "BF16SR")
}


@dataclass(frozen=True, slots=True)
class OwnCodec(_Framed):
    """A user's codec or a published format; frames are its object's, padded with zeros to 16 bytes.

    ``name`` is ``module:object``, or a format's, and is imported on first use, so that a record that has it
    can be read where the module is missing; or it is the name of ``instance``.
    """

    name: str
    instance: OwnObject | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def published(self) -> bool:
        """Whether it is one of ``FORMATS``, for which backends have kernels; else it is a user's."""
        return self.instance is None and self.name in FORMATS

    @property
    def definition(self) -> OwnObject:
        """Its attributes and methods; a CodecError if it cannot be imported, or lacks what a codec has."""
        return self.instance or own_object.import_definition(FORMATS.get(self.name, self.name))

    @property
    def claimed(self) -> BuiltIn | None:
        """The built-in codec that it claims to equal bit for bit; None without such a claim."""
        text = self.definition.codec
        try:
            return None if text is None else built_in(str(text))
        except CodecError as error:
            raise CodecError(f"{self.name}: {error}") from None

    @property
    def _contract(self) -> BuiltIn | OwnObject:
        """The source of its sizes and promises: the codec that it claims to equal, or its object."""
        return self.claimed or self.definition

    @property
    def block(self) -> Block:
        """Elements that share a scale, or ``shard``."""
        return self._contract.block

    @property
    def grain(self) -> int:
        """Elements that a shard must be a multiple of."""
        return self._contract.grain

    @property
    def laws(self) -> frozenset[Law]:
        """The laws that it promises."""
        return self._contract.laws

    @property
    def stochastic(self) -> bool:  # type: ignore[override]  # frozen: never written
        """Whether it takes random bits."""
        return bool(self._contract.stochastic)

    def own_bytes(self, numel: int) -> int:
        """Bytes of its object's frame, before padding; a CodecError unless it is a whole number."""
        with raising(CodecError, f"{self.name}: frame_bytes({numel}):"):
            return operator.index(self._contract.frame_bytes(numel))  # type: ignore[misc]  # checked when read

    def frame_bytes(self, numel: int) -> int:
        """Bytes of the frame of ``numel`` elements, with padding."""
        return padded_bytes(self.own_bytes(numel))

    def error_bound(self, low: float, high: float, out: Dtype = "fp32") -> float:
        """The bound that it promises; infinite without one."""
        bound = self._contract.error_bound if self.laws & {Law.BOUND, Law.UNBIASED} else None
        return math.inf if bound is None else float(bound(low, high, out))


def user_codec(source: Any, name: str | None = None) -> OwnCodec:
    """The codec of a user's object or class; a CodecError names what it lacks (docs/reference/codecs.md).

    ``name``, by default the class's, stands in messages; it must be the same on all ranks.
    """
    kind = source if isinstance(source, type) else type(source)
    name = name or f"{kind.__module__}:{kind.__qualname__}"
    codec = OwnCodec(name, own_object.definition_of(name, source))
    _ = codec.claimed  # an invalid claim raises here, not later
    return codec


Blocked = IntCodec | FloatCodec  # codecs with scales
BuiltIn = Raw | Blocked
Codec = BuiltIn | OwnCodec  # all that a wire can carry


def has_kernels(codec: Codec) -> TypeGuard[Blocked | OwnCodec]:
    """Whether backends have kernels of it: it has scales, or is a published format."""
    return codec.published if isinstance(codec, OwnCodec) else not isinstance(codec, Raw)


FP32: Final = Raw("fp32")
BF16: Final = Raw("bf16")
FP16: Final = Raw("fp16")


def _rounding(low: float, high: float, dtype: Dtype) -> float:
    """Half an ulp of ``dtype`` at the largest magnitude in [low, high]."""
    relative, absolute = HALF_ULP[dtype]
    return max(abs(low), abs(high)) * relative + absolute


_TEXT: Final = re.compile(
    r"(fp32|bf16|fp16)"
    r"|(?:(?:int(\d{1,9})|(fp8e4m3|fp8e5m2)):(shard|\d{1,20})|(mxfp8|mxfp8e5m2|mxfp4))"
    r"(?::(asym|clip))?(?::hadamard([1-9]\d{0,9}))?(:stochastic)?"
)
_HEAD: Final = re.compile(r"(fp32|bf16|fp16|int\d+|fp8\w*|mxfp\w*)(:|$)")  # of texts that name no module
_ALLOWED: Final = (
    "expected fp32, bf16, fp16, int<2..8>:<block or 'shard'>[:asym or :clip], fp8e4m3:<block>, "
    "fp8e5m2:<block>, mxfp8, mxfp8e5m2 or mxfp4, then [:hadamard<n>][:stochastic], e.g. int8:2048; or "
    f"{', '.join(FORMATS)}; a codec of your own is named as module:object, such as mykernels:Int4"
)


def parse(text: str) -> Codec:
    """Read a codec's text form; a CodecError says what is allowed.  ``str(parse(text)) == text``.

    ``module:object`` is a user's codec, which is imported on first use.
    """
    if not isinstance(text, str):
        raise CodecError(f"codec {text!r} is a {type(text).__name__}: {_ALLOWED}")
    stripped = text.strip()
    if stripped in FORMATS or (not _HEAD.match(stripped) and is_name(stripped)):
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
    """Read the text form of a built-in codec; a user's is a CodecError too."""
    codec = parse(text)
    if isinstance(codec, OwnCodec):
        raise CodecError(f"codec {text!r} is a user's own: expected one that is built in")
    return codec


def common_grain(*codecs: Codec) -> int:
    """Elements that a shard must be a multiple of to suit all ``codecs``."""
    return math.lcm(32, *(codec.grain for codec in codecs))  # 32 codes of 4 bits are a 16-byte vector
