"""Codecs on CPU tensors in C++: bit-equal to :mod:`impl.codecs.reference`, on the calling thread.

The library (:mod:`impl.cpu.build`) takes one structure, :class:`_Job`.  Rows may lie anywhere; elements
that are not contiguous within a row are copied first.  Raw frames are copied, and summed in one pass;
casts from one type to another are torch's, at the speed of memory.  ctypes lets other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Final, NamedTuple, Self, TypeGuard

import torch
from torch import Tensor

from impl.codecs import reference
from impl.codecs.codec import Blocked, Codec, FloatCodec, IntCodec, Raw, padded_bytes
from impl.codecs.reference import Carried
from impl.codecs.rounding_noise import Noise

MOST_DIMS: Final = 8  # leading dimensions after merging, kDims of job.hpp
_MOST_SEEN: Final = 4096  # jobs that are remembered; a unit has about six
KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CODING: Final = (
    "kind",
    "bits",
    "mantissa",
    "powers",
    "hadamard",
    "stochastic",
    "block",
    "blocks",
    "codes_end",
    "scales_at",
    "frame_bytes",
)
_Dims: Final = ctypes.c_int64 * MOST_DIMS
_Steps = tuple[int, ...]  # from one row to the next, one per leading dimension


class _Plane(ctypes.Structure):
    """Rows of one tensor: where the first lies, and bytes from one to the next by dimension."""

    _fields_ = (("address", ctypes.c_int64), ("strides", _Dims))


class _Coding(ctypes.Structure):
    """How a row is coded."""

    _fields_ = tuple((name, ctypes.c_int64) for name in _CODING)


class _Job(ctypes.Structure):
    """One call: ``Job`` of job.hpp, field by field."""

    _fields_ = (
        ("numel", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("dims", ctypes.c_int64),
        ("sizes", _Dims),
        ("sources", ctypes.c_int64),
        ("source_stride", ctypes.c_int64),
        ("values", _Plane),
        ("frames", _Plane),
        ("output", _Plane),
        ("random", _Plane),  # numbers of elements, not bytes
        ("errors", _Plane),
        ("coding", _Coding),
        ("second", _Coding),
        ("error_kind", ctypes.c_int64),
        ("key", ctypes.c_uint32 * 4),
        ("decay", ctypes.c_float * 2),
    )


_Key = tuple[Hashable, ...]


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
    planes: tuple[str, str]
    codecs: tuple[Codec, ...]


def _key(what: Hashable, codecs: tuple[Codec, ...], first: Tensor, second: Tensor) -> _Key:
    """All that a job without noise and carried errors depends on, but for where its tensors lie."""
    return (
        what,
        *map(id, codecs),  # hashing a codec takes longer than the rest
        *(first.shape, first.stride(), first.dtype, first.is_cpu),
        *(second.shape, second.stride(), second.dtype, second.is_cpu),
    )


class Kernels:
    """The operations of :mod:`impl.codecs.reference`, with its shapes and checks.

    Every operation raises ValueError if its sizes, types, devices or strides are not possible.

    Args:
        library: the built library.

    Raises:
        OSError: if it cannot be loaded.
    """

    def __init__(self, library: Path) -> None:
        self._seen: dict[_Key, _Seen] = {}
        self._library = ctypes.CDLL(str(library))
        for name in ("encode", "decode", "decode_sum", "decode_sum_encode", "copy", "stream", "sum_raw"):
            function = getattr(self._library, name)
            function.argtypes, function.restype = [ctypes.POINTER(_Job)], ctypes.c_int
        self._library.job_bytes.restype = ctypes.c_int64
        if self._library.job_bytes() != ctypes.sizeof(_Job):
            raise OSError(
                f"{library}: a job has {self._library.job_bytes()} bytes, not {ctypes.sizeof(_Job)}"
            )

    def supports(self, codec: Codec) -> bool:
        """Whether it has kernels for ``codec``; the reference serves the others."""
        return _has_kernels(codec)

    def encode(
        self,
        codec: Codec,
        x: Tensor,
        frames: Tensor,
        *,
        noise: Noise | None = None,
        carried: Carried | None = None,
    ) -> None:
        """Write the frames (..., F) uint8 of ``x`` (..., S); see :func:`impl.codecs.reference.encode`."""
        plain = noise is None and carried is None
        key = _key("encode", (codec,), x, frames)
        if plain and self._repeat(key, x, frames):
            return
        if isinstance(codec, Raw):
            self._encode_raw(codec, x, frames, carried, key)
            return
        reference.check(codec, x, frames)
        _check(codec, x, frames)
        _check_state(codec, x.shape, noise, carried)
        if x.numel() == 0:
            return
        values = x if _is_contiguous(x) else x.contiguous()
        with _State(codec, noise, carried) as state:
            job = _job(x.shape, state, values=values, frames=frames)
            job.kind, job.coding = KINDS[x.dtype], _coding(codec, x.shape[-1])
            self._run(self._library.encode, job)
        if plain and values is x:
            self._remember(key, _Seen(self._library.encode, bytes(job), ("values", "frames"), (codec,)))

    def decode(self, codec: Codec, frames: Tensor, out: Tensor) -> None:
        """Write the elements (..., S) of ``frames`` (..., F); see :func:`impl.codecs.reference.decode`."""
        key = _key("decode", (codec,), out, frames)
        if self._repeat(key, out, frames):
            return
        if isinstance(codec, Raw):
            self._decode_raw(codec, frames, out, key)
            return
        reference.check(codec, out, frames)
        _check(codec, out, frames)
        if out.numel() == 0:
            return
        values = out if _is_contiguous(out) else torch.empty(out.shape, dtype=out.dtype)
        job = _job(out.shape, None, values=values, frames=frames)
        job.kind, job.coding = KINDS[out.dtype], _coding(codec, out.shape[-1])
        self._run(self._library.decode, job)
        if values is not out:
            out.copy_(values)
        else:
            self._remember(key, _Seen(self._library.decode, bytes(job), ("values", "frames"), (codec,)))

    def decode_sum(self, codec: Codec, frames: Tensor, out: Tensor) -> None:
        """Write the fp32 sum (..., S) over the first dimension; see
        :func:`impl.codecs.reference.decode_sum`.
        """
        key = _key("decode_sum", (codec,), out, frames)
        if self._repeat(key, out, frames):
            return
        reference.check_sum(codec, frames, out)
        _check(codec, out, frames)
        if out.numel() == 0:
            return
        values = out if _is_contiguous(out) else torch.empty(out.shape)
        job = _job(out.shape, None, values=values, frames=frames[0])
        job.sources, job.source_stride = len(frames), frames.stride(0)
        if isinstance(codec, Raw):
            job.kind, function = KINDS[reference.DTYPES[codec.dtype]], self._library.sum_raw
        else:
            job.coding, function = _coding(codec, out.shape[-1]), self._library.decode_sum
        self._run(function, job)
        if values is not out:
            out.copy_(values)
        else:
            self._remember(key, _Seen(function, bytes(job), ("values", "frames"), (codec,)))

    def decode_sum_encode(
        self,
        first: Codec,
        second: Codec,
        frames: Tensor,
        out: Tensor,
        numel: int,
        *,
        noise: Noise | None = None,
        carried: Carried | None = None,
    ) -> None:
        """Write the frames of the sum; see :func:`impl.codecs.reference.decode_sum_encode`."""
        plain = noise is None and carried is None
        key = _key(numel, (first, second), frames, out)
        if plain and self._repeat(key, frames, out):
            return
        shape = torch.Size((*out.shape[:-1], numel))
        if isinstance(first, Raw) or isinstance(second, Raw) or out.numel() == 0:
            held = torch.empty(shape)
            self.decode_sum(first, frames, held)
            self.encode(second, held, out, noise=noise, carried=carried)
            return
        summed = torch.empty(shape, device="meta")
        reference.check_sum(first, frames, summed)
        reference.check(second, summed, out)
        _check(first, None, frames)
        _check(second, None, out)
        _check_state(second, shape, noise, carried)
        with _State(second, noise, carried) as state:
            job = _job(shape, state, frames=frames[0], output=out)
            job.sources, job.source_stride = len(frames), frames.stride(0)
            job.coding, job.second = _coding(first, numel), _coding(second, numel)
            function = self._library.decode_sum_encode
            self._run(function, job)
        if plain:
            self._remember(key, _Seen(function, bytes(job), ("frames", "output"), (first, second)))

    def _encode_raw(self, codec: Raw, x: Tensor, frames: Tensor, carried: Carried | None, key: _Key) -> None:
        """Elements of the frame's own type are copied; the others are cast by torch."""
        reference.check(codec, x, frames)
        if carried is not None or not _is_copy(codec, x, frames):
            reference.encode(codec, x, frames, carried=carried)
            return
        nbytes = codec.code_bytes(x.shape[-1])
        job = _job(x.shape, None, values=x, output=frames)
        job.numel = nbytes
        self._run(self._library.copy, job)
        if nbytes < frames.shape[-1]:
            frames[..., nbytes:] = 0
        else:
            self._remember(key, _Seen(self._library.copy, bytes(job), ("values", "output"), (codec,)))

    def _decode_raw(self, codec: Raw, frames: Tensor, out: Tensor, key: _Key) -> None:
        """The same in the other direction; frames are read at once by others, elements later, if at all."""
        reference.check(codec, out, frames)
        if not _is_copy(codec, out, frames):
            reference.decode(codec, frames, out)
            return
        job = _job(out.shape, None, values=frames, output=out)
        job.numel = codec.code_bytes(out.shape[-1])
        self._run(self._library.stream, job)
        self._remember(key, _Seen(self._library.stream, bytes(job), ("output", "values"), (codec,)))

    def _repeat(self, key: _Key, *tensors: Tensor) -> bool:
        """Run the job that was remembered as ``key`` on tensors that may lie elsewhere; False if none was."""
        seen = self._seen.get(key)
        if seen is None:
            return False
        job = _Job.from_buffer_copy(seen.job)  # others may run the same at once
        for name, tensor in zip(seen.planes, tensors, strict=True):
            getattr(job, name).address = tensor.data_ptr()
        self._run(seen.function, job)
        return True

    def _remember(self, key: _Key, seen: _Seen) -> None:
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[key] = seen

    def _run(self, function: Callable[[_Job], int], job: _Job) -> None:
        if function(job) != 0:
            raise MemoryError(f"no memory for the sums of a block of {job.second.block} elements")


