"""A bundle holds all that its README names, and the verdicts that follow from its records."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.records import archive, run_record
from harness.records.trial_record import RecordError, read_all, write
from harness.suites.suite import LONGEST_NAME
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


def renamed(folder: Path, into: Path, suite: str, configurations: dict[str, str] | None = None) -> Path:
    """Copy a results folder, as if a suite of another name had written its records."""
    for path in sorted((folder / "runs").glob("*.json")):
        run = run_record.read(folder, path.stem)
        assert run.suite is not None
        text = run.suite.text.replace('name = "quickstart"', f'name = "{suite}"')
        named = run.suite.model_copy(update={"text": text, "configurations": configurations or {}})
        name = run_record.write(into, run.model_copy(update={"suite": named}))
    for record in read_all(folder):
        write(into, record.model_copy(update={"suite": suite, "run": name}))
    return into


@pytest.mark.parametrize("suite", ["q" * 93, "q" * 94, "q" * LONGEST_NAME])
def test_a_suite_of_any_name_is_bundled(folder: Path, tmp_path: Path, suite: str) -> None:
    """The longest name of a suite, and a results folder that was renamed: the bundle is named after the suite."""
    other = renamed(
        folder, tmp_path / "before the change", suite, {"ä/ö.json": "{}", f"{'d' * 120}.json": "{}"}
    )
    with tarfile.open(bundle(other, tmp_path)) as packed:
        names = set(packed.getnames())
        assert {f"{suite}-artifact/{name}" for name in (f"{suite}.tar.xz", "ä/ö.json", "run.sh")} < names
        inside = packed.extractfile(f"{suite}-artifact/{suite}.tar.xz")
        assert inside is not None
        (tmp_path / f"{suite}.tar.xz").write_bytes(inside.read())
    assert len(read_all(archive.unpack(tmp_path / f"{suite}.tar.xz"))) == len(read_all(folder))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/etc/ds.json", "lies outside"), ("../ds.json", "lies outside"), ("~/ds.json", "lies outside"),
        ("run.sh", "has the name of another file"), ("./quickstart.toml", "has the name of another file"),
    ],
)  # fmt: skip
def test_no_file_of_the_suite_replaces_another(folder: Path, tmp_path: Path, path: str, says: str) -> None:
    """A configuration outside of the suite's folder, or with the name of a file of the bundle, is refused."""
    other = renamed(folder, tmp_path / "quickstart", "quickstart", {path: "{}"})
    with pytest.raises(RecordError, match=f"this file, which the suite names, {says}"):
        bundle(other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["archive", "bundle"])
def test_nothing_is_packed_into_the_results_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """``zeropp report`` would take it for a folder of archives."""
    assert cli.main([command, str(folder), f"{folder}/../{folder.name}"]) == cli.REFUSED
    assert "is the results folder itself" in capsys.readouterr().err
    assert not list(folder.glob("*.tar.xz"))


def test_a_link_to_itself_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bundle cannot be written there."""
    (tmp_path / "loop").symlink_to("loop")
    assert cli.main(["bundle", str(folder), str(tmp_path / "loop")]) == cli.REFUSED
    assert "loop/quickstart-artifact.tar.xz: cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("suite", ["", "../evil", "/evil", "a b"])
def test_records_that_name_no_suite_are_refused(folder: Path, tmp_path: Path, suite: str) -> None:
    """Records are anybody's: no bundle is written outside of its folder."""
    other = renamed(folder, tmp_path / "quickstart", suite)
    with pytest.raises(RecordError, match=r"they name the suite .* and no suite can have this name"):
        bundle(other, tmp_path / "out")
    assert not (tmp_path / "out").exists()
