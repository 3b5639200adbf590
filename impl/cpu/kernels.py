"""Codecs on CPU tensors in C++: bit-equal to :mod:`impl.codecs.reference`, on the calling thread.

The library (:mod:`impl.cpu.build`) takes one structure, :class:`_Job`.  Rows may lie anywhere; elements
that are not contiguous within a row are copied first.  Raw frames are copied, and summed in one pass;
casts from one type to another are torch's, at the speed of memory.  ctypes lets other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from impl.codecs.codec import FORMATS, Blocked, Codec, FloatCodec, OwnCodec, Raw
from impl.codecs.reference import DTYPES, Beside, Carried, Operations, merged_rows

MOST_DIMS: Final = 8  # leading dimensions after merging, kDims of job.hpp
KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CODING: Final = (
    *("kind", "bits", "mantissa", "powers", "hadamard", "stochastic", "clipped"),
    *("block", "blocks", "codes_end", "scales_at", "frame_bytes"),
)
_FUNCTIONS: Final = (
    *("encode", "decode", "decode_sum", "decode_sum_encode", "copy", "stream", "sum_raw"),
    *("encode_formats", "decode_formats"),
)
_Dims: Final = ctypes.c_int64 * MOST_DIMS
_Call = tuple[Hashable, tuple[Codec, ...], Tensor, Tensor]  # as Operations._remember gets it


class _Plane(ctypes.Structure):
    """Rows of one tensor: where the first lies, and bytes from one to the next by dimension."""

    _fields_ = (("address", ctypes.c_int64), ("strides", _Dims))


class _Coding(ctypes.Structure):
    """How a row is coded."""

    _fields_ = tuple((name, ctypes.c_int64) for name in _CODING)


class _Job(ctypes.Structure):
    """One call: ``Job`` of job.hpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("numel", "kind", "dims")),
        ("sizes", _Dims),
        *((name, ctypes.c_int64) for name in ("sources", "source_stride", "halves")),
        *((name, _Plane) for name in ("values", "frames", "output")),
        ("random", _Plane),  # numbers of elements, not bytes
        ("errors", _Plane),
        ("coding", _Coding),
        ("second", _Coding),
        ("error_kind", ctypes.c_int64),
        ("key", ctypes.c_uint32 * 4),
        ("decay", ctypes.c_float * 2),
    )


