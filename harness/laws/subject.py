"""Subjects of the laws: codecs of ours on a backend, and user objects given as ``module:object``.

A class is instantiated without arguments.  The object has

- ``encode(x, frame)``: write the frame (F,) uint8 of x (S,); all of it, and nothing beyond it;
- ``decode(frame, out)``: write the elements (S,) of a frame;

and either ``codec``, the text form of a codec of ours, which it then claims to be, bit for bit; or

- ``laws``: names of the laws that it promises, as ``["bound", "zero"]`` (:class:`impl.codecs.codec.Law`);
- ``block``: elements that share a scale, or ``"shard"``;
- ``frame_bytes(numel)``: bytes of a frame;
- ``error_bound(low, high, out)``: largest error of finite values in [low, high] of one block, decoded to
  ``out``: ``"fp32"``, ``"bf16"`` or ``"fp16"``; asked only where it promises ``bound`` or ``unbiased``.

Where it offers them, these are tried too: ``decode_sum(frames, out)``: write to out (S,) the fp32 sum of
frames (sources, F), in ascending order; ``decode_sum_encode(frames, frame, numel)``: write the frame (F,) of
that sum; with ``noise`` as a fourth argument where it is stochastic.

Optional, with these defaults: ``stochastic`` (False; if True, ``encode(x, frame, noise)`` gets
an :class:`impl.codecs.rounding_noise.Noise`), ``kinds`` (``["fp32"]``: types of x and out), ``device``
(``"cpu"``).
"""

from __future__ import annotations

import importlib
import itertools
import operator
import re
from collections.abc import Callable
from typing import Any, Final, get_args

import torch
from torch import Tensor

from harness.laws.laws import Promises, Subject, raised
from harness.workloads.input_digests import see_working_folder
from impl import ops
from impl.codecs.codec import Block, Codec, CodecError, Dtype, Law, Raw, parse
from impl.codecs.reference import REFERENCE
from impl.codecs.rounding_noise import Noise

BACKENDS: Final = ("reference", "cpu", "cuda")
# One of every kind, width and option, in blocks of a size that hostile rows fill.
REPRESENTATIVE: Final = (
    "fp32", "bf16", "fp16",
    "int8:64", "int7:8", "int6:24", "int5:13", "int4:32", "int3:64", "int2:5",
    "int8:shard", "int4:1", "int8:2048",
    "int8:64:asym", "int4:32:asym", "int3:7:asym", "int8:64:clip", "int4:32:clip", "int3:7:clip",
    "fp8e4m3:32", "fp8e5m2:32", "fp8e4m3:shard", "mxfp8", "mxfp8e5m2", "mxfp4",
    "int8:64:hadamard16", "int4:64:hadamard32", "mxfp4:hadamard8",
    "int8:64:stochastic", "int4:32:stochastic", "int4:32:asym:stochastic",
    "fp8e4m3:32:stochastic", "mxfp4:stochastic", "int4:32:hadamard8:stochastic",
)  # fmt: skip
_CODEC_HEAD: Final = re.compile(r"fp32|bf16|fp16|int\d+|fp8\w*|mxfp\w*")
_OBJECT: Final = re.compile(r"[\w.]+:[\w.]+")
_OWN: Final = "a codec of your own is named as module:object, such as mykernels:Int4"
_KINDS: Final[tuple[Dtype, ...]] = get_args(Dtype)


class SubjectError(ValueError):
    """A named subject cannot be checked here; one line says why."""


def missing(backend: str) -> str | None:
    """Why ``backend`` is not available on this machine; None if it is."""
    if backend not in BACKENDS:
        return f"unknown backend {backend!r}: expected one of {', '.join(BACKENDS)}"
    try:
        ops.operations_of(backend)
    except ValueError as error:
        return str(error)
    if backend == "cuda" and not torch.cuda.is_available():
        return "backend 'cuda': torch finds no CUDA device"
    return None


