"""Numbers in README and docs follow from the committed records, and nothing else passes for them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from docs.tables import from_records
from docs.tables.from_records import ROOT
from harness import cli
from report.answer.lead import answer
from report.data.metrics import Derived
from report.tables import all_tables

FILES = {  # with the text before the first number by the records
    "README.md": "<!-- of the records -->",
    "docs/questions.md": "<!-- finding 1 -->",
    "docs/paper.md": "<!-- by volume -->",
    "docs/results.md": "\n## ",
    "docs/claims.md": "\n## ",
}


def other(digit: str) -> str:
    return str((int(digit) + 1) % 10)


@pytest.mark.long
def test_what_is_committed_follows_from_the_records_and_any_other_digit_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files and figures follow from the records; with one digit of a number changed, the check names
    the file and the line; and pages say one number for a step.
    """
    suites = from_records.derive_all()  # once for all: it takes half a minute
    files = from_records.expected_files(ROOT, suites)
    monkeypatch.setattr(from_records, "derive_all", lambda _: suites)
    monkeypatch.setattr(from_records, "expected_files", lambda _, __: files)
    assert cli.main(["report", "--check"]) == cli.OK, capsys.readouterr().out
    expected = []
    for name in (*FILES, "docs/figures"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    for name, begin in FILES.items():
        path = tmp_path / name
        text = path.read_text(encoding="utf-8")
        start = text.index(begin) + len(begin)
        digit = re.search(r"\d", text[start:])
        assert digit is not None
        place = start + digit.start()
        path.write_text(text[:place] + other(text[place]) + text[place + 1 :], encoding="utf-8")
        expected.append(f"{name}: line {text[:place].count(chr(10)) + 1} is ")
    lines = from_records.differences(tmp_path)
    assert [line[: len(begin)] for line, begin in zip(lines, expected, strict=True)] == expected
    check_one_number_for_a_step(suites)


def check_one_number_for_a_step(suites: Mapping[str, Derived]) -> None:
    """On every page of one setting that states steps, the lead's seconds and ratios are the Summary's."""
    compared = 0
    sentence = re.compile(r"A step of (.+?) takes (\S+) s where (.+?)'s takes (\S+) s")
    for suite, derived in suites.items():
        if derived.trials.empty or derived.trials["setting"].nunique() > 1:
            continue
        summary, lead = all_tables.summary(derived), answer(derived).sentences
        rows = {row[0]: row for row in summary.rows()}
        titles = [column.title for column in summary.columns]
        match = next(filter(None, map(sentence.match, lead[1:])), None)
        if match is None or match[1] not in rows or match[3] not in rows:
            continue
        step = titles.index("Step, s")
        speedup = next(n for n, title in enumerate(titles) if "Speed-up" in title)
        assert (rows[match[1]][step], rows[match[3]][step]) == (match[2], match[4]), suite
        assert rows[match[1]][speedup].split(" (")[0] in lead[0], suite
        compared += 1
    assert compared >= 2
