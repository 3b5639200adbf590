"""The campaign on a GPU, rehearsed without one: no stage stops the next, and none is asked for in vain."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from harness import gpu_campaign
from harness.gpu_campaign import Stage, main, run, stages, table
from harness.runs.forecast import Host, forecast
from harness.suites.suite_file import load


def test_the_same_commands_run_on_a_cpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Laws, tests, benches and engines leave their records, and a line each in the table that comes last."""
    assert main(["--device", "cpu", "--results", str(tmp_path), "--minutes", "10"]) == 0
    lines = capfd.readouterr().out.splitlines()
    names = [stage.name for stage in stages("cpu", tmp_path)]
    assert (tmp_path / "campaign.txt").read_text().splitlines() == lines[-len(names) - 1 :]
    for name, line in zip(names, lines[-len(names) :], strict=True):
        assert line.startswith(name)
        assert " ok " in line
    assert len(list(tmp_path.glob("engine/*.json"))) == 4
    assert len(list(tmp_path.glob("shared/*.json"))) == 15
    assert len(list(tmp_path.glob("*-MiB/bench-codecs/*.json"))) == 1


def test_its_suites_fit_one_gpu(tmp_path: Path) -> None:
    """With the sizes for a GPU all trials can run on one of 78 GiB, and none of them on a CPU."""
    assert [stage.name[0] for stage in stages("cuda", tmp_path)] == sorted(
        stage.name[0] for stage in stages("cuda", tmp_path)
    )
    found = [load(path).trials for path in sorted(tmp_path.glob("*.toml"))]
    assert sum(map(len, found)) == 23
    host = Host(128 * 2**30, (78 * 2**30,), lambda: "no namespaces")
    for trials in found:
        for one in forecast(trials, host):
            assert not one.problems
            assert one.trial.cluster.device == "cuda"


def test_a_stage_that_fails_hangs_or_lacks_something_is_a_line(tmp_path: Path) -> None:
    """What a stage started ends with it."""
    fork = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); "
    wanted = [
        (Stage("a fails", ("-c", "print('why'); raise SystemExit(3)"), 9), 9.0, "status 3", "why"),
        (Stage("b hangs", ("-c", fork + "time.sleep(600)"), 2), 2.0, "cut at 2 s", ""),
        (Stage("c lacks", ("-c", ""), 9, ("no_such_module",)), 9.0, "left out", "no no_such_module"),
        (Stage("d late", ("-c", ""), 9), 0.0, "left out", "no time was left"),
        (Stage("e ok", ("-c", "print('fine')"), 9), 9.0, "ok", "fine"),
    ]
    ended = [run(stage, tmp_path / stage.name, seconds) for stage, seconds, _, _ in wanted]
    for one, (stage, _, status, found) in zip(ended, wanted, strict=True):
        assert (one.name, one.status) == (stage.name, status)
        if found:
            assert one.found == found
    pid = int((tmp_path / "b hangs").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert [line.split("  ")[0] for line in table(ended).splitlines()[1:]] == [one.name for one in ended]


def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the names of distributions, one a line; a module that is here is not."""
    monkeypatch.setattr(gpu_campaign, "NEEDED", {"no_such_module": "no-such-package", "json": "json"})
    assert main(["--missing"]) == 0
    assert capsys.readouterr().out == "no-such-package\n"


def test_it_imports_the_standard_library_alone() -> None:
    """So that it can say what is missing."""
    lines = Path(gpu_campaign.__file__).read_text().splitlines()
    modules = {line.split()[1].partition(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert modules <= sys.stdlib_module_names