def of_codec(codec: Codec, backend: str) -> Subject:
    """A codec of ours on a backend.

    Raises:
        ValueError: if this machine lacks what the backend needs.
    """
    operations = ops.operations_of(backend)
    return Subject(
        name=f"{codec} on {backend}",
        promises=codec,
        block=_block_of(codec),
        encode=lambda x, frames, noise: operations.encode(codec, x, frames, noise=noise),
        decode=lambda frames, out: operations.decode(codec, frames, out),
        decode_sum=lambda frames, out: operations.decode_sum(codec, frames, out),
        decode_sum_encode=lambda frames, out, numel, noise: operations.decode_sum_encode(
            codec, codec, frames, out, numel, noise=noise
        ),
        device=torch.device("cuda" if backend == "cuda" else "cpu"),
        codec=codec,
        specification=operations is REFERENCE,
    )


def _block_of(codec: Codec) -> Block:
    return 1 if isinstance(codec, Raw) else codec.block


def read(text: str) -> Codec | Subject:
    """Resolve a codec of ours by its text form, or a user's ``module:object``.

    Raises:
        SubjectError: if it is neither, naming what is wrong.
    """
    if _CODEC_HEAD.fullmatch(text.partition(":")[0]) or not _OBJECT.fullmatch(text):
        try:
            return parse(text)
        except ValueError as error:  # CodecError, or a number of thousands of digits
            own = "" if _CODEC_HEAD.fullmatch(text.partition(":")[0]) else f"; {_OWN}"
            raise SubjectError(f"{error}{own}") from error
    return of_object(text, _import(text))


def of_object(name: str, thing: Any) -> Subject:
    """A user's own codec or kernel; the module's docstring says what it must have.

    Raises:
        SubjectError: naming what it lacks, or what it raised.
    """
    try:
        return _of_object(name, thing() if isinstance(thing, type) else thing)
    except (SubjectError, KeyboardInterrupt):
        raise
    except BaseException as error:  # its constructor and properties may raise whatever they like
        raise SubjectError(f"{name}: raised {raised(error)}") from error


