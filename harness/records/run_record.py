"""What all trials of one run have in common, in one file: sources, suite, and what every node had.

The file lies in the folder ``runs`` of the suite's results, and is named by the hash of its content; records
name it by that.  Runs that had the same share it.  No torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, Field

from harness.records.record import RecordError, digest_of, read_as, write_whole

# 1: first schema.
SCHEMA_VERSION: Final = 1
RUNS: Final = "runs"
_LETTERS: Final = 16  # of the SHA-256


class _Part(BaseModel, extra="forbid", frozen=True):
    pass


class SuiteText(_Part):
    """The file of a suite."""

    name: str
    text: str
    # DeepSpeed configurations in files, as JSON text, by the path that the suite has
    configurations: dict[str, str] = {}


class Changes(_Part):
    """How the checkout differed from its commit, as ``git apply`` reads it."""

    # size, sha256: of the whole, in bytes
    size: int
    sha256: str
    text: str  # the first bytes of it, as many as are kept; empty if it is no text in UTF-8

    @property
    def whole(self) -> bool:
        """Whether all of it is kept."""
        return len(self.text.encode()) == self.size


class Software(_Part):
    """What runs trials beside our sources, on one node."""

    packages: list[str]  # all that are installed, as ``name==version``
    # versions of CUDA, cuDNN and NCCL as torch has them, and of CUDA as the driver allows it; only those that
    # are there
    libraries: dict[str, str]


class Node(BaseModel, extra="ignore", frozen=True):
    """What one node had; older files hold more, which is not read."""

    # machine, code: as records have them (``harness.measure.machine``)
    machine: dict[str, Any]
    code: dict[str, Any]
    software: Software
    environment: dict[str, str]  # variables that matter, without secrets
    # names of its InfiniBand adapters that have an active port, in order; empty in older records
    hcas: list[str] = []


class Run(_Part):
    """What all trials of one run have in common."""

    schema_version: int = SCHEMA_VERSION
    suite: SuiteText | None  # None for trials that are of no file
    changes: Changes | None  # of the checkout of node 0; None if it is that of its commit, or not known
    nodes: list[Node] = Field(min_length=1)  # by number; the first wrote the records


def path_of(results: Path, run: str) -> Path:
    """Path of the file of run ``run``."""
    return results / RUNS / f"{run}.json"


def write(results: Path, run: Run) -> str:
    """Write ``run`` atomically, unless it is there; returns its hash.

    Raises:
        RecordError: if the folder cannot be written.
    """
    text = run.model_dump_json(indent=1)
    name = digest_of(json.loads(text))[:_LETTERS]
    if not path_of(results, name).exists():
        write_whole(path_of(results, name), text)
    return name


def read(results: Path, run: str) -> Run:
    """Read the file of run ``run``, whose content is that of its name; raises as :func:`read_as`."""
    path = path_of(results, run)
    found = read_as(Run, path, SCHEMA_VERSION)
    name = digest_of(json.loads(path.read_text(encoding="utf-8")))[:_LETTERS]
    if name != run:
        raise RecordError(f"{path}: edited or damaged since it was written: its content is that of {name}")
    return found
