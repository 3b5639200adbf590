"""Encodes and decodes tensors with the kernels for their device.

A codec says how elements become bytes.  There are three backends that run codecs, and all of them give the same bits:

* ``cpu``: C++ kernels for tensors on a CPU, which are compiled on first use.
* ``cuda``: CUDA kernels for tensors on a GPU, which NVRTC compiles and CuPy launches.
* ``reference`` (:mod:`impl.codecs.reference`): plain torch, used if the compiler or CuPy is missing.

:func:`backend_of` returns the name of the backend in use.  If this is the reference, :func:`warning_of` returns why.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable

import torch
from torch import Tensor

from impl.codecs.codec import FRAME_ALIGNMENT, Codec, OwnCodec, Raw, Sums, has_kernels
from impl.codecs.reference import DTYPES, NAMES, REFERENCE, Carried, Operations
from impl.codecs.rounding_noise import OCTET, Noise
from impl.cpu import build
from impl.cpu import kernels as cpu
from impl.cuda import kernels as cuda
from impl.cuda.launch import loaded_sha256, on_device


def prepare(device: torch.device, codecs: Iterable[Codec] = ()) -> None:
    """Compile the C++ kernels for a CPU, or the CUDA kernels of ``codecs`` for a GPU, before the first step needs them.

    If the C++ compiler or CuPy is missing, no error is raised: the reference backend takes the place of the kernels,
    and :func:`warning_of` says why.

    On a GPU, the kernels for encoding and decoding with ``codecs`` are compiled, because :func:`try_codec` encodes and
    decodes eight elements with each codec.  Kernels for other types of elements, other sizes and other operations are
    compiled when they are first called.

    Raises:
        ValueError: if no backend serves the device, or if a user's codec does not support the device.
        RuntimeError: on a GPU, if the kernels of a codec do not compile or run.
    """
    operations, _ = _choose(device.type)
    codecs = dict.fromkeys(codecs)
    check_devices(device, codecs)
    if device.type == "cuda":
        for codec in codecs:
            try_codec(operations, codec, device)
        operations.sums_of_bits(torch.zeros(OCTET, device=device))
        torch.cuda.synchronize(device)


def try_codec(operations: Operations, codec: Codec, device: torch.device) -> None:
    """Encode and decode eight zeros on ``device``, to learn whether the kernels of ``codec`` run.

    For a codec that only casts, such as ``bf16``, the summing decode (:func:`decode_sum`) is tried instead of
    :func:`decode`.  A codec without kernels of its own is not tried.

    Raises:
        RuntimeError: if a kernel does not compile or run; the message names the codec.
    """
    if not (isinstance(codec, Raw) or has_kernels(codec)):
        return
    x = torch.zeros(OCTET, device=device)
    frames = torch.zeros(codec.frame_bytes(OCTET), dtype=torch.uint8, device=device)
    try:
        if isinstance(codec, Raw):
            operations.encode(codec, x.to(DTYPES[codec.dtype]), frames)
            operations.decode_sum(codec, frames[None], x)
        else:
            operations.encode(codec, x, frames, noise=Noise((0, 0, 0, 0)) if codec.stochastic else None)
            operations.decode(codec, frames, x)
    except (ImportError, OSError, RuntimeError) as problem:
        raise RuntimeError(f"the kernels of {codec} do not run on {device}: {problem}") from problem


def check_devices(device: torch.device, codecs: Iterable[Codec]) -> None:
    """Raise a ValueError for a user's codec that does not support ``device``."""
    for codec in codecs:
        target = codec.definition.device if isinstance(codec, OwnCodec) else "any"
        if target != "any" and torch.device(target).type != device.type:
            raise ValueError(
                f"{codec} supports only {target}, but the tensors are on {device}: use another codec, or run on "
                f"{target}"
            )


def backend_of(device: torch.device) -> str:
    """Return the name of the backend that serves ``device``; raises a ValueError if there is none."""
    return _choose(device.type)[0].name


def loaded_kernels(device: torch.device) -> str | None:
    """Return the SHA-256 of the compiled kernels that this process has loaded for ``device``.

    Returns None if ``device`` has no kernels, so that the reference, written in plain torch, is used.
    """
    operations, _ = _choose(device.type)
    return loaded_sha256() if isinstance(operations, cuda.Kernels) else getattr(operations, "sha256", None)


def operations_of(name: str) -> Operations:
    """Return the backend called ``name``: cpu, cuda or reference.

    Raises:
        ValueError: if ``name`` is another name, or if this machine lacks the compiler or the package that the backend
            needs.
    """
    if name == REFERENCE.name:
        return REFERENCE
    operations, warning = _choose(name)
    if operations is REFERENCE:
        raise ValueError(f"backend {name!r} cannot be used: {warning}")
    return operations


def warning_of(device: torch.device) -> str | None:
    """Return one line that says why ``device`` has no compiled kernels; None if it has them.

    Without kernels, the reference, which is written in plain torch, encodes and decodes.
    """
    return _choose(device.type)[1]


