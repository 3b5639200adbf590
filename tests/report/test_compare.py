"""Two result folders of one suite, side by side."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import cli
from harness.records.confidence_intervals import Interval
from harness.records.trial_record import with_digest, write
from harness.suites.trial import Cluster, Trial
from report.compare import compare, judge, page
from report.data.frames import ReportError
from tests.report.records import changed_steps, record_of

SHAPED = Cluster(rate="50 Mbit/s")


def folder(
    path: Path, factor: float, *, repeats: int = 8, strategies: tuple[str, ...] = ("zero3", "zeropp")
) -> Path:
    """Records of some strategies, ZeRO++'s steps ``factor`` times as long as usual."""
    for name, repeat in product(strategies, range(repeats)):
        record = record_of(Trial(strategy=name, cluster=SHAPED, repeat=repeat))
        if name == "zeropp":
            record = with_digest(changed_steps(record, lambda step: {"total": step.total * factor}))
        write(path, record)
    return path


@given(st.floats(0.5, 2.0), st.floats(0.0, 0.2), st.floats(0.005, 0.1))
def test_a_verdict_follows_from_the_interval(estimate: float, half: float, margin: float) -> None:
    """``same`` lies within the margin, ``better`` and ``worse`` on one side of 1."""
    ratio = Interval(estimate, estimate * math.exp(-half), estimate * math.exp(half), 9)
    means = {
        "same": 1 / (1 + margin) < ratio.low <= ratio.high < 1 + margin,
        "better": ratio.high < 1,
        "worse": ratio.low > 1,
        "inconclusive": ratio.low <= 1.0 <= ratio.high,
    }
    assert means[judge(ratio, margin)]
    assert judge(Interval(estimate, math.nan, math.nan, 3), margin) == "inconclusive"


def test_what_got_slower_is_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration whose steps take 1.5 times as long is worse, an unchanged one the same; the status is 1."""
    before, after = folder(tmp_path / "a", 1.0), folder(tmp_path / "b", 1.5)
    comparison = compare(before, after, 0.02)
    rows = comparison.table.data.set_index("configuration")
    assert dict(rows["verdict"]) == {"ZeRO-3": "same", "ZeRO++": "worse"}
    assert rows["step"]["ZeRO++"].estimate == pytest.approx(1.5)
    assert rows["bytes"]["ZeRO++"] == 1.0
    assert comparison.worse == 1
    html = tmp_path / "compared.html"
    assert cli.main(["compare", str(before), str(after), "--html", str(html)]) == cli.SOME_FAILED
    shown = capsys.readouterr().out
    assert "Of 2 comparisons: 1 worse, 1 same" in shown
    assert all(setting in html.read_text() for row in comparison.table.rows() for setting in row[2:6])
    assert cli.main(["compare", str(after), str(before)]) == cli.OK


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, one line, and no table."""
    before = folder(tmp_path / "a", 1.0)
    assert cli.main(["compare", str(before), str(before), "--html", str(tmp_path)]) == cli.REFUSED
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"zeropp: {tmp_path}: cannot be written: Is a directory\n"


def test_too_few_pairs_are_not_judged(tmp_path: Path) -> None:
    """Five pairs have no interval, so nothing is worse, and the notes say why."""
    comparison = compare(folder(tmp_path / "a", 1.0, repeats=5), folder(tmp_path / "b", 1.5, repeats=5), 0.02)
    assert set(comparison.table.data["verdict"]) == {"inconclusive"}
    assert any("too few pairs are inconclusive" in note for note in comparison.notes)


def test_steps_without_seconds_are_not_said_to_lack_repeats(tmp_path: Path) -> None:
    """Ranks that are threads are not timed, however often they run."""
    untimed = Cluster(ranks="threads")
    for name, repeat in product("ab", range(8)):
        write(tmp_path / name, record_of(Trial(strategy="zero3", cluster=untimed, repeat=repeat)))
    comparison = compare(tmp_path / "a", tmp_path / "b", 0.02)
    assert set(comparison.table.data["verdict"]) == {"inconclusive"}
    assert any("their ranks were threads" in note for note in comparison.notes)
    assert not any("run more repeats" in note for note in comparison.notes)


@pytest.mark.parametrize("apart", ["a", "b"])
def test_the_occasions_of_both_folders_count(tmp_path: Path, apart: str) -> None:
    """Two sweeps a day apart in either folder are two values, not one for each pair."""
    for name, repeat in product("ab", range(8)):
        sweep = repeat // 4
        record = record_of(Trial(strategy="zero3", cluster=SHAPED, repeat=repeat))
        times = dict.fromkeys(
            ("started", "finished"), f"2026-01-0{1 + sweep * (name == apart)}T00:00:00+00:00"
        )
        write(tmp_path / name, with_digest(record.model_copy(update={"sweep": sweep, **times})))
    (step,) = compare(tmp_path / "a", tmp_path / "b", 0.02).table.data["step"]
    assert (step.n, step.occasions) == (8, 2)


def test_what_is_in_one_folder_only_is_said(tmp_path: Path) -> None:
    """Trials without a partner are counted, and folders without a common trial are refused."""
    before = folder(tmp_path / "a", 1.0)
    comparison = compare(before, folder(tmp_path / "b", 1.0, strategies=("zero3",)), 0.02)
    assert any(note.startswith(f"Only in {before}") and "(8)" in note for note in comparison.notes)
    with pytest.raises(ReportError, match="no trial finished in both"):
        compare(before, folder(tmp_path / "c", 1.0, strategies=("ddp",)), 0.02)
    with pytest.raises(ReportError, match="no such folder"):
        compare(before, tmp_path / "nowhere", 0.02)


def test_names_are_escaped(tmp_path: Path) -> None:
    """A folder's name is text on the page."""
    comparison = compare(folder(tmp_path / "<b>a", 1.0), folder(tmp_path / "b", 1.0), 0.02)
    assert "<b>a" not in page(comparison)


@pytest.mark.parametrize("margin", ["2", "-1%", "0%", "x"])
def test_a_margin_is_a_share(margin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Anything but a percentage is one line and status 2."""
    assert cli.main(["compare", str(tmp_path), str(tmp_path), f"--margin={margin}"]) == cli.REFUSED
    assert "expected a number above 0 and below 100 with %" in capsys.readouterr().err
