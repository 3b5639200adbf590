"""The roofline of codecs is what rounds of the benchmark give."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from harness.records import bench_record
from report.bench.page import boards_of, build
from report.bench.roofline import NAMES, points, rooflines
from tests.report.bench.bench_records import codecs, engine


def test_a_dot_is_elements_a_second_and_a_byte() -> None:
    """Both are of the sample's own sizes, and what is reached is the copy's share, as in the table."""
    record = codecs(("int8:256", "int4:256"))
    ((board, data),) = boards_of([record])
    for figure, rounds in rooflines(data):
        assert figure.name in NAMES
        found, roof = points(rounds)
        longest = max(int(one.names["numel"] or 0) for one in record.samples)
        copies = [
            2 * one.sizes["element_bytes"] / seconds / 1e9
            for one in record.samples
            for seconds in one.reference_seconds
            if figure.name == f"roofline-{one.names['type']}-{one.names['device']}"
            and int(one.names["numel"] or 0) == longest
        ]
        assert roof == pytest.approx(statistics.median(copies))
        for sample in record.samples:
            names = sample.names
            if figure.name != f"roofline-{names['type']}-{names['device']}":
                continue
            here = found[(found["backend"] == names["backend"]) & (found["codec"] == names["codec"])]
            (row,) = here[here["operation"] == board.labels(sample)["operation"]].to_dict("records")
            moved = sample.sizes["moved_bytes"]
            rates = [moved / seconds / 1e9 for seconds in sample.seconds]
            assert row["intensity"] == pytest.approx(int(names["numel"] or 0) / moved)
            assert row["rate"] == pytest.approx(statistics.median(rates) * row["intensity"])
            assert row["reached"] == pytest.approx(statistics.median(rates) / roof)


def test_only_codecs_have_one(tmp_path: Path) -> None:
    """It is on the page of codecs, with its table, and on no other."""
    for name, record, count in (("codecs", codecs(), 1), ("engine", engine(), 0)):
        folder = tmp_path / name
        bench_record.write(folder, record)
        build(folder)
        assert len(list((folder / "figures").glob("roofline-*.csv"))) == count
        assert ("Roofline of codecs" in (folder / "report.html").read_text()) == bool(count)
