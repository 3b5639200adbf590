"""A bundle holds all that its README names, and the verdicts that follow from its records."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.records import archive
from harness.records.trial_record import RecordError
from report.bundle import bundle
from report.data.frames import load
from report.data.metrics import derive
from report.verdicts import verdicts

REFERENCE = Path(__file__).parents[2] / "results" / "reference"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return archive.unpack(REFERENCE / "quickstart.tar.xz", tmp_path_factory.mktemp("results"))


def test_all_is_in_one_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Records, the suite's text, packages, verdicts, and a script that a shell can read; the same each time."""
    command = ["bundle", "quickstart", str(tmp_path / "out"), "--results", str(folder.parent)]
    assert cli.main(command) == cli.OK
    path = tmp_path / "out" / "quickstart-artifact.tar.xz"
    assert capsys.readouterr().out == f"{path}\n"
    first = path.read_bytes()
    assert bundle(folder, tmp_path / "out").read_bytes() == first
    safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # before 3.11.4
    with tarfile.open(path) as packed:
        packed.extractall(tmp_path, **safely)  # noqa: S202  # our own
    bundled = tmp_path / "quickstart-artifact"
    assert {path.name for path in bundled.iterdir()} == {
        "README.md", "VERDICTS.md", "packages.txt", "quickstart.tar.xz", "quickstart.toml", "run.sh",
    }  # fmt: skip
    readme = (bundled / "README.md").read_text()
    assert all(name in readme for name in ("quickstart.tar.xz", "run.sh", "VERDICTS.md"))
    again = archive.unpack(bundled / "quickstart.tar.xz", tmp_path / "again")
    there, here = ({path.name: path.read_bytes() for path in of.glob("*.json")} for of in (again, folder))
    assert there == here
    subprocess.run(["sh", "-n", str(bundled / "run.sh")], check=True)
    refused = subprocess.run(["sh", str(bundled / "run.sh")], capture_output=True, text=True, check=False)
    assert "expected the folder of a clone" in refused.stderr
    assert 'name = "quickstart"' in (bundled / "quickstart.toml").read_text()
    table = verdicts(derive(load(folder))).table
    assert table.markdown() in (bundled / "VERDICTS.md").read_text()
    assert "Expected in a new run" in [column.title for column in table.columns]
    assert "torch==" in (bundled / "packages.txt").read_text()


def test_what_cannot_be_bundled_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown suite, and a folder without records."""
    assert cli.main(["bundle", "nothing", str(tmp_path), "--results", str(tmp_path)]) == cli.REFUSED
    assert "unknown suite" in capsys.readouterr().err
    with pytest.raises(RecordError, match="no records in it"):
        bundle(tmp_path, tmp_path)
