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
    """Attributes of a user's codec: an object, or a class that is instantiated without arguments.

    docs/reference/codecs.md explains them.  It has ``codec``, or ``laws`` (names, which become members of
    :class:`Law`), ``block`` and ``frame_bytes``; all but ``encode`` and ``decode`` may be left out.
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
        """A device that it supports."""
        return "cpu" if self.device == "any" else str(self.device)

    @property
    def grain(self) -> int:
        """Elements that a shard must be a multiple of."""
        return 1 if self.block == "shard" else int(self.block)


@cache
def import_definition(name: str) -> OwnObject:
    """The codec of ``module:object``, as :func:`definition_of`; a CodecError if it cannot be imported."""
    try:
        return definition_of(name, import_object(name))
    except NamedObjectError as error:
        raise CodecError(str(error)) from error


def definition_of(name: str, source: Any) -> OwnObject:
    """The attributes of a user's object or class; a CodecError names what it lacks, or what it raised."""
    with raising(CodecError, f"{name}: raised"):
        source = source() if isinstance(source, type) else source
        names = [field.name for field in fields(OwnObject) if hasattr(source, field.name)]
        definition = OwnObject(**{field: getattr(source, field) for field in names})
    for problem in _problems(definition):
        raise CodecError(f"{name}: {problem}")
    if definition.codec is None:
        definition.laws = frozenset(_LAWS[law] for law in definition.laws)
    return definition


def _problems(definition: OwnObject) -> Iterator[str]:
    """What is wrong with a definition; the first may make the others meaningless."""
    for name in ("encode", "decode", "decode_sum", "decode_sum_encode"):
        function = getattr(definition, name)
        if not callable(function) and (function is not None or name in ("encode", "decode")):
            yield f"has no method {name!r}"
    if definition.codec is None:
        if not isinstance(definition.laws, list | tuple | set | frozenset):
            yield f"has neither 'codec' nor a list 'laws' with some of {', '.join(_LAWS)}"
        for law in definition.laws:
            if law not in _LAWS:
                yield f"unknown law {law!r}: expected some of {', '.join(_LAWS)}"
        if not callable(definition.frame_bytes):
            yield "has no method 'frame_bytes'"
        if {"bound", "unbiased"} & {*definition.laws} and not callable(definition.error_bound):
            yield "has no method 'error_bound'"
        if "unbiased" in definition.laws and not definition.stochastic:
            yield "promises unbiased, and is not stochastic"
        if definition.block != "shard" and not (isinstance(definition.block, int) and definition.block >= 1):
            yield f"block {definition.block!r}: expected a number of elements from 1, or 'shard'"
    kinds = definition.kinds
    if not isinstance(kinds, list | tuple) or not kinds or any(kind not in _KINDS for kind in kinds):
        yield f"kinds {kinds!r}: expected a list with some of {', '.join(_KINDS)}"
    if _DEVICE.fullmatch(str(definition.device)) is None:
        yield f"device {definition.device!r}: expected any, cpu, cuda, or cuda with a number"
