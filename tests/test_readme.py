"""The texts say what is so: two lines do everything, and examples are what the code does."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import app
from harness.suites.suite_file import load

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def shell_blocks(heading: str) -> list[str]:
    """Fenced shell blocks under a heading of the README."""
    section = re.split(r"^## ", README, flags=re.MULTILINE)
    (body,) = [part for part in section if part.startswith(f"{heading}\n")]
    return re.findall(r"^```sh\n(.*?)^```$", body, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("heading", "words"), [("Quickstart", "zeropp run suites/quickstart.toml"), ("Tests", "tox")]
)
def test_one_line_each(heading: str, words: str) -> None:
    """Quickstart and Tests are each followed by exactly one fenced shell block of one line."""
    (block,) = shell_blocks(heading)
    assert block.count("\n") == 1
    assert words in block
    assert "-c constraints.txt" in block


def test_no_other_shell_block() -> None:
    """There is no third line to type."""
    assert len(re.findall(r"^```sh$", README, flags=re.MULTILINE)) == 2


def test_links() -> None:
    """Every link of every text leads to a file that is there."""
    texts = [ROOT / "README.md", ROOT / "results" / "README.md", *(ROOT / "docs").rglob("*.md")]
    for text in texts:
        for target in re.findall(r"\]\(([^)#]+)", text.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (text.parent / target).exists(), f"{text.name}: {target}"


def test_every_suite_is_listed() -> None:
    """The README lists every shipped suite."""
    for suite in (ROOT / "suites").glob("*.toml"):
        assert f"](suites/{suite.name})" in README


def test_example_suite(tmp_path: Path) -> None:
    """The README's suite compares two weight codecs of ZeRO++ with one ZeRO-3 and one DDP."""
    (block,) = re.findall(r"^```toml\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.toml").write_text(block, encoding="utf-8")
    trials = load(tmp_path / "mine.toml").trials
    cells = {(trial.strategy, trial.policy.weights) for trial in trials}
    assert {strategy for strategy, _ in cells} == {"zero3", "ddp", "zeropp"}
    assert len(cells) == 4
    assert len(trials) == 6 * len(cells)


def test_commands_are_named() -> None:
    """The README names every command."""
    for command in app.registered_commands:
        assert f"`zeropp {command.name or command.callback.__name__}" in README


def test_ci_runs_the_tests_line() -> None:
    """Continuous integration runs exactly the line under Tests."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (extract,) = re.findall(r"^line=\$\((.*)\)$", script, flags=re.MULTILINE)
    done = subprocess.run(["bash", "-c", extract], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [done.stdout] == shell_blocks("Tests")


def python_example(word: str) -> str:
    """The README's one Python example that holds ``word``."""
    blocks = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    (code,) = [block for block in blocks if word in block]
    return code


# Ranks with torchrun's variables, forked after torch was imported once.
RANKS = """
import os, sys
import torch

for rank in range(4):
    if os.fork() == 0:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        exec(sys.argv[1], {"__name__": "__main__"})
        sys.exit(0)
sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(4)))
"""


def _ran(code: str) -> list[str]:
    """What four ranks print that run ``code``."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-c", RANKS, code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **told, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_the_loop_trains_as_shown() -> None:
    """The README's loop runs as it stands: five steps of four ranks, with falling losses."""
    said = [line.split() for line in _ran(python_example("zero.step(optimizer"))]
    assert [step for step, _ in said] == ["0", "1", "2", "3", "4"]
    assert float(said[-1][1]) < float(said[0][1])


@pytest.mark.long
def test_the_collectives_stand_alone_as_shown() -> None:
    """The README's two lines gather weights and reduce a gradient; it prints the stated shapes and types."""
    code = python_example("quantized_all_gather")
    assert "(4, 100, 3)" in code
    assert "(50, 2) fp32" in code
    assert _ran(code) == ["(4, 100, 3) torch.float32 (50, 2) torch.float32"]
