"""Records of benchmarks become a page whose numbers are those of the rounds."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.records import bench_record
from harness.records.bench_record import Bench
from harness.records.confidence_intervals import FEWEST
from harness.records.trial_record import RecordError
from report.bench_page import OPERATIONS, build, show, tables_of
from report.data.frames import ReportError
from tests.report.bench.bench_records import codecs, collectives, overlap


def tables(*benches: Bench) -> dict[str, list[dict[str, Any]]]:
    """Rows of the tables of these records."""
    return {table.name: table.data.to_dict("records") for table in tables_of(benches)}  # type: ignore[misc]


def test_ratios_are_of_pairs() -> None:
    """A speed is the median over rounds of the copy's seconds over the operation's, of one round."""
    record = codecs(("int8:256",))
    names = [sample.names for sample in record.samples]
    keys = [(OPERATIONS[str(name["operation"])], name["backend"]) for name in names]
    samples = dict(zip(keys, record.samples, strict=True))
    rows = tables(record)["codecs"]
    assert len(rows) == len(samples)
    for row in rows:
        sample = samples[row["where"].split(",")[0], row["backend"]]
        pairs = zip(sample.reference_seconds, sample.seconds, strict=True)
        speed = row["speed"]
        assert speed.estimate == pytest.approx(statistics.median(copy / seconds for copy, seconds in pairs))
        assert speed.known == (len(sample.seconds) >= FEWEST)
        assert not speed.known or speed.low <= speed.estimate <= speed.high
        work = sample.sizes["moved_bytes"] / (2 * sample.sizes["element_bytes"])
        assert row["of_copy"].estimate == pytest.approx(speed.estimate * work)


def test_runs_of_one_machine_are_put_together() -> None:
    """Rounds of several runs count as one run's."""
    once, twice = tables(codecs())["codecs"], tables(codecs(), codecs())["codecs"]
    assert [row["rounds"] for row in twice] == [2 * row["rounds"] for row in once]
    assert [row["speed"].estimate for row in twice] == [row["speed"].estimate for row in once]


def test_what_a_round_is_divided_by() -> None:
    """Times gloo is gloo's seconds over ours; a step is divided by compute alone of its round, chunks by the
    shorter hop of theirs.
    """
    rows = tables(collectives(ratio=5.0))["collectives"]
    assert [row["times"].estimate for row in rows] == pytest.approx([5.0] * len(rows))
    by_name = tables(overlap(of_alone=1.05, hidden=0.9))
    for row in by_name["steps"]:
        assert row["of_alone"].estimate == pytest.approx(1.05)
        assert row["room_forward"].estimate == pytest.approx(1.26)
    (hops,) = by_name["hops"]
    assert hops["hidden"].estimate == pytest.approx(0.9)
    assert hops["first_milliseconds"].estimate == pytest.approx(25.0)


PAGES: dict[str, tuple[Callable[[], Bench], tuple[str, ...]]] = {
    "codecs": (codecs, ("codecs",)),
    "collectives": (collectives, ("collectives",)),
    "overlap": (overlap, ("steps", "hops")),
}


@pytest.mark.parametrize("subject", PAGES)
def test_page(tmp_path: Path, subject: str) -> None:
    """The page holds every table, escapes what records hold, and comes out equal twice."""
    make, names = PAGES[subject]
    bench_record.write(tmp_path, make())
    page = build(tmp_path)
    text = page.read_text(encoding="utf-8")
    for name in names:
        assert f'<section id="table-{name}">' in text
        assert (tmp_path / "tables" / f"{name}.csv").exists()
    assert "<codebook>" not in text
    assert build(tmp_path).read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("subject", "texts"),
    [
        ("codecs", ("GB/s: bytes moved / (10^9 * seconds)", "'Encode with carried error' adds")),
        ("collectives", ()),
        ("overlap", ("A ratio of 1 means that all communication is hidden",)),
    ],
)
def test_a_terminal_shows_narrow_tables_and_how_to_read_them(subject: str, texts: tuple[str, ...]) -> None:
    """They need no more than 100 columns; text below them explains brackets, ratios and columns."""
    out = Console(width=200, file=io.StringIO(), color_system=None)
    show([PAGES[subject][0]()], out)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    printed = " ".join(text.split())
    for part in ("each ratio is formed within one round", *texts):
        assert part in printed
    assert ("GB/s:" in printed) == (subject == "codecs")


def test_what_is_not_put_together(tmp_path: Path) -> None:
    """Records of two machines, or of two subjects, are refused."""
    with pytest.raises(RecordError, match="no records in it"):
        build(tmp_path)
    bench_record.write(tmp_path, codecs())
    other = bench_record.write(tmp_path, codecs(pool="b" * 12))
    with pytest.raises(ReportError, match="2 machines or versions of the code"):
        build(tmp_path)
    other.unlink()
    bench_record.write(tmp_path, collectives())
    with pytest.raises(ReportError, match="2 benchmarks"):
        build(tmp_path)
