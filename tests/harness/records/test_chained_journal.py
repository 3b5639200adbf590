"""A journal reveals records that are not those that the sweep wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.records import archive, chained_journal, trial_record
from harness.records.chained_journal import JOURNAL
from harness.records.trial_record import Failure, Record, with_digest
from harness.suites.trial import Trial
from tests.report.records import changed_steps, record_of

MADE = [record_of(Trial(steps=2, warmup=0, seed=seed), suite="q", order=seed) for seed in range(3)]


def write_all(folder: Path) -> list[Record]:
    return [chained_journal.append(folder, made) for made in MADE]


def sentences(folder: Path) -> list[str]:
    return chained_journal.verify(folder, trial_record.read_all(folder))


def test_what_a_sweep_wrote_is_not_named(tmp_path: Path) -> None:
    """Changed questions and trials run again after a failure are not named either; packing keeps the journal valid."""
    folder = tmp_path / "q"
    failed = record_of(Trial(steps=2, warmup=0, seed=9), failure=Failure(kind="lost", message="", log=None))
    chained_journal.append(folder, failed)
    chained_journal.append(folder, record_of(Trial(steps=2, warmup=0, seed=9)))
    first, *_ = write_all(folder)
    trial_record.write(folder, first.model_copy(update={"role": "baseline"}))
    assert sentences(folder) == []
    unpacked = archive.unpack(archive.pack(folder, tmp_path / "b"))
    assert sentences(unpacked) == []
    assert (unpacked / JOURNAL).read_bytes() == (folder / JOURNAL).read_bytes()


def delete(folder: Path) -> None:
    trial_record.path_of(folder, MADE[1].id).unlink()


def rerun(folder: Path) -> None:
    delete(folder)
    chained_journal.append(folder, MADE[1])


def scale_times(folder: Path) -> None:
    slower = trial_record.read(trial_record.path_of(folder, MADE[1].id))
    faster = changed_steps(slower, lambda step: {"total": step.total / 2})
    trial_record.write(folder, with_digest(faster))


def keep(*numbers: int) -> Callable[[Path], None]:
    """Return a sabotage that keeps only these lines of the journal."""

    def cut(folder: Path) -> None:
        lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
        (folder / JOURNAL).write_bytes(b"".join(lines[number] for number in numbers))

    return cut


def edit_line(folder: Path) -> None:
    text = (folder / JOURNAL).read_text(encoding="utf-8")
    (folder / JOURNAL).write_text(text.replace(MADE[1].id, MADE[2].id), encoding="utf-8")


@pytest.mark.parametrize(
    ("sabotage", "named"),
    [
        (delete, "records were deleted after they were written: 1 trial"),
        (rerun, "trials were run again although they had a result: 1 trial"),
        (scale_times, "records were edited after they were written: 1 trial"),
        (keep(0, 2), "line 2 of 2 does not follow from the line before it"),
        (edit_line, "line 3 of 3 does not follow from the line before it"),
        (keep(0), "records name a line that it does not have: 2 trials"),
        (keep(), "records name a line that it does not have: 3 trials"),
    ],
)
def test_sabotages_are_named(tmp_path: Path, sabotage: Callable[[Path], None], named: str) -> None:
    """Deleted, repeated and edited trials are named by their ids; a journal that was cut or edited is named too."""
    write_all(tmp_path)
    sabotage(tmp_path)
    faults = sentences(tmp_path)
    assert any(named in sentence for sentence in faults)
    if sabotage in (delete, rerun, scale_times):
        assert len(faults) == 1
        assert MADE[1].id in faults[0]
        assert MADE[0].id not in faults[0]


def test_older_records_have_no_journal(tmp_path: Path) -> None:
    """Records without a journal are counted, and not called deleted or edited."""
    for made in MADE:
        trial_record.write(tmp_path, made)
    (sentence,) = sentences(tmp_path)
    assert sentence.startswith("Not in the journal: 3 records, written before")
