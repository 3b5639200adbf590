"""Numbers in README and docs follow from the committed records, and nothing else passes for them."""

from __future__ import annotations

import io
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from harness import cli
from harness.records.record import RecordError
from report import committed
from report.committed import REFERENCE, ROOT


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The files that follow from records, and the records, in a folder of their own."""
    for name in ("README.md", "docs/results.md", "docs/claims.md", "docs/quickstart.svg", str(REFERENCE)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        whole = ROOT / name
        (shutil.copytree if whole.is_dir() else shutil.copy)(whole, tmp_path / name)
    return tmp_path


def other(digit: str) -> str:
    """Another digit."""
    return str((int(digit) + 1) % 10)


def test_what_is_committed_follows_from_the_records_and_any_other_digit_is_found(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """README's sentences and figure, docs/results.md and docs/claims.md are those of the records; with one
    digit of one number in a file changed, the check names the file and the line.
    """
    wanted = committed.wanted(copied)  # once for all: the copied records are the committed ones
    monkeypatch.setattr(committed, "wanted", lambda _: wanted)
    assert cli.main(["report", "--check"]) == cli.OK, capsys.readouterr().out
    expected = []
    for name in ("README.md", "docs/results.md", "docs/claims.md"):
        path = copied / name
        text = path.read_text(encoding="utf-8")
        start = text.index("<!-- of the records -->") if name == "README.md" else text.index("\n## ")
        found = re.search(r"\d", text[start:])
        assert found is not None
        place = start + found.start()
        path.write_text(text[:place] + other(text[place]) + text[place + 1 :], encoding="utf-8")
        expected.append(f"{name}: line {text[:place].count(chr(10)) + 1} is ")
    lines = committed.wrong(copied)
    assert [line[: len(begin)] for line, begin in zip(lines, expected, strict=True)] == expected


def test_an_edited_record_is_refused(copied: Path) -> None:
    """One digit of a committed record changed, and it is no record of these trials any more."""
    path = next((copied / REFERENCE).glob("quickstart.tar.xz"))
    with tarfile.open(path) as archive:
        parts = [(entry, archive.extractfile(entry).read()) for entry in archive]  # type: ignore[union-attr]
    with tarfile.open(path, "w:xz") as archive:
        for number, (entry, content) in enumerate(parts):
            changed = content
            if number == 0:
                place = content.index(b'"total":') + 11
                changed = content[:place] + other(chr(content[place])).encode() + content[place + 1 :]
            archive.addfile(entry, io.BytesIO(changed))
    with pytest.raises(RecordError, match="edited or damaged"):
        committed.wrong(copied)
