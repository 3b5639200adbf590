"""Records of benchmarks that never ran."""

from __future__ import annotations

from typing import Any

from harness.bench import overlap as bench_overlap
from harness.bench.codecs import CODECS
from harness.records.bench_record import Bench, Sample, Subject
from impl.codecs.codec import parse
from tests.report.records import CODE, MACHINE, POOL

OPERATIONS = ("encode", "decode", "decode_sum", "decode_sum_encode", "encode_carried")
_NUMEL = 1 << 20


def _bench(subject: Subject, samples: list[Sample], **fields: Any) -> Bench:
    return Bench(
        subject=subject, started="2026-01-01T00:00:00.000+00:00", finished="2026-01-01T00:01:00.000+00:00",
        machine=MACHINE, code=CODE, samples=samples, **({"setting": {}, "pool": POOL} | fields),
    )  # fmt: skip


def codecs(names: tuple[str, ...] = CODECS, *, pool: str = POOL) -> Bench:
    """A record of ``names`` on two backends and of one peer."""
    samples = []
    for place, name in enumerate(names):
        for backend, slower in (("cpu", 1.0), ("reference", 30.0)):
            for operation in OPERATIONS:
                seconds = [slower * (1 + 0.1 * place + 0.01 * index) * 1e-3 for index in range(6)]
                samples.append(_codec(operation, name, backend, seconds))
    samples.append(_codec("encode", "nf4:64", "bitsandbytes", [0.1, 0.2, 0.15], other="4-bit <codebook>"))
    return _bench("codecs", samples, setting={"threads": 1}, pool=pool, missing={"cuda": "no device"})


def _codec(operation: str, name: str, backend: str, seconds: list[float], other: str | None = None) -> Sample:
    frame = _NUMEL // 2 if other else parse(name).frame_bytes(_NUMEL)
    return Sample(
        kind="codec",
        names={
            "operation": operation, "codec": name, "backend": backend, "device": "cpu", "type": "fp32",
            "threads": 1, "numel": _NUMEL, "other": other,
        },
        sizes={"element_bytes": 4 * _NUMEL, "moved_bytes": 4 * _NUMEL + frame, "calls": 1},
        seconds=seconds,
        reference_seconds=[1e-3] * len(seconds),
    )  # fmt: skip


def collectives(*, ratio: float = 5.0) -> Bench:
    """A record in which everything takes gloo's seconds over ``ratio``."""
    algorithms = {"all_gather": ("flat", "hierarchical"), "reduce_scatter": ("one_hop", "two_hop")}
    samples = [
        Sample(
            kind="collective",
            names={
                "operation": operation, "algorithm": algorithm, "codec": codec, "transport": transport,
                "nodes": 1, "ranks_per_node": 4, "rate_mbit": None, "numel": 16 << 20,
            },
            sizes={"reference_sent": 3 << 26},
            seconds=[0.1 / ratio, 0.11 / ratio],
            reference_seconds=[0.1, 0.11],
            sent={"inter": 0, "intra": 3 << 26},
        )
        for operation in ("all_gather", "reduce_scatter")
        for algorithm in algorithms[operation]
        for codec in ("fp32", "int8:2048")
        for transport in ("shm", "backend")
    ]  # fmt: skip
    return _bench("collectives", samples)


def overlap(*, of_alone: float = 1.05, hidden: float = 0.9) -> Bench:
    """A record of two policies' steps, at the usual room, and of a reduction in chunks."""
    room = bench_overlap.ROOM
    steps = [
        Sample(
            kind="step",
            names={
                "policy": policy, "nodes": 2, "ranks_per_node": 1, "rate_mbit": 80.0,
                "model": "gpt-small", "layers": 16,
                "sequence": bench_overlap.SEQUENCE, "sequences": 96,
            },
            sizes={"parameters": 9_630_976, "sent_forward": 1_000_000, "sent_backward": 2_000_000},
            seconds=[0.4 * of_alone, 0.5 * of_alone],
            reference_seconds=[0.4, 0.5],
            parts={
                "forward": [0.1 * room, 0.11 * room], "backward": [0.25 * room, 0.24 * room],
            },
        )
        for policy in ("zero3", "zeropp")
    ]  # fmt: skip
    hops = Sample(
        kind="hops",
        names={
            "chunks": 4, "codec": "int4:256", "numel": 128 << 18,
            "nodes": 2, "ranks_per_node": 2, "rate_mbit": 1000.0,
        },
        sizes={"first_sent": 8_650_752, "second_sent": 4_325_376},
        seconds=[0.2 - 0.02 * hidden, 0.2 - 0.03 * hidden],
        reference_seconds=[0.2, 0.2],
        parts={"first": [0.02, 0.03], "second": [0.07, 0.08]},
    )  # fmt: skip
    return _bench("overlap", [*steps, hops])
