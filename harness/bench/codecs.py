"""``zeropp bench codecs``: times every operation, codec and backend, each beside a copy of the same elements.

Rounds of all operations interleave, each ``calls`` copies, then ``calls`` operations on existing buffers.
The reference backend is timed on an eighth of the elements, at least 2 M; a GPU by events, its cache flushed.
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

from harness.bench import ablation, other_libraries
from harness.bench.rounds import COLLECTING
from harness.cluster.rank import Progress, Rank
from harness.records.bench_record import ElementType, Sample
from impl import ops
from impl.codecs.codec import Codec, OwnCodec, Raw, parse
from impl.codecs.reference import DTYPES, NAMES, Carried
from impl.codecs.rounding_noise import Key

CODECS: Final = (
    "fp32", "bf16", "fp16",
    "int8:2048", "int8:256", "int6:256", "int4:256", "int3:256", "int2:256", "int8:shard",
    "int8:256:asym", "int4:256:asym",
    "fp8e4m3:128", "fp8e5m2:128", "mxfp8", "mxfp4",
    "int4:128:hadamard32", "int8:256:stochastic", "int4:256:stochastic",
)  # fmt: skip
OURS: Final = ("cpu", "cuda", "reference")
BACKENDS: Final = (*OURS, *other_libraries.QUANTISERS, *ablation.ABLATED)
USUAL: Final = (*OURS, *other_libraries.QUANTISERS)  # where nothing is asked for
SOURCES: Final = 4  # frames that a sum adds
MEBIBYTES: Final = {"cpu": 64, "cuda": 256}  # of elements, where nothing is asked for
REFERENCE_SHARE: Final = 8  # the reference backend is timed on one part of so many,
REFERENCE_NUMEL: Final = 1 << 21  # of at least so many elements: a core's cache must not hold them
GRAIN: Final = 1 << 15  # elements: whole blocks of every usual codec
MOST_ROUNDS: Final = 15
FEWEST_ROUNDS: Final = 3
_ROUND_SECONDS: Final = 2e-3  # at least, in one round, so that reading the clock does not count
_FLUSH_BYTES: Final = 1 << 29  # read on a GPU before a timed call; no cache holds it
_MOST_QUEUED: Final = 10  # calls of a round on a GPU, each timed by itself
_QUEUE_CYCLES: Final = 1_000_000  # of a GPU, half a millisecond, in which the host queues a call


class Buffers(NamedTuple):
    """Elements of one type on one device, and what operations on them write, which all share."""

    x: Tensor  # (S,) the elements; what the reference copies
    target: Tensor  # (S,) to which it copies them
    out: Tensor  # (S,) to which frames are decoded
    error: Tensor  # (S,) fp32, what encoding carries over


class Work(NamedTuple):
    """One operation to time."""

    names: dict[str, str | None]  # operation, codec, backend; what a peer computes in place of our arithmetic
    on: Buffers
    moved_bytes: int  # read and written in one call
    run: Callable[[], object]  # one call


def why_missing(name: str) -> str | None:
    """Why a backend is not available; None if it is."""
    if name in other_libraries.QUANTISERS:
        return other_libraries.why_missing(name)
    ours = "cuda" if name in ablation.ABLATED else name
    if ours == "cuda" and not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if name in ablation.ABLATED and (why := ablation.why_not(name, torch.cuda.get_device_properties())):
        return why
    try:
        ops.operations_of(ours)
    except ValueError as problem:
        return str(problem)
    return None


def measure(
    rank: Rank,
    *,
    codecs: Sequence[str],
    backends: Sequence[str],
    kinds: Sequence[ElementType],
    mebibytes: int | None,
    seconds: float,
) -> list[Sample]:
    """Run the benchmark; the target of one process.  ``mebibytes`` are of elements, ``seconds`` about what an
    operation takes, copies included.
    """
    clocks: dict[str, _Clock] = {}
    on_gpu = {"cuda", *ablation.ABLATED} & set(backends)
    if not on_gpu or "cpu" in backends:
        clocks["cpu"] = _wall_seconds
    if on_gpu:
        flush = torch.zeros(_FLUSH_BYTES // 4, device="cuda")
        clocks["cuda"] = partial(_device_seconds, flush)
    works: list[Work] = []
    for device, kind in product(clocks, kinds):
        numel = ((mebibytes or MEBIBYTES[device]) << 20) // DTYPES[kind].itemsize
        x = torch.randn(max(GRAIN, numel // GRAIN * GRAIN), generator=torch.Generator().manual_seed(0))
        x = x.to(device, DTYPES[kind])
        error = torch.zeros_like(x, dtype=torch.float32)
        works += _works(Buffers(x, torch.empty_like(x), torch.empty_like(x), error), codecs, backends)
    timed = []
    for index, work in enumerate(works):
        rank.report(Progress("warm-up", index, len(works)))
        timed.append(Timed(work, clocks[work.on.x.device.type], seconds))
    most = max(each.rounds for each in timed)
    for index in range(most):
        rank.report(Progress("round", index, most))
        for each in timed:
            if each.takes_part(index, most):
                each.round()
    return [each.sample(rank.threads) for each in timed]


_Clock = Callable[[Callable[[], object], int], float]


def _wall_seconds(run: Callable[[], object], calls: int) -> float:
    """Mean seconds of ``calls`` calls."""
    return timeit(run, setup=COLLECTING, number=calls) / calls


def _device_seconds(flush: Tensor, run: Callable[[], object], calls: int) -> float:
    """Mean seconds of ``calls`` calls on a GPU, by CUDA events; its cache is flushed before each by reading
    ``flush``.

    The device is kept waiting until the host has queued all of them, so that no launch is in the time.
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


