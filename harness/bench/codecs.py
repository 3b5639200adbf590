"""``zeropp bench codecs``: times every operation of every codec and backend, against a copy of the same elements.

In each round, the elements are copied N times, and then the operation is called N times.  Copies and our codecs write
into buffers that exist already; other libraries' quantisers allocate their results.  A GPU is timed with CUDA events,
and its cache is flushed before each call.  The reference backend is slow, so it is timed on an eighth of the elements,
but on at least 2^21 elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from timeit import timeit
from typing import Final, NamedTuple

import torch
from torch import Tensor

from harness.bench import kernel_ablation, other_libraries
from harness.bench.rounds import COLLECTING
from harness.cluster.rank import Progress, Rank
from harness.records.bench_record import ElementType, Sample
from impl import ops
from impl.codecs.codec import Codec, OwnCodec, Raw, parse
from impl.codecs.own_rows import used_bytes
from impl.codecs.reference import DTYPES, NAMES, Carried
from impl.codecs.rounding_noise import Key
from impl.cuda.launch import on_device

CODECS: Final = (
    "fp32", "bf16", "fp16",
    "int8:2048", "int8:256", "int6:256", "int4:256", "int3:256", "int2:256", "int8:shard",
    "int8:256:asym", "int4:256:asym",
    "fp8e4m3:128", "fp8e5m2:128", "mxfp8", "mxfp4",
    "int4:128:hadamard32", "int8:256:stochastic", "int4:256:stochastic",
)  # fmt: skip
OURS: Final = ("cpu", "cuda", "reference")
BACKENDS: Final = (*OURS, *other_libraries.QUANTISERS, *kernel_ablation.ABLATED)
USUAL: Final = (*OURS, *other_libraries.QUANTISERS)  # backends that are timed by default
SOURCES: Final = 4  # frames that decode_sum adds
MEBIBYTES: Final = {"cpu": 64, "cuda": 256}  # of elements, by default
REFERENCE_SHARE: Final = 8  # the reference backend is timed on an eighth of the elements,
REFERENCE_NUMEL: Final = 1 << 21  # but on at least this many elements: too many for a core's cache
GRAIN: Final = 1 << 15  # elements come in multiples of this, so that blocks of all default codecs are whole
MOST_ROUNDS: Final = 15
FEWEST_ROUNDS: Final = 3
_ROUND_SECONDS: Final = 2e-3  # least duration of a round, so that reading the clock does not matter
_FLUSH_BYTES: Final = 1 << 29  # read on a GPU before each timed call; larger than any cache
_MOST_QUEUED: Final = 10  # calls in a round on a GPU, where each call is timed by itself
_QUEUE_CYCLES: Final = 1_000_000  # GPU cycles, about half a millisecond, in which the host queues a call


class Work(NamedTuple):
    """One operation of a codec or of another library's quantiser, to be timed."""

    # The names of the sample: ``operation``, ``codec``, ``backend``, and ``other``, which says in words what another
    # library's quantiser computes, and is None for codecs of this project.
    names: dict[str, str | None]
    x: Tensor  # (S,) the elements; the operation is compared with a copy of them
    moved_bytes: int  # bytes that one call reads and writes
    run: Callable[[], object]  # makes one call


def why_missing(name: str) -> str | None:
    """Return why a backend is not available on this machine; None if it is available."""
    if name in other_libraries.QUANTISERS:
        return other_libraries.why_missing(name)
    ablated = name in kernel_ablation.ABLATED
    if (ablated or name == "cuda") and not torch.cuda.is_available():
        return "torch finds no CUDA device"
    try:
        ops.operations_of("cuda" if ablated else name)
    except ValueError as problem:
        return str(problem)
    return kernel_ablation.why_not(name, torch.cuda.get_device_properties()) if ablated else None


