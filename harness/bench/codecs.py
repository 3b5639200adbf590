"""``zeropp bench codecs``: times every operation, codec and backend, each beside a copy.

One process measures: for every round and operation first ``calls`` copies of the same elements into an
existing buffer, then ``calls`` operations on existing buffers, so that a ratio compares neighbours.
Rounds of all operations interleave; a slow operation has fewer, spread over the run.  The reference
backend, ten to a hundred times slower, is timed on an eighth of the elements, but at least 2 M where
there are so many, beside copies of those.  Elements are normal random numbers.  On a GPU seconds are
the device's, by events, and its cache is flushed before every call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from harness.bench import peers as bench_peers
from harness.cluster.rank import Progress, Rank
from harness.records.bench_record import ElementType, Sample
from impl import ops
from impl.codecs.codec import Codec, Raw, parse
from impl.codecs.reference import DTYPES, NAMES, Carried, Operations
from impl.codecs.rounding_noise import Key, Noise

CODECS: Final = (
    "fp32", "bf16", "fp16",
    "int8:2048", "int8:256", "int6:256", "int4:256", "int3:256", "int2:256", "int8:shard",
    "int8:256:asym", "int4:256:asym",
    "fp8e4m3:128", "fp8e5m2:128", "mxfp8", "mxfp4",
    "int4:128:hadamard32", "int8:256:stochastic", "int4:256:stochastic",
)  # fmt: skip
OPERATIONS: Final = ("encode", "decode", "decode_sum", "decode_sum_encode", "encode_carried")
OURS: Final = ("cpu", "cuda", "reference")
BACKENDS: Final = (*OURS, *bench_peers.NAMES)
SOURCES: Final = 4  # frames that a sum adds
MEBIBYTES: Final = {"cpu": 64, "cuda": 256}  # of elements, where nothing is asked for
REFERENCE_SHARE: Final = 8  # the reference backend is timed on one part of so many,
REFERENCE_NUMEL: Final = 1 << 21  # of at least so many elements: a core's cache must not hold them
GRAIN: Final = 1 << 15  # elements: whole blocks of every usual codec
MOST_ROUNDS: Final = 15
FEWEST_ROUNDS: Final = 3
_ROUND_SECONDS: Final = 2e-3  # at least, in one round, so that reading the clock does not count
_FLUSH_BYTES: Final = 1 << 29  # written on a GPU before a timed call; no cache holds it


@dataclass(frozen=True, slots=True)
class Setting:
    """Options of the benchmark.

    Attributes:
        codecs: text forms.
        backends: of :data:`BACKENDS`, all available.
        kinds: types of the elements; sums are of fp32.
        mebibytes: of elements; None takes the device's of :data:`MEBIBYTES`.
        threads: of torch.
        seconds: approximate time per operation, copies included.
    """

    codecs: tuple[str, ...]
    backends: tuple[str, ...]
    kinds: tuple[ElementType, ...]
    mebibytes: int | None
    threads: int
    seconds: float

    def numel(self, device: str, kind: ElementType) -> int:
        """Number of elements on ``device``."""
        size = (self.mebibytes or MEBIBYTES[device]) << 20
        return max(GRAIN, size // DTYPES[kind].itemsize // GRAIN * GRAIN)

    def devices(self) -> list[str]:
        """Devices to measure on: those of the chosen backends, and the CPU if there is none."""
        found = ["cuda"] if "cuda" in self.backends else []
        return found if found and set(self.backends) <= {"cuda", "reference"} else ["cpu", *found]


@dataclass(frozen=True, slots=True)
class Work:
    """One operation to time.

    Attributes:
        operation: of :data:`OPERATIONS`.
        codec: text form, or a peer library's name for its own.
        backend: whose kernels run.
        x: (S,) the elements; what the reference copies.
        moved_bytes: read and written in one call.
        run: one call.
        other: what a peer computes instead of our arithmetic.
    """

    operation: str
    codec: str
    backend: str
    x: Tensor
    moved_bytes: int
    run: Callable[[], object]
    other: str | None = None


def found() -> tuple[list[str], dict[str, str]]:
    """Available backends, and the others with the reason."""
    missing = {name: reason for name in BACKENDS if (reason := _why_missing(name)) is not None}
    return [name for name in BACKENDS if name not in missing], missing


def _why_missing(name: str) -> str | None:
    if name in bench_peers.NAMES:
        return bench_peers.why_missing(name)
    if name == "cuda" and not torch.cuda.is_available():
        return "torch finds no CUDA device"
    try:
        ops.operations_of(name)
    except ValueError as problem:
        return str(problem)
    return None


def measure(rank: Rank, setting: Setting) -> list[Sample]:
    """Run the benchmark; the target of one process."""
    clocks: dict[str, _Clock] = {"cpu": _wall_seconds}
    if "cuda" in setting.devices():
        clocks["cuda"] = _Device()
    works = [work for device in setting.devices() for work in _works(setting, device)]
    timed = []
    for index, work in enumerate(works):
        rank.report(Progress("warm-up", index, len(works)))
        timed.append(Timed(work, clocks[work.x.device.type], setting.seconds))
    most = max(each.rounds for each in timed)
    for index in range(most):
        rank.report(Progress("round", index, most))
        for each in timed:
            if each.takes_part(index, most):
                each.round()
    return [each.sample(setting.threads) for each in timed]


_Clock = Callable[[Callable[[], object], int], float]


def _wall_seconds(run: Callable[[], object], calls: int) -> float:
    """Mean seconds of ``calls`` calls."""
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begin) / calls


class _Device:
    """Clock of a GPU, by CUDA events.

    The cache is flushed before each call by writing more than it holds, which also lets the host queue
    the call while the device is busy: its launch is not in the time.
    """

    def __init__(self) -> None:
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def __call__(self, run: Callable[[], object], calls: int) -> float:
        pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for _ in range(calls):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._flush.zero_()
            begin.record()
            run()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in pairs)) / 1e3 / calls


class Timed:
    """One operation with the times of its rounds; warms up when constructed."""

    def __init__(self, work: Work, clock: _Clock, seconds: float) -> None:
        self._work, self._clock = work, clock
        self._target = torch.empty_like(work.x)
        clock(self._copy, 1)  # pages of the target
        copy, took = clock(self._copy, 1), clock(work.run, 1)  # kernels are compiled, pages of buffers
        if took < seconds:
            took = clock(work.run, 1)
        self._calls = max(1, math.ceil(_ROUND_SECONDS / min(copy, took)))
        self.rounds = min(MOST_ROUNDS, max(FEWEST_ROUNDS, int(seconds / (self._calls * (copy + took)))))
        self._seconds: list[float] = []
        self._copy_seconds: list[float] = []

    def _copy(self) -> None:
        self._target.copy_(self._work.x)

    def takes_part(self, index: int, most: int) -> bool:
        """Whether it runs in round ``index`` of ``most``: its rounds are spread evenly."""
        return index * self.rounds // most != (index + 1) * self.rounds // most

    def round(self) -> None:
        """Time the copies, then the operations."""
        self._copy_seconds.append(self._clock(self._copy, self._calls))
        self._seconds.append(self._clock(self._work.run, self._calls))

    def sample(self, threads: int) -> Sample:
        """The measurements as a sample; seconds are of one call."""
        work, x = self._work, self._work.x
        return Sample(
            kind="codec",
            names={
                "operation": work.operation, "codec": work.codec, "backend": work.backend,
                "device": x.device.type, "type": NAMES[x.dtype], "threads": threads,
                "numel": x.numel(), "other": work.other,
            },
            sizes={"element_bytes": x.nbytes, "moved_bytes": work.moved_bytes, "calls": self._calls},
            seconds=self._seconds,
            reference_seconds=self._copy_seconds,
        )  # fmt: skip


def _works(setting: Setting, device: str) -> Iterator[Work]:
    """All operations to time on one device."""
    backends = [name for name in setting.backends if name in (device, "reference")]
    for kind in setting.kinds:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(setting.numel(device, kind), generator=generator).to(device, DTYPES[kind])
        for text in setting.codecs:
            codec = parse(text)
            for name in backends:
                if not isinstance(codec, Raw) or name == backends[0]:  # casts are torch's: timed once
                    part = max(x.numel() // REFERENCE_SHARE, REFERENCE_NUMEL)
                    yield from _of_codec(codec, x[:part] if name == "reference" else x, name)
        peers = [name for name in setting.backends if name in bench_peers.NAMES and device == "cpu"]
        for peer in (coding for name in peers for coding in bench_peers.codings(name, x)):
            nbytes = x.nbytes + peer.nbytes
            yield Work("encode", peer.codec, peer.backend, x, nbytes, peer.encode, peer.arithmetic)
            yield Work("decode", peer.codec, peer.backend, x, nbytes, peer.decode, peer.arithmetic)


def _of_codec(codec: Codec, x: Tensor, backend: str) -> Iterator[Work]:
    """The operations of one codec on one backend, which share their buffers."""
    sums = x.dtype == torch.float32
    numel, frame_bytes = x.numel(), codec.frame_bytes(x.numel())
    frames = torch.zeros((SOURCES if sums else 1, frame_bytes), dtype=torch.uint8, device=x.device)
    calls = _Calls(
        ops.operations_of(backend),
        codec,
        x,
        frames,
        written=torch.zeros_like(frames[0]),
        out=torch.empty_like(x),
        error=torch.zeros_like(x, dtype=torch.float32),
        noise=Key(seed=0, step=0, micro_batch=0, unit="bench", purpose="gradients", source=0).noise(),
    )
    calls.encode()
    frames.copy_(calls.written.expand_as(frames))
    moved: dict[str, tuple[Callable[[], None], int]] = {
        "encode": (calls.encode, x.nbytes + frame_bytes),
        "decode": (calls.decode, x.nbytes + frame_bytes),
    }
    if sums:
        moved["decode_sum"] = calls.decode_sum, frames.nbytes + x.nbytes
        moved["decode_sum_encode"] = calls.decode_sum_encode, frames.nbytes + frame_bytes
    if not isinstance(codec, Raw):
        moved["encode_carried"] = calls.encode_carried, x.nbytes + 2 * 4 * numel + frame_bytes
    for operation, (run, nbytes) in moved.items():
        yield Work(operation, str(codec), backend, x, nbytes, run)


@dataclass(frozen=True, slots=True)
class _Calls:
    """The operations of one backend and codec on existing buffers."""

    operations: Operations
    codec: Codec
    x: Tensor  # (S,)
    frames: Tensor  # (sources, F)
    written: Tensor  # (F,)
    out: Tensor  # (S,)
    error: Tensor  # (S,) fp32
    noise: Noise

    def encode(self) -> None:
        self.operations.encode(self.codec, self.x, self.written, noise=self.noise)

    def decode(self) -> None:
        self.operations.decode(self.codec, self.frames[0], self.out)

    def decode_sum(self) -> None:
        self.operations.decode_sum(self.codec, self.frames, self.out)

    def decode_sum_encode(self) -> None:
        self.operations.decode_sum_encode(
            self.codec, self.codec, self.frames, self.written, self.x.numel(), noise=self.noise
        )

    def encode_carried(self) -> None:
        carried = Carried(self.error)
        self.operations.encode(self.codec, self.x, self.written, noise=self.noise, carried=carried)
