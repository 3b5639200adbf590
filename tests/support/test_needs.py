"""What tests need beyond pip is named by one mark, and a test whose need is not met is skipped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import needs

TESTS = Path(__file__).parents[1]
MARKED = """
import pytest
from tests.support import needs

needs.COMPONENTS["a dragon"] = lambda: "apt-get install dragon"

@pytest.mark.needs("a dragon", "root")
def test_marked(): raise AssertionError

@pytest.fixture
def hoard(): raise AssertionError

needs.FIXTURES["hoard"] = ("a dragon",)

def test_with_a_fixture(hoard): pass

def test_of_nothing(): pass
"""


def test_what_is_missing_skips_and_is_counted(tmp_path: Path) -> None:
    """By mark or by fixture; the summary says how many tests need it and what installs it."""
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_marked.py").write_text(MARKED)
    options = ["-q", "-n", "1", "-p", "no:cacheprovider", "-c", str(TESTS.parent / "pyproject.toml")]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(TESTS.parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ +2 need a dragon: apt-get install dragon$", done.stdout, re.MULTILINE)
    assert "1 passed, 2 skipped" in done.stdout


def test_a_misspelt_need_is_an_error() -> None:
    """A component that nobody looks for would never skip."""
    with pytest.raises(pytest.UsageError, match="needs 'shd': expected one of c\\+\\+, g\\+\\+, ip"):
        needs.missing("shd")


@pytest.mark.parametrize("component", [name for name in needs.COMPONENTS if name[0].islower()])
def test_a_hidden_program_is_missing(component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a component is a program, its absence names the package of Debian that has it."""
    monkeypatch.setattr(needs.shutil, "which", lambda *_, **__: None)
    told = needs.COMPONENTS[component]()
    assert component in ("root", "x86-64", "futex", "no CUDA device") or "apt-get install" in str(told)


def test_no_test_skips_by_a_rule_of_its_own() -> None:
    """What a machine must have is asked for by the mark alone."""
    own = re.compile(r"\b(skipif|importorskip)\(|shutil\.which\(")
    allowed = {"support/needs.py", "support/test_needs.py", "support/cubin.py"}  # the last asks for a program
    found = {str(path.relative_to(TESTS)) for path in TESTS.rglob("*.py") if own.search(path.read_text())}
    assert found <= allowed
