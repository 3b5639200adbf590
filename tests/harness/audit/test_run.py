"""Tests of running a program with the witness: what it writes, and that the program is not disturbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from harness.audit import run
from harness.audit.calls import CSV, PAGE, Calls, read
from harness.audit.witness import RING
from harness.errors import Refusal

ALONE = """
import os, sys, torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
weight = torch.nn.Parameter(torch.ones(8))
optimizer = torch.optim.SGD([weight], lr=0.1)
def step(elements):
    dist.all_reduce(torch.ones(elements))
    weight.grad = torch.ones(8)
    optimizer.step()
"""


def audited(
    tmp_path: Path, text: str, *, status: int = 0, last_step: int | None = None, marker: str = ""
) -> Calls:
    """Audit a script that has to end with ``status``."""
    (script := tmp_path / "script.py").write_text(textwrap.dedent(text))
    folder = tmp_path / "audit"
    run.prepare(folder, {"last_step": last_step, "marker": marker})
    assert run.run([sys.executable, str(script)], folder) == status
    return read(folder / run.RANKS)


def elements(calls: Calls, rank: int = 0) -> dict[int, int]:
    """Elements of all-reduces by step."""
    rows = calls.ranks[rank].rows
    return {step: sum(count.elements for count in found.values()) for step, found in rows.items()}


def test_a_program_without_torch_loads_the_witness_and_is_not_disturbed(tmp_path: Path) -> None:
    """Its path has no folder of ours, its status is its own, and there is nothing to report."""
    calls = audited(
        tmp_path,
        """
        import sys
        assert not any(path.endswith("site") for path in sys.path), sys.path
        assert "torch" not in sys.modules
        sys.exit(3)
        """,
        status=3,
    )
    assert (calls.ranks, calls.processes) == ([], 1)
    assert run.why_nothing(1, ["python"]).startswith("1 Python process ran, but none made a process group")


def test_a_program_of_another_language_is_named(tmp_path: Path) -> None:
    """No Python process loaded the witness."""
    run.prepare(tmp_path, {})
    assert run.run(["true"], tmp_path) == 0
    calls = read(tmp_path / run.RANKS)
    assert "no Python process of the program loaded the audit" in run.why_nothing(calls.processes, ["true"])


def test_the_users_own_sitecustomize_runs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one that Python would have found, under its own name."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text(
        "import os\nos.environ['MINE'] = __name__ + __file__\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    audited(
        tmp_path,
        f"""
        import os, sitecustomize
        path = {str(tmp_path / "mine" / "sitecustomize.py")!r}
        assert os.environ["MINE"] == "sitecustomize" + path
        assert sitecustomize.__file__ == path
        """,
    )


def test_an_error_of_the_users_sitecustomize_is_pythons_to_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python prints it as without an audit, and runs the program."""
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('mine')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    audited(tmp_path, "print('ran')")
    out, err = capfd.readouterr()
    assert out == "ran\n"
    assert "Error in sitecustomize" in err
    assert "ValueError: mine" in err


