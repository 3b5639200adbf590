"""The tutorials' commands run as they stand there, and their configurations are DeepSpeed's."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.impl.test_deepspeed import SNIPPETS

PAGES = Path(__file__).parent.parent / "docs" / "tutorials"


def blocks(page: str) -> list[str]:
    """Shell blocks of a page, in order."""
    return re.findall(r"```bash\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", ["zero.md", "zeropp.md"])
def test_every_command_of_a_tutorial_runs(page: str, tmp_path: Path) -> None:
    """In one folder, one after the other; each starts a process that imports torch, so it takes seconds."""
    program = f'zeropp() {{ {shlex.quote(sys.executable)} -m harness.cli "$@"; }}\nset -e\n'
    root = Path(__file__).parent.parent
    for block in blocks(page):
        done = subprocess.run(
            ["bash", "-c", program + block],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        steps = re.findall(r"^step \d+/2 \| loss", done.stdout, re.MULTILINE)
        assert len(steps) == (0 if "--plan" in block else 2)


def test_the_configurations_are_those_of_deepspeed_s_tutorials() -> None:
    """Key by key and value by value."""
    shown = [
        json.loads(text)
        for page in ("zero.md", "zeropp.md")
        for block in blocks(page)
        for text in re.findall(r"<<'JSON'\n(.*?)JSON\n", block, re.DOTALL)
    ]
    assert shown == [json.loads(text) for text in SNIPPETS.values()]
