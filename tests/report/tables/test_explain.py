"""A number is explained by its records and formula, and an unknown cell is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import Refusal
from harness.records.record import write
from report.tables.all_tables import explanation
from tests.report.records import records_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    for record in records_of("quickstart", repeats=2):
        write(folder, record)
    return folder


def test_a_number_is_its_records_and_formula(folder: Path) -> None:
    """Trials of the contender and of the baseline, and the ends of the interval."""
    text = explanation(folder, "summary", "ZeRO++", "Speed-up over ZeRO-3")
    records = records_of("quickstart", repeats=2)
    for strategy, prefix in (("zeropp", "records (2): "), ("zero3", "compared with (2): ")):
        ids = sorted(record.id for record in records if record.trial["strategy"] == strategy)
        assert prefix + " ".join(f"{identity}.json" for identity in ids) in text
    assert "speedup_low = " in text
    assert "Speed-up: geometric mean over repeats and seeds" in text
    assert text.splitlines()[0].startswith("Summary, ZeRO++, Speed-up over ZeRO-3: ")


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (("sumary", "ZeRO++", "n"), r"no table 'sumary': expected one of summary, .*did you mean 'summary'"),
        (("summary", "DDP", "n"), r"0 rows of summary hold 'DDP': expected words of one of ZeRO-3; "),
        (("summary", "Z", "n"), r"[3-9] rows of summary hold 'Z'"),
        (("summary", "ZeRO++", "speed"), "no column 'speed' in summary: expected one of Contender; n; Step"),
    ],
)
def test_what_is_not_there_is_refused(folder: Path, cell: tuple[str, str, str], message: str) -> None:
    """The message lists the valid names."""
    with pytest.raises(Refusal, match=message):
        explanation(folder, *cell)
