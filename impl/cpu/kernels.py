"""Runs codecs on CPU tensors in C++, on the calling thread, bit-equal to :mod:`impl.codecs.reference`.

A codec encodes each row of a tensor (its last dimension) as bytes, called a frame.  The C++ library has functions that
encode, decode, copy or sum rows.  Each of these functions takes one structure, the job (:class:`_Job`).  The job says
where the rows are in memory and how they are encoded.  The functions need rows whose elements are contiguous.  If a
tensor has other rows, the functions work on a contiguous copy, and a result is copied back.

A codec that does not quantise only casts elements to a type.  For such a codec, the library only copies elements that
have this type already, and sums encoded elements in one pass.  PyTorch does the casts.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from impl.codecs.codec import FORMATS, Blocked, BuiltIn, Codec, FloatCodec, OwnCodec, Raw
from impl.codecs.reference import DTYPES, Carried, Operations, Options, Repeat, merged_rows

MOST_DIMS: Final = 8  # most leading dimensions after merging, kDims of job.hpp
KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CODING: Final = (
    *("kind", "bits", "mantissa", "powers", "hadamard", "stochastic", "clipped"),
    *("block", "blocks", "codes_end", "scales_at", "frame_bytes"),
)
_Dims: Final = ctypes.c_int64 * MOST_DIMS


class _Plane(ctypes.Structure):
    """Says where the rows of one tensor are in memory; it mirrors the structure ``Plane`` of job.hpp.

    The rows are the tensor's last dimension.  ``address`` is the address of the first row.  ``strides`` are the
    distances between rows along the other dimensions, in bytes.  Random bits are not in memory: for them, both fields
    count elements.
    """

    _fields_ = (("address", ctypes.c_int64), ("strides", _Dims))


class _Coding(ctypes.Structure):
    """Says how a row of elements is encoded as bytes; it mirrors the structure ``Code`` of job.hpp.

    Both structures have the same fields in the same order.
    """

    _fields_ = tuple((name, ctypes.c_int64) for name in _CODING)


class _Job(ctypes.Structure):
    """The argument of one call of the C++ library; it mirrors the structure ``Job`` of job.hpp.

    Both structures have the same fields in the same order.  ``kind`` and ``error_kind`` are named ``type`` and
    ``error_type`` in job.hpp.
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("numel", "kind", "dims")),
        ("sizes", _Dims),
        *((name, ctypes.c_int64) for name in ("sources", "source_stride", "halves")),
        *((name, _Plane) for name in ("values", "frames", "output")),
        ("random", _Plane),  # counts elements, not bytes
        ("errors", _Plane),
        ("coding", _Coding),
        ("second", _Coding),
        ("error_kind", ctypes.c_int64),
        ("key", ctypes.c_uint32 * 4),
        ("decay", ctypes.c_float * 2),
    )


