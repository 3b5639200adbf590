"""Records of benchmarks become a page whose numbers are those of the rounds."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from harness.records import bench_record
from harness.records.record import RecordError
from report.bench import codecs as bench_codecs
from report.bench import collectives as bench_collectives
from report.bench import dots
from report.bench import engine as bench_engine
from report.bench import overlap as bench_overlap
from report.bench.page import build
from report.data.frames import ReportError
from tests.report.bench.bench_records import codecs, collectives, engine, overlap


def test_ratios_are_of_pairs() -> None:
    """A speed is the median over rounds of the copy's seconds over the operation's, of one round."""
    record = codecs(("int8:256",))
    found = bench_codecs.derived(bench_codecs.frame([record]))
    for sample, row in zip(record.codecs, dots.rows_of(found), strict=True):
        pairs = zip(sample.reference_seconds, sample.seconds, strict=True)
        assert row["speed"] == pytest.approx(statistics.median(copy / took for copy, took in pairs))
        assert row["speed_low"] <= row["speed"] <= row["speed_high"]
        assert row["of_copy"] == pytest.approx(row["speed"] * sample.moved_bytes / (2 * sample.element_bytes))


def test_runs_of_one_machine_are_put_together() -> None:
    """Rounds of several runs count as one run's."""
    once = bench_codecs.derived(bench_codecs.frame([codecs()]))
    twice = bench_codecs.derived(bench_codecs.frame([codecs(), codecs()]))
    assert list(twice["rounds"]) == [2 * rounds for rounds in once["rounds"]]
    assert list(twice["speed"]) == list(once["speed"])


def test_times_gloo() -> None:
    """Times gloo is gloo's seconds over ours."""
    found = bench_collectives.derived(bench_collectives.frame([collectives(ratio=5.0)]))
    assert found["ratio"].to_list() == pytest.approx([5.0] * len(found))


def test_of_compute_alone() -> None:
    """A contender's share of compute alone is alone's seconds over its own, of one round."""
    record = engine(ours=2.0)
    found = bench_engine.derived(bench_engine.frame([record]))
    shares = found.set_index(["contender", "transport", "nodes"])["of_alone"]
    assert shares["alone", "none", 1] == pytest.approx(1.0)
    assert shares["exact", "shm", 2] == pytest.approx(0.5)
    assert shares["ddp", "backend", 1] == pytest.approx(0.25)
    speeds = found.set_index(["contender", "transport", "nodes"])["speed"]
    assert speeds["ddp", "backend", 1] == pytest.approx(statistics.median([6144 / 1.0, 6144 / 1.1]))


def test_what_overlap_hides() -> None:
    """A step stands beside compute alone of its round, chunks beside the shorter hop of theirs."""
    found = bench_overlap.derived(bench_overlap.frame([overlap(of_alone=1.05, hidden=0.9)]))
    assert found["measured"].to_list() == pytest.approx([1.05, 1.05, 0.9])
    assert found["first"].to_list() == pytest.approx([1.26, 1.26, 0.025])


PAGES = {
    "codecs": (codecs, ("roofline-cpu-fp32", "speeds-cpu-fp32")),
    "collectives": (collectives, bench_collectives.NAMES_OF_FIGURES),
    "engine": (engine, bench_engine.NAMES_OF_FIGURES),
    "overlap": (overlap, bench_overlap.NAMES_OF_FIGURES),
}


@pytest.mark.parametrize("subject", PAGES)
def test_page(tmp_path: Path, subject: str) -> None:
    """The page holds every figure and its table, escapes what records hold, and comes out equal twice."""
    made, names = PAGES[subject]
    bench_record.write(tmp_path, made())
    page = build(tmp_path)
    text = page.read_text(encoding="utf-8")
    for name in names:
        assert f'<figure id="{name}">' in text
        assert (tmp_path / "figures" / f"{name}.svg").exists()
    assert (tmp_path / "tables" / f"{subject}.csv").exists()
    assert "<codebook>" not in text
    assert build(tmp_path).read_text(encoding="utf-8") == text


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
