"""Whatever is killed at any moment: no finished trial is lost, and a later run ends with the same results."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from harness.records.record import read_all
from tests.harness.cluster.test_rank_processes import until

ROOT = Path(__file__).parents[3]
SUITE = """
name = "kills"
question = "Does a run that was killed go on?"
[defaults]
model.name = "gpt-tiny"
sequence = 16
tokens_per_rank = 32
steps = 2
warmup = 1
validate_every = 0
validation_batches = 1
measure_quantisation = false
timeout_seconds = 100
policy.max_padding = 1.0
[defaults.cluster]
nodes = 2
ranks_per_node = 1
link = "LINK"
launcher = "LAUNCHER"
[matrix]
strategy = ["zero3", "zeropp"]
seed = [0, 1]
"""
LOCAL, TORCHRUN = ("none", "local"), ("auto", "torchrun")
KILLS = 100
RUNS = 5  # that are killed, then one that is not


def started(folder: Path, launched: tuple[str, str]) -> list[subprocess.Popen[bytes]]:
    """A run of the suite; under torchrun, one process for each node, with the variables that it sets."""
    link, launcher = launched
    file = folder / f"{launcher}.toml"
    file.write_text(SUITE.replace("LINK", link).replace("LAUNCHER", launcher), encoding="utf-8")
    port = 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    for node in range(1 if launched is LOCAL else 2):
        told = {} if launched is LOCAL else {
            "TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": str(node), "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        with (folder / f"output{node}").open("ab") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "harness.cli", "run", "--no-report", file.name],
                    cwd=folder,
                    env=os.environ | {"PYTHONPATH": str(ROOT)} | told,
                    stdout=output,
                    stderr=output,
                )
            )
    return processes


def results(folder: Path) -> dict[str, Any]:
    """Ledgers and losses of finished trials, by id."""
    there = folder / "results" / "kills"
    return {
        one.id: (
            [rank.ledger for rank in one.ranks],
            [step.loss for rank in one.ranks for step in rank.steps],
        )
        for one in (read_all(there) if there.is_dir() else [])
        if one.failure is None
    }


def ended(processes: list[subprocess.Popen[bytes]], folder: Path) -> list[int]:
    """Exit statuses of processes that end by themselves."""
    try:
        return [process.wait(timeout=180) for process in processes]
    except subprocess.TimeoutExpired:
        said = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("output*")))
        raise AssertionError(f"a run does not end:\n{said}") from None
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run finds that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert ended(started(folder, LOCAL), folder) == [0]
    found = results(folder)
    assert len(found) == 4
    return found


class Folder:
    """Where runs of one suite are killed, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.there = folder, dict[str, Any]()

    def kill(self, who: str, seconds: float, which: int) -> None:
        """Start a run and kill one of its processes: what had a result keeps it, and nothing stays behind."""
        processes = started(self.folder, TORCHRUN if who == "supervisor" else LOCAL)
        tree = [psutil.Process(process.pid) for process in processes]
        if who == "supervisor":  # for one that has not come yet, the first waits for five minutes
            until(lambda: bool(tree[1].children()) or processes[0].poll() is not None)
            seconds /= 2
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and processes[0].poll() is None:
            time.sleep(0.05)
        below = [child for one in tree if one.is_running() for child in one.children(recursive=True)]
        own = {process.pid for process in processes}
        ranks = [child for child in below if child.is_running() and child.ppid() not in own]
        victims = {"runner": tree[:1], "supervisor": tree[1:], "rank": ranks, "server": below}[who]
        if victims:
            victim = victims[which % len(victims)]
            if victim.is_running():
                victim.kill()
        ended(processes, self.folder)
        _, alive = psutil.wait_procs(below, timeout=120)
        assert not alive, f"left behind: {alive}"
        now = results(self.folder)
        assert self.there.items() <= now.items(), "a finished trial is lost"
        self.there = now

    def check(self, undisturbed: dict[str, Any]) -> None:
        """A run that is left alone ends with the ids, bytes and losses of one that was never disturbed."""
        assert ended(started(self.folder, LOCAL), self.folder) == [0]
        assert results(self.folder) == undisturbed


RUNNER = [("runner", 4.0)]
ALL = [("supervisor", 6.0), ("rank", 5.0), *RUNNER]


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(RUNNER, id="runner", marks=pytest.mark.long),
        pytest.param(ALL, id="all", marks=pytest.mark.long),
    ],
)
def test_no_finished_trial_is_lost_by_kills(
    tmp_path: Path, undisturbed: dict[str, Any], kills: list[tuple[str, float]]
) -> None:
    """A supervisor of another node, a rank or the runner is killed by signal 9; what had a result keeps it,
    nothing of a run stays behind, and a run that is left alone ends with the ids, bytes and losses of one
    that was never disturbed.
    """
    folder = Folder(tmp_path)
    for which, (who, seconds) in enumerate(kills):
        folder.kill(who, seconds, which)
    folder.check(undisturbed)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_no_finished_trial_is_lost(undisturbed: dict[str, Any]) -> None:
    """The same of runners, supervisors, servers and ranks, at any moment."""

    class Killed(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.temporary = tempfile.TemporaryDirectory()
            self.folder = Folder(Path(self.temporary.name))

        @rule(
            who=st.sampled_from(["runner", "rank", "server", "supervisor"]),
            seconds=st.floats(0, 14, allow_subnormal=False),
            which=st.integers(0, 7),
        )
        def kill(self, who: str, seconds: float, which: int) -> None:
            try:
                self.folder.kill(who, seconds, which)
            except BaseException:  # what Hypothesis tries again may end in another way
                print(who, seconds, which)
                traceback.print_exc()
                raise

        def teardown(self) -> None:
            try:
                self.folder.check(undisturbed)
            finally:
                self.temporary.cleanup()

    case = Killed.TestCase
    case.settings = settings(
        max_examples=KILLS // RUNS,
        stateful_step_count=RUNS,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a shorter way to a failure would take too long
        suppress_health_check=list(HealthCheck),
    )
    case().runTest()
