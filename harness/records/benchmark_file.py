"""Reads the JSON files that pytest-benchmark writes (``tox -e bench``).  No torch.

The format is pytest-benchmark's own.  Of its fields, only those that report pages show are checked.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from harness.records.trial_record import RecordError
from impl import regular_file

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Stats(BaseModel, frozen=True):
    """Seconds of one benchmark's rounds."""

    median: Seconds
    rounds: int = Field(ge=1)
    data: list[Seconds] = []  # by round; only with --benchmark-save-data


class Timed(BaseModel, frozen=True):
    """One benchmark: a test with its parameters, and the seconds of its rounds."""

    name: str
    fullname: str = ""  # the name with the path of the test's file; tests of several files may share a name
    group: str | None = None
    extra_info: dict[str, Any] = {}  # moved_bytes, sent_bytes, reference and others, as the test noted them
    stats: Stats

    @property
    def identity(self) -> str:
        """The benchmark's unique name in its run: the full name, or the short name if the file has no full name."""
        return self.fullname or self.name

    def noted(self, key: str) -> float | None:
        """Return the number in ``extra_info`` that the test noted under ``key``.

        Returns None if there is no such number, or if it is not finite.
        """
        value = self.extra_info.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        return float(value)


class BenchmarkFile(BaseModel, frozen=True):
    """One JSON file of pytest-benchmark: the benchmarks of one run."""

    machine_info: dict[str, Any] = {}
    commit_info: dict[str, Any] = {}
    datetime: str
    version: str
    benchmarks: list[Timed] = Field(min_length=1)


def paths_in(folder: Path) -> list[Path]:
    """Return the JSON files of a folder, and of the folders that pytest-benchmark makes in it for each machine."""
    return sorted([*folder.glob("*.json"), *folder.glob("*/*.json")])


def holds(folder: Path) -> bool:
    """Return whether a folder holds files of pytest-benchmark.

    Only the first JSON file that can be read is examined.
    """
    for path in paths_in(folder):
        with suppress(OSError, ValueError, RecursionError, TypeError):
            return {"benchmarks", "machine_info"} <= set(json.loads(regular_file.read_text(path)))
    return False


def read_all(folder: Path) -> list[BenchmarkFile]:
    """Read all JSON files of pytest-benchmark in a folder, in the order in which they were written.

    Raises:
        RecordError: If the folder has no JSON file.  Also if one of its JSON files was not written by pytest-benchmark,
            or lacks a field that report pages need; the message names this file.
    """
    files = []
    for path in paths_in(folder):
        try:
            files.append(BenchmarkFile.model_validate_json(regular_file.read_text(path)))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            why = f"{place}: {first['msg']}"
            raise RecordError(
                f"{path}: is not a file of pytest-benchmark: {why}; move it out of the folder"
            ) from None
        except (OSError, ValueError) as error:
            raise RecordError(f"{path}: cannot be read: {error}; move it out of the folder") from error
    if not files:
        raise RecordError(
            f"{folder}: there are no files of pytest-benchmark in it; `tox -e bench` writes them"
        )
    return sorted(files, key=lambda file: file.datetime)
