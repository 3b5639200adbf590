"""Tests of ``zeropp audit``: its options, its outputs and its exit status."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from harness.audit import command, tables
from harness.audit.calls import read
from harness.audit.command import exit_status, parse_steps, reported
from harness.errors import Refusal
from harness.terminal_table import console
from tests.harness.audit.events import given, row
from tests.harness.conftest import Zeropp

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "steps"), [("5", (5, 5)), ("2:10", (2, 10)), ("2:", (2, None)), ("1:1", (1, 1))]
)
def test_steps(text: str, steps: tuple[int, int | None]) -> None:
    """A step, a range, or a range without an end."""
    assert parse_steps(text) == steps


@pytest.mark.parametrize("text", ["", "x", "0", "3:2", ":3", "1:2:3", "-1", "9" * 5000, f"1:{'9' * 5000}"])
def test_steps_that_are_none_are_refused(text: str) -> None:
    """The line says what is expected."""
    with pytest.raises(Refusal, match="--steps"):
        parse_steps(text)


def test_a_marker_that_is_none_is_refused(tmp_path: Path) -> None:
    """It names a module and a function."""
    with pytest.raises(Refusal, match="--step-marker train: expected module:function"):
        given(tmp_path, marker="train")


def test_the_tables_of_an_audit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Calls, closed form and counters are printed, each with its difference."""
    wanted = given(folder, "all_gather float32 == 4 M", "reduce_scatter <= 12 kB between nodes")
    report = reported(read(folder / "ranks", 2), wanted)
    assert report is not None
    command.show_report(report, console())
    out = capsys.readouterr().out
    assert "4 of 4 ranks on 2 nodes; steps 2-3 (by optimizer steps); numbers are of one step" in out
    assert "1,000 parameters (from optimizer AdamW)." in out
    assert "These are the messages of ZeRO-3: +0.00% from the closed form." in out
    assert re.search(r"backward +all_gather +- +float32 +1 +4 +3 +train\.py:7 \(main\)", out)
    assert re.search(r"0 +eth0 +24\.2 +24 +\+0\.83%", out)
    assert "broken: reduce_scatter" not in out
    assert "All expectations hold (2)." in out


def test_the_csv_of_an_audit(folder: Path) -> None:
    """It has a line for each step and row, and no cell that a spreadsheet would compute."""
    report = reported(read(folder / "ranks", 2), given(folder))
    assert report is not None
    with command.write_files(report, folder).open() as file:
        lines = [*csv.DictReader(file)]
    assert [line["step"] for line in lines] == ["2"] * 3 + ["3"] * 3
    assert {line["site"][:3] for line in lines} == {"tra", "'=<"}
    assert lines[0]["bytes"] == "4000"


def test_steps_that_differ_are_said(folder: Path) -> None:
    """The largest class of steps stands for all."""
    with (folder / "ranks" / "here-0.jsonl").open("a") as file:
        more = {"event": "rows", "first": 3, "last": 3, "rows": [row("broadcast", 9)]}
        file.write(json.dumps(more) + "\n")
    report = reported(read(folder / "ranks", 2), given(folder, steps="1:"))
    assert report is not None
    assert "Steps 1-2 are alike and shown; steps 3 differ: see calls.csv." in tables.sentences(report)


@pytest.mark.parametrize(
    ("program", "broken", "expected", "status"),
    [(0, 0, 1, 0), (0, 1, 1, 1), (3, 1, 1, 3), (0, None, 1, 1), (0, None, 0, 0)],
)
def test_the_exit_status(folder: Path, program: int, broken: int | None, expected: int, status: int) -> None:
    """The program's failure comes first, then broken expectations, then those that could not be checked."""
    report = None
    if broken is not None:
        report = reported(read(folder / "ranks", 2), given(folder, *["all <= 1 B"] * broken))
    assert exit_status(program, report, expected) == status


def test_what_is_refused_starts_no_program(
    tmp_path: Path, zeropp: Zeropp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong expectation is one line with status 2, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    done = zeropp("audit", "--expect", "all_gather < 1 M", "--", "touch", "started", status=2)
    assert done.stderr.startswith("zeropp: expectation 'all_gather < 1 M': expected OPERATION")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("absent-program", "there is no such program"),
        ("", "there is no such program"),
        ("./train.py", "not executable"),
    ],
)
def test_a_program_that_cannot_start_leaves_no_folder(
    tmp_path: Path, zeropp: Zeropp, monkeypatch: pytest.MonkeyPatch, program: str, says: str
) -> None:
    """It is refused in one line before anything is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    done = zeropp("audit", "--", program, status=2)
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_program_that_sends_nothing(tmp_path: Path, zeropp: Zeropp) -> None:
    """One line says so, and the status is the program's."""
    program = [sys.executable, "-c", "raise SystemExit(4)"]
    done = zeropp("audit", "--out", tmp_path / "a", *program, status=4)
    assert "the program ended with status 4" in done.stderr
    assert "none made a process group of torch.distributed" in done.stderr
    done = zeropp("audit", "--out", tmp_path / "a", "--expect", "all <= 1 B", "true", status=1)
    assert "1 expectation could not be checked" in done.stderr


@pytest.mark.long
def test_steps_that_a_program_did_not_make(tmp_path: Path, zeropp: Zeropp) -> None:
    """One line says how many steps the program made, and that the report is of all of them."""
    text = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        dist.all_reduce(torch.ones(8))
        weight.grad = torch.ones(8)
        optimizer.step()
    """
    (script := tmp_path / "script.py").write_text(textwrap.dedent(text))
    done = zeropp("audit", "--steps", "5:", "--out", tmp_path / "a", sys.executable, script, status=0)
    assert "--steps 5: the program made only 3 steps; the report covers all of them instead" in done.stderr


def fsdp2_of_the_guide() -> str:
    """The program with which the guide begins."""
    page = (ROOT / "docs" / "guide" / "your_program.md").read_text()
    return page.partition("```python\n")[2].partition("```")[0]


def test_the_guides_program_is_audited_as_the_guide_says(tmp_path: Path) -> None:
    """A torchrun of two ranks, of which each line of the guide's output that has no path is printed."""
    (tmp_path / "train.py").write_text(fsdp2_of_the_guide())
    torchrun = Path(sys.executable).with_name("torchrun")
    start = [str(torchrun)] if torchrun.exists() else [sys.executable, "-m", "torch.distributed.run"]
    program = [*start, "--nproc-per-node", "2", "train.py"]
    shutil.rmtree(tmp_path / "audit", ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", "audit", "--expect", "all_gather bfloat16 >= 0.9 M", "--", *program],
        cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "These are the messages of ZeRO-3 (FSDP2): +0.00% from the closed form." in done.stdout
    assert "broken: all_gather bfloat16 >= 0.9 M: rank 0 has 0 M in step 2" in done.stdout
    assert re.search(r"forward +all_gather +- +float32 .* train\.py:\d+ \(main\)", done.stdout)
    assert (tmp_path / "audit" / "audit.html").is_file()