def test_a_witness_that_cannot_be_loaded_does_not_disturb(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The program runs as if nothing were there."""
    folder = tmp_path / "audit"
    run.prepare(folder, {})
    (folder / "site" / "witness.py").write_text("raise OSError('gone')\n")
    assert run.run([sys.executable, "-c", "print('ran')"], folder) == 0
    assert capfd.readouterr() == ("ran\n", "")


def test_a_program_that_exits_at_once_loses_nothing(tmp_path: Path) -> None:
    """os._exit() comes after everything was written, and keeps its status; calls after the last step count too."""
    calls = audited(
        tmp_path, ALONE + "step(1); step(2); step(3)\ndist.all_reduce(torch.ones(9))\nos._exit(7)", status=7
    )
    assert elements(calls) == {1: 1, 2: 2, 3: 3, 4: 9}
    assert (calls.whole, calls.ranks[0].ended, calls.notes) == (3, "os._exit", [])
    assert calls.ranks[0].model is not None
    assert calls.ranks[0].model["elements"] == 8


@pytest.mark.long
def test_a_killed_program_loses_no_step_that_ended(tmp_path: Path) -> None:
    """Each of the first ten steps is written when it ends."""
    text = ALONE + "step(1); step(2)\ndist.all_reduce(torch.ones(9))\nos.kill(os.getpid(), 9)"
    calls = audited(tmp_path, text, status=128 + signal.SIGKILL)
    assert elements(calls) == {1: 1, 2: 2}
    assert calls.notes == ["rank 0 was killed in step 3"]


@pytest.mark.long
def test_a_program_that_fails_keeps_its_status_and_its_calls(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The traceback is the program's own, without a line of ours."""
    calls = audited(tmp_path, ALONE + "step(1)\nstep(2)\nraise ValueError('mine')", status=1)
    assert elements(calls) == {1: 1, 2: 2}
    assert "witness" not in (err := capfd.readouterr().err)
    assert "ValueError: mine" in err


@pytest.mark.long
def test_steps_after_the_last_one_that_was_asked_for_are_not_recorded(tmp_path: Path) -> None:
    """The methods of torch are its own again."""
    text = """
    noting = dist.ProcessGroup.allreduce
    step(1); step(2)
    assert dist.ProcessGroup.allreduce is not noting
    step(3)
    """
    calls = audited(tmp_path, ALONE + textwrap.dedent(text), last_step=2)
    assert elements(calls) == {1: 1, 2: 2}
    assert calls.notes == []


@pytest.mark.long
def test_a_marker_ends_steps(tmp_path: Path) -> None:
    """A program without an optimizer names a function of an imported module, whose returns end steps."""
    (tmp_path / "marked.py").write_text("def end():\n    return 5\n")
    text = """
    import marked
    dist.all_reduce(torch.ones(3)); assert marked.end() == 5
    dist.all_reduce(torch.ones(4)); marked.end()
    """
    calls = audited(tmp_path, ALONE + textwrap.dedent(text), marker="marked:end")
    assert elements(calls) == {1: 3, 2: 4}


@pytest.mark.long
def test_a_marker_that_its_module_lacks_is_named(tmp_path: Path) -> None:
    """A mistyped function of ``--step-marker`` gives one line that names module and function, and no step."""
    (tmp_path / "marked.py").write_text("def end():\n    return 5\n")
    calls = audited(
        tmp_path, ALONE + "import marked\ndist.all_reduce(torch.ones(3))\n", marker="marked:ended"
    )
    assert calls.whole == 0
    (note,) = calls.notes
    assert note == (
        "rank 0: --step-marker marked:ended: module marked has no ended, so that no step ended; give the name of a "
        "function of that module"
    )


@pytest.mark.long
def test_a_program_that_forks_is_recorded_in_each_process(tmp_path: Path) -> None:
    """A child that makes a group of its own has a file of its own; a child that makes none has none."""
    text = """
    import os, sys, torch
    import torch.distributed as dist
    def work(rank):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(5 + rank))
        os._exit(0)
    for rank in (0, 1):
        if not os.fork():
            work(rank)
        os.wait()
    if not os.fork():
        os._exit(0)
    os.wait()
    """
    folder = tmp_path / "audit"
    audited(tmp_path, text)
    files = [path.read_text() for path in sorted((folder / run.RANKS).glob("*.jsonl"))]
    assert sorted(text.count('"event":"rows"') for text in files) == [0, 1, 1]


@pytest.mark.long
@pytest.mark.skipif(torch.__version__ < "2.13", reason="gloo has a recorder from torch 2.13 on")
def test_a_full_recorder_is_reported(tmp_path: Path) -> None:
    """Where nothing reads the ring in time, the number of lost calls is said."""
    text = f"""
    from torch.distributed._functional_collectives import all_reduce
    for _ in range({RING + 50}):
        all_reduce(torch.ones(1), "sum", [0])
    """
    calls = audited(tmp_path, ALONE + textwrap.dedent(text))
    assert "the flight recorder overflowed: 50 calls of steps 1 to 1 are lost" in calls.notes[0]


def test_a_program_that_looks_for_torch_first_is_recorded(tmp_path: Path) -> None:
    """Looking for a module, as many libraries do for optional ones, does not use up the hook on its import."""
    calls = audited(
        tmp_path, "import importlib.util\nimportlib.util.find_spec('torch')\n" + ALONE + "step(3)\n"
    )
    assert elements(calls)[1] == 3


@pytest.mark.parametrize("leave", ["os._exit(5)", "sys.exit(5)"])
def test_a_full_disk_changes_no_exit_status(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], leave: str
) -> None:
    """Files may not grow any more when the program ends; it ends as it wants, and prints nothing."""
    full = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
    calls = audited(tmp_path, f"{ALONE}step(3)\n{full}{leave}\n", status=5)
    assert elements(calls) == {1: 3}
    assert "Traceback" not in capfd.readouterr().err


