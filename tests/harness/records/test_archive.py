"""A suite's records are packed into one file and unpacked unchanged; an archive can hold nothing else."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from harness.records import archive, chained_journal, trial_record
from harness.records.trial_record import RecordError
from harness.suites.trial import Trial
from tests.report.records import record_of


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    """Records, runs and traces are equal to the byte, logs are left out, and packing again gives the same file."""
    folder = tmp_path / "a" / "q"
    for seed in range(3):
        trial_record.write(folder, record_of(Trial(steps=2, warmup=0, seed=seed), suite="q"))
    (folder / "runs").mkdir()
    (folder / "runs" / f"{'0' * 16}.json").write_text("{}", encoding="utf-8")
    (folder / "traces").mkdir()
    (folder / "traces" / f"trace-{'0' * 12}.json").write_text("{}", encoding="utf-8")
    (folder / "traces" / f"trace-{'0' * 12}.svg").write_text("<svg/>", encoding="utf-8")
    (folder / "logs").mkdir()
    (folder / "logs" / "x.log").write_text("x", encoding="utf-8")
    packed = archive.pack(folder, tmp_path / "b")
    unpacked = archive.unpack(packed)
    assert unpacked == tmp_path / "b" / "q"
    for part in ("*.json", "runs/*.json", "traces/*.json"):
        assert {path.name: path.read_bytes() for path in unpacked.glob(part)} == {
            path.name: path.read_bytes() for path in folder.glob(part)
        }
    assert not (unpacked / "logs").exists()
    assert not list(unpacked.rglob("*.svg"))
    assert archive.pack(unpacked, tmp_path / "c").read_bytes() == packed.read_bytes()


def test_what_would_not_come_back_is_not_packed(tmp_path: Path) -> None:
    """A trace under another name is refused by its path, and no archive is written."""
    folder = tmp_path / "q"
    trial_record.write(folder, record_of(Trial(steps=2, warmup=0), suite="q"))
    (folder / "traces").mkdir()
    (folder / "traces" / "trace-old.json").write_text("{}", encoding="utf-8")
    with pytest.raises(
        RecordError, match=r"trace-old.json: is larger than 64 MiB, or archives do not allow its name"
    ):
        archive.pack(folder, tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "name",
    ["../0123456789ab.json", "/tmp/0123456789ab.json", "q/../0123456789ab.json", "q/report.html",  # noqa: S108
     "other/0123456789ab.json", "q/0123456789ab.json"],
)  # fmt: skip
def test_nothing_but_records_comes_out(tmp_path: Path, name: str) -> None:
    """An entry that is not named like a record of the suite is refused and not written, and so is a link."""
    entry = tarfile.TarInfo(name)
    if name.startswith("q/0"):
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(tmp_path / "q.tar.xz", "w:xz") as file:
        file.addfile(entry, io.BytesIO())
    with pytest.raises(RecordError, match="which is no file of suite q"):
        archive.unpack(tmp_path / "q.tar.xz")
    assert [path.name for path in tmp_path.iterdir()] == ["q.tar.xz"]


def test_damaged_archives_are_named(tmp_path: Path) -> None:
    """A file that ends early, or is no archive, is refused in one line."""
    folder = tmp_path / "q"
    trial_record.write(folder, record_of(Trial(steps=2, warmup=0)))
    whole = archive.pack(folder, tmp_path).read_bytes()
    for content in (b"", b"no archive", whole[: len(whole) // 2]):
        (tmp_path / "q.tar.xz").write_bytes(content)
        with pytest.raises(RecordError, match="cannot be unpacked"):
            archive.unpack(tmp_path / "q.tar.xz")


def test_records_that_are_not_in_it_are_not_mixed_in(tmp_path: Path) -> None:
    """A folder with a further record, or a later one of a trial, is refused and stays unchanged."""
    folder = tmp_path / "q"
    first = record_of(Trial(steps=2, warmup=0))
    chained_journal.append(folder, first)
    packed = archive.pack(folder, tmp_path)
    chained_journal.append(folder, first.model_copy(update={"finished": "later"}))
    for refusal in ("journal has lines", "has records"):
        kept = {path: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(RecordError, match=rf"{refusal} that q\.tar\.xz lacks"):
            archive.unpack(packed)
        assert kept == {path: path.read_bytes() for path in folder.iterdir()}
        trial_record.write(folder, record_of(Trial(steps=2, warmup=0, seed=1)))


def test_an_archive_of_what_was_unpacked_and_went_on_is_unpacked_over_it(tmp_path: Path) -> None:
    """An archive may be unpacked over a folder whose journal is the beginning of its own."""
    folder = tmp_path / "a" / "q"
    for seed in range(2):
        chained_journal.append(folder, record_of(Trial(steps=2, warmup=0, seed=seed)))
        unpacked = archive.unpack(archive.pack(folder, tmp_path))
        assert {path.name: path.read_bytes() for path in unpacked.iterdir()} == {
            path.name: path.read_bytes() for path in folder.iterdir()
        }


def test_a_folder_whose_name_has_no_room_is_refused(tmp_path: Path) -> None:
    """Tar has room for 155 characters of a folder's name; a longer one is refused in one line."""
    for length in (155, 156):
        folder = tmp_path / ("q" * length)
        trial_record.write(folder, record_of(Trial(steps=2, warmup=0), suite="q"))
        (folder / "traces").mkdir()
        (folder / "traces" / f"trace-{'0' * 12}.json").write_text("{}", encoding="utf-8")
    assert archive.unpack(archive.pack(tmp_path / ("q" * 155), tmp_path / "b")).name == "q" * 155
    with pytest.raises(
        RecordError, match=r"archives do not allow its name or its folder's name; move .* rename"
    ):
        archive.pack(folder, tmp_path / "b")
    assert [path.name for path in (tmp_path / "b").glob("*.xz")] == [f"{'q' * 155}.tar.xz"]


def test_a_folder_may_be_named_by_the_way_to_it(tmp_path: Path) -> None:
    """``q/runs/..`` is the folder q."""
    trial_record.write(tmp_path / "q", record_of(Trial(steps=2, warmup=0), suite="q"))
    (tmp_path / "q" / "runs").mkdir()
    assert archive.pack(tmp_path / "q" / "runs" / "..", tmp_path).name == "q.tar.xz"