class _State:
    """What an encoding has beside its elements; inside ``with``, carried errors are rows that lie in order.

    Attributes:
        noise: of a codec that rounds stochastically.
        errors: what is carried.
        decay: of it.
    """

    def __init__(self, codec: Blocked, noise: Noise | None, carried: Carried | None) -> None:
        self.noise = noise if codec.stochastic else None
        self._carried = carried
        self.decay = 0.0 if carried is None else carried.decay
        self.errors: Tensor | None = None
        if carried is not None:
            self.errors = carried.error if _is_contiguous(carried.error) else carried.error.contiguous()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._carried is not None and self.errors is not None and self.errors is not self._carried.error:
            self._carried.error.copy_(self.errors)


def supports(codec: Codec) -> bool:
    """Whether there are kernels for ``codec``, asked without building them."""
    return _has_kernels(codec)


def _has_kernels(codec: Codec) -> TypeGuard[Blocked]:
    return isinstance(codec, (IntCodec, FloatCodec))


def _is_copy(codec: Raw, x: Tensor, frames: Tensor) -> bool:
    """Whether rows of ``x`` are, byte by byte, what frames hold."""
    same = x.dtype == reference.DTYPES[codec.dtype]
    return same and x.numel() > 0 and _is_contiguous(x) and frames.stride(-1) == 1


