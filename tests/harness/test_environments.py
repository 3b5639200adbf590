"""In environments that lack something, commands end in one line, or do what they can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import cli, errors
from harness.errors import Refusal, check_installed, not_imported
from tests.harness.conftest import Zeropp

SUITE = """
name = "s"
question = "Does it print?"
[defaults]
model.name = "gpt-tiny"
steps = 1
warmup = 0
tokens_per_rank = 64
sequence = 64
"""
ROOT = Path(__file__).parents[2]
HIDDEN = "import sys; sys.modules[sys.argv.pop(1)] = None; from harness.cli import main; sys.exit(main())"
NOT_UTF_8 = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a suite."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(SUITE, encoding="utf-8")
    return tmp_path


def python(
    code: str, *arguments: str, then: str = "", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """Run code in another process, maybe with redirections of a shell."""
    command = [sys.executable, "-c", code, *arguments]
    if then:
        command = ["bash", "-c", f'"$@" {then}', "bash", *command]
    # Unbuffered output would hide what happens to output that is still buffered when a command ends.
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""} | environment
    return subprocess.run(command, capture_output=True, env=variables, check=False)


MAIN = "import sys; from harness.cli import main; sys.exit(main())"


@pytest.mark.parametrize("package", ["typer", "pydantic", "seaborn", "torch", "pandas"])
def test_a_missing_package_is_one_line(package: str) -> None:
    """A missing package gives one line with the command that installs it, and status 2, at whatever time it is
    needed.
    """
    process = python(HIDDEN, package, "plan", "s.toml")
    assert process.returncode == cli.REFUSED
    line = process.stderr.decode()
    assert line.startswith(f"zeropp: {package} is not installed for {sys.executable}: cd {ROOT} && ")
    assert line.endswith("-m pip install -c constraints.txt -e .\n")
    assert line.count("\n") == 1


def test_packages_that_are_there_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All missing packages are named together; an import error in our own code is shown with its traceback."""
    check_installed()
    monkeypatch.setattr(errors, "_NEEDED", ("torch", "no_such_a", "no_such_b"))
    with pytest.raises(Refusal, match="no_such_a, no_such_b are not installed"):
        check_installed()
    assert not_imported(ImportError("no name", name="harness.cli")) is None
    broken = not_imported(ImportError("libcudart.so.12: no such file", name="cupy"))
    assert broken is not None
    assert broken.startswith("cannot import cupy (libcudart.so.12: no such file) for ")


@pytest.mark.parametrize(
    "command", [["plan", "s.toml"], ["--help"], ["doctor"], ["show", "none", "--results", "ü¶"]]
)
def test_a_terminal_that_is_not_utf_8_gets_other_characters(command: list[str]) -> None:
    """Characters that the terminal cannot show are replaced, in output and in errors."""
    process = python(MAIN, *command, **NOT_UTF_8)
    assert b"Traceback" not in process.stderr
    assert b"UnicodeEncodeError" not in process.stderr
    (process.stdout + process.stderr).decode("ascii")
    assert process.returncode == (cli.REFUSED if command[0] == "show" else cli.OK)


@pytest.mark.parametrize(("then", "status"), [(">&-", 0), (">&- 2>&-", 0), ("<&-", 0), (">/dev/full", 2)])
def test_closed_and_full_outputs(then: str, status: int) -> None:
    """Output to a closed stream is dropped; output to a full device is an error."""
    process = python(MAIN, "plan", "s.toml", then=then)
    assert process.returncode == status
    assert b"Traceback" not in process.stderr
    if status:
        assert process.stderr == b"zeropp: cannot go on: No space left on device\n"


def test_an_output_that_ends_early_is_no_error() -> None:
    """A reader that closes the pipe early, such as `zeropp plan s.toml | head -1`, causes no error."""
    process = python(MAIN, "plan", "s.toml", then="| head -1")
    assert process.stdout.startswith(b"s: Does it print?")
    assert process.stderr == b""


@pytest.mark.parametrize("columns", ["0", "1", "20", "x"])
def test_every_width_prints(zeropp: Zeropp, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    """Tables print at every width; a width of 0, from terminals without a size, counts as unknown."""
    monkeypatch.setenv("COLUMNS", columns)
    output = zeropp("plan", "s.toml").stdout
    assert "".join(output.split()).startswith("s:Doesitprint?")
    if columns == "20":
        assert max(map(len, output.splitlines())) <= 20


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xef\xbb\xbf" + SUITE.encode(), None),
        (SUITE.replace("\n", "\r\n").encode(), None),
        (
            SUITE.replace("print", "caf\u00e9").encode("latin-1"),
            "s.toml: is not TOML: byte 0xe9 in line 3 is not UTF-8",
        ),
        (SUITE.encode("utf-16"), "s.toml: is not TOML: byte 0xff in line 1 is not UTF-8"),
    ],
    ids=["a byte order mark", "ends of lines as in Windows", "Latin-1", "UTF-16"],
)
def test_encodings_of_suites(folder: Path, zeropp: Zeropp, content: bytes, message: str | None) -> None:
    """Suites are read in UTF-8, with or without a byte order mark; other encodings are refused with the place."""
    (folder / "s.toml").write_bytes(content)
    process = zeropp("plan", "s.toml", status=cli.OK if message is None else cli.REFUSED)
    assert message is None or message in process.stderr
