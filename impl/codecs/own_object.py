"""Reads a user's own codec: an object with methods ``encode`` and ``decode``, named as ``module:object``.

A class is instantiated without arguments.  The object has

- ``encode(x, frame)``: write the frame (F,) uint8 of x (S,); all of it, and nothing beyond it;
- ``decode(frame, out)``: write the elements (S,) of a frame;

and either ``codec``, the text form of a codec of ours, which it then claims to be, bit for bit; or

- ``laws``: names of the laws that it promises, as ``["bound", "zero"]`` (:class:`impl.codecs.codec.Law`);
- ``block``: elements that share a scale, or ``"shard"``;
- ``frame_bytes(numel)``: bytes of a frame;
- ``error_bound(low, high, out)``: largest error of finite values in [low, high] of one block, decoded to
  ``out``: ``"fp32"``, ``"bf16"`` or ``"fp16"``; asked only where it promises ``bound`` or ``unbiased``.

It may also offer ``decode_sum(frames, out)``: write to out (S,) the fp32 sum of frames (sources, F), in
ascending order; and ``decode_sum_encode(frames, frame, numel)``: write the frame (F,) of that sum, with
``noise`` as a fourth argument where it is stochastic.  ``zeropp check codecs`` tries both; the engine calls
the first, and encodes the sum by ``encode``.

Optional, with these defaults: ``stochastic`` (False; if True, ``encode(x, frame, noise)`` gets
an :class:`impl.codecs.rounding_noise.Noise`), ``kinds`` (``["fp32"]``: types of x and out), ``device``
(``"cpu"``).  No torch.
"""

from __future__ import annotations

import importlib
import operator
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from impl.errors import raised

_NAME: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_KINDS: Final = ("fp32", "bf16", "fp16")
_DEVICE: Final = re.compile(r"cpu|cuda(:\d{1,3})?")
_seen: Final[list[Path]] = []  # folders whose modules count
_added: Final[list[str]] = []  # of them, those that were not in sys.path
_names: Final[list[str]] = []  # of modules that were imported
LAWS: Final = ("bound", "zero", "idempotent", "sign", "power_of_two", "nonfinite", "unbiased")