class Kernels(Operations):
    """The operations in C++, of a built ``library``, whose hash is :attr:`sha256`.

    Raises:
        OSError: if it cannot be loaded.
    """

    name = "cpu"

    def __init__(self, library: Path) -> None:
        super().__init__()
        self._library = ctypes.CDLL(str(library))
        self.sha256 = hashlib.sha256(library.read_bytes()).hexdigest()
        for name in _FUNCTIONS:
            function = getattr(self._library, name)
            function.argtypes, function.restype = [ctypes.POINTER(_Job)], ctypes.c_int
        self._library.job_bytes.restype = ctypes.c_int64
        if self._library.job_bytes() != ctypes.sizeof(_Job):
            found, wanted = self._library.job_bytes(), ctypes.sizeof(_Job)
            raise OSError(f"{library}: a job has {found} bytes, not {wanted}")

    def _fuses(self, first: Blocked, second: Blocked, numel: int, carried: Carried | None) -> bool:
        return True

    def _encode(self, codec: Codec, x: Tensor, frames: Tensor, beside: Beside) -> None:
        call, numel = ("encode", (codec,), x, frames), x.shape[-1]
        kernels, coding = _coding(codec, numel)
        plain = beside.carried is None
        if coding is not None and (plain or isinstance(codec, Blocked)):
            values = x if _has_whole_rows(x) else x.contiguous()
            planes, again = {"values": values, "frames": frames}, call if values is x else None
            self._run(
                f"encode{kernels}", planes, again, beside, numel=numel, kind=KINDS[x.dtype], coding=coding
            )
        elif plain and isinstance(codec, Raw) and _is_copy(codec, x):
            nbytes = codec.code_bytes(numel)
            whole = nbytes == frames.shape[-1]
            self._run("copy", {"values": x, "output": frames}, call if whole else None, numel=nbytes)
            if not whole:
                frames[..., nbytes:] = 0
        else:
            super()._encode(codec, x, frames, beside)

    def _decode(self, codec: Codec, frames: Tensor, out: Tensor) -> None:
        call = ("decode", (codec,), frames, out)
        kernels, coding = _coding(codec, out.shape[-1])
        if coding is not None:
            self._run_into(out, f"decode{kernels}", frames, call, kind=KINDS[out.dtype], coding=coding)
        elif isinstance(codec, Raw) and _is_copy(codec, out):  # past the caches: read later, if at all
            planes = {"values": frames, "output": out}
            self._run("stream", planes, call, numel=codec.code_bytes(out.shape[-1]))
        else:
            super()._decode(codec, frames, out)

    def _decode_sum(self, codec: Codec, frames: Tensor, out: Tensor) -> None:
        call, sources = ("decode_sum", (codec,), frames, out), _sources(frames)
        kernels, coding = _coding(codec, out.shape[-1])
        if coding is not None:
            name = "decode_formats" if kernels else "decode_sum"
            self._run_into(out, name, frames[0], call, coding=coding, **sources)
        elif isinstance(codec, Raw):
            self._run_into(out, "sum_raw", frames[0], call, kind=KINDS[DTYPES[codec.dtype]], **sources)
        else:
            super()._decode_sum(codec, frames, out)

    def _sum_halves(self, codec: Codec, frames: Tensor, out: Tensor) -> None:
        if isinstance(codec, Blocked):
            _, coding = _coding(codec, out.shape[-1])
            self._run_into(out, "decode_sum", frames[0], None, coding=coding, halves=1, **_sources(frames))
        else:
            super()._sum_halves(codec, frames, out)

    def _decode_sum_encode(
        self, hops: tuple[Blocked, Blocked], frames: Tensor, out: Tensor, numel: int, beside: Beside
    ) -> None:
        self._run(
            "decode_sum_encode",
            {"frames": frames[0], "output": out},
            (numel, hops, frames, out),
            beside,
            numel=numel,
            coding=_coding(hops[0], numel)[1],
            second=_coding(hops[1], numel)[1],
            **_sources(frames),
        )

    def _run_into(self, out: Tensor, name: str, frames: Tensor, call: _Call | None, **fields: Any) -> None:
        """Decode ``frames`` to ``out``, by way of whole rows where it has none."""
        values = out if _has_whole_rows(out) else torch.empty(out.shape, dtype=out.dtype)
        again = call if values is out else None
        self._run(name, {"frames": frames, "values": values}, again, numel=out.shape[-1], **fields)
        if values is not out:
            out.copy_(values)

    def _run(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        call: _Call | None,
        beside: Beside = Beside(),  # noqa: B008  # immutable
        **fields: Any,
    ) -> None:
        """Call the function ``name`` of the library, with ``fields`` of the job.

        ``tensors`` have equal leading dimensions, by the plane that they are; in this order they are those of
        the ``call`` that :meth:`_repeats` is to repeat.
        """
        job, planes, (noise, carried) = _Job(error_kind=-1, **fields), dict(tensors), beside
        if carried is not None:
            errors = carried.error
            planes["errors"] = errors if _has_whole_rows(errors) else errors.contiguous()
            job.error_kind, job.decay[:] = KINDS[errors.dtype], (carried.decay, 1.0 - carried.decay)
        if not all(each.is_cpu for each in planes.values()):
            devices = sorted({str(each.device) for each in planes.values()})
            raise ValueError(f"the C++ kernels are the CPU's, got tensors on {devices}")
        rows = merged_rows([*planes.values()], noise, MOST_DIMS, "C++")
        job.dims, job.sizes = len(rows), _Dims(*(size for size, _ in rows))
        starts = {plane: tensor.data_ptr() for plane, tensor in planes.items()}
        if noise is not None:
            starts["random"], job.key[:] = noise.start, noise.words
        for index, (plane, start) in enumerate(starts.items()):
            setattr(job, plane, _Plane(start, _Dims(*(steps[index] for _, steps in rows))))
        function = getattr(self._library, name)
        _finish(function, job)
        if carried is not None and planes["errors"] is not carried.error:
            carried.error.copy_(planes["errors"])
        if call is not None and noise is None and carried is None:
            self._remember(partial(_run_again, function, bytes(job), tuple(tensors)), *call)


def _run_again(function: Callable[[_Job], int], job: bytes, planes: Sequence[str], *tensors: Tensor) -> None:
    """Run a job that was checked and laid out, on tensors that may differ in their addresses."""
    copy = _Job.from_buffer_copy(job)  # others may run the same at once
    for name, tensor in zip(planes, tensors, strict=True):
        getattr(copy, name).address = tensor.data_ptr()
    _finish(function, copy)


def _finish(function: Callable[[_Job], int], job: _Job) -> None:
    if function(job) != 0:
        raise MemoryError(f"no memory for the sums of a block of {job.second.block} elements")


def _has_whole_rows(x: Tensor) -> bool:
    """Whether the elements of each row lie side by side."""
    return x.shape[-1] == 1 or x.stride(-1) == 1


def _is_copy(codec: Raw, x: Tensor) -> bool:
    """Whether rows of ``x`` are, byte by byte, what frames hold."""
    return x.dtype == DTYPES[codec.dtype] and _has_whole_rows(x)


def _sources(frames: Tensor) -> dict[str, int]:
    return {"sources": len(frames), "source_stride": frames.stride(0)}


def _coding(codec: Codec, numel: int) -> tuple[str, _Coding | None]:
    """What the names of a codec's kernels end with, and how it codes a row; None where it has no kernels."""
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
