"""Record of a benchmark: raw seconds of every round, in one file per run.  No torch.

The counterpart of :mod:`harness.records.trial_record` for ``zeropp bench``: a record holds no rates and no ratios.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, model_validator

from harness.records.trial_record import RecordError, path_of, read_as, with_digest, write_whole

Subject = Literal["codecs", "collectives", "overlap"]
Kind = Literal["codec", "collective", "step", "hops"]
ElementType = Literal["fp32", "bf16", "fp16"]


class Sample(BaseModel, extra="forbid", frozen=True):
    """One candidate, timed in every round beside a reference, so that drift cancels in their ratio."""

    kind: Kind
    names: dict[str, str | int | float | None]
    sizes: dict[str, int] = {}  # bytes, elements and the like, of one call or step
    seconds: list[float]  # by round, of the slowest rank
    reference_seconds: list[float]  # likewise
    parts: dict[str, list[float]] = {}  # further seconds likewise
    sent: dict[str, int] = {}  # bytes of one call, of all ranks, by link, from the wire's ledger

    @model_validator(mode="after")
    def _in_rounds(self) -> Sample:
        for name, values in self.timed.items():
            if len(values) != len(self.seconds) or not values:
                raise ValueError(f"{len(self.seconds)} rounds of seconds beside {len(values)} of {name}")
            if min(values) <= 0:
                raise ValueError("seconds are above 0")
        return self

    @property
    def timed(self) -> dict[str, list[float]]:
        """All seconds by round."""
        return {"seconds": self.seconds, "reference_seconds": self.reference_seconds} | self.parts

    @property
    def place(self) -> tuple[Any, ...]:
        """Nodes, ranks of each, and the rate of the link between nodes in Mbit/s; None is unshaped."""
        return tuple(self.names.get(name) for name in ("nodes", "ranks_per_node", "rate_mbit"))


def merge_ranks(ranks: Sequence[Sequence[Sample]]) -> list[Sample]:
    """All ranks' samples as one: the slowest rank's seconds of every round, and the sum of bytes."""
    merged = []
    for samples in zip(*ranks, strict=True):
        first = samples[0]
        slowest: dict[str, Any] = {
            name: [max(seconds) for seconds in zip(*(sample.timed[name] for sample in samples), strict=True)]
            for name in first.timed
        }
        slowest["parts"] = {name: slowest.pop(name) for name in first.parts}
        sent = {link: sum(sample.sent[link] for sample in samples) for link in first.sent}
        merged.append(first.model_copy(update={**slowest, "sent": sent}))
    return merged


class Bench(BaseModel, extra="forbid", frozen=True):
    """One run of a benchmark."""

    schema_version: int = 3
    subject: Subject  # the command
    started: str  # ISO 8601 in UTC
    finished: str
    setting: dict[str, Any]  # arguments of the command
    machine: dict[str, Any]  # facts about where it ran (``harness.measure.machine``)
    code: dict[str, Any]  # version, commit, and whether the checkout was changed
    pool: str  # hash of the facts that must agree before two records are pooled
    missing: dict[str, str] = {}  # why a candidate could not be timed, by name
    samples: list[Sample]
    digest: str | None = None  # of all else in the file; None in older records

    @property
    def id(self) -> str:
        """12 hex digits by setting, pool and start."""
        text = json.dumps([self.subject, self.setting, self.pool, self.started], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def write(folder: Path, bench: Bench) -> Path:
    """Write ``bench`` atomically, or raise a RecordError; returns the file."""
    target = path_of(folder, bench.id)
    write_whole(target, with_digest(bench).model_dump_json(indent=1))
    return target


def holds(folder: Path) -> bool:
    """Whether ``folder`` is of benchmarks' records: by its first record, else by its name."""
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError, RecursionError, TypeError):
            return "subject" in json.loads(path.read_text(encoding="utf-8"))
    return folder.name in {f"bench-{subject}" for subject in get_args(Subject)}


def read_all(folder: Path) -> list[Bench]:
    """All records of a folder, by time; a RecordError if there is none, or a file is no benchmark's."""
    benches = [read_as(Bench, path) for path in sorted(folder.glob("*.json"))]
    if not benches:
        raise RecordError(f"{folder}: no records in it; `zeropp bench` writes them")
    return sorted(benches, key=lambda bench: (bench.started, bench.id))