def _of_object(name: str, thing: Any) -> Subject:
    for method in ("encode", "decode"):
        if not callable(getattr(thing, method, None)):
            raise SubjectError(f"{name}: has no method {method!r}")
    declared = getattr(thing, "kinds", ("fp32",))
    if not isinstance(declared, list | tuple) or not declared or any(k not in _KINDS for k in declared):
        raise SubjectError(f"{name}: kinds {declared!r}: expected a list with some of {', '.join(_KINDS)}")
    kinds: tuple[Dtype, ...] = tuple(declared)
    device = _device(name, getattr(thing, "device", "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SubjectError(f"{name}: its device is {device}, and torch finds no CUDA device")
    codec, promises = _promises(name, thing)
    return Subject(
        name=name,
        promises=promises,
        block=_block(name, thing, codec),
        encode=_by_rows(thing.encode, stochastic=promises.stochastic),
        decode=_by_rows(thing.decode),
        kinds=kinds,
        device=device,
        decode_sum=_offered(name, thing, "decode_sum", kinds),
        decode_sum_encode=_with_noise(
            _offered(name, thing, "decode_sum_encode", kinds), stochastic=promises.stochastic
        ),
        codec=codec,
    )


def _offered(name: str, thing: Any, method: str, kinds: tuple[Dtype, ...]) -> Callable[..., None] | None:
    """A method that an object may have; a sum is fp32, so its elements must be, too."""
    found = getattr(thing, method, None)
    if found is None:
        return None
    if not callable(found):
        raise SubjectError(f"{name}: its {method!r} is a {type(found).__name__}: expected a method")
    if "fp32" not in kinds:
        raise SubjectError(f"{name}: has a method {method!r}, whose sum is fp32: expected fp32 in kinds")
    return found  # type: ignore[no-any-return]  # just looked at


def _with_noise(function: Callable[..., None] | None, *, stochastic: bool) -> Callable[..., None] | None:
    """A function of frames, frame and numel, that takes random bits only where it is stochastic."""
    if function is None or stochastic:
        return function
    return lambda frames, frame, numel, _: function(frames, frame, numel)


def _device(name: str, text: Any) -> torch.device:
    try:
        device = torch.device(text)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise SubjectError(f"{name}: device {text!r}: expected cpu or cuda")
    return device


def _promises(name: str, thing: Any) -> tuple[Codec | None, Codec | Promises]:
    text = getattr(thing, "codec", None)
    if text is not None:
        try:
            codec = parse(str(text))
        except CodecError as error:
            raise SubjectError(f"{name}: {error}") from error
        return codec, codec
    by_name = {law.name.lower(): law for law in Law}
    declared = getattr(thing, "laws", None)
    if not isinstance(declared, list | tuple | set | frozenset):
        raise SubjectError(f"{name}: has neither 'codec' nor a list 'laws' with some of {', '.join(by_name)}")
    words = [law.name.lower() if isinstance(law, Law) else str(law) for law in declared]
    unknown = [word for word in words if word not in by_name]
    if unknown:
        raise SubjectError(f"{name}: unknown law {unknown[0]!r}: expected some of {', '.join(by_name)}")
    laws = frozenset(by_name[word] for word in words)
    bound = getattr(thing, "error_bound", None)
    if not callable(getattr(thing, "frame_bytes", None)):
        raise SubjectError(f"{name}: has no method 'frame_bytes'")
    if laws & {Law.BOUND, Law.UNBIASED} and not callable(bound):
        raise SubjectError(f"{name}: promises bound or unbiased, and has no method 'error_bound'")
    stochastic = bool(getattr(thing, "stochastic", False))
    if Law.UNBIASED in laws and not stochastic:
        raise SubjectError(f"{name}: promises unbiased, and is not stochastic")
    return None, Promises(laws, stochastic, _counting(thing.frame_bytes), bound)  # type: ignore[arg-type]  # where None, unused


def _counting(frame_bytes: Callable[[int], Any]) -> Callable[[int], int]:
    """A user's ``frame_bytes``, which must return a number of bytes."""

    def checked(numel: int) -> int:
        size = frame_bytes(numel)
        try:
            return operator.index(size)
        except TypeError:
            raise TypeError(f"frame_bytes({numel}) returned {size!r}, expected an int") from None

    return checked


def _block(name: str, thing: Any, codec: Codec | None) -> Block:
    if codec is not None:
        return _block_of(codec)
    block: Any = getattr(thing, "block", None)
    if block == "shard" or (isinstance(block, int) and block >= 1):
        return block  # type: ignore[no-any-return]  # just looked at
    raise SubjectError(f"{name}: block {block!r}: expected a number of elements from 1, or 'shard'")


def _by_rows(function: Callable[..., None], *, stochastic: bool = False) -> Callable[..., None]:
    """Lift a function of one row, which may take its random bits, to rows (..., S)."""

    def all_rows(source: Tensor, target: Tensor, noise: Noise | None = None) -> None:
        for row in itertools.product(*map(range, source.shape[:-1])):
            random: tuple[Noise, ...] = ()
            if noise is not None and stochastic:
                start = noise.start + sum(i * stride for i, stride in zip(row, noise.strides, strict=True))
                random = (Noise(noise.words, start),)
            function(source[row], target[row], *random)

    return all_rows


def _import(text: str) -> Any:
    module, _, path = text.partition(":")
    see_working_folder()
    failed = f"cannot import {module!r}"
    try:
        thing: Any = importlib.import_module(module)
        failed = f"{module} has no {path!r}"
        return operator.attrgetter(path)(thing)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may raise whatever it likes, SystemExit too
        raise SubjectError(f"{text}: {failed}: {raised(error)}") from error