def test_ctrl_c_stays_ignored(tmp_path: Path) -> None:
    """A shell has its background commands ignore Ctrl-C, which the audited program inherits."""
    run.prepare(folder := tmp_path / "audit", {})
    program = "import signal; raise SystemExit(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run.run([sys.executable, "-c", program], folder) == 1
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_folder_with_other_files_is_not_used(tmp_path: Path) -> None:
    """An audit replaces only a former audit."""
    (tmp_path / "mine").write_text("")
    with pytest.raises(Refusal, match="holds files but no earlier audit; name another folder"):
        run.prepare(tmp_path, {})
    with pytest.raises(Refusal, match="this is a file"):
        run.prepare(tmp_path / "mine", {})


def test_a_former_audit_is_replaced(tmp_path: Path) -> None:
    """Its ranks' files go, and its page and CSV, which a program that sends nothing does not replace."""
    run.prepare(tmp_path, {})
    for path in (tmp_path / run.RANKS / "old-1.jsonl", tmp_path / CSV, tmp_path / PAGE):
        path.write_text("")
    run.prepare(tmp_path, {})
    assert read(tmp_path / run.RANKS).processes == 0
    assert not [path.name for path in (tmp_path / CSV, tmp_path / PAGE) if path.exists()]


@pytest.mark.parametrize(
    ("command", "message"),
    [("absent-program", "no such program"), (__file__, "put its interpreter before it")],
)
def test_a_program_that_cannot_start_is_refused(tmp_path: Path, command: str, message: str) -> None:
    """One line says how to give it."""
    run.prepare(tmp_path, {})
    with pytest.raises(Refusal, match=message):
        run.run([command], tmp_path)


def test_the_recorders_ring_is_as_large_as_the_larger_of_both_wishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own size is kept if it is larger."""
    for size, expected in (("50000", "50000"), ("0", "5000"), ("", "5000")):
        monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", size)
        assert run.environment(tmp_path)["TORCH_FR_BUFFER_SIZE"] == expected


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 5), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_signals_are_the_programs(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """Ctrl-C goes to both, SIGTERM to the audit alone; the audit waits for what becomes of the program."""
    text = f"""
import sys
sys.path.insert(0, {str(Path(run.__file__).parents[2])!r})
from pathlib import Path
from harness.audit import run
run.prepare(Path({str(tmp_path / "audit")!r}), {{}})
program = "import time\\ntry:\\n  print('ready', flush=True); time.sleep(60)\\n"
program += "except KeyboardInterrupt: raise SystemExit(5)"
raise SystemExit(run.run([sys.executable, "-c", program], Path({str(tmp_path / "audit")!r})))
"""
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        assert process.wait(30) == status


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "expected module:function"),
        ("absent_module:f", "cannot import 'absent_module'"),
        ("json:absent", "has no 'absent'"),
        ("json:dumps", "TypeError"),
        ("os:getcwd", "expected a torch.nn.Module"),
    ],
)
def test_a_model_that_cannot_be_made_is_refused(name: str, message: str) -> None:
    """One line says what was wrong."""
    with pytest.raises(Refusal, match=message):
        run.count_parameters(name)


def test_parameters_of_a_model_are_counted_without_memory() -> None:
    """The model is made on the meta device."""
    assert run.count_parameters("docs.audited.programs:build") == 1_703_936
