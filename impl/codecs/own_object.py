"""What a user's codec object must have, and the promises that all codecs make.  No torch."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Final

from impl.errors import raising
from impl.named_object import NamedObjectError, import_object

_KINDS: Final = ("fp32", "bf16", "fp16")
_DEVICE: Final = re.compile(r"any|cpu|cuda(:\d{1,3})?")


class Law(enum.Enum):
    """A property that a codec promises; the tests run exactly the declared ones."""

    BOUND = "the error of each element is within error_bound of its block"
    ZERO = "zeros decode to zeros"
    IDEMPOTENT = "what was decoded, encoded again, decodes to the same, but for the last bits of a scale"
    SIGN = "encoding -x decodes to minus what x decodes to"
    POWER_OF_TWO = "scaling by a power of two commutes, away from the ends of the range"
    NONFINITE = "a block with a NaN or an infinity decodes to NaN, or to itself"
    UNBIASED = "the mean over random bits is the value, within 2^-16 of a step"


_LAWS: Final = {law.name.lower(): law for law in Law}


class CodecError(ValueError):
    """A codec's text, its numbers or its object are not possible; the message names them."""


@dataclass(slots=True, eq=False)
class OwnObject:
    """What a user's codec, an object or a class that is instantiated without arguments, has by these names.

    docs/reference/codecs.md says what each is.  Either it has ``codec``, or ``laws`` (names of :class:`Law`,
    here turned into them), ``block`` and ``frame_bytes``; all but the first two may be left out.
    """

    encode: Any = None
    decode: Any = None
    codec: str | None = None
    laws: Any = None
    block: Any = None
    frame_bytes: Callable[[int], Any] | None = None
    error_bound: Callable[..., float] | None = None
    stochastic: bool = False
    kinds: Any = ("fp32",)
    device: Any = "cpu"  # or cuda, maybe with a number; any for both
    decode_sum: Callable[..., None] | None = None
    decode_sum_encode: Callable[..., None] | None = None

    @property
    def tried_on(self) -> str:
        """A device that it is for."""
        return "cpu" if self.device == "any" else str(self.device)

    @property
    def grain(self) -> int:
        """Elements that a shard must be a multiple of."""
        return 1 if self.block == "shard" else int(self.block)


@cache
def imported(name: str) -> OwnObject:
    """The codec of ``module:object``, as :func:`declared`; a CodecError if it cannot be imported."""
    try:
        return declared(name, import_object(name))
    except NamedObjectError as error:
        raise CodecError(str(error)) from error


def declared(name: str, thing: Any) -> OwnObject:
    """What a user's object has of what is listed; a CodecError names what it lacks, or what it raised."""
    with raising(CodecError, f"{name}: raised"):
        thing = thing() if isinstance(thing, type) else thing
        names = [field.name for field in fields(OwnObject) if hasattr(thing, field.name)]
        found = OwnObject(**{field: getattr(thing, field) for field in names})
    for lacks in _lacks(found):
        raise CodecError(f"{name}: {lacks}")
    if found.codec is None:
        found.laws = frozenset(_LAWS[law] for law in found.laws)
    return found


def _lacks(found: OwnObject) -> Iterator[str]:
    """What is wrong with it, in words; the first may make the others meaningless."""
    for name in ("encode", "decode", "decode_sum", "decode_sum_encode"):
        function = getattr(found, name)
        if not callable(function) and (function is not None or name in ("encode", "decode")):
            yield f"has no method {name!r}"
    if found.codec is None:
        if not isinstance(found.laws, list | tuple | set | frozenset):
            yield f"has neither 'codec' nor a list 'laws' with some of {', '.join(_LAWS)}"
        for law in found.laws:
            if law not in _LAWS:
                yield f"unknown law {law!r}: expected some of {', '.join(_LAWS)}"
        if not callable(found.frame_bytes):
            yield "has no method 'frame_bytes'"
        if {"bound", "unbiased"} & {*found.laws} and not callable(found.error_bound):
            yield "has no method 'error_bound'"
        if "unbiased" in found.laws and not found.stochastic:
            yield "promises unbiased, and is not stochastic"
        if found.block != "shard" and not (isinstance(found.block, int) and found.block >= 1):
            yield f"block {found.block!r}: expected a number of elements from 1, or 'shard'"
    kinds = found.kinds
    if not isinstance(kinds, list | tuple) or not kinds or any(kind not in _KINDS for kind in kinds):
        yield f"kinds {kinds!r}: expected a list with some of {', '.join(_KINDS)}"
    if _DEVICE.fullmatch(str(found.device)) is None:
        yield f"device {found.device!r}: expected any, cpu, cuda, or cuda with a number"
