"""Reads a user's own objects, named as ``module:object``; of codecs, checks what :class:`OwnObject` lists.

No torch.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import operator
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final

from impl.errors import raised

_NAME: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_KINDS: Final = ("fp32", "bf16", "fp16")
_DEVICE: Final = re.compile(r"any|cpu|cuda(:\d{1,3})?")
_seen: Final[dict[Path, bool]] = {}  # folders whose modules count, and whether they came into sys.path by it
_names: Final[list[str]] = []  # of modules that were imported


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


class OwnObjectError(CodecError):
    """A named object cannot be had, or lacks what a codec has; one line says which."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnObject:
    """What a user's codec, an object or a class that is instantiated without arguments, has by these names.

    It has either ``codec``, or ``laws``, ``block`` and ``frame_bytes``; all others may be left out.

    Attributes:
        encode: (x, frame): writes the frame (F,) uint8 of x (S,); all of it, and nothing beyond it.
        decode: (frame, out): writes the elements (S,) of a frame.
        codec: text form of a codec of ours, which it then claims to be, bit for bit.
        laws: those that it promises (:class:`Law`), a user's by name, as ``["bound", "zero"]``.
        block: elements that share a scale, or ``"shard"``.
        frame_bytes: (numel): bytes of a frame.
        error_bound: (low, high, out): largest error of finite values in [low, high] of one block, decoded to
            ``out``: ``"fp32"``, ``"bf16"`` or ``"fp16"``; asked where it promises ``bound`` or ``unbiased``.
        stochastic: whether ``encode(x, frame, noise)`` gets an :class:`impl.codecs.rounding_noise.Noise`.
        kinds: types of x and out.
        device: ``cpu`` or ``cuda``, maybe with a number; ``any`` for both.
        decode_sum: (frames, out): writes to out (S,) the fp32 sum of frames (sources, F), in ascending order.
        decode_sum_encode: (frames, frame, numel), and noise where it is stochastic: writes the frame (F,) of
            that sum; ``zeropp check codecs`` tries it, the engine encodes the sum by ``encode``.

    Raises:
        OwnObjectError: naming what it lacks.
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
    device: Any = "cpu"
    decode_sum: Callable[..., None] | None = None
    decode_sum_encode: Callable[..., None] | None = None

    def __post_init__(self) -> None:
        if (lacks := next(self._lacks(), None)) is not None:
            raise OwnObjectError(lacks)
        if self.codec is None:
            object.__setattr__(self, "laws", frozenset(_LAWS[_name(law)] for law in self.laws))

    def _lacks(self) -> Iterator[str]:
        """What is wrong with it, in words."""
        for method in ("encode", "decode"):
            if not callable(getattr(self, method)):
                yield f"has no method {method!r}"
        kinds = self.kinds
        if not isinstance(kinds, list | tuple) or not kinds or any(kind not in _KINDS for kind in kinds):
            yield f"kinds {kinds!r}: expected a list with some of {', '.join(_KINDS)}"
        if _DEVICE.fullmatch(str(self.device)) is None:
            yield f"device {self.device!r}: expected any, cpu, cuda, or cuda with a number"
        for method in ("decode_sum", "decode_sum_encode"):
            offered = getattr(self, method)
            if offered is not None and not callable(offered):
                yield f"its {method!r} is a {type(offered).__name__}: expected a method"
            if offered is not None and "fp32" not in kinds:  # a sum is fp32
                yield f"has a method {method!r}, whose sum is fp32: expected fp32 in kinds"
        if self.codec is not None:
            return
        if not isinstance(self.laws, list | tuple | set | frozenset):
            yield f"has neither 'codec' nor a list 'laws' with some of {', '.join(_LAWS)}"
        names = [*map(_name, self.laws)]
        if unknown := [name for name in names if name not in _LAWS]:
            yield f"unknown law {unknown[0]!r}: expected some of {', '.join(_LAWS)}"
        if not callable(self.frame_bytes):
            yield "has no method 'frame_bytes'"
        if {"bound", "unbiased"} & {*names} and not callable(self.error_bound):
            yield "promises bound or unbiased, and has no method 'error_bound'"
        if "unbiased" in names and not self.stochastic:
            yield "promises unbiased, and is not stochastic"
        if self.block != "shard" and not (isinstance(self.block, int) and self.block >= 1):
            yield f"block {self.block!r}: expected a number of elements from 1, or 'shard'"

    @property
    def tried_on(self) -> str:
        """A device that it is for."""
        return "cpu" if self.device == "any" else str(self.device)

    @property
    def grain(self) -> int:
        """Elements that a shard must be a multiple of."""
        return 1 if self.block == "shard" else int(self.block)


def _name(law: object) -> str:
    """Of a law, or of one that is given by name."""
    return str(getattr(law, "name", law)).lower()


def is_name(text: str) -> bool:
    """Whether ``text`` has the form ``module:object``."""
    return _NAME.fullmatch(text) is not None


def see(folder: Path) -> None:
    """Add a folder to ``sys.path``, so that its modules can be imported."""
    here = folder.resolve()
    if added := str(here) not in sys.path:
        sys.path.append(str(here))
    _seen[here] = _seen.get(here, False) or added


def forget() -> None:
    """Drop the folders, and what was imported by name, as in a process that begins."""
    for name in _names:
        sys.modules.pop(name, None)
    sys.path[:] = [one for one in sys.path if not _seen.get(Path(one), False)]
    _names.clear()
    _seen.clear()
    imported.cache_clear()


def import_object(text: str) -> Any:
    """The object of ``module:object``; modules of the working folder count.

    Raises:
        OwnObjectError: if there is none, or what importing it raised.
    """
    module, _, path = text.partition(":")
    see(Path.cwd())
    if module not in sys.modules:
        _names.append(module)
    with told(f"{text}: cannot import {module!r}:"):
        thing: Any = importlib.import_module(module)
    _check_origin(text, module, getattr(thing, "__file__", None))
    with told(f"{text}: {module} has no {path!r}:"):
        return operator.attrgetter(path)(thing)


@contextlib.contextmanager
def told(words: str) -> Iterator[None]:
    """Whatever other people's code raises, SystemExit too, becomes one line of an OwnObjectError."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise OwnObjectError(f"{words} {raised(error)}") from error


def _check_origin(text: str, module: str, file: str | None) -> None:
    """Refuse a module that an installed one of the same name hides."""
    first = module.partition(".")[0]
    for folder in _seen:
        there = folder / f"{first}.py", folder / first / "__init__.py"
        if any(one.exists() for one in there):
            if file is None or not Path(file).resolve().is_relative_to(folder):
                raise OwnObjectError(
                    f"{text}: {module} is that of {file}, which hides the one in {folder}; rename it"
                )
            return


@cache
def imported(name: str) -> OwnObject:
    """The codec of ``module:object``.

    Raises:
        OwnObjectError: as :func:`import_object` and :func:`declared`.
    """
    return declared(name, import_object(name))


def declared(name: str, thing: Any) -> OwnObject:
    """What a user's object has of what :class:`OwnObject` lists.

    Raises:
        OwnObjectError: naming what it lacks, or what it raised.
    """
    with told(f"{name}: raised"):
        thing = thing() if isinstance(thing, type) else thing
        names = [field.name for field in fields(OwnObject) if hasattr(thing, field.name)]
        held = {field: getattr(thing, field) for field in names}
    try:
        return OwnObject(**held)
    except OwnObjectError as error:
        raise OwnObjectError(f"{name}: {error}") from None
