"""Records as they are read: those of today, and those from before a field was there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.records import record
from harness.records.record import RecordError
from harness.suites.trial import Trial
from tests.report.records import record_of


def content(path: Path) -> Any:
    """What a record's file holds but for its digest, as before records had one."""
    data = json.loads(path.read_text(encoding="utf-8"))
    del data["digest"]
    return data


def written(folder: Path, change: Any) -> Path:
    """A finished trial's record, with every step changed by ``change``."""
    path = record.write(folder, record_of(Trial(steps=2, warmup=0)))
    data = content(path)
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


def test_a_record_from_before_the_machines_use_is_read(tmp_path: Path) -> None:
    """A record without the machine's processor seconds is read, and says that these are not known."""
    made = record_of(Trial(steps=2, warmup=0))
    assert made.processor_use is not None
    path = record.write(tmp_path, made)
    data = content(path)
    del data["processor_use"]
    path.write_text(json.dumps(data), encoding="utf-8")
    assert record.read(path).processor_use is None


@pytest.mark.parametrize(
    ("field", "value"), [("steal", -0.1), ("user", float("nan")), ("seconds", 0.0), ("processors", 0)]
)
def test_uses_of_the_machine_that_cannot_be_are_refused(tmp_path: Path, field: str, value: Any) -> None:
    """Seconds below 0 or no number, no time at all and no processor are no record; the field is named."""
    path = record.write(tmp_path, record_of(Trial(steps=2, warmup=0)))
    data = content(path)
    data["processor_use"][field] = value
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(RecordError, match=rf"not a record: processor_use\.{field}"):
        record.read(path)


@pytest.mark.parametrize("seconds", [-0.1, float("inf"), float("nan"), "long"])
def test_processor_seconds_that_cannot_be_are_refused(tmp_path: Path, seconds: Any) -> None:
    """Processor seconds below 0, infinite or no number are no record; the message names the field."""
    path = written(tmp_path, lambda step: step.update(cpu_seconds=seconds))
    with pytest.raises(RecordError, match=r"not a record: ranks\.0\.steps\.0\.cpu_seconds"):
        record.read(path)


def edited_time(data: Any) -> None:
    data["ranks"][0]["steps"][1]["total"] *= 0.5


def halved_ledger(data: Any) -> None:
    for rank in data["ranks"]:
        for row in rank["ledger"]:
            row["bytes"] //= 2


def another_machine(data: Any) -> None:
    data["machine"]["cores"] = 64


def one_more(data: Any) -> None:
    data["note"] = "nothing"


@pytest.mark.parametrize("edit", [edited_time, halved_ledger, another_machine, one_more])
def test_an_edited_record_is_refused(tmp_path: Path, edit: Any) -> None:
    """A step's time, ledgers, the machine or a further key: reading says in one line that it was edited."""
    path = record.write(tmp_path, record_of(Trial(steps=2, warmup=0)))
    data = json.loads(path.read_text(encoding="utf-8"))
    edit(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(RecordError, match="edited or damaged since it was written") as caught:
        record.read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_digest_is_of_content_not_of_its_form(tmp_path: Path) -> None:
    """Other spaces and another order of keys are no edit; a record written again has its own digest."""
    made = record_of(Trial(steps=2, warmup=0))
    path = record.write(tmp_path, made)
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(dict(reversed(data.items())), indent=7), encoding="utf-8")
    found = record.read(path)
    assert found == made
    changed = found.model_copy(update={"question": "What else?"})
    assert record.read(record.write(tmp_path, changed)).digest != made.digest


def test_a_record_from_before_digests_is_read(tmp_path: Path) -> None:
    """A record without a digest is read, and says that it has none."""
    path = record.write(tmp_path, record_of(Trial(steps=2, warmup=0)))
    path.write_text(json.dumps(content(path)), encoding="utf-8")
    assert record.read(path).digest is None
