"""Codecs on CPU tensors in C++: bit-equal to :mod:`impl.codecs.reference`, on the calling thread.

The library (:mod:`impl.cpu.build`) takes one structure, :class:`_Job`.  Rows may lie anywhere; elements
that are not contiguous within a row are copied first.  Raw frames are copied, and summed in one pass;
casts from one type to another are torch's, at the speed of memory.  ctypes lets other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from impl.codecs.codec import FORMATS, Blocked, BuiltIn, Codec, FloatCodec, OwnCodec, Raw
from impl.codecs.reference import DTYPES, Beside, Carried, Operations, merged_rows

MOST_DIMS: Final = 8  # leading dimensions after merging, kDims of job.hpp
_MOST_SEEN: Final = 4096  # jobs that are remembered; a unit has about six
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
_Call = tuple[Hashable, tuple[Codec, ...], Tensor, Tensor]  # as Operations._repeats gets it


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


class _Seen(NamedTuple):
    """A job that was checked and laid out, to be run again on tensors of the same types, shapes and strides.

    Attributes:
        function: of the library.
        job: its bytes.
        planes: of the tensors in the key, in their order.
        codecs: in the key by their addresses, which therefore must live as long.
    """

    function: Callable[[_Job], int]
    job: bytes
    planes: tuple[str, ...]
    codecs: tuple[Codec, ...]


def _key(what: Hashable, codecs: tuple[Codec, ...], first: Tensor, second: Tensor) -> tuple[Hashable, ...]:
    """All that a job without noise and carried errors depends on, but for where its tensors lie."""
    return (
        what,
        *map(id, codecs),  # hashing a codec takes longer than the rest
        *(first.shape, first.stride(), first.dtype, first.is_cpu),
        *(second.shape, second.stride(), second.dtype, second.is_cpu),
    )


class Kernels(Operations):
    """The operations in C++.

    Args:
        library: the built library, whose hash is :attr:`sha256`.

    Raises:
        OSError: if it cannot be loaded.
    """

    name = "cpu"

    def __init__(self, library: Path) -> None:
        self._seen: dict[tuple[Hashable, ...], _Seen] = {}
        self._library, self.sha256 = (
            ctypes.CDLL(str(library)),
            hashlib.sha256(library.read_bytes()).hexdigest(),
        )
        for name in _FUNCTIONS:
            function = getattr(self._library, name)
            function.argtypes, function.restype = [ctypes.POINTER(_Job)], ctypes.c_int
        self._library.job_bytes.restype = ctypes.c_int64
        if self._library.job_bytes() != ctypes.sizeof(_Job):
            raise OSError(
                f"{library}: a job has {self._library.job_bytes()} bytes, not {ctypes.sizeof(_Job)}"
            )

    def _repeats(self, what: Hashable, codecs: tuple[Codec, ...], first: Tensor, second: Tensor) -> bool:
        seen = self._seen.get(_key(what, codecs, first, second))
        if seen is None:
            return False
        job = _Job.from_buffer_copy(seen.job)  # others may run the same at once
        for name, tensor in zip(seen.planes, (first, second), strict=True):
            getattr(job, name).address = tensor.data_ptr()
        _finish(seen.function, job)
        return True

    def _fuses(self, first: Blocked, second: Blocked, numel: int, carried: Carried | None) -> bool:
        return True

    def _encode(self, codec: BuiltIn, x: Tensor, frames: Tensor, beside: Beside) -> None:
        call, numel = ("encode", (codec,), x, frames), x.shape[-1]
        if not isinstance(codec, Raw):
            self._run_from("encode", call, beside, _coding(codec, numel))
        elif beside.carried is None and _is_copy(codec, x):
            nbytes = codec.code_bytes(numel)
            whole = nbytes == frames.shape[-1]
            self._run("copy", {"values": x, "output": frames}, call if whole else None, numel=nbytes)
            if not whole:
                frames[..., nbytes:] = 0
        else:
            super()._encode(codec, x, frames, beside)

    def _decode(self, codec: BuiltIn, frames: Tensor, out: Tensor) -> None:
        call = ("decode", (codec,), frames, out)
        if not isinstance(codec, Raw):
            coding = _coding(codec, out.shape[-1])
            self._run_into(out, "decode", frames, call, kind=KINDS[out.dtype], coding=coding)
        elif _is_copy(codec, out):  # written past the caches: elements are read later, if at all
            self._run(
                "stream", {"values": frames, "output": out}, call, numel=codec.code_bytes(out.shape[-1])
            )
        else:
            super()._decode(codec, frames, out)

    def _decode_sum(self, codec: BuiltIn, frames: Tensor, out: Tensor) -> None:
        call, sources = ("decode_sum", (codec,), frames, out), _sources(frames)
        if isinstance(codec, Raw):
            self._run_into(out, "sum_raw", frames[0], call, kind=KINDS[DTYPES[codec.dtype]], **sources)
        else:
            coding = _coding(codec, out.shape[-1])
            self._run_into(out, "decode_sum", frames[0], call, coding=coding, **sources)

    def _sum_halves(self, codec: Codec, frames: Tensor, out: Tensor) -> None:
        if isinstance(codec, Blocked):
            coding = _coding(codec, out.shape[-1])
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
            coding=_coding(hops[0], numel),
            second=_coding(hops[1], numel),
            **_sources(frames),
        )

    def _encode_own(self, codec: OwnCodec, x: Tensor, frames: Tensor, beside: Beside) -> None:
        if beside.carried is not None or (coding := _format(codec, x.shape[-1])) is None:
            super()._encode_own(codec, x, frames, beside)
        else:
            self._run_from("encode_formats", ("encode", (codec,), x, frames), beside, coding)

    def _decode_own(self, codec: OwnCodec, frames: Tensor, out: Tensor) -> None:
        if (coding := _format(codec, out.shape[-1])) is None:
            super()._decode_own(codec, frames, out)
        else:
            call = ("decode", (codec,), frames, out)
            self._run_into(out, "decode_formats", frames, call, kind=KINDS[out.dtype], coding=coding)

    def _decode_sum_own(self, codec: OwnCodec, frames: Tensor, out: Tensor) -> None:
        if (coding := _format(codec, out.shape[-1])) is None:
            super()._decode_sum_own(codec, frames, out)
        else:
            call = ("decode_sum", (codec,), frames, out)
            self._run_into(out, "decode_formats", frames[0], call, coding=coding, **_sources(frames))

    def _run_from(self, name: str, call: _Call, beside: Beside, coding: _Coding) -> None:
        """Encode the elements of ``call``, by way of whole rows where they have none."""
        _, _, x, frames = call
        values = x if _has_whole_rows(x) else x.contiguous()
        planes, again = {"values": values, "frames": frames}, call if values is x else None
        self._run(name, planes, again, beside, numel=x.shape[-1], kind=KINDS[x.dtype], coding=coding)

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
        """Call a function of the library.

        Args:
            name: of the function.
            tensors: with equal leading dimensions, by the plane that they are.
            call: which :meth:`_repeats` is to repeat; its tensors are the planes, in this order.
            beside: noise and error feedback of the rows.
            fields: of the job.

        Raises:
            ValueError: for tensors that are not on the CPU, or whose rows do not merge to MOST_DIMS.
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
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[_key(*call)] = _Seen(function, bytes(job), tuple(tensors), call[1])


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


def _format(codec: OwnCodec, numel: int) -> _Coding | None:
    """Which format a codec is, and the size of its frames; None for a user's own."""
    if not codec.published:
        return None
    return _Coding(kind=[*FORMATS].index(codec.name), frame_bytes=codec.frame_bytes(numel))


def _coding(codec: Blocked, numel: int) -> _Coding:
    return _Coding(
        2 if isinstance(codec, FloatCodec) else int(codec.asymmetric),
        codec.bits,
        codec.mantissa if isinstance(codec, FloatCodec) else 0,
        codec.scale == "e8m0",
        codec.hadamard,
        codec.stochastic,
        codec.clipped,
        codec.block_size(numel),
        codec.blocks(numel),
        codec.code_bytes(numel),
        codec.scales_at(numel),
        codec.frame_bytes(numel),
    )
