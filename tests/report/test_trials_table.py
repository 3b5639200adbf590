"""Records as one table: of a folder, an archive, or a folder of them; the page's example draws."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import report
from harness.records import archive
from harness.records.trial_record import RecordError
from report.data.frames import ReportError

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "results" / "reference"


def test_folders_and_archives_give_the_same_trials(tmp_path: Path) -> None:
    """One row for each trial that trained, with its settings and measurements."""
    packed = report.load(REFERENCE / "slow_node.tar.xz")
    folder = archive.unpack(REFERENCE / "slow_node.tar.xz", tmp_path)
    pd.testing.assert_frame_equal(packed, report.load(str(folder)))
    pd.testing.assert_frame_equal(packed, report.load(tmp_path))
    left = tmp_path / ".zeropp-unfinished-left"  # by a process that was killed while it unpacked
    left.mkdir()
    (left / "0123456789ab.json").write_text("{", encoding="utf-8")
    pd.testing.assert_frame_equal(packed, report.load(tmp_path))
    assert packed["id"].is_unique
    assert (packed["step_seconds"] > 0).all()
    assert all(trial["cluster"]["rate"] == 100.0 for trial in packed["trial"])
    suites = ("slow_node", "generation", "models")
    for name in suites:
        shutil.copy(REFERENCE / f"{name}.tar.xz", tmp_path)
    shutil.rmtree(folder)
    whole = report.load(tmp_path)
    assert set(whole["suite"]) == {*suites} - {"generation"}  # whose trials decode
    assert len(whole[whole["suite"] == "slow_node"]) == len(packed)


def test_a_trials_loss_curve_is_a_table() -> None:
    """It has all validations of a trial and ends with its validation loss, or is empty without any."""
    trained = report.load(REFERENCE / "convergence.tar.xz")
    for trial in trained.to_dict("records"):
        curve = pd.DataFrame(trial["losses"])
        assert list(curve["step"]) == list(range(25, 201, 25))
        assert curve["loss"].iloc[-1] == trial["validation_loss"]
    assert all(curve == [] for curve in report.load(REFERENCE / "slow_node.tar.xz")["losses"])


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    """No folder, an empty one, and a file that is no archive."""
    (tmp_path / "some.tar.xz").write_bytes(b"none")
    (tmp_path / "empty").mkdir()
    for path, error, message in (
        (tmp_path / "nowhere", ReportError, "no such folder or archive"),
        (tmp_path / "empty", ReportError, "no records and no archives"),
        (tmp_path / "some.tar.xz", RecordError, "some.tar.xz"),
    ):
        with pytest.raises(error, match=message):
            report.load(path)


def test_the_pages_example_draws_a_figure(tmp_path: Path) -> None:
    """It runs as printed, from the root of the repository."""
    page = (ROOT / "docs" / "guide" / "compare.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = code.replace('"steps.svg"', repr(str(tmp_path / "steps.svg")))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "ZeRO++" in done.stdout
    assert (tmp_path / "steps.svg").stat().st_size > 1000
