"""What is behind one number is said, and a cell that is not there is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import Refusal
from harness.records.record import write
from report.tables.all_tables import explanation
from tests.report.records import records_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("quickstart")
    for record in records_of("quickstart", repeats=2):
        write(there, record)
    return there


def test_a_number_is_its_records_and_formula(folder: Path) -> None:
    """Trials of the contender and of what it is compared with, and the ends of its interval."""
    told = explanation(folder, "summary", "ZeRO++", "Speed-up over ZeRO-3")
    records = records_of("quickstart", repeats=2)
    for strategy, words in (("zeropp", "records (2): "), ("zero3", "compared with (2): ")):
        ids = sorted(record.id for record in records if record.trial["strategy"] == strategy)
        assert words + " ".join(f"{one}.json" for one in ids) in told
    assert "speedup_low = " in told
    assert "Speed-up: geometric mean over repeats and seeds" in told
    assert told.splitlines()[0].startswith("Summary, ZeRO++, Speed-up over ZeRO-3: ")


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (("sumary", "ZeRO++", "n"), r"no table 'sumary': expected one of summary, .*did you mean 'summary'"),
        (("summary", "DDP", "n"), r"0 rows of summary hold 'DDP': expected words of one of ZeRO-3; "),
        (("summary", "Z", "n"), r"[3-9] rows of summary hold 'Z'"),
        (("summary", "ZeRO++", "speed"), "no column 'speed' in summary: expected one of Contender; n; Step"),
    ],
)
def test_what_is_not_there_is_refused(folder: Path, cell: tuple[str, str, str], words: str) -> None:
    """Naming what there is."""
    with pytest.raises(Refusal, match=words):
        explanation(folder, *cell)