def measure(
    rank: Rank,
    *,
    codecs: Sequence[str],
    backends: Sequence[str],
    kinds: Sequence[ElementType],
    mebibytes: int | None,
    seconds: float,
) -> list[Sample]:
    """Time every operation of every codec and backend, and return a sample (the measured seconds) for each operation.

    This must run in a process that does nothing else.

    Args:
        rank: This process's rank, through which progress is reported.
        codecs: Text forms of codecs.
        backends: Names of :data:`BACKENDS`.
        kinds: Types of elements.
        mebibytes: Size of all elements together, in MiB; None for the device's default in :data:`MEBIBYTES`.
        seconds: About how long to time each operation.
    """
    clocks: dict[str, _Clock] = {}
    on_gpu = {"cuda", *kernel_ablation.ABLATED} & set(backends)
    if not on_gpu or "cpu" in backends:
        clocks["cpu"] = _wall_seconds
    if on_gpu:
        flush = torch.zeros(_FLUSH_BYTES // 4, device="cuda")
        clocks["cuda"] = partial(_device_seconds, flush)
    samples: list[Sample] = []
    for device, kind in product(clocks, kinds):
        numel = ((mebibytes or MEBIBYTES[device]) << 20) // DTYPES[kind].itemsize
        x = torch.randn(max(GRAIN, numel // GRAIN * GRAIN), generator=torch.Generator().manual_seed(0))
        for work in works(x.to(device, DTYPES[kind]), codecs, backends):
            rank.report(Progress(f"{len(samples)} operations timed"))
            samples.append(_time(work, clocks[device], seconds, rank.threads))
    return samples


_Clock = Callable[[Callable[[], object], int], float]


def _wall_seconds(run: Callable[[], object], calls: int) -> float:
    """Return the wall-clock seconds of a call of ``run``, as the mean of ``calls`` calls."""
    return timeit(run, setup=COLLECTING, number=calls) / calls


def _device_seconds(flush: Tensor, run: Callable[[], object], calls: int) -> float:
    """Return the seconds of a call of ``run`` on a GPU, from CUDA events, as the mean of ``calls`` calls.

    Before each call, the tensor ``flush`` is read, which flushes the GPU's cache.  The GPU first sleeps until the host
    has queued all calls, so that the times do not include the launches.
    """
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    torch.cuda._sleep(_QUEUE_CYCLES * calls)  # type: ignore[no-untyped-call]  # noqa: SLF001
    for _ in range(calls):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        flush.amax()
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return float(sum(begin.elapsed_time(end) for begin, end in pairs)) / 1e3 / calls


def _time(work: Work, clock: _Clock, seconds: float, threads: int) -> Sample:
    """Warm the operation ``work`` up, then time it in rounds for about ``seconds``, and return a sample.

    For each round, the sample has two means: the seconds of one call of the operation and, as reference, the seconds of
    one copy of its elements.  ``clock`` returns the mean seconds of a number of calls.  ``threads``, the number of
    threads that torch uses, is noted in the sample.
    """
    x = work.x
    copy = partial(torch.empty_like(x).copy_, x)
    clock(copy, 1)  # touches the pages of the target
    copied, called = clock(copy, 1), clock(work.run, 1)  # the first call compiles kernels, touches buffers
    if called < seconds:
        called = clock(work.run, 1)
    most = _MOST_QUEUED if x.is_cuda else math.inf
    calls = int(min(most, max(1, math.ceil(_ROUND_SECONDS / min(copied, called)))))
    rounds = min(MOST_ROUNDS, max(FEWEST_ROUNDS, int(seconds / (calls * (copied + called)))))
    pairs = [(clock(copy, calls), clock(work.run, calls)) for _ in range(rounds)]
    setting = {"device": x.device.type, "type": NAMES[x.dtype], "threads": threads, "numel": x.numel()}
    return Sample(
        kind="codec",
        names={**work.names, **setting},
        sizes={"element_bytes": x.nbytes, "moved_bytes": work.moved_bytes, "calls": calls},
        seconds=[operation for _, operation in pairs],
        reference_seconds=[copied for copied, _ in pairs],
    )


def works(x: Tensor, codecs: Sequence[str], backends: Sequence[str]) -> Iterator[Work]:
    """Yield the operations to time on the elements ``x`` (S,).

    ``codecs`` and ``backends`` are names.  Backends that do not work on the device of ``x`` are skipped.  All backends
    of this project leave casts, such as ``bf16``, to torch.  Casts are therefore timed only on the first backend of
    this project in ``backends``.
    """
    kernels = [name for name in backends if name in (x.device.type, "reference")]
    kernels += [name for name in backends if name in kernel_ablation.ABLATED and x.is_cuda]
    for codec, name in product(map(parse, codecs), kernels):
        if (
            not isinstance(codec, Raw) or name == kernels[0]
        ):  # a cast is torch's on every backend: time it once
            numel = max(x.numel() // REFERENCE_SHARE, REFERENCE_NUMEL) if name == "reference" else x.numel()
            yield from _codec_works(codec, x[:numel], name)
    for name in (name for name in backends if name in other_libraries.QUANTISERS):
        for coding, arithmetic, nbytes, encode, decode in other_libraries.codings(name, x):
            for operation, run in (("encode", encode), ("decode", decode)):
                names = {"operation": operation, "codec": coding, "backend": name}
                yield Work({**names, "other": arithmetic}, x, x.nbytes + nbytes, run)


def _codec_works(codec: Codec, x: Tensor, backend: str) -> Iterator[Work]:
    """Yield the operations of one codec on one backend, to be timed on the elements ``x`` (S,).

    All of them write into the same buffers, which are allocated once.
    """
    ablated = kernel_ablation.ABLATED.get(backend)
    operations = ops.operations_of(backend) if ablated is None else ablated(on_device)
    numel, out = x.numel(), torch.empty_like(x)
    frame = torch.zeros(codec.frame_bytes(numel), dtype=torch.uint8, device=x.device)
    noise = Key(seed=0, step=0, micro_batch=0, unit="bench", purpose="gradients", source=0).noise()
    encode = partial(operations.encode, codec, x, frame, noise=noise)
    encode()
    frames, frame_bytes = frame.repeat(SOURCES, 1), used_bytes(codec, frame)

    def work(operation: str, moved_bytes: int, run: Callable[[], object]) -> Work:
        names = {"operation": operation, "codec": str(codec), "backend": backend, "other": None}
        return Work(names, x, moved_bytes, run)

    yield work("encode", x.nbytes + frame_bytes, encode)
    yield work("decode", x.nbytes + frame_bytes, partial(operations.decode, codec, frames[0], out))
    if x.dtype == torch.float32:
        fused = partial(operations.decode_sum_encode, codec, codec, frames, frame, numel, noise=noise)
        yield work(
            "decode_sum", SOURCES * frame_bytes + x.nbytes, partial(operations.decode_sum, codec, frames, out)
        )
        yield work("decode_sum_encode", SOURCES * frame_bytes + frame_bytes, fused)
    if not isinstance(codec, Raw | OwnCodec):
        carried = partial(encode, carried=Carried(torch.zeros_like(x, dtype=torch.float32)))
        yield work("encode_carried", x.nbytes + 2 * 4 * numel + frame_bytes, carried)
