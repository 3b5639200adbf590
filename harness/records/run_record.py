"""Records what all trials of one run have in common: the suite, changes of the sources, and each node's software.

These facts are kept in one file ``runs/<hash of the file's content>.json`` in the suite's results folder.  Each trial's
record names the file in its field ``run``.  No torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, Field

from harness.records.trial_record import RecordError, digest_of, read_as, write_whole
from impl import regular_file

RUNS: Final = "runs"
_LETTERS: Final = 16  # hex digits of the SHA-256 that are the file's name


class _Part(BaseModel, extra="forbid", frozen=True):
    """Base class of the parts of a run's file; it refuses unknown keys."""


class SuiteText(_Part):
    """A suite file, and the DeepSpeed configurations that it names."""

    name: str
    text: str
    configurations: dict[str, str] = {}  # the DeepSpeed configurations as JSON, by path


class Changes(_Part):
    """The difference between the checkout and its commit, as a patch for ``git apply``."""

    size: int  # bytes of the whole patch
    sha256: str  # of the whole patch
    text: str  # the first part of the patch, without bytes that are no UTF-8

    @property
    def whole(self) -> bool:
        """Whether ``text`` is the complete patch: it was not cut off, and no bytes that are no UTF-8 were left out."""
        return len(self.text.encode()) == self.size


class Software(_Part):
    """Software that is installed on one node."""

    packages: list[str]  # all Python packages, as ``name==version``
    libraries: dict[str, str]  # versions of CUDA, cuDNN and NCCL, if installed


class Node(BaseModel, extra="ignore", frozen=True):
    """Machine, sources and software of one node.

    Keys that only older files have are ignored.
    """

    machine: dict[str, Any]  # facts about the machine (``harness.measure.machine``)
    code: dict[str, Any]  # version, commit and hash of the sources
    software: Software
    environment: dict[str, str]  # environment variables that affect results, without secrets
    hcas: list[str] = []  # its InfiniBand and RoCE adapters with an active port; empty in older records


class Run(_Part):
    """Facts that all trials of one run have in common."""

    schema_version: int = 1
    suite: SuiteText | None  # None if the trials came from no suite file
    changes: Changes | None  # of node 0's checkout; None if there were none, or if they are not known
    nodes: list[Node] = Field(min_length=1)  # by number; node 0 wrote the records


def path_of(results: Path, run: str) -> Path:
    """Return the path of a run's file; ``run`` is the file's name without ``.json``, a hash of its content."""
    return results / RUNS / f"{run}.json"


def write(results: Path, run: Run) -> str:
    """Write ``run`` atomically into its file in the results folder; do nothing if this file exists.

    Returns:
        The name of the file without ``.json``: the first 16 hex digits of the SHA-256 of its content.

    Raises:
        RecordError: If the file cannot be written.
    """
    text = run.model_dump_json(indent=1)
    name = digest_of(json.loads(text))[:_LETTERS]
    if not path_of(results, name).exists():
        write_whole(path_of(results, name), text)
    return name


def read(results: Path, run: str) -> Run:
    """Read the file ``runs/<run>.json`` of a results folder, and check that its content has the hash ``run``.

    Raises:
        RecordError: If the file is unreadable or invalid, or if its content has another hash.
    """
    path = path_of(results, run)
    record = read_as(Run, path)
    name = digest_of(json.loads(regular_file.read_text(path)))[:_LETTERS]
    if name != run:
        raise RecordError(
            f"{path}: was edited or damaged since it was written: the hash of its content is {name}; restore it, or "
            "delete it with the records of its run and run again"
        )
    return record
