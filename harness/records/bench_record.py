"""What a benchmark leaves behind: raw seconds of every round, in one file per run.  No torch.

The counterpart of :mod:`harness.records.record` for ``zeropp bench``: a record holds no rates and no ratios.
Every sample stands beside the reference (a copy, the library's own collective, or a step that sends
nothing) that was timed in the same round, so that what drifts between rounds cancels in their ratio.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from harness.records.record import RecordError, path_of, read_as, write_whole

# 1: first schema.
SCHEMA_VERSION: Final = 1

Subject = Literal["codecs", "collectives", "engine", "overlap"]
Kind = Literal["fp32", "bf16", "fp16"]
FOLDERS: Final[dict[Subject, str]] = {
    "codecs": "bench-codecs",
    "collectives": "bench-collectives",
    "engine": "bench-engine",
    "overlap": "bench-overlap",
}


class BenchError(Exception):
    """A benchmark cannot be run as asked; one line that names the numbers."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Paired(_Part):
    """Raw seconds by round, and those of the reference in the same round."""

    seconds: list[float]
    reference_seconds: list[float]

    @model_validator(mode="after")
    def _in_pairs(self) -> _Paired:
        if len(self.seconds) != len(self.reference_seconds) or not self.seconds:
            raise ValueError(
                f"{len(self.seconds)} rounds of seconds beside {len(self.reference_seconds)} of the reference"
            )
        if not all(value > 0 for value in (*self.seconds, *self.reference_seconds)):
            raise ValueError("seconds are above 0")
        return self


class CodecSample(_Paired):
    """One operation of one codec on one backend; the reference is a copy of the elements.

    Attributes:
        operation: what was timed (:data:`harness.bench.codecs.OPERATIONS`).
        codec: text form; of a peer, its own name.
        backend: whose kernels ran.
        device: cpu or cuda.
        kind: type of the elements.
        threads: of torch.
        numel: elements of the shard.
        element_bytes: of those elements: what the reference copies.
        moved_bytes: every byte that the operation reads or writes, once.
        calls: in one round; ``seconds`` and ``reference_seconds`` are of one call.
        other: what a peer computes instead of our arithmetic; None for ours.
    """

    operation: str
    codec: str
    backend: str
    device: str
    kind: Kind
    threads: int
    numel: int
    element_bytes: int
    moved_bytes: int
    calls: int
    other: str | None = None


class CollectiveSample(_Paired):
    """One algorithm on one transport; the reference is gloo's own collective of the same fp32 tensor.

    Attributes:
        operation: all_gather or reduce_scatter.
        algorithm: flat, hierarchical; ring, one_hop, two_hop.
        codecs: text forms, one a hop.
        transport: shm or backend.
        nodes: of the topology.
        ranks_per_node: likewise.
        rate_mbit: of the link between nodes; None is unshaped.
        numel: elements of the whole tensor.
        sent_inter: bytes that all ranks sent between nodes in one call, by the wire's ledger.
        sent_intra: likewise, inside nodes.
        reference_sent: bytes that all ranks send in gloo's collective, by its algorithm.
    """

    operation: Literal["all_gather", "reduce_scatter"]
    algorithm: str
    codecs: tuple[str, ...]
    transport: str
    nodes: int
    ranks_per_node: int
    rate_mbit: float | None
    numel: int
    sent_inter: int
    sent_intra: int
    reference_sent: int


class EngineSample(_Paired):
    """Training steps of one contender; the reference is the same model stepping alone, sending nothing.

    Attributes:
        contender: who trained (:mod:`harness.bench.engine`).
        transport: what carried messages inside a node: shm or backend; none of the one that sends nothing.
        nodes: of the topology.
        ranks_per_node: likewise.
        rate_mbit: of the link between nodes; None is unshaped.
        model: by its preset's name.
        parameters: of the model.
        sequence: tokens of a sequence.
        sequences: of each rank in a step.
        steps: in one round; ``seconds`` and ``reference_seconds`` are of all of them.
        losses: mean over ranks before each step, those before the first round included.
        equal_steps: of the first of them, those whose loss must be every other contender's.
        cpu_seconds: that all ranks' processes computed in each round, waiting awake included.
        told: how it was set up, in its own words.
    """

    contender: str
    transport: Literal["shm", "backend", "none"]
    nodes: int
    ranks_per_node: int
    rate_mbit: float | None
    model: str
    parameters: int
    sequence: int
    sequences: int
    steps: int
    losses: list[float]
    equal_steps: int
    cpu_seconds: list[float]
    told: dict[str, Any] = {}

    @property
    def tokens(self) -> int:
        """Of all ranks in one round."""
        return self.nodes * self.ranks_per_node * self.sequences * self.sequence * self.steps

    @property
    def equal_to_end(self) -> bool:
        """Whether all its losses must be the others'."""
        return self.equal_steps == len(self.losses)