class OwnObjectError(ValueError):
    """A named object cannot be had, or lacks what a codec has; one line says which."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnObject:
    """What a user's object declares and can do, checked; attributes are named as there.

    Attributes:
        claimed: text of the codec of ours that it claims to be; then ``laws``, ``frame_bytes`` and
            ``error_bound`` are that codec's, and not read here.
        laws: names, in lower case.
        device: ``cpu`` or ``cuda``, as it says it.
    """

    name: str
    encode: Callable[..., None]
    decode: Callable[..., None]
    claimed: str | None
    laws: tuple[str, ...]
    block: Any
    stochastic: bool
    kinds: tuple[str, ...]
    device: str
    frame_bytes: Callable[[int], int] | None
    error_bound: Callable[..., float] | None
    decode_sum: Callable[..., None] | None
    decode_sum_encode: Callable[..., None] | None


def is_name(text: str) -> bool:
    """Whether ``text`` has the form ``module:object``."""
    return _NAME.fullmatch(text) is not None


def see(folder: Path) -> None:
    """Add a folder to ``sys.path``, so that its modules can be imported."""
    here = folder.resolve()
    if here not in _seen:
        _seen.append(here)
    if str(here) not in sys.path:
        sys.path.append(str(here))
        _added.append(str(here))


def forget() -> None:
    """Drop the folders, and what was imported by name, as in a process that begins."""
    for name in _names:
        sys.modules.pop(name, None)
    sys.path[:] = [one for one in sys.path if one not in _added]
    for known in (_names, _added, _seen):
        known.clear()
    imported.cache_clear()


def import_object(text: str) -> Any:
    """The object of ``module:object``; modules of the working folder count.

    Raises:
        OwnObjectError: if there is none, or what importing it raised.
    """
    module, _, path = text.partition(":")
    see(Path.cwd())
    failed = f"cannot import {module!r}"
    try:
        if module not in sys.modules:
            _names.append(module)
        thing: Any = importlib.import_module(module)
        _check_origin(text, module, getattr(thing, "__file__", None))
        failed = f"{module} has no {path!r}"
        return operator.attrgetter(path)(thing)
    except (KeyboardInterrupt, OwnObjectError):
        raise
    except BaseException as error:  # a module may raise whatever it likes, SystemExit too
        raise OwnObjectError(f"{text}: {failed}: {raised(error)}") from error


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
    """Check what a user's object has, which the module's docstring lists.

    Raises:
        OwnObjectError: naming what it lacks, or what it raised.
    """
    try:
        return _declared(name, thing() if isinstance(thing, type) else thing)
    except (OwnObjectError, KeyboardInterrupt):
        raise
    except BaseException as error:  # its constructor and properties may raise whatever they like
        raise OwnObjectError(f"{name}: raised {raised(error)}") from error


def _declared(name: str, thing: Any) -> OwnObject:
    for method in ("encode", "decode"):
        if not callable(getattr(thing, method, None)):
            raise OwnObjectError(f"{name}: has no method {method!r}")
    kinds = getattr(thing, "kinds", ("fp32",))
    if not isinstance(kinds, list | tuple) or not kinds or any(kind not in _KINDS for kind in kinds):
        raise OwnObjectError(f"{name}: kinds {kinds!r}: expected a list with some of {', '.join(_KINDS)}")
    device = str(getattr(thing, "device", "cpu"))
    if _DEVICE.fullmatch(device) is None:
        raise OwnObjectError(f"{name}: device {device!r}: expected cpu, cuda, or cuda with a number")
    claimed = getattr(thing, "codec", None)
    laws = getattr(thing, "laws", None)
    words: tuple[str, ...] = ()
    if claimed is None:
        if not isinstance(laws, list | tuple | set | frozenset):
            raise OwnObjectError(
                f"{name}: has neither 'codec' nor a list 'laws' with some of {', '.join(LAWS)}"
            )
        words = tuple(str(getattr(law, "name", law)).lower() for law in laws)
        if unknown := [word for word in words if word not in LAWS]:
            raise OwnObjectError(f"{name}: unknown law {unknown[0]!r}: expected some of {', '.join(LAWS)}")
    bound, size = getattr(thing, "error_bound", None), getattr(thing, "frame_bytes", None)
    stochastic = bool(getattr(thing, "stochastic", False))
    block = getattr(thing, "block", None)
    if claimed is None:
        if not callable(size):
            raise OwnObjectError(f"{name}: has no method 'frame_bytes'")
        if {"bound", "unbiased"} & set(words) and not callable(bound):
            raise OwnObjectError(f"{name}: promises bound or unbiased, and has no method 'error_bound'")
        if "unbiased" in words and not stochastic:
            raise OwnObjectError(f"{name}: promises unbiased, and is not stochastic")
        if block != "shard" and not (isinstance(block, int) and block >= 1):
            raise OwnObjectError(f"{name}: block {block!r}: expected a number of elements from 1, or 'shard'")
    return OwnObject(
        name=name,
        encode=thing.encode,
        decode=thing.decode,
        claimed=None if claimed is None else str(claimed),
        laws=words,
        block=block,
        stochastic=stochastic,
        kinds=tuple(kinds),
        device=device,
        frame_bytes=_counting(name, size) if callable(size) else None,
        error_bound=bound,
        decode_sum=_offered(name, thing, "decode_sum", kinds),
        decode_sum_encode=_offered(name, thing, "decode_sum_encode", kinds),
    )


def _offered(name: str, thing: Any, method: str, kinds: Sequence[str]) -> Callable[..., None] | None:
    """A method that an object may have; a sum is fp32, so its elements must be, too."""
    found = getattr(thing, method, None)
    if found is None:
        return None
    if not callable(found):
        raise OwnObjectError(f"{name}: its {method!r} is a {type(found).__name__}: expected a method")
    if "fp32" not in kinds:
        raise OwnObjectError(f"{name}: has a method {method!r}, whose sum is fp32: expected fp32 in kinds")
    return found  # type: ignore[no-any-return]  # just looked at


def _counting(name: str, frame_bytes: Callable[[int], Any]) -> Callable[[int], int]:
    """A user's ``frame_bytes``, which must return a number of bytes."""

    def checked(numel: int) -> int:
        try:
            size = frame_bytes(numel)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: it is no end of ours
            raise OwnObjectError(f"{name}: frame_bytes({numel}) raised {raised(error)}") from error
        try:
            found = operator.index(size)
        except TypeError:
            raise OwnObjectError(f"{name}: frame_bytes({numel}) returned {size!r}, expected an int") from None
        if not 0 <= found < 2**63:
            raise OwnObjectError(f"{name}: frame_bytes({numel}) returned {found}")
        return found

    return checked
