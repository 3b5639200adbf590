"""Files of pytest-benchmark become a page whose numbers are those of the rounds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from harness import cli
from harness.records.benchmark_file import read_all
from report.benchmark_page import build, tables_of
from tests.harness.records.test_benchmark_file import written


def two_runs(folder: Path) -> None:
    """Write two runs; in the second, the benchmark takes half as long and stands beside a reference of 4 ms."""
    written(folder / "0001.json")
    stats = {"median": 0.001, "rounds": 6, "data": [0.001] * 6}
    noted = {"moved_bytes": 8_000_000, "sent_bytes": 3_000_000}
    own = {"name": "test_a[1]", "group": "g <b>", "extra_info": noted, "stats": stats}
    slower = {"median": 0.004, "rounds": 6, "data": [0.004] * 6}
    copy = {"name": "test_copy", "group": "g <b>", "extra_info": {"reference": True}, "stats": slower}
    fewer = own | {"name": "test_b", "extra_info": {"elements": 7}}
    written(folder / "0002.json", datetime="2026-01-03T00:00:00", benchmarks=[copy, own, fewer])


def test_a_row_compares_with_the_reference_and_the_last_run(tmp_path: Path) -> None:
    """A benchmark's speed is its group's reference's median over its own, if both have as many elements; its change
    is that over the last run's median; GB/s and MB follow from what the test noted.
    """
    two_runs(tmp_path)
    (table,) = tables_of(read_all(tmp_path))
    copy, own, fewer = table.data.to_dict("records")
    assert math.isnan(fewer["times"])
    assert own["times"] == pytest.approx(4.0)
    assert own["change"] == pytest.approx(0.5)
    assert own["rate"] == pytest.approx(8.0)
    assert own["sent_mb"] == pytest.approx(3.0)
    assert own["milliseconds"].estimate == pytest.approx(1.0)
    assert own["rounds"] == 6
    assert copy["times"] == pytest.approx(1.0)


def test_the_page_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``zeropp report FOLDER`` draws the page and escapes names; options of suites' pages are refused."""
    two_runs(tmp_path)
    assert cli.main(["report", str(tmp_path)]) == cli.OK
    assert capsys.readouterr().out == f"{tmp_path}/report.html\n"
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "a[1]" in html
    assert "<b>" not in html
    assert cli.main(["report", str(tmp_path), "--pdf"]) == cli.REFUSED
    assert "are for suites" in capsys.readouterr().err
    assert build(tmp_path) == tmp_path / "report.html"


def test_groups_with_names_alike_have_files_of_their_own(tmp_path: Path) -> None:
    """No group's files overwrite another's, whatever the groups are called."""
    stats = {"median": 0.001, "rounds": 1}
    names = ["Wire (fp32)", "wire fp32", "wire-fp32-2", "速度", "重さ", "/", "x" * 400, "x" * 401]
    groups = [
        {"name": f"test_{place}", "group": group, "stats": stats}
        for place, group in enumerate([*names, None])
    ]
    written(tmp_path / "0001.json", benchmarks=groups)
    assert [table.name for table in tables_of(read_all(tmp_path))] == [
        "wire-fp32", "wire-fp32-2", "wire-fp32-2-2", "benchmarks", "benchmarks-2", "benchmarks-3", "x" * 80,
        f"{'x' * 80}-2", "benchmarks-4",
    ]  # fmt: skip
    build(tmp_path)
    files = sorted(path.name for path in (tmp_path / "tables").glob("*.csv"))
    assert len(files) == len(groups)


def test_tests_of_two_files_may_share_a_name(tmp_path: Path) -> None:
    """Their rows are named with the file, and each is compared with its own previous run."""

    def run(first: float, second: float) -> list[dict[str, object]]:
        return [
            {"name": "test_a", "fullname": f"tests/{file}.py::test_a", "group": "g",
             "stats": {"median": median, "rounds": 1}}
            for file, median in (("one", first), ("two", second))
        ]  # fmt: skip

    written(tmp_path / "0001.json", benchmarks=run(0.001, 0.1))
    written(tmp_path / "0002.json", datetime="2026-01-03T00:00:00", benchmarks=run(0.002, 0.3))
    (table,) = tables_of(read_all(tmp_path))
    assert list(table.data["configuration"]) == ["tests/one.py::test_a", "tests/two.py::test_a"]
    assert list(table.data["change"]) == pytest.approx([2.0, 3.0])
