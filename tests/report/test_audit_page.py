"""Tests of the page of an audit."""

from __future__ import annotations

from pathlib import Path

from harness.audit.calls import read
from harness.audit.command import reported
from report import audit_page
from tests.harness.audit.events import given, zero_3


def test_the_page_of_an_audit_escapes_what_the_program_says(tmp_path: Path) -> None:
    """Call sites, commands and expectations are text."""
    folder = zero_3(tmp_path)
    report = reported(read(folder / "ranks", 2), given(folder, "all <= 1 B"))
    assert report is not None
    page = audit_page.page(report, ["python", "<script>"])
    assert "<b>train" not in page
    assert "&lt;b&gt;train&lt;/b&gt;.py:9" in page
    assert "&lt;script&gt;" in page
    assert "broken: all &lt;= 1 B: rank 0 has 0.012 MB in step 2" in page
    assert "These are the messages of ZeRO-3" in page


def test_the_page_is_written_into_the_audits_folder(tmp_path: Path) -> None:
    """Its path is returned, and what was unusual is on it."""
    folder = zero_3(tmp_path)
    calls = read(folder / "ranks", 2)
    calls.notes.append("rank 3 was killed in step 4")
    report = reported(calls, given(folder))
    assert report is not None
    path = audit_page.write(report, folder, ["torchrun", "train.py"])
    assert path == folder / "audit.html"
    assert "rank 3 was killed in step 4" in path.read_text()
