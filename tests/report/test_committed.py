"""Numbers in README and docs follow from the committed records, and nothing else passes for them."""

from __future__ import annotations

import io
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from harness import cli
from harness.records.archive import unpack
from harness.records.record import RecordError
from report import committed
from report.answer.lead import answer
from report.committed import REFERENCE, ROOT
from report.data.frames import load
from report.data.metrics import derive
from report.tables import registry

FILES = {  # and where in each the first number by the records stands
    "README.md": "<!-- of the records -->",
    "docs/questions.md": "<!-- finding 1 -->",
    "docs/paper.md": "<!-- by volume -->",
    "docs/results.md": "\n## ",
    "docs/claims.md": "\n## ",
}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The files that follow from records, and the records, in a folder of their own."""
    for name in (*FILES, "docs/figures", str(REFERENCE)):
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
    """What files say by the records, figures among them, follows from the records; with one digit of one
    number in a file changed, the check names the file and the line.
    """
    wanted = committed.wanted(copied)  # once for all: the copied records are the committed ones
    monkeypatch.setattr(committed, "wanted", lambda _: wanted)
    assert cli.main(["report", "--check"]) == cli.OK, capsys.readouterr().out
    expected = []
    for name, begin in FILES.items():
        path = copied / name
        text = path.read_text(encoding="utf-8")
        start = text.index(begin) + len(begin)
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


def test_documents_are_text_and_no_longer_than_one_reads() -> None:
    """No dot is escaped in what is written from records, and docs/results.md has at most 600 lines."""
    results, claims = (
        (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("results.md", "claims.md")
    )
    assert "\\." not in results + claims
    assert results.count("\n") <= 600


def test_a_page_prints_one_number_for_a_step(copied: Path, tmp_path: Path) -> None:
    """On every committed page that states steps, the lead's seconds and ratios are those of the Summary."""
    compared = 0
    for packed in sorted((copied / REFERENCE).glob("*.tar.xz")):
        derived = derive(load(unpack(packed, tmp_path)))
        if derived.trials.empty:
            continue
        rows = (
            {row[0]: row for row in registry.summary(derived).rows()}
            if derived.trials["cell"].nunique() == 1
            else {}
        )
        lead = answer(derived).sentences
        told = re.compile(r"A step of (.+?) takes (\S+) s where (.+?)'s takes (\S+) s")
        found = next((match for sentence in lead[1:] if (match := told.match(sentence))), None)
        if found is None or found[1] not in rows or found[3] not in rows:
            continue
        titles = [column.title for column in registry.summary(derived).columns]
        step, speedup = (
            titles.index("Step, s"),
            next(n for n, title in enumerate(titles) if "Speed-up" in title),
        )
        assert (rows[found[1]][step], rows[found[3]][step]) == (found[2], found[4]), packed.name
        assert rows[found[1]][speedup].split(" (")[0] in lead[0], packed.name
        compared += 1
    assert compared >= 2
