"""Reads the attributes of a user's codec object and checks them, and defines the laws: what a codec can promise.

docs/reference/codecs.md explains to users which attributes an object needs.  This module does not import torch.
"""

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
    """A property that a codec can promise; tests and ``zeropp check codecs`` try what a codec promises."""

    BOUND = "the error of each element is within error_bound of its block"
    ZERO = "zeros decode to zeros"
    IDEMPOTENT = "decoded values, encoded again, decode to the same values, up to the last bits of a scale"
    SIGN = "if x decodes to y, then -x decodes to -y"
    POWER_OF_TWO = "if x is scaled by a power of two, so is its decoded value, except near the range's ends"
    NONFINITE = "a block with a NaN or an infinity decodes to NaN, or to the same values"
    UNBIASED = "the mean of the decoded values over all random bits is x, within 2^-16 of a step"


_LAWS: Final = {law.name.lower(): law for law in Law}


class CodecError(ValueError):
    """A codec is invalid or cannot be used, for example because its text form is wrong; the message says why."""


@dataclass(slots=True, eq=False)
class OwnObject:
    """The attributes of a user's codec, read from its object (docs/reference/codecs.md explains them).

    A codec must have ``encode`` and ``decode``.  For the other required attributes there are two cases:

    - If the codec equals a built-in codec bit for bit, ``codec`` is the built-in codec's text, such as ``int8:2048``.
    - Otherwise the codec must have ``laws``, ``block`` and ``frame_bytes``, and also ``error_bound`` if its laws
      include ``bound`` or ``unbiased``.

    All further attributes may be left out.  In the user's object ``laws`` are lower-case names, such as ``bound``; here
    they are members of :class:`Law`.
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
    device: Any = "cpu"  # ``cpu``, ``cuda``, ``cuda:<number>``, or ``any``, for CPUs and GPUs
    decode_sum: Callable[..., None] | None = None
    decode_sum_encode: Callable[..., None] | None = None
    used_bytes: Callable[..., Any] | None = None  # counts a frame's used bytes, if they depend on the values

    @property
    def tried_on(self) -> str:
        """The device on which the codec is checked: its ``device``, or ``cpu`` if the codec runs on any device."""
        return "cpu" if self.device == "any" else str(self.device)

    @property
    def grain(self) -> int:
        """The grain: a shard must have a multiple of this number of elements."""
        return 1 if self.block == "shard" else int(self.block)


@cache
def import_definition(name: str, *, ours: bool = False) -> OwnObject:
    """Imports the object ``name``, in the form ``module:object``, and returns its attributes (:func:`definition_of`).

    ``ours`` says that the object belongs to this project.  Such an object may be imported even where the import of
    users' modules is forbidden (:func:`impl.named_object.forbidden`).

    Raises CodecError: if the object cannot be imported, or is not a codec.
    """
    try:
        return definition_of(name, import_object(name, ours=ours))
    except NamedObjectError as error:
        raise CodecError(str(error)) from error


def definition_of(name: str, source: Any) -> OwnObject:
    """Returns the attributes of a user's codec ``source``, an object or a class.

    A class is instantiated without arguments.  ``name`` is what error messages call the codec.

    Raises CodecError: if an attribute is missing or wrong, or if the class or an attribute raises an exception.
    """
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
    """Yield a text for each thing that is wrong with a user's codec, such as ``has no method 'encode'``.

    Only the first text is meaningful: the problems behind later texts may follow from the first problem.
    """
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
            yield "has no method 'error_bound', which the laws 'bound' and 'unbiased' need"
        if "unbiased" in definition.laws and not definition.stochastic:
            yield "promises the law 'unbiased', but is not stochastic: set stochastic = True, or remove the law"
        if definition.block != "shard" and not (isinstance(definition.block, int) and definition.block >= 1):
            yield f"block {definition.block!r}: expected a number of elements of 1 or more, or 'shard'"
    kinds = definition.kinds
    if not isinstance(kinds, list | tuple) or not kinds or any(kind not in _KINDS for kind in kinds):
        yield f"kinds {kinds!r}: expected a list with some of {', '.join(_KINDS)}"
    if _DEVICE.fullmatch(str(definition.device)) is None:
        yield f"device {definition.device!r}: expected any, cpu, cuda, or a device such as cuda:0"
