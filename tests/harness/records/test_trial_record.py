"""Records are read, also those that were written before a field existed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.records import trial_record
from harness.records.trial_record import RecordError
from harness.suites.trial import Trial
from tests.report.records import record_of


def rewritten(folder: Path, change: Any) -> Path:
    """Return the path of a finished trial's record whose content ``change`` has changed, without a digest, as older
    ones are.
    """
    path = trial_record.write(folder, record_of(Trial(steps=2, warmup=0)))
    data = json.loads(path.read_text(encoding="utf-8"))
    del data["digest"]
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def steps_of(data: Any) -> list[Any]:
    return [step for rank in data["ranks"] for step in rank["steps"]]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """A record is read as it was written, processor seconds included."""
    made = record_of(Trial(steps=2, warmup=0))
    assert made.ranks[0].steps[0].cpu_seconds
    assert made.processor_use is not None
    assert trial_record.read(trial_record.write(tmp_path, made)) == made


def test_an_older_record_is_read(tmp_path: Path) -> None:
    """Fields that it lacks have their default, and fields that no longer exist are ignored."""

    def older(data: Any) -> None:
        del data["processor_use"]
        data["power"] = None
        for step in steps_of(data):
            del step["cpu_seconds"]

    old = trial_record.read(rewritten(tmp_path, older))
    assert {step.cpu_seconds for rank in old.ranks for step in rank.steps} == {None}
    assert old.processor_use is old.digest is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("processor_use.steal", -0.1),
        ("processor_use.user", float("nan")),
        ("processor_use.seconds", 0.0),
        ("processor_use.processors", 0),
        ("ranks.0.steps.0.cpu_seconds", float("inf")),
        ("ranks.0.steps.0.cpu_seconds", "long"),
    ],
)
def test_measurements_that_cannot_be_are_refused(tmp_path: Path, field: str, value: Any) -> None:
    """Seconds that are negative or not finite, a duration of 0 and no processors are refused; the message names the
    field.
    """

    def wrong(data: Any) -> None:
        *_, name = field.split(".")
        (data["processor_use"] if field.startswith("p") else steps_of(data)[0])[name] = value

    with pytest.raises(RecordError, match=f"not a record: {re.escape(field)}"):
        trial_record.read(rewritten(tmp_path, wrong))


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data["ranks"][0]["steps"][1].update(total=0.1),
        lambda data: data["ranks"][0]["ledger"].pop(),
        lambda data: data["machine"].update(cores=64),
        lambda data: data.update(note="nothing"),
    ],
    ids=["time", "ledger", "machine", "key"],
)
def test_an_edited_record_is_refused(tmp_path: Path, edit: Any) -> None:
    """After an edit of a step's time, a ledger or the machine, or with a further key, reading says in one line that
    it was edited.
    """
    path = trial_record.write(tmp_path, record_of(Trial(steps=2, warmup=0)))
    data = json.loads(path.read_text(encoding="utf-8"))
    edit(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(RecordError, match="edited or damaged since it was written") as caught:
        trial_record.read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_digest_is_of_content_not_of_its_form(tmp_path: Path) -> None:
    """Other white space and another order of keys are no edit; a changed record that is written again has its own
    digest.
    """
    made = record_of(Trial(steps=2, warmup=0))
    path = trial_record.write(tmp_path, made)
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(dict(reversed(data.items())), indent=7), encoding="utf-8")
    reordered = trial_record.read(path)
    assert reordered == made
    changed = reordered.model_copy(update={"question": "What else?"})
    assert trial_record.read(trial_record.write(tmp_path, changed)).digest != made.digest
