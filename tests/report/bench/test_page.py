"""Records of benchmarks become a page whose numbers are those of the rounds."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from harness.records import bench_record
from harness.records.bench_record import Bench
from harness.records.confidence_intervals import FEWEST
from harness.records.record import RecordError
from report.bench.boards import Board
from report.bench.page import boards_of, build, derived, scattering, show
from report.data.frames import ReportError
from tests.report.bench.bench_records import codecs, collectives, overlap
from tests.support.params import long


def numbers(board: Board, data: pd.DataFrame) -> pd.DataFrame:
    """Rows of a table, with the ends of intervals in columns of their own."""
    found = derived(board, data)
    for key in board.measures:
        for end in ("low", "high"):
            found[f"{key}_{end}"] = [getattr(one, end) for one in found[key]]
        found[key] = [one.estimate for one in found[key]]
    return found


def rows(*benches: Bench) -> pd.DataFrame:
    ((board, data),) = boards_of(benches)
    return numbers(board, data)


def test_ratios_are_of_pairs() -> None:
    """A speed is the median over rounds of the copy's seconds over the operation's, of one round."""
    record = codecs(("int8:256",))
    for sample, row in zip(record.samples, rows(record).to_dict("records"), strict=True):
        pairs = zip(sample.reference_seconds, sample.seconds, strict=True)
        assert row["speed"] == pytest.approx(statistics.median(copy / took for copy, took in pairs))
        few = len(sample.seconds) < FEWEST  # which have no interval
        assert math.isnan(row["speed_low"]) == math.isnan(row["speed_high"]) == few
        assert few or row["speed_low"] <= row["speed"] <= row["speed_high"]
        work = sample.sizes["moved_bytes"] / (2 * sample.sizes["element_bytes"])
        assert row["of_copy"] == pytest.approx(row["speed"] * work)


def test_runs_of_one_machine_are_put_together() -> None:
    """Rounds of several runs count as one run's."""
    once, twice = rows(codecs()), rows(codecs(), codecs())
    assert list(twice["rounds"]) == [2 * rounds for rounds in once["rounds"]]
    assert list(twice["speed"]) == list(once["speed"])


def test_times_gloo() -> None:
    """Times gloo is gloo's seconds over ours."""
    found = rows(collectives(ratio=5.0))
    assert found["times"].to_list() == pytest.approx([5.0] * len(found))


def test_what_overlap_hides() -> None:
    """A step stands beside compute alone of its round, chunks beside the shorter hop of theirs."""
    found = {
        board.name: numbers(board, data) for board, data in boards_of([overlap(of_alone=1.05, hidden=0.9)])
    }
    assert found["steps"]["of_alone"].to_list() == pytest.approx([1.05, 1.05])
    assert found["steps"]["room_forward"].to_list() == pytest.approx([1.26, 1.26])
    assert found["hops"]["hidden"].to_list() == pytest.approx([0.9])
    assert found["hops"]["first_milliseconds"].to_list() == pytest.approx([25.0])


PAGES: dict[str, tuple[Callable[[], Bench], tuple[str, ...], tuple[str, ...]]] = {
    "codecs": (codecs, ("codecs",), ("codecs-fp32-cpu",)),
    "collectives": (collectives, ("collectives",), ("collectives-all_gather", "collectives-reduce_scatter")),
    "overlap": (overlap, ("steps", "hops"), ("steps", "hops")),
}


@pytest.mark.parametrize("subject", ["overlap", *long("codecs", "collectives")])
def test_page(tmp_path: Path, subject: str) -> None:
    """The page holds every figure and its table, escapes what records hold, and comes out equal twice."""
    made, tables, names = PAGES[subject]
    bench_record.write(tmp_path, made())
    page = build(tmp_path)
    text = page.read_text(encoding="utf-8")
    for name in names:
        assert f'<figure id="{name}">' in text
        assert (tmp_path / "figures" / f"{name}.svg").exists()
    assert all((tmp_path / "tables" / f"{name}.csv").exists() for name in tables)
    assert "<codebook>" not in text
    assert build(tmp_path).read_text(encoding="utf-8") == text


@pytest.mark.parametrize("subject", PAGES)
def test_tables_fit_a_terminal(subject: str) -> None:
    """Tables need no more than 100 columns."""
    record = PAGES[subject][0]()
    out = Console(width=200, file=io.StringIO(), color_system=None)
    show([record], out)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100


def test_a_terminal_says_how_to_read_its_tables() -> None:
    """Below them stands what brackets, ratios and columns are, as on the page."""
    said = {}
    for record in (codecs(), collectives()):
        out = Console(width=200, file=io.StringIO(), color_system=None)
        show([record], out)
        said[record.subject] = " ".join(out.file.getvalue().split())  # type: ignore[attr-defined]
        assert "in brackets 95 % intervals of ratios formed inside a round" in said[record.subject]
    assert "GB/s: bytes moved / (10^9 * seconds)" in said["codecs"]
    assert "'carried error' adds" in said["codecs"]
    assert "GB/s:" not in said["collectives"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("seconds", "scatters"), [([1.0, 1.1, 1.0, 1.1], False), ([1.0, 1.6, 1.0, 1.6], True)]
)
def test_rounds_that_scatter_are_told(seconds: list[float], scatters: bool, tmp_path: Path) -> None:
    """A middle half beyond a fifth of the median is told, with its contender; less is not."""
    record = collectives()
    samples = [
        sample.model_copy(
            update={
                "seconds": seconds if sample.names["algorithm"] == "one_hop" else [1.0] * 4,
                "reference_seconds": [1.0] * 4,
                "parts": {name: [1.0] * 4 for name in sample.parts},
            }
        )
        for sample in record.samples
    ]
    record = record.model_copy(update={"samples": samples})
    ((board, data),) = boards_of([record])
    said = scattering(board, data)
    assert (said is not None) is scatters
    assert said is None or "one_hop" in said
    bench_record.write(tmp_path, record)
    assert ("Rounds scatter" in build(tmp_path).read_text(encoding="utf-8")) is scatters


def test_what_is_not_put_together(tmp_path: Path) -> None:
    """Records of two machines, or of two subjects, are refused."""
    with pytest.raises(RecordError, match="no records in it"):
        build(tmp_path)
    bench_record.write(tmp_path, codecs())
    other = bench_record.write(tmp_path, codecs(pool="b" * 12))
    with pytest.raises(ReportError, match="2 machines or codes"):
        build(tmp_path)
    other.unlink()
    bench_record.write(tmp_path, collectives())
    with pytest.raises(ReportError, match="2 subjects"):
        build(tmp_path)
