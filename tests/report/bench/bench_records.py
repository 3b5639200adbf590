"""Records of benchmarks that never ran."""

from __future__ import annotations

from harness.bench.codecs import CODECS, OPERATIONS
from harness.records import engine_goals, overlap_goals
from harness.records.bench_record import (
    Bench,
    CodecSample,
    CollectiveSample,
    EngineSample,
    OverlapHops,
    OverlapStep,
)
from impl.codecs.codec import parse
from tests.report.records import CODE, MACHINE, POOL

_NUMEL = 1 << 20


def codecs(names: tuple[str, ...] = CODECS, *, pool: str = POOL) -> Bench:
    """A record of ``names`` on two backends and of one peer."""
    samples = []
    for place, name in enumerate(names):
        for backend, slower in (("cpu", 1.0), ("reference", 30.0)):
            for operation in OPERATIONS:
                seconds = [slower * (1 + 0.1 * place + 0.01 * index) * 1e-3 for index in range(4)]
                samples.append(_codec(operation, name, backend, seconds))
    samples.append(_codec("encode", "nf4:64", "bitsandbytes", [0.1, 0.2, 0.15], other="4-bit <codebook>"))
    return Bench(
        subject="codecs", started="2026-01-01T00:00:00.000+00:00", finished="2026-01-01T00:01:00.000+00:00",
        setting={"threads": 1}, machine=MACHINE, code=CODE, pool=pool, missing={"cuda": "no device"},
        codecs=samples,
    )  # fmt: skip


def _codec(
    operation: str, name: str, backend: str, seconds: list[float], other: str | None = None
) -> CodecSample:
    frame = _NUMEL // 2 if other else parse(name).frame_bytes(_NUMEL)
    return CodecSample(
        operation=operation, codec=name, backend=backend, device="cpu", kind="fp32", threads=1, numel=_NUMEL,
        element_bytes=4 * _NUMEL, moved_bytes=4 * _NUMEL + frame, calls=1, other=other, seconds=seconds,
        reference_seconds=[1e-3] * len(seconds),
    )  # fmt: skip


def collectives(*, ratio: float = 5.0) -> Bench:
    """A record in which everything takes gloo's seconds over ``ratio``."""
    algorithms = {"all_gather": ("flat", "hierarchical"), "reduce_scatter": ("one_hop", "two_hop")}
    samples = [
        CollectiveSample(
            operation=operation, algorithm=algorithm, codecs=(codec,), transport=transport, nodes=1,
            ranks_per_node=4, rate_mbit=None, numel=16 << 20, sent_inter=0, sent_intra=3 << 26,
            reference_sent=3 << 26, seconds=[0.1 / ratio, 0.11 / ratio], reference_seconds=[0.1, 0.11],
        )
        for operation in ("all_gather", "reduce_scatter")
        for algorithm in algorithms[operation]
        for codec in ("fp32", "int8:2048")
        for transport in ("shm", "backend")
    ]  # fmt: skip
    return Bench(
        subject="collectives", started="2026-01-01T00:00:00.000+00:00",
        finished="2026-01-01T00:01:00.000+00:00", setting={}, machine=MACHINE, code=CODE, pool=POOL,
        collectives=samples,
    )  # fmt: skip


def engine(*, ours: float = 2.0) -> Bench:
    """A record of peers, of ours, ``ours`` times as fast, and of compute alone, 4 times as fast."""
    contenders = [
        (engine_goals.ALONE, "none", 0.25),
        ("exact", "shm", 1 / ours),
        ("exact", "backend", 1 / ours),
    ]
    contenders += [(name, "backend", 1.0) for name in ("ddp", *engine_goals.SHARDED)]
    samples = [
        EngineSample(
            contender=contender, transport=transport, nodes=nodes, ranks_per_node=4 // nodes, rate_mbit=rate,
            model=engine_goals.MODEL, parameters=3_312_384, sequence=engine_goals.SEQUENCE,
            sequences=engine_goals.SEQUENCES, steps=3, losses=[5.5, 4.0 if transport == "none" else 5.0],
            equal_steps=1 if transport == "none" else 2, seconds=[took, 1.1 * took],
            reference_seconds=[0.25, 0.275], cpu_seconds=[4 * took, 4 * took],
        )
        for nodes, rate in ((1, None), (2, 1000.0))
        for contender, transport, took in contenders
    ]  # fmt: skip
    return Bench(
        subject="engine", started="2026-01-01T00:00:00.000+00:00", finished="2026-01-01T00:01:00.000+00:00",
        setting={}, machine=MACHINE, code=CODE, pool=POOL, engine=samples,
    )  # fmt: skip


def overlap(*, of_alone: float = 1.05, hidden: float = 0.9, room: float = overlap_goals.ROOM) -> Bench:
    """A record of two policies' steps and of a reduction in chunks, at the goals' sizes."""
    steps = [
        OverlapStep(
            policy=policy, nodes=2, ranks_per_node=1, rate_mbit=80.0, model=overlap_goals.MODEL,
            layers=overlap_goals.LAYERS, parameters=9_630_976, sequence=overlap_goals.SEQUENCE,
            sequences=overlap_goals.SEQUENCES, sent_forward=1_000_000, sent_backward=2_000_000,
            forward_seconds=[0.1 * room, 0.11 * room], backward_seconds=[0.25 * room, 0.24 * room],
            seconds=[0.4 * of_alone, 0.5 * of_alone], reference_seconds=[0.4, 0.5],
        )
        for policy in ("zero3", "zeropp")
    ]  # fmt: skip
    hops = OverlapHops(
        nodes=2, ranks_per_node=2, rate_mbit=1000.0, numel=overlap_goals.MEBIBYTES << 18,
        codecs=("int4:256", "int4:256"), chunks=overlap_goals.CHUNKS, first_sent=8_650_752,
        second_sent=4_325_376, first_seconds=[0.02, 0.03], second_seconds=[0.07, 0.08],
        seconds=[0.2 - 0.02 * hidden, 0.2 - 0.03 * hidden], reference_seconds=[0.2, 0.2],
    )  # fmt: skip
    return Bench(
        subject="overlap", started="2026-01-01T00:00:00.000+00:00", finished="2026-01-01T00:01:00.000+00:00",
        setting={}, machine=MACHINE, code=CODE, pool=POOL, overlap_steps=steps, overlap_hops=[hops],
    )  # fmt: skip