def _job(shape: torch.Size, state: _State | None, **tensors: Tensor) -> _Job:
    """A job over the rows of tensors with equal leading dimensions, merged to as few as possible.

    Args:
        shape: (..., S) of the elements.
        state: random bits and carried errors, whose rows are those of the tensors.
        tensors: by the name of their plane.

    Raises:
        ValueError: if more than MOST_DIMS remain.
    """
    lead = shape[:-1]
    if state is not None and state.errors is not None:
        tensors["errors"] = state.errors
    planes = {name: (tensor.data_ptr(), _byte_strides(tensor)) for name, tensor in tensors.items()}
    job = _Job(numel=shape[-1], error_kind=-1)
    if state is not None and state.errors is not None:
        job.error_kind = KINDS[state.errors.dtype]
        job.decay[:] = (state.decay, 1.0 - state.decay)
    if state is not None and state.noise is not None:
        planes["random"] = (state.noise.start, state.noise.strides)
        job.key[:] = state.noise.words
    merged: list[tuple[int, _Steps]] = []
    for dim, size in enumerate(lead):
        steps = tuple(strides[dim] for _, strides in planes.values())
        if size == 1:
            continue
        if merged and merged[-1][1] == tuple(size * step for step in steps):
            merged[-1] = (merged[-1][0] * size, steps)
        else:
            merged.append((size, steps))
    if len(merged) > MOST_DIMS:
        raise ValueError(
            f"leading dimensions {tuple(lead)} with strides {[t.stride() for t in tensors.values()]}: "
            f"the C++ kernels take {MOST_DIMS}, and these do not merge to so few"
        )
    job.dims, job.sizes = len(merged), _Dims(*(size for size, _ in merged))
    for index, (name, (address, _)) in enumerate(planes.items()):
        setattr(job, name, _Plane(address, _Dims(*(steps[index] for _, steps in merged))))
    return job


