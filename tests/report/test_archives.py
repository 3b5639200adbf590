"""Folders of archives, as they are committed, give their pages."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from docs.tables.from_records import REFERENCE, ROOT
from harness import cli
from harness.measure import machine
from tests.support.params import nightly


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("cores", [1, *nightly(2)])
def test_a_folder_of_archives_is_reported_whole(
    cores: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``zeropp report`` draws a page of each, in as many processes."""
    monkeypatch.setattr(machine, "cores", lambda: cores)
    for suite in ("rlhf", "stages"):
        shutil.copy(ROOT / REFERENCE / f"{suite}.tar.xz", tmp_path)
    assert cli.main(["report", str(tmp_path)]) == cli.OK
    pages = [Path(page) for page in capsys.readouterr().out.split()]
    assert pages == [tmp_path / suite / "report.html" for suite in ("rlhf", "stages")]
    assert all(page.stat().st_size > 1000 for page in pages)