class Timed:
    """One operation with the times of its rounds; warms up when constructed."""

    def __init__(self, work: Work, clock: _Clock, seconds: float) -> None:
        self.work, self.copy_seconds, self.seconds = work, list[float](), list[float]()
        copy: Callable[[], object] = partial(work.on.target.copy_, work.on.x)
        clock(copy, 1)  # pages of the target
        copied, took = clock(copy, 1), clock(work.run, 1)  # kernels are compiled, pages of buffers
        if took < seconds:
            took = clock(work.run, 1)
        most = _MOST_QUEUED if work.on.x.is_cuda else math.inf
        self.calls = int(min(most, max(1, math.ceil(_ROUND_SECONDS / min(copied, took)))))
        self.rounds = min(MOST_ROUNDS, max(FEWEST_ROUNDS, int(seconds / (self.calls * (copied + took)))))
        self._timed = [(copy, self.copy_seconds), (work.run, self.seconds)]
        self._clock = clock

    def takes_part(self, index: int, most: int) -> bool:
        """Whether it runs in round ``index`` of ``most``: its rounds are spread evenly."""
        return index * self.rounds // most != (index + 1) * self.rounds // most

    def round(self) -> None:
        """Time the copies, then the operations."""
        for run, took in self._timed:
            took.append(self._clock(run, self.calls))

    def sample(self, threads: int) -> Sample:
        """The measurements as a sample; seconds are of one call."""
        names, (x, *_), moved, _ = self.work
        ran = {"device": x.device.type, "type": NAMES[x.dtype], "threads": threads, "numel": x.numel()}
        return Sample(
            kind="codec",
            names={**names, **ran},
            sizes={"element_bytes": x.nbytes, "moved_bytes": moved, "calls": self.calls},
            seconds=self.seconds,
            reference_seconds=self.copy_seconds,
        )


def _works(on: Buffers, codecs: Sequence[str], backends: Sequence[str]) -> Iterator[Work]:
    """All operations to time on elements, on their device."""
    x = on.x
    here = [name for name in backends if name in (x.device.type, "reference")]
    here += [name for name in backends if name in ablation.ABLATED and x.device.type == "cuda"]
    for codec, name in product(map(parse, codecs), here):
        if not isinstance(codec, Raw) or name == here[0]:  # torch's casts are timed once
            numel = max(x.numel() // REFERENCE_SHARE, REFERENCE_NUMEL) if name == "reference" else x.numel()
            yield from _of_codec(codec, Buffers(*(each[:numel] for each in on)), name)
    for name in (name for name in backends if name in other_libraries.QUANTISERS):
        for own, arithmetic, nbytes, encode, decode in other_libraries.codings(name, x):
            for operation, run in (("encode", encode), ("decode", decode)):
                names = {"operation": operation, "codec": own, "backend": name}
                yield Work({**names, "other": arithmetic}, on, x.nbytes + nbytes, run)


def _of_codec(codec: Codec, on: Buffers, backend: str) -> Iterator[Work]:
    """The operations of one codec on one backend, which share its frames."""
    x, out = on.x, on.out
    ours = ablation.operations(backend) if backend in ablation.ABLATED else ops.operations_of(backend)
    sums = x.dtype == torch.float32
    numel, frame_bytes = x.numel(), codec.frame_bytes(x.numel())
    frames = torch.zeros((SOURCES if sums else 1, frame_bytes), dtype=torch.uint8, device=x.device)
    written = torch.zeros_like(frames[0])
    noise = Key(seed=0, step=0, micro_batch=0, unit="bench", purpose="gradients", source=0).noise()
    encode = partial(ours.encode, codec, x, written, noise=noise)
    encode()
    frames.copy_(written.expand_as(frames))
    moved: dict[str, tuple[Callable[[], object], int]] = {
        "encode": (encode, x.nbytes + frame_bytes),
        "decode": (partial(ours.decode, codec, frames[0], out), x.nbytes + frame_bytes),
    }
    if sums:
        both = partial(ours.decode_sum_encode, codec, codec, frames, written, numel, noise=noise)
        moved["decode_sum"] = partial(ours.decode_sum, codec, frames, out), frames.nbytes + x.nbytes
        moved["decode_sum_encode"] = both, frames.nbytes + frame_bytes
    if not isinstance(codec, Raw | OwnCodec):
        moved["encode_carried"] = (
            partial(encode, carried=Carried(on.error)),
            x.nbytes + 2 * 4 * numel + frame_bytes,
        )
    for operation, (run, nbytes) in moved.items():
        names = {"operation": operation, "codec": str(codec), "backend": backend, "other": None}
        yield Work(names, on, nbytes, run)
