"""Folders of archives, as they are committed, give their pages."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from harness import cli
from harness.measure import machine
from harness.records import record
from tests.report.records import records_of
from tests.support.params import nightly


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("cores", [1, *nightly(2)])
def test_a_folder_of_archives_is_reported_whole(
    cores: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``zeropp archive`` writes them, and ``zeropp report`` draws a page of each, in as many processes."""
    monkeypatch.setattr(machine, "cores", lambda: cores)
    monkeypatch.setattr(gc, "disable", lambda: None)
    for suite in ("quickstart", "baselines"):
        for one in records_of(suite, repeats=1):
            record.write(tmp_path / "results" / suite, one)
        arguments = ["archive", suite, str(tmp_path / "kept"), "--results", str(tmp_path / "results")]
        assert cli.main(arguments) == cli.OK
    capsys.readouterr()
    assert cli.main(["report", str(tmp_path / "kept")]) == cli.OK
    pages = capsys.readouterr().out.split()
    assert pages == [str(tmp_path / "kept" / suite / "report.html") for suite in ("baselines", "quickstart")]
    assert all(Path(page).stat().st_size > 1000 for page in pages)
