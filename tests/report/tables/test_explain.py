"""A number is explained by its records and formula, and an unknown cell is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from harness.errors import Refusal
from harness.records.trial_record import write
from report import build
from report.build import explanation
from report.data.frames import frames_of
from report.data.metrics import derive
from report.tables.summary import summary
from report.tables.table import Column, Table
from tests.report.records import records_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    for record in records_of("quickstart", repeats=2):
        write(folder, record)
    return folder


def test_a_number_is_its_records_and_formula(folder: Path) -> None:
    """Trials of the configuration and of the baseline, and the ends of the interval."""
    text = explanation(folder, "summary", "ZeRO++", "Speed-up over ZeRO-3")
    records = records_of("quickstart", repeats=2)
    for strategy, prefix in (("zeropp", "records (2): "), ("zero3", "compared with (2): ")):
        ids = sorted(record.id for record in records if record.trial["strategy"] == strategy)
        assert prefix + " ".join(f"{identity}.json" for identity in ids) in text
    assert "speedup_low = " in text
    assert (
        "Speed-up: geometric mean, over pairs of trials with the same repeat and seed, of step of the" in text
    )
    assert text.splitlines()[0].startswith("Summary, ZeRO++, Speed-up over ZeRO-3: ")


def test_a_verdict_is_its_records_and_its_word(folder: Path) -> None:
    """The table of the page's head is explained as others are."""
    text = explanation(folder, "verdicts", "ZeRO++", "Speed-up")
    assert re.match(r"Verdicts, ZeRO\+\+, Speed-up: 3\.\d\d \?\n", text)
    assert "speedup_verdict = inconclusive" in text
    assert "records (2): " in text
    assert "compared with (2): " in text


def test_values_of_other_columns_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count ``n`` is not explained by ``net_speedup``, nor the speed-up of a step by that of generating."""
    cells = {"where": "2x2 ranks", "configuration": "ZeRO++", "n": 6, "net_speedup": 1.5}
    cells |= {"speedup": 2.0, "speedup_verdict": "better", "speedup_generate": 3.0}
    printed = ("configuration", "n", "net_speedup", "speedup", "speedup_generate")
    table = Table("made", "Made", "", pd.DataFrame([cells]), tuple(Column(key, key, str) for key in printed))
    monkeypatch.setattr(build, "every_table", lambda _: [table])

    def values(column: str) -> list[str]:
        return re.findall(r"^  (.+)$", explanation(folder, "made", "ZeRO++", column), re.MULTILINE)

    assert values("n") == ["n = 6"]
    assert values("speedup") == ["speedup = 2.0", "speedup_verdict = better"]
    assert values("speedup_generate") == ["speedup_generate = 3.0"]


def test_a_row_is_found_by_a_place_that_all_rows_share(folder: Path) -> None:
    """Which stands in the caption: what finds a row among several rates also finds it at one."""
    assert explanation(folder, "summary", "ZeRO++, 50 Mbit/s", "n") == explanation(
        folder, "summary", "ZeRO++", "n"
    )


@pytest.mark.parametrize(
    ("asked", "title"),
    [
        ("Speed-up over the hierarchical ZeRO-3", "Speed-up over the hierarchical ZeRO-3"),
        ("Speed-up over ZeRO-3", "Speed-up over the hierarchical ZeRO-3"),  # its words
        ("Speed-up", "Speed-up over the hierarchical ZeRO-3"),  # its beginning
        ("speedup", "Speed-up over the hierarchical ZeRO-3"),  # its name in the CSV
        ("Step", "Step, s"),
        ("n", "n"),  # a title, though others begin so
        ("baseline paper's", "over the paper's baseline"),
    ],
)
def test_a_column_is_found_by_its_beginning_or_its_words(asked: str, title: str) -> None:
    """Where the paper's baseline ran, the title of the speed-up is longer than what guides type."""
    table = summary(derive(frames_of(records_of("baselines", repeats=1))))
    assert table.column(asked).title == title


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            "the",
            r"2 columns of table summary match 'the': expected one of Speed-up over the hierarchical ZeRO-3; over the",
        ),
        (
            "Speed-up over DDP",
            r"no column 'Speed-up over DDP' in table summary: expected one of Configuration; n; Step",
        ),
        ("", "no column '' in table summary: expected one of Configuration"),
        ("S", r"[2-9] columns of table summary match 'S': expected one of Step, s; Speed-up"),
    ],
)
def test_a_column_that_is_not_one_is_refused_with_those_there_are(asked: str, message: str) -> None:
    """Several that match are listed, else all."""
    table = summary(derive(frames_of(records_of("baselines", repeats=1))))
    with pytest.raises(Refusal, match=message):
        table.column(asked)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (
            ("sumary", "ZeRO++", "n"),
            r"no table 'sumary': expected one of verdicts, summary, .*did you mean 'summary'",
        ),
        (("summary", "DDP", "n"), r"0 rows of table summary hold 'DDP': expected words .*: ZeRO-3; "),
        (("summary", "Z", "n"), r"[3-9] rows of table summary hold 'Z'"),
        (
            ("summary", "ZeRO++", "speed"),
            "no column 'speed' in table summary: expected one of Configuration; n; Step",
        ),
    ],
)
def test_what_is_not_there_is_refused(folder: Path, cell: tuple[str, str, str], message: str) -> None:
    """The message lists the valid names."""
    with pytest.raises(Refusal, match=message):
        explanation(folder, *cell)
