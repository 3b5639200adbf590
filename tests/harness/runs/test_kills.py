"""Processes are killed at any moment: no finished trial is lost, and a later run gets the same results."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.records.trial_record import read_all
from tests.harness.cluster.test_rank_processes import until
from tests.harness.runs.test_launchers import SUITE, measurements

ROOT = Path(__file__).parents[3]
CHANGES = {
    '"walk"': '"kills"',
    "faulty:model": "gpt-tiny",
    "ranks_per_node = 2": "ranks_per_node = 1",
    '["qgz"]': '["zero3", "zeropp"]',
    "max_padding = 0.5": "max_padding = 1.0",
}


def started(folder: Path, nodes: int = 1) -> list[subprocess.Popen[bytes]]:
    """Start a run of the suite; with several nodes, one process for each, with torchrun's variables."""
    file = folder / f"{nodes}.toml"
    link, launcher = ("none", "local") if nodes == 1 else ("auto", "torchrun")
    text = SUITE.partition("[[override]]")[0]
    changes = CHANGES | {'launcher = "torchrun"': f'link = "{link}"\nlauncher = "{launcher}"'}
    for old, new in changes.items():
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    for node in range(nodes):
        variables = {
            "TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": str(node), "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        command = [sys.executable, "-m", "harness.cli", "run", "--no-report", file.name]
        with (folder / f"output{node}").open("ab") as output:
            processes.append(
                subprocess.Popen(
                    command, cwd=folder, env=os.environ | variables, stdout=output, stderr=output
                )
            )
    return processes


def results(folder: Path) -> dict[tuple[str, int], object]:
    """Return ledgers and losses of finished trials, by strategy and seed."""
    records = folder / "results" / "kills"
    return measurements(read_all(records) if records.is_dir() else [])


def ended(processes: list[subprocess.Popen[bytes]], folder: Path) -> list[int]:
    """Return the exit statuses of processes that end by themselves."""
    try:
        return [process.wait(timeout=180) for process in processes]
    except subprocess.TimeoutExpired:
        output = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("output*")))
        raise AssertionError(f"a run does not end:\n{output}") from None
    finally:
        for process in processes:
            process.kill()


def kill(folder: Path, role: str, seconds: float, number: int) -> None:
    """Start a run and kill one of its processes; checks that nothing is left behind."""
    processes = started(folder, 2 if role == "supervisor" else 1)
    tree = [psutil.Process(process.pid) for process in processes]
    if role == "supervisor":  # the first one waits five minutes for another that has not come yet
        until(lambda: bool(tree[1].children()) or processes[0].poll() is not None)
        seconds /= 2
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and processes[0].poll() is None:
        time.sleep(0.05)
    below = [child for root in tree if root.is_running() for child in root.children(recursive=True)]
    roots = {process.pid for process in processes}
    ranks = [child for child in below if child.is_running() and child.ppid() not in roots]
    victims = {"runner": tree[:1], "supervisor": tree[1:], "rank": ranks, "server": below}[role]
    if victims:
        victim = victims[number % len(victims)]
        if victim.is_running():
            victim.kill()
    ended(processes, folder)
    _, alive = psutil.wait_procs(below, timeout=120)
    assert not alive, f"left behind: {alive}"


@pytest.mark.long
def test_no_finished_trial_is_lost_by_kills(tmp_path: Path) -> None:
    """A supervisor of another node, a rank, a server or the runner is killed by signal 9.

    Finished trials keep their results and no process is left behind.  A last run without kills ends with the ids,
    bytes and losses of a run that was never disturbed.
    """
    folder, undisturbed, finished = tmp_path / "killed", tmp_path / "undisturbed", results(tmp_path)
    folder.mkdir()
    undisturbed.mkdir()
    assert ended(started(undisturbed), undisturbed) == [0]
    assert len(results(undisturbed)) == 4
    kills = [("supervisor", 6.0), ("rank", 5.0), ("server", 3.0), ("runner", 4.0)]
    for number, (role, seconds) in enumerate(kills):
        kill(folder, role, seconds, number)
        now = results(folder)
        assert finished.items() <= now.items(), "a finished trial is lost"
        finished = now
    assert ended(started(folder), folder) == [0]
    assert results(folder) == results(undisturbed)