class Kernels(Operations):
    """Encodes, decodes and sums with the C++ functions of ``library``, a shared library built by impl/cpu/build.py.

    Raises OSError: if the library cannot be loaded, or was built from sources with another layout of :class:`_Job`.
    """

    name = "cpu"

    def __init__(self, library: Path) -> None:
        super().__init__()
        self._library = ctypes.CDLL(str(library))
        self.sha256 = hashlib.sha256(library.read_bytes()).hexdigest()
        self._library.job_bytes.restype = ctypes.c_int64
        if (size := self._library.job_bytes()) != ctypes.sizeof(_Job):
            raise OSError(
                f"{library}: was built from other sources (a job has {size} bytes, expected {ctypes.sizeof(_Job)}): "
                "delete the file, so that it is built again"
            )

    def _fuses(self, first: BuiltIn, second: BuiltIn, numel: int, carried: Carried | None) -> bool:
        return isinstance(first, Blocked) and isinstance(second, Blocked)

    def _encode(self, codec: Codec, x: Tensor, frames: Tensor, options: Options) -> Repeat | None:
        numel, plain = x.shape[-1], options.carried is None
        kernels, coding = _coding(codec, numel)
        if coding is not None and (plain or isinstance(codec, Blocked)):
            values = x if _has_whole_rows(x) else x.contiguous()
            fields = {"numel": numel, "kind": KINDS[x.dtype], "coding": coding}
            repeat = self._run(f"encode{kernels}", {"values": values, "frames": frames}, options, **fields)
            return repeat if values is x else None
        if plain and _is_copy(codec, x):
            nbytes = codec.code_bytes(numel)
            repeat = self._run("copy", {"values": x, "output": frames}, numel=nbytes)
            if nbytes == frames.shape[-1]:
                return repeat
            frames[..., nbytes:] = 0
            return None
        return super()._encode(codec, x, frames, options)

    def _decode(self, codec: Codec, frames: Tensor, out: Tensor) -> Repeat | None:
        kernels, coding = _coding(codec, out.shape[-1])
        if coding is not None:
            return self._run_into(out, f"decode{kernels}", frames, kind=KINDS[out.dtype], coding=coding)
        if _is_copy(codec, out):  # large rows are written past the caches, since they are not read soon
            planes = {"values": frames, "output": out}
            return self._run("stream", planes, numel=codec.code_bytes(out.shape[-1]))
        return super()._decode(codec, frames, out)

    def _decode_sum(self, codec: Codec, frames: Tensor, out: Tensor) -> Repeat | None:
        kernels, coding = _coding(codec, out.shape[-1])
        if coding is not None:
            name = "decode_formats" if kernels else "decode_sum"
            return self._run_into(out, name, frames[0], coding=coding, **_sources(frames))
        if isinstance(codec, Raw):
            kind = KINDS[DTYPES[codec.dtype]]
            return self._run_into(out, "sum_raw", frames[0], kind=kind, **_sources(frames))
        return super()._decode_sum(codec, frames, out)

    def _sum_halves(self, codec: Codec, frames: Tensor, out: Tensor) -> None:
        if isinstance(codec, Blocked):
            _, coding = _coding(codec, out.shape[-1])
            self._run_into(out, "decode_sum", frames[0], coding=coding, halves=1, **_sources(frames))
        else:
            super()._sum_halves(codec, frames, out)

    def _decode_sum_encode(
        self, hops: tuple[BuiltIn, BuiltIn], frames: Tensor, out: Tensor, numel: int, options: Options
    ) -> Repeat | None:
        (_, coding), (_, second) = (_coding(codec, numel) for codec in hops)
        fields = {"numel": numel, "coding": coding, "second": second, **_sources(frames)}
        return self._run("decode_sum_encode", {"frames": frames[0], "output": out}, options, **fields)

    def _run_into(self, out: Tensor, name: str, frames: Tensor, **fields: Any) -> Repeat | None:
        """Call the library's function ``name``, which decodes ``frames`` (encoded rows) to ``out``.

        The argument of the function is a job (:class:`_Job`).  ``fields`` are the fields of the job that do not follow
        from ``frames`` and ``out``.

        If the elements of each row of ``out`` are contiguous, the result is a function that repeats the call on other
        tensors.  If they are not, the rows are decoded to a contiguous tensor and copied to ``out``, and the result is
        None.
        """
        values = out if _has_whole_rows(out) else torch.empty(out.shape, dtype=out.dtype)
        repeat = self._run(name, {"frames": frames, "values": values}, numel=out.shape[-1], **fields)
        if values is out:
            return repeat
        out.copy_(values)
        return None

    def _run(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        options: Options = Options(),  # noqa: B008  # immutable
        **fields: Any,
    ) -> Repeat:
        """Call the library's function ``name``, and return a function that repeats the call on other tensors.

        Args:
            name: the name of the function.
            tensors: the tensors of the call, by the names of their fields in the job, such as ``values``.  The job
                (:class:`_Job`) is the argument of the function.  All dimensions but the last are the same for all
                tensors.  Tensors that are read come before tensors that are written.
            options: the random bits of a stochastic codec, and error feedback.
            fields: fields of the job that do not follow from the other arguments.
        """
        job, planes, (noise, carried) = _Job(error_kind=-1, **fields), dict(tensors), options
        if carried is not None:
            errors = carried.error
            planes["errors"] = errors if _has_whole_rows(errors) else errors.contiguous()
            job.error_kind, job.decay[:] = KINDS[errors.dtype], (carried.decay, 1.0 - carried.decay)
        rows = merged_rows([*planes.values()], noise, MOST_DIMS, "C++")
        job.dims, job.sizes = len(rows), _Dims(*(size for size, _ in rows))
        starts = {plane: tensor.data_ptr() for plane, tensor in planes.items()}
        if noise is not None:
            starts["random"], job.key[:] = noise.start, noise.philox
        for index, (plane, start) in enumerate(starts.items()):
            setattr(job, plane, _Plane(start, _Dims(*(steps[index] for _, steps in rows))))
        repeat = partial(_run_job, getattr(self._library, name), bytes(job), tuple(tensors))
        repeat(*tensors.values())
        if carried is not None and planes["errors"] is not carried.error:
            carried.error.copy_(planes["errors"])
        return repeat


