"""A journal reveals records that are not those that the sweep wrote."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from harness.records import archive, chained_journal, trial_record
from harness.records.chained_journal import JOURNAL
from harness.records.trial_record import Failure, Record, RecordError, with_digest
from harness.suites.trial import Trial
from tests.report.records import changed_steps, record_of

ROOT = Path(__file__).parents[3]
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
    first, second, _ = write_all(folder)
    trial_record.write(folder, first.model_copy(update={"role": "baseline"}))
    trial_record.write(folder, second.model_copy(update={"answer": "loss", "margin": 14}))
    assert sentences(folder) == []
    unpacked = archive.unpack(archive.pack(folder, tmp_path / "b"))
    assert sentences(unpacked) == []
    assert (unpacked / JOURNAL).read_bytes() == (folder / JOURNAL).read_bytes()


def test_lines_of_earlier_versions_are_valid(tmp_path: Path) -> None:
    """They hash the margin too; an edit is found nevertheless."""
    before = chained_journal.LEFT_OUT_AT_FIRST
    with mock.patch.object(chained_journal.content_of, "__defaults__", (before,)):
        chained_journal.append(tmp_path, MADE[1].model_copy(update={"margin": 14}))
    assert sentences(tmp_path) == []
    scale_times(tmp_path)
    assert "records were edited after they were written: 1 trial" in sentences(tmp_path)[0]


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
        (keep(0), "records name a line that is missing from the journal: 2 trials"),
        (keep(), "records name a line that is missing from the journal: 3 trials"),
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


def test_of_many_records_the_first_three_are_named_and_counted(tmp_path: Path) -> None:
    """A page's warning does not list hundreds of ids."""
    made = [
        chained_journal.append(
            tmp_path, record_of(Trial(steps=2, warmup=0, seed=seed), suite="q", order=seed)
        )
        for seed in range(7)
    ]
    for record in made[1:]:
        trial_record.path_of(tmp_path, record.id).unlink()
    (sentence,) = sentences(tmp_path)
    named = ", ".join(record.id for record in made[1:4])
    assert sentence.endswith(f"deleted after they were written: 6 trials ({named} and 3 more).")


def test_older_records_have_no_journal(tmp_path: Path) -> None:
    """Records without a journal are counted, and not called deleted or edited."""
    for made in MADE:
        trial_record.write(tmp_path, made)
    (sentence,) = sentences(tmp_path)
    assert sentence.startswith("Not in the journal: 3 records, written before zeropp kept journals")


def killed(folder: Path, made: Record, written: str, moment: str) -> None:
    """Append a record in a process that is killed by signal 9 while it writes the record or the journal."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=append_and_die, args=(folder, made, written, moment))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def append_and_die(folder: Path, made: Record, written: str, moment: str) -> None:
    """Append a record, and end this process by signal 9 before or after the renaming of the file ``written``."""
    replace = Path.replace

    def renamed(self: Path, target: Path) -> Path:
        if (self.name == JOURNAL) == (written == "journal") and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = replace(self, target)
        if (self.name == JOURNAL) == (written == "journal"):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    with mock.patch.object(Path, "replace", renamed):
        chained_journal.append(folder, made)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("written", ["record", "journal"])
@pytest.mark.parametrize("earlier", ["nothing", "a failure"])
def test_a_run_killed_while_it_writes_leaves_nothing_to_name(
    tmp_path: Path, written: str, moment: str, earlier: str
) -> None:
    """At any moment, the next run completes the journal or runs the trial again, and then all records match.

    Until then, a report has at most one sentence, which names the record without a line.
    """
    chained_journal.append(tmp_path, MADE[0])
    if earlier == "a failure":
        failure = Failure(kind="lost", message="", log=None)
        chained_journal.append(tmp_path, MADE[1].model_copy(update={"failure": failure}))
    killed(tmp_path, MADE[1], written, moment)
    between = (written, moment) in {("record", "after"), ("journal", "before")}
    named = sentences(tmp_path)
    assert len(named) == between
    assert all(
        MADE[1].id in sentence and "the next run of the suite adds the line" in sentence for sentence in named
    )
    chained_journal.complete(tmp_path)
    kept = trial_record.path_of(tmp_path, MADE[1].id)
    if not kept.exists() or not trial_record.read(kept).settled:
        assert (written, moment) == ("record", "before")
        chained_journal.append(tmp_path, MADE[1])
    chained_journal.append(tmp_path, MADE[2])
    assert sentences(tmp_path) == []
    entries = [trial_record.read(trial_record.path_of(tmp_path, made.id)).entry for made in MADE]
    assert entries == [0, 1 + (earlier == "a failure"), 2 + (earlier == "a failure")]


@pytest.mark.parametrize("full", ["record", "journal"])
def test_a_full_disk_leaves_nothing_to_name(tmp_path: Path, full: str) -> None:
    """If the record or the journal does not fit, the run ends with an error, and the next run makes both match."""
    chained_journal.append(tmp_path, MADE[0])
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    fsync, calls = os.fsync, itertools.count()

    def failing(handle: int) -> None:
        if next(calls) == (full == "journal"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with (
        mock.patch.object(os, "fsync", failing),
        pytest.raises(RecordError, match=r"No space left on device$"),
    ):
        chained_journal.append(tmp_path, MADE[1])
    assert kept.items() <= {path.name: path.read_bytes() for path in tmp_path.iterdir()}.items()
    chained_journal.complete(tmp_path)
    if full == "record":
        chained_journal.append(tmp_path, MADE[1])
    assert sentences(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system, which only root may do")
def test_a_full_file_system_leaves_nothing_to_name(tmp_path: Path) -> None:
    """On a file system of 1 MB records are appended until it is full; freed space lets the next run go on."""
    script = f"""
import sys
from pathlib import Path
from harness.records import chained_journal, trial_record
from harness.records.trial_record import RecordError
folder = Path({str(tmp_path)!r})
made = trial_record.read(Path({str(tmp_path)!r}).parent / "made.json")
for seed in range(10_000):
    try:
        chained_journal.append(folder, made.model_copy(update={{"id": f"{{seed:012x}}"}}))
    except RecordError as error:
        assert str(error).endswith("No space left on device"), error
        break
(folder / "ballast").unlink()
chained_journal.complete(folder)
chained_journal.append(folder, made)
records = trial_record.read_all(folder)
assert len(records) > 10, len(records)
assert chained_journal.verify(folder, records) == []
print("all match")
"""
    trial_record.write(tmp_path.parent, MADE[0])
    trial_record.path_of(tmp_path.parent, MADE[0].id).rename(tmp_path.parent / "made.json")
    mount = f"mount -t tmpfs -o size=1m none {shlex.quote(str(tmp_path))}"
    ballast = f"head -c 200000 /dev/zero > {shlex.quote(str(tmp_path / 'ballast'))}"
    command = f"{mount} && {ballast} && {shlex.quote(sys.executable)} -c {shlex.quote(script)}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, check=False, cwd=ROOT
    )
    if "mount" in done.stderr.partition("\n")[0] or "unshare" in done.stderr:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    assert done.stdout == "all match\n", done.stderr