class OverlapStep(_Paired):
    """Training steps of one policy; the reference is compute alone on the same ranks and link.

    Attributes:
        policy: by its preset's name.
        nodes: of the topology.
        ranks_per_node: likewise.
        rate_mbit: of the link between nodes.
        model: by its preset's name.
        layers: of the model.
        parameters: likewise.
        sequence: tokens of a sequence.
        sequences: of each rank in a step.
        sent_forward: bytes that a node sends to others in a step's forward pass, as predicted.
        sent_backward: likewise, in the backward pass.
        forward_seconds: of compute alone in the same round.
        backward_seconds: likewise.
    """

    policy: str
    nodes: int
    ranks_per_node: int
    rate_mbit: float
    model: str
    layers: int
    parameters: int
    sequence: int
    sequences: int
    sent_forward: int
    sent_backward: int
    forward_seconds: list[float]
    backward_seconds: list[float]

    @model_validator(mode="after")
    def _as_many(self) -> OverlapStep:
        _check_rounds(len(self.seconds), self.forward_seconds, self.backward_seconds)
        return self


class OverlapHops(_Paired):
    """A gradient's two-hop reduction in several chunks; the reference is that in one.

    Attributes:
        nodes: of the topology.
        ranks_per_node: likewise.
        rate_mbit: of the link between nodes.
        numel: elements of the gradient.
        codecs: text forms, one a hop.
        chunks: how many.
        first_sent: bytes that a rank sends to each other rank of its group in the first hop.
        second_sent: likewise, in the second.
        first_seconds: of the first hop's messages by themselves, in the same round.
        second_seconds: likewise, of the second's.
    """

    nodes: int
    ranks_per_node: int
    rate_mbit: float
    numel: int
    codecs: tuple[str, str]
    chunks: int
    first_sent: int
    second_sent: int
    first_seconds: list[float]
    second_seconds: list[float]

    @model_validator(mode="after")
    def _as_many(self) -> OverlapHops:
        _check_rounds(len(self.seconds), self.first_seconds, self.second_seconds)
        return self


def _check_rounds(rounds: int, *others: list[float]) -> None:
    for values in others:
        if len(values) != rounds:
            raise ValueError(f"{len(values)} values beside {rounds} rounds")
        if not all(value > 0 for value in values):
            raise ValueError("seconds are above 0")


class Bench(_Part):
    """One run of a benchmark.

    Attributes:
        subject: what was measured.
        started: ISO 8601 in UTC.
        finished: likewise.
        setting: what the command was asked for.
        machine: facts about where it ran (``harness.measure.machine``).
        code: version, commit, and whether the checkout was changed.
        pool: hash of the facts that must agree before two records are pooled.
        missing: what is not here and why, by name.
        codecs: samples of codecs.
        collectives: samples of collectives.
        engine: samples of training steps.
        overlap_steps: samples of training steps beside compute alone.
        overlap_hops: samples of reductions in chunks.
    """

    schema_version: int = SCHEMA_VERSION
    subject: Subject
    started: str
    finished: str
    setting: dict[str, Any]
    machine: dict[str, Any]
    code: dict[str, Any]
    pool: str
    missing: dict[str, str] = {}
    codecs: list[CodecSample] = []
    collectives: list[CollectiveSample] = []
    engine: list[EngineSample] = []
    overlap_steps: list[OverlapStep] = []
    overlap_hops: list[OverlapHops] = []

    @property
    def id(self) -> str:
        """12 hex digits by setting, pool and start."""
        text = json.dumps([self.subject, self.setting, self.pool, self.started], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def write(folder: Path, bench: Bench) -> Path:
    """Write ``bench`` whole or not at all; returns where.

    Raises:
        RecordError: if the folder cannot be written.
    """
    target = path_of(folder, bench.id)
    write_whole(target, bench.model_dump_json(indent=1))
    return target


def holds(folder: Path) -> bool:
    """Whether ``folder`` is one of benchmarks' records: by its first record, else by its name."""
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        return isinstance(data, dict) and "subject" in data
    return folder.name in FOLDERS.values()


def read_all(folder: Path) -> list[Bench]:
    """All records of a folder, by time.

    Raises:
        RecordError: for any file that is not a benchmark's record of this schema, and where there is
            none.
    """
    found = [read_as(Bench, path, SCHEMA_VERSION) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise RecordError(f"{folder}: no records in it; `zeropp bench` writes them")
    return sorted(found, key=lambda bench: (bench.started, bench.id))


def check_pool(folder: Path, pool: str) -> None:
    """Refuse a folder whose records a run of pool ``pool`` cannot join.

    Raises:
        BenchError: naming both pools.
        RecordError: for a file that is no record.
    """
    if not any(folder.glob("*.json")):
        return
    strange = [bench for bench in read_all(folder) if bench.pool != pool]
    if strange:
        raise BenchError(
            f"{folder}: holds {len(strange)} records of another machine or code (pool {strange[0].pool}, "
            f"here {pool}), which are not put together; move the folder aside or choose other --results"
        )