def _run_job(function: Callable[[Any], int], job: bytes, planes: Sequence[str], *tensors: Tensor) -> None:
    """Call ``function`` of the C++ library on ``tensors``, with a copy of ``job`` that has the tensors' addresses.

    ``job`` has the bytes of a :class:`_Job`, the argument of the function.  It was prepared for tensors of the same
    shapes and strides.  In the copy, the address of ``tensors[i]`` is written to the field ``planes[i]``, such as
    ``values``; all other bytes stay.

    Raises MemoryError: if the function cannot allocate its buffers.
    """
    copy = _Job.from_buffer_copy(job)  # other threads may run the same job
    for name, tensor in zip(planes, tensors, strict=True):
        getattr(copy, name).address = tensor.data_ptr()
    if function(ctypes.byref(copy)) != 0:
        raise MemoryError(
            "not enough host memory for the buffers in which the C++ kernels encode a row: free memory, or run fewer "
            "ranks on this host"
        )


def _has_whole_rows(x: Tensor) -> bool:
    """Returns whether the elements of each row of ``x`` (its last dimension) are contiguous in memory."""
    return x.shape[-1] == 1 or x.stride(-1) == 1


def _is_copy(codec: Codec, x: Tensor) -> bool:
    """Returns whether encoding ``x`` to frames (encoded rows), or decoding frames to ``x``, only copies bytes.

    This is so if ``codec`` is a cast to the type that ``x`` has already, and the elements of each row are contiguous.
    """
    return isinstance(codec, Raw) and x.dtype == DTYPES[codec.dtype] and _has_whole_rows(x)


def _sources(frames: Tensor) -> dict[str, int]:
    return {"sources": len(frames), "source_stride": frames.stride(0)}


def _coding(codec: Codec, numel: int) -> tuple[str, _Coding | None]:
    """Returns (suffix, coding): the end of the names of the library's functions for ``codec``, and their argument.

    An example of a suffix is ``_formats`` in ``encode_formats``; the suffix may be empty.  The coding tells the
    functions how a row of ``numel`` elements is encoded.  It is None for a codec that only casts, and for a user's own
    codec.
    """
    if isinstance(codec, OwnCodec) and codec.published:
        return "_formats", _Coding(kind=[*FORMATS].index(codec.name), frame_bytes=codec.frame_bytes(numel))
    if isinstance(codec, Raw | OwnCodec):
        return "", None
    return "", _Coding(
        2 if isinstance(codec, FloatCodec) else int(codec.asymmetric),
        codec.bits,
        codec.mantissa if isinstance(codec, FloatCodec) else 0,
        codec.scale == "e8m0",
        *(codec.hadamard, codec.stochastic, codec.clipped),
        *(codec.block_size(numel), codec.blocks(numel)),
        *(codec.code_bytes(numel), codec.scales_at(numel), codec.frame_bytes(numel)),
    )