def _byte_strides(x: Tensor) -> _Steps:
    """Of the leading dimensions."""
    return tuple(stride * x.element_size() for stride in x.stride()[:-1])


def _coding(codec: Blocked, numel: int) -> _Coding:
    codes_end = codec.code_bytes(numel)
    return _Coding(
        2 if isinstance(codec, FloatCodec) else int(codec.asymmetric),
        codec.bits,
        codec.mantissa if isinstance(codec, FloatCodec) else 0,
        isinstance(codec, FloatCodec) and codec.scale == "e8m0",
        codec.hadamard,
        codec.stochastic,
        numel if codec.block == "shard" else min(codec.block, numel),
        codec.blocks(numel),
        codes_end,
        padded_bytes(codes_end),
        codec.frame_bytes(numel),
    )


def _is_contiguous(x: Tensor) -> bool:
    """Whether the elements of each row lie side by side."""
    return x.shape[-1] == 1 or x.stride(-1) == 1


def _check(codec: Codec, x: Tensor | None, frames: Tensor) -> None:
    """What the kernels need beyond the reference's checks."""
    if frames.shape[-1] > 1 and frames.stride(-1) != 1:
        raise ValueError(f"{codec}: a frame's bytes are contiguous, got strides {frames.stride()}")
    devices = {each.device.type for each in (frames, *([] if x is None else [x]))}
    if devices != {"cpu"}:
        raise ValueError(f"{codec}: the C++ kernels are the CPU's, elements and frames on {sorted(devices)}")


def _check_state(codec: Blocked, shape: torch.Size, noise: Noise | None, carried: Carried | None) -> None:
    """Refuse noise and carried errors that do not fit elements of ``shape``."""
    reference.check_noise(codec, shape[:-1], noise)
    if carried is not None:
        reference.check_carried(codec, shape, carried)
        if carried.error.device.type != "cpu":
            raise ValueError(
                f"{codec}: the C++ kernels are the CPU's, carried errors on {carried.error.device.type}"
            )
