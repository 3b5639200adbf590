"""Records as they are read: those of today, and those from before a field was there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness import record
from harness.record import RecordError
from harness.suite import Trial
from tests.report.records import record_of


def written(folder: Path, change: Any) -> Path:
    """A finished trial's record, with every step changed by ``change``."""
    path = record.write(folder, record_of(Trial(steps=2, warmup=0)))
    data = json.loads(path.read_text(encoding="utf-8"))
    for rank in data["ranks"]:
        for step in rank["steps"]:
            change(step)
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """A record comes back as it was, processor seconds included."""
    made = record_of(Trial(steps=2, warmup=0))
    assert made.ranks[0].steps[0].cpu_seconds
    assert record.read(record.write(tmp_path, made)) == made


def test_a_record_from_before_processor_seconds_is_read(tmp_path: Path) -> None:
    """Steps without processor seconds are read, and say that these are not known."""
    found = record.read(written(tmp_path, lambda step: step.pop("cpu_seconds")))
    assert {step.cpu_seconds for rank in found.ranks for step in rank.steps} == {None}


@pytest.mark.parametrize("seconds", [-0.1, float("inf"), float("nan"), "long"])
def test_processor_seconds_that_cannot_be_are_refused(tmp_path: Path, seconds: Any) -> None:
    """Processor seconds below 0, infinite or no number are no record; the message names the field."""
    path = written(tmp_path, lambda step: step.update(cpu_seconds=seconds))
    with pytest.raises(RecordError, match=r"not a record: ranks\.0\.steps\.0\.cpu_seconds"):
        record.read(path)
