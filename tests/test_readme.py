"""The texts are true: two lines do everything, the files that they name exist, examples run as shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import app
from harness.suites.suite_file import load

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("[rs]*s/README.md"), *(ROOT / "docs").rglob("*.md")]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
STATUSES = ("measured", "in part", "tested", "modelled", "not available")
NAMED = re.compile(r"`((?:impl|harness|report|tests|suites|docs)(?:/[\w.]+)+/?)`")


def fenced(language: str) -> list[str]:
    """The README's blocks of code in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_two_lines_do_everything() -> None:
    """Quickstart and Tests each have a shell block of one line, the only ones; CI runs that of Tests."""
    sections = {part.partition("\n")[0]: part for part in re.split(r"^## ", README, flags=re.MULTILINE)}
    quickstart, tests = blocks = fenced("sh")
    for block, section, command in (
        (quickstart, "Quickstart", "zeropp run suites/quickstart.toml"),
        (tests, "Tests", "tox"),
    ):
        assert block in sections[section]
        assert command in block
    assert all(block.count("\n") == 1 and "-c constraints.txt" in block for block in blocks)
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (extract,) = re.findall(r"^line=\$\((.*)\)$", script, flags=re.MULTILINE)
    process = subprocess.run(["bash", "-c", extract], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == tests


def test_what_texts_name_is_there() -> None:
    """Every link, and every path that a page names in code, leads to a file."""
    link = re.compile(r"\]\((?!\w+://)([^)#]+)")
    links = [(page, page.parent / to) for page in PAGES for to in link.findall(TEXTS[page])]
    paths = [(page, ROOT / path) for page in PAGES for path in NAMED.findall(TEXTS[page])]
    assert len(paths) > 20
    assert [(page, to) for page, to in links + paths if not to.exists()] == []


def test_all_suites_and_commands_are_listed() -> None:
    """Every shipped suite by a link in suites/README.md, every command by its name; README links to both."""
    suites = TEXTS[ROOT / "suites" / "README.md"]
    for suite in (ROOT / "suites").glob("*.toml"):
        assert f"]({suite.name})" in suites
    commands = TEXTS[ROOT / "docs" / "guide" / "commands.md"]
    for command in app.registered_commands:
        assert f"zeropp {command.name or command.callback.__name__}" in commands
    assert "](suites/README.md)" in README
    assert "](docs/guide/commands.md)" in README


def test_readme_is_by_task() -> None:
    """Each task that README names has a heading with commands or an example below it."""
    sections = {part.partition("\n")[0]: part for part in re.split(r"^## ", README, flags=re.MULTILINE)}
    for task in (
        "Run a suite on GPU nodes", "Property-test a kernel of your own", "Regenerate figures and tables",
        "Your own question", "Your own loop", "Tests",
    ):  # fmt: skip
        assert re.search(r"^```\w+\n", sections[task], flags=re.MULTILINE), task
    assert "![" in sections["Quickstart"]
    assert "fp32" in sections["Comparison with DDP, FSDP2 and DeepSpeed"]


def test_commands_of_the_readme_exist() -> None:
    """Every `zeropp` command in the README's shell blocks is one of the application's."""
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    names |= {group.name for group in app.registered_groups}
    typed = re.findall(r"(?:^|\s|/)zeropp ([\w-]+)", "".join(fenced("sh") + fenced("bash")))
    assert {"run", "report", "check", "doctor"} <= {*typed} <= names


def test_the_slurm_line_runs_a_suite_that_may_be_started_by_slurm(tmp_path: Path) -> None:
    """README's sed turns the suite for torchrun into one for Slurm."""
    (line,) = [line for block in fenced("bash") for line in block.splitlines() if line.startswith("sed ")]
    copied = tmp_path / "gpu_slurm.toml"
    subprocess.run(["bash", "-c", line.replace("> gpu_slurm.toml", f"> {copied}")], cwd=ROOT, check=True)
    assert {trial.cluster.launcher for trial in load(copied).trials} == {"slurm"}


def test_every_item_of_the_paper_has_a_version_and_a_status() -> None:
    """Each row of the paper's tables has six cells, and a status that the page explains."""
    text = TEXTS[ROOT / "docs" / "paper.md"]
    rows = [
        [cell.strip() for cell in line.split(" | ")] for line in text.splitlines() if line.startswith("| ")
    ]
    items = [row for row in rows if len(row) == 6 and row[0] not in ("| item", "| ---")]
    assert len(items) >= 25
    for item, version, status, _, here, where in items:
        assert item != "|"
        assert version, item
        assert set(status.split(", ")) <= set(STATUSES), item
        assert here, item
        assert where != "|", item
    assert all(f"\n| {status} | " in text for status in STATUSES)


def test_documents_from_records_have_no_escapes() -> None:
    """What records write into documents is plain Markdown: no escaped dot."""
    assert "\\." not in TEXTS[ROOT / "docs" / "results.md"] + TEXTS[ROOT / "suites" / "README.md"]


def test_example_suite(tmp_path: Path) -> None:
    """The README's suite compares two weight codecs of ZeRO++ with one ZeRO-3 and one DDP."""
    (block,) = fenced("toml")
    (tmp_path / "mine.toml").write_text(block, encoding="utf-8")
    trials = load(tmp_path / "mine.toml").trials
    cells = {(trial.strategy, trial.policy.weights) for trial in trials}
    assert {strategy for strategy, _ in cells} == {"zero3", "ddp", "zeropp"}
    assert len(cells) == 4
    assert len(trials) == 6 * len(cells)


def torchrun(program: Path, ranks: int) -> list[str]:
    """Lines printed by ranks that torchrun starts in the program's folder, in seconds: all import torch."""
    process = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", program],
        cwd=program.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def python_example(name: str) -> str:
    """The README's Python example of a name."""
    assert f"Save this as `{name}` and start it with `torchrun --nproc-per-node 4 {name}`:" in README
    word = {"loop.py": "zero.step(optimizer", "collectives.py": "quantized_all_gather"}[name]
    (code,) = [block for block in fenced("python") if word in block]
    return code


@pytest.mark.long
def test_examples_run_as_shown(tmp_path: Path) -> None:
    """The loop trains five steps with falling losses; the collectives print the stated shapes and types."""
    for name in ("loop.py", "collectives.py"):
        (tmp_path / name).write_text(python_example(name), encoding="utf-8")
    printed = [line.split() for line in torchrun(tmp_path / "loop.py", 4)]
    assert [step for step, _ in printed] == ["0", "1", "2", "3", "4"]
    assert float(printed[-1][1]) < float(printed[0][1])
    code = python_example("collectives.py")
    assert "(4, 100, 3)" in code
    assert "(50, 2) fp32" in code
    wanted = ["(4, 100, 3) torch.float32 (50, 2) torch.float32"]
    assert torchrun(tmp_path / "collectives.py", 4) == wanted
