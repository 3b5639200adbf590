"""Defines the record of ``zeropp bench``: the raw seconds of every round, one JSON file per run.  No torch.

In each round, a candidate (such as a codec) is timed next to the reference that it is compared with.  Reports compute
rates and ratios from these seconds.  :mod:`harness.records.trial_record` is the counterpart for trials.
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
from impl import regular_file

Subject = Literal["codecs", "collectives", "overlap"]
Kind = Literal["codec", "collective", "step", "hops"]
ElementType = Literal["fp32", "bf16", "fp16"]


class Sample(BaseModel, extra="forbid", frozen=True):
    """Seconds of one candidate, such as a codec, and of the reference that it is compared with, such as a copy.

    Candidate and reference are timed in every round, so that slow changes of the machine's speed cancel in the ratio of
    the two.
    """

    kind: Kind
    names: dict[str, str | int | float | None]  # what was timed, and under which conditions
    sizes: dict[str, int] = {}  # bytes, elements and the like of one call or step
    seconds: list[float]  # of the slowest rank, by round; before :func:`merge_ranks`, of one rank
    reference_seconds: list[float]  # of the reference, by round
    parts: dict[str, list[float]] = {}  # seconds of parts of the call or step, by round
    sent: dict[str, int] = {}  # bytes that all ranks send in one call, by link, from the wire's ledger

    @model_validator(mode="after")
    def _in_rounds(self) -> Sample:
        for name, values in self.timed.items():
            if len(values) != len(self.seconds) or not values:
                raise ValueError(
                    f"numbers of rounds: {len(self.seconds)} in seconds, but {len(values)} in {name}: expected the "
                    "same number, at least 1"
                )
            if min(values) <= 0:
                raise ValueError(f"{name} = {min(values):g}: expected seconds above 0")
        return self

    @property
    def timed(self) -> dict[str, list[float]]:
        """All lists of seconds, by name: ``seconds``, ``reference_seconds``, and the names of ``parts``."""
        return {"seconds": self.seconds, "reference_seconds": self.reference_seconds} | self.parts

    @property
    def place(self) -> tuple[Any, ...]:
        """The cluster on which the sample was timed: (nodes, ranks per node, rate of the link between nodes).

        The rate is in Mbit/s, and None if the link's rate is not limited.  All three are None for codecs, which need no
        cluster.
        """
        return tuple(self.names.get(name) for name in ("nodes", "ranks_per_node", "rate_mbit"))


def merge_ranks(ranks: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Merge the samples of all ranks into one list, with one sample for each candidate, such as a codec.

    For each round, the merged sample has the seconds of the rank that was slowest in this round.  The slowest rank is
    found separately for the seconds of the candidate, of the reference, and of each part.  The bytes that the ranks
    sent are added up.

    Args:
        ranks: The samples of each rank; all ranks have the same candidates in the same order.
    """
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
    """The record of one run of ``zeropp bench``."""

    schema_version: int = 3
    subject: Subject  # what was timed: the argument of ``zeropp bench``
    started: str  # ISO 8601 in UTC
    finished: str
    setting: dict[str, Any]  # options of the command
    machine: dict[str, Any]  # facts about the machine (``harness.measure.machine``)
    code: dict[str, Any]  # version, commit, and whether the checkout was changed
    pool: str  # hash of machine and code; only records with equal hashes are evaluated together
    missing: dict[str, str] = {}  # by candidate that could not be timed: the reason
    samples: list[Sample]
    digest: str | None = None  # SHA-256 of everything else in the file; None in older records

    @property
    def id(self) -> str:
        """The record's id: the first 12 hex digits of a SHA-256 of its subject, setting, pool and time of start."""
        text = json.dumps([self.subject, self.setting, self.pool, self.started], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def write(folder: Path, bench: Bench) -> Path:
    """Write ``bench`` atomically and return the file's path; raises a RecordError if that fails."""
    target = path_of(folder, bench.id)
    write_whole(target, with_digest(bench).model_dump_json(indent=1))
    return target


def holds(folder: Path) -> bool:
    """Return whether ``folder`` holds records of benchmarks.

    The first JSON file that can be read decides: the record of a benchmark has the key ``subject``.  If no JSON file
    can be read, the folder's name decides: folders for such records are named like ``bench-codecs``.
    """
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError, RecursionError, TypeError):
            return "subject" in json.loads(regular_file.read_text(path))
    return folder.name in {f"bench-{subject}" for subject in get_args(Subject)}


def read_all(folder: Path) -> list[Bench]:
    """Read all records of a folder, in the order in which their benchmarks were started.

    Raises:
        RecordError: If the folder holds no records, or a file is not the record of a benchmark.
    """
    benches = [read_as(Bench, path) for path in sorted(folder.glob("*.json"))]
    if not benches:
        raise RecordError(f"{folder}: there are no records in it; `zeropp bench` writes them")
    return sorted(benches, key=lambda bench: (bench.started, bench.id))