@functools.cache
def _choose(device: str) -> tuple[Operations, str | None]:
    """Return (backend, warning) for a type of device, ``cpu`` or ``cuda``.

    If there are no compiled kernels, the backend is the plain-torch reference, and the warning says why in one line.
    Otherwise the warning is None.
    """
    if device == "cpu":
        try:
            return cpu.Kernels(build.library(build.user_folder())), None
        except (build.BuildError, OSError) as problem:
            return REFERENCE, f"no C++ kernels: {problem}"
    if device == "cuda":
        if importlib.util.find_spec("cupy") is None:
            return REFERENCE, "no CUDA kernels: CuPy is not installed"
        return cuda.Kernels(on_device), None
    raise ValueError(
        f"there are no kernels for device {device}: move the tensors to a device of type cpu or cuda"
    )


def encode(
    codec: Codec, x: Tensor, frames: Tensor, *, noise: Noise | None = None, carried: Carried | None = None
) -> None:
    """Encode ``x`` (..., S), and write the encoded bytes to ``frames`` (..., F) uint8.

    F is ``codec.frame_bytes(S)``, the bytes of S encoded elements.  :meth:`Operations.encode` lists the errors raised.

    Args:
        codec: the codec.
        x: the elements to encode.
        frames: the tensor to write to.
        noise: the random bits, if the codec rounds stochastically.
        carried: the state of error feedback (:class:`~impl.codecs.reference.Carried`); None for no error feedback.  The
            state has the error of earlier encodings, which is added to the elements before they are encoded.  The error
            of this encoding then replaces the old error or, with a decay, is averaged with the old error.
    """
    if isinstance(codec, Raw) and carried is None and (elements := _cast_of(codec, x, frames)) is not None:
        elements.copy_(x)
        return
    _choose(x.device.type)[0].encode(codec, x, frames, noise=noise, carried=carried)


def decode(codec: Codec, frames: Tensor, out: Tensor) -> None:
    """Decode the encoded bytes ``frames`` (..., F) uint8, and write the elements to ``out`` (..., S).

    F is ``codec.frame_bytes(S)``, the bytes of S encoded elements.  :meth:`Operations.decode` lists the errors raised.
    """
    if isinstance(codec, Raw) and (elements := _cast_of(codec, out, frames)) is not None:
        out.copy_(elements)
        return
    _choose(out.device.type)[0].decode(codec, frames, out)


def _cast_of(codec: Raw, x: Tensor, frames: Tensor) -> Tensor | None:
    """Return ``frames`` viewed as elements (..., S) of the codec's type; None if the backend must encode or decode.

    The codec only casts elements to a type, and ``Tensor.copy_()`` casts too.  So copying ``x`` (..., S) to the view
    encodes ``x``, and copying the view to ``x`` decodes ``frames``: the backend is not needed.

    Returns None in these cases:

    - ``x`` has the codec's type already;
    - frames have padding, or are not aligned to the size of their elements;
    - shapes, devices or types of the tensors do not match.
    """
    kind = DTYPES[codec.dtype]
    size, shape = kind.itemsize, x.shape
    if x.dtype is kind or x.dtype not in NAMES or not shape or frames.dtype is not torch.uint8:
        return None
    nbytes = shape[-1] * size
    if nbytes % FRAME_ALIGNMENT or frames.shape != (*shape[:-1], nbytes) or x.device != frames.device:
        return None
    *steps, last = frames.stride()
    for step in (frames.storage_offset(), *steps):
        if step % size:
            return None
    return frames.view(kind) if last == 1 else None


def decode_sum(codec: Codec, frames: Tensor, out: Tensor, *, sums: Sums = "fp32", divisor: int = 1) -> None:
    """Decode ``frames`` and write their sum over the first dimension, divided by ``divisor``, to ``out`` (..., S) fp32.

    ``frames`` is (sources, ..., F) uint8; ``frames[i]`` are the encoded values from source i, such as a rank.
    ``divisor`` may be the number of sources, so that ``out`` gets the mean.  ``sums`` is the type in which partial sums
    are kept, fp32 or fp16; see :meth:`Operations.decode_sum`.
    """
    _choose(out.device.type)[0].decode_sum(codec, frames, out, sums=sums, divisor=divisor)


def decode_sum_encode(
    first: Codec,
    second: Codec,
    frames: Tensor,
    out: Tensor,
    numel: int,
    *,
    noise: Noise | None = None,
    carried: Carried | None = None,
    sums: Sums = "fp32",
) -> None:
    """Decode ``frames`` with ``first``, sum them over the first dimension, and encode the sum with ``second``.

    A reduction in two hops (exchanges between ranks) calls this after its first hop, to make the message of its second
    hop.  For most pairs of codecs, one kernel does all three steps; see :meth:`Operations.decode_sum_encode`.

    Args:
        first: the codec of ``frames``.
        second: the codec of the sum.
        frames: (sources, ..., F) uint8, with ``numel`` elements in each frame.
        out: (..., F') uint8, receives the encoded sum.
        numel: the number of elements in a frame.
        noise: the random bits, if ``second`` rounds stochastically.
        carried: the state of error feedback, used as in :func:`encode`; None for none.
        sums: the type in which partial sums are kept, fp32 or fp16.
    """
    operations, _ = _choose(out.device.type)
    operations.decode_sum_encode(first, second, frames, out, numel, noise=noise, carried=carried, sums=sums)


def sums_of_bits(values: Tensor) -> Tensor:
    """Return checksums (n,) int64 of the bits of ``values`` (S,) fp32.

    A caller compares the checksums before and after some code, to find out whether the code wrote to ``values``.  The
    number n depends on S and on the backend; see :meth:`Operations.sums_of_bits`.
    """
    return _choose(values.device.type)[0].sums_of_bits(values)
