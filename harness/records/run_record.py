"""What all trials of one run have in common, in one file: sources, suite, and what every node had.

The file ``runs/<hash of its content>.json`` lies in the suite's results; records name it.  No torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, Field

from harness.records.trial_record import RecordError, digest_of, read_as, write_whole

RUNS: Final = "runs"
_LETTERS: Final = 16  # of the SHA-256


class _Part(BaseModel, extra="forbid", frozen=True):
    pass


class SuiteText(_Part):
    """The file of a suite."""

    name: str
    text: str
    configurations: dict[str, str] = {}  # DeepSpeed's in files, JSON by the path that the suite has


class Changes(_Part):
    """How the checkout differed from its commit, as ``git apply`` reads it."""

    size: int  # of the whole, in bytes
    sha256: str  # of the whole
    text: str  # its first bytes, without those that are no UTF-8

    @property
    def whole(self) -> bool:
        """Whether all of it is kept."""
        return len(self.text.encode()) == self.size


class Software(_Part):
    """Software of one node, beside our sources."""

    packages: list[str]  # all that are installed, as ``name==version``
    libraries: dict[str, str]  # versions of CUDA, cuDNN and NCCL, if installed


class Node(BaseModel, extra="ignore", frozen=True):
    """What one node had; older files hold more, which is not read."""

    machine: dict[str, Any]  # as records have it (``harness.measure.machine``)
    code: dict[str, Any]
    software: Software
    environment: dict[str, str]  # variables that matter, without secrets
    hcas: list[str] = []  # its InfiniBand adapters with an active port, in order; empty in older records


class Run(_Part):
    """What all trials of one run have in common."""

    schema_version: int = 1
    suite: SuiteText | None  # None for trials of no file
    changes: Changes | None  # of node 0's checkout; None if there are none, or they are not known
    nodes: list[Node] = Field(min_length=1)  # by number; the first wrote the records


def path_of(results: Path, run: str) -> Path:
    """Path of the file of run ``run``."""
    return results / RUNS / f"{run}.json"


def write(results: Path, run: Run) -> str:
    """Write ``run`` atomically, unless its file exists, or raise a RecordError; returns its hash."""
    text = run.model_dump_json(indent=1)
    name = digest_of(json.loads(text))[:_LETTERS]
    if not path_of(results, name).exists():
        write_whole(path_of(results, name), text)
    return name


def read(results: Path, run: str) -> Run:
    """Read the file of run ``run`` and check its hash; raises as :func:`read_as`."""
    path = path_of(results, run)
    record = read_as(Run, path)
    name = digest_of(json.loads(path.read_text(encoding="utf-8")))[:_LETTERS]
    if name != run:
        raise RecordError(f"{path}: edited or damaged since it was written: its content is that of {name}")
    return record
