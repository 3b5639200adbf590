"""Files of pytest-benchmark are read whole or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.records.benchmark_file import holds, read_all
from harness.records.trial_record import RecordError


def written(path: Path, *, datetime: str = "2026-01-01T00:00:00", **changes: Any) -> dict[str, Any]:
    """Write a file as pytest-benchmark does, with one benchmark, and return its content."""
    stats = {"median": 0.002, "rounds": 3, "data": [0.001, 0.002, 0.003], "iqr": 0.001}
    benchmark = {"name": "test_a[1]", "group": "g", "extra_info": {"moved_bytes": 8_000_000}, "stats": stats}
    content = {
        "machine_info": {}, "commit_info": {}, "datetime": datetime, "version": "5", "benchmarks": [benchmark]
    } | changes  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return content


def test_files_are_read_in_the_order_of_their_runs(tmp_path: Path) -> None:
    """Files of a folder, and of pytest-benchmark's folder of a machine in it, are read by time."""
    written(tmp_path / "Linux" / "0001.json", datetime="2026-01-02T00:00:00")
    written(tmp_path / "0002.json")
    assert holds(tmp_path)
    assert [file.datetime for file in read_all(tmp_path)] == ["2026-01-01T00:00:00", "2026-01-02T00:00:00"]
    (timed,) = read_all(tmp_path)[0].benchmarks
    assert timed.noted("moved_bytes") == 8e6
    assert timed.noted("sent_bytes") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"benchmarks": []}, "benchmarks: List should have at least 1 item"),
        ({"benchmarks": [{"name": "a", "stats": {"median": 0, "rounds": 1}}]}, "benchmarks.0.stats.median"),
        (
            {"benchmarks": [{"name": "a", "stats": {"median": 1e999, "rounds": 1}}]},
            "benchmarks.0.stats.median",
        ),
        ({"version": None}, "version"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """A field that is missing or impossible is named with its file."""
    written(tmp_path / "a.json", **changes)
    with pytest.raises(RecordError, match=r"a\.json: is not a file of pytest-benchmark: ") as error:
        read_all(tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_of_trials_holds_none(tmp_path: Path) -> None:
    """A folder without such files, or with other JSON, is not taken for one."""
    assert not holds(tmp_path)
    (tmp_path / "a.json").write_text('{"id": "abc"}', encoding="utf-8")
    assert not holds(tmp_path)
    with pytest.raises(RecordError, match="no files of pytest-benchmark"):
        read_all(tmp_path / "none")
