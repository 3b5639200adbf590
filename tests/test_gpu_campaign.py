"""The first measurements of a GPU, and the campaign, rehearsed without one: a killed run keeps its results,
no stage stops the next, and every option exists.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from harness import cli
from harness.runs.feasibility import Host, forecast
from harness.suites.suite_file import load
from tests import gpu_campaign
from tests.gpu_campaign import ARCHIVE, Stage, main, run, stages, table
from tests.gpu_first import ENGINES, questions

NO_GPU = pytest.mark.needs("no CUDA device")


@pytest.mark.parametrize(
    "letters", [pytest.param("e", marks=pytest.mark.long), pytest.param("abcde", marks=pytest.mark.nightly)]
)
@pytest.mark.timeout(660)  # its stages have limits of their own
def test_the_same_commands_run_on_a_cpu(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], letters: str
) -> None:
    """Stages leave records and a line in the last table; one file holds them, to archive suites from."""
    results, packed = tmp_path / "there", tmp_path / "out"
    command = ["--device", "cpu", "--results", str(results), "--minutes", "10", "--pack", str(packed)]
    assert main([*command, "--stages", letters]) == 0
    lines = capfd.readouterr().out.splitlines()
    names = [stage.name for stage in stages("cpu", results) if stage.name[0] in letters]
    assert (results / f"campaign-{letters}.txt").read_text().splitlines() == lines[-len(names) - 1 :]
    for name, line in zip(names, lines[-len(names) :], strict=True):
        assert line.startswith(name)
        assert " ok " in line
        assert not line.endswith(".html")
    assert [path.name for path in packed.iterdir()] == [ARCHIVE]
    safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # before 3.11.4
    with tarfile.open(packed / ARCHIVE) as archive:
        archive.extractall(tmp_path, **safely)  # noqa: S202  # our own
    back = tmp_path / "gpu-campaign"
    assert not list(back.rglob("*.html"))
    assert len(list(back.glob("*.log"))) == len(names)
    counts = [len(list(back.glob(f"{name}/*.json"))) for name in ("gpu-*", "*/bench-codecs", "gpu-pair")]
    assert counts == ([2, 0, 2] if letters == "e" else [14, 2, 2])
    assert cli.main(["archive", "gpu-pair", str(tmp_path), "--results", str(back)]) == 0
    assert (tmp_path / "gpu-pair.tar.xz").exists()


def test_its_suites_fit_one_gpu(tmp_path: Path) -> None:
    """With the sizes for a GPU all trials are feasible on one of 78 GiB, and all are for a GPU."""
    names = [stage.name for stage in stages("cuda", tmp_path)]
    assert names == sorted(names, key=lambda name: name[0])
    assert len(set(names)) == len(names)
    suites = [load(path).trials for path in sorted(tmp_path.glob("*.toml"))]
    assert sum(map(len, suites)) == 23
    host = Host(128 * 2**30, (78 * 2**30,), lambda: "no namespaces")
    for trials in suites:
        for plan in forecast(trials, host):
            assert not plan.problems
            assert plan.trial.cluster.device == "cuda"
            policy = plan.trial.resolved_policy()
            computes = plan.trial.peer.compute if policy is None else policy.compute
            assert computes == ("fp16" if "fp16" in str(plan.trial.policy) else "bf16")
            assert plan.trial.activation_checkpointing == (plan.trial.topology().world == 1)


@NO_GPU
def test_benches_of_a_gpu_lack_nothing_but_the_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All their options are valid: without a GPU each reports that the GPU or CuPy is missing."""
    benches = [stage for stage in stages("cuda", tmp_path) if stage.name[0] == "b" or stage.name == "a laws"]
    assert len(benches) == 10
    for stage in benches:
        assert stage.command[:2] == ("-m", "harness.cli")
        assert cli.main([*stage.command[2:]]) == 2
        errors = capsys.readouterr().err
        assert "torch finds no CUDA device" in errors or "CuPy is not installed" in errors


def test_a_stage_that_fails_hangs_or_lacks_something_is_a_line(tmp_path: Path) -> None:
    """The processes of a stage end with it."""
    fork = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); "
    wanted = [
        (Stage("a fails", ("-c", "print('why'); raise SystemExit(3)"), 9), 9.0, "status 3", "why"),
        (Stage("b hangs", ("-c", fork + "time.sleep(600)"), 2), 2.0, "cut at 2 s", None),
        (Stage("c lacks", ("-c", ""), 9, ("no_such_module",)), 9.0, "left out", "no no_such_module"),
        (Stage("d late", ("-c", ""), 9), 0.0, "left out", "no time was left"),
        (Stage("e ok", ("-c", "print('fine')"), 9), 9.0, "ok", "fine"),
    ]
    ended = [run(stage, tmp_path / stage.name, seconds) for stage, seconds, _, _ in wanted]
    for end, (stage, _, status, line) in zip(ended, wanted, strict=True):
        assert (end.name, end.status, end.last_line) == (stage.name, status, line or end.last_line)
    pid = int((tmp_path / "b hangs").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert [line.split("  ")[0] for line in table(ended).splitlines()[1:]] == [end.name for end in ended]


def test_killed_at_any_time_it_leaves_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a stage runs, the archive and the table hold all earlier ones."""
    look = (
        "import sys, tarfile; from pathlib import Path; there = Path(sys.argv[1]); "
        "print(*tarfile.open(there / sys.argv[2]).getnames(), *there.glob('*.txt')); "
        "print((there / 'campaign-ab.txt').read_text())"
    )
    looks = Stage("b looks", ("-c", look, str(tmp_path), ARCHIVE), 9)
    both = (Stage("a first", ("-c", "print(1)"), 9), looks)
    monkeypatch.setattr(gpu_campaign, "stages", lambda *_, **__: both)
    assert main(["--device", "cpu", "--results", str(tmp_path), "--stages", "ab"]) == 0
    output = (tmp_path / "1-b-looks.log").read_text()
    assert {"gpu-campaign/0-a-first.log", "gpu-campaign/campaign-ab.txt"} <= {*output.split()}
    assert re.search(r"^a first +ok .*\n^b looks +not ended", output, re.MULTILINE)


def test_it_imports_the_standard_library_alone() -> None:
    """So that it can name missing packages."""
    lines = Path(gpu_campaign.__file__).read_text().splitlines()
    modules = {line.split()[1].partition(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert modules <= sys.stdlib_module_names


@pytest.mark.long
@pytest.mark.parametrize("kept", [3, None])
def test_each_answer_of_gpu_first_is_written_as_it_comes(tmp_path: Path, kept: int | None) -> None:
    """A killed run keeps its lines; in a whole one kernels equal the reference, and first losses agree."""
    out = tmp_path / "first.jsonl"
    command = [sys.executable, "-m", "tests.gpu_first", "--device", "cpu", "--out", str(out)]
    with subprocess.Popen(
        command, cwd=gpu_campaign._REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        printed = list(itertools.islice(process.stdout, kept))
        if kept is not None:
            process.kill()
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [json.loads(line) for line in printed] == answers[: len(printed)]
    if kept is not None:
        assert len(answers) >= kept
        return
    assert process.returncode == 0, printed
    assert len(answers) == len(list(questions(torch.device("cpu"), large=False)))
    assert all(line["equal"] for line in answers if line["ask"] == "reference")
    engines = [line for line in answers if line["ask"] == "engine"]
    assert [line["engine"] for line in engines] == list(ENGINES)
    assert max(line["losses"][0] for line in engines) - min(line["losses"][0] for line in engines) < 0.05
