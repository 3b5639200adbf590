"""What tests need beyond pip is named by one mark, and a test whose need is not met is skipped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
MARKED = """
import pytest
from tests.support import needs

needs.COMPONENTS["a dragon"] = lambda: "apt-get install dragon"

@pytest.mark.needs("a dragon")
def test_marked(): raise AssertionError

@pytest.fixture
def hoard(): raise AssertionError

needs.FIXTURES["hoard"] = ("a dragon",)

def test_with_a_fixture(hoard): pass

def test_of_nothing(): pass
"""


def test_what_is_missing_skips(tmp_path: Path) -> None:
    """By mark or by fixture; the summary says what they need and what installs it."""
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_marked.py").write_text(MARKED)
    options = ["-q", "-n", "1", "-p", "no:cacheprovider", "-c", str(TESTS.parent / "pyproject.toml")]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(TESTS.parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("needs a dragon (apt-get install dragon)") == 2
    assert "1 passed, 2 skipped" in done.stdout


def test_no_test_skips_by_a_rule_of_its_own() -> None:
    """What a machine must have is asked for by the mark alone."""
    own = re.compile(r"\b(skipif|importorskip)\(|shutil\.which\(")
    allowed = {"support/needs.py", "support/test_needs.py", "support/cubin.py"}  # the last asks for a program
    found = {str(path.relative_to(TESTS)) for path in TESTS.rglob("*.py") if own.search(path.read_text())}
    assert found <= allowed
