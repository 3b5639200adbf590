"""What the system says of the processors, and what a process learns from it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from unittest import mock

import pytest

from harness.measure import cpu_usage
from harness.measure.cpu_usage import SCHEDULED, ProcessorMeter, ThreadClock, busy, grown
from tests.harness.measure.test_step_clock import compute

OURS = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
ELSEWHERE = 4096  # no machine of ours has so many
TICK = 1 / os.sysconf("SC_CLK_TCK")


def _stat(folder: Path, *lines: str) -> Path:
    path = folder / "stat"
    path.write_text("\n".join(("cpu 9 9 9 9 9 9 9 9 9 9", *lines, "intr 5 0 1", "ctxt 7")) + "\n")
    return path


def test_counts_of_our_processors_are_told_by_who_had_them(tmp_path: Path) -> None:
    """Niced programs are programs, both kinds of interrupts are one; the sum, idleness, guests and processors
    that the process may not use are left out.
    """
    path = _stat(tmp_path, f"cpu{OURS} 100 20 30 4000 50 6 7 80 90 10", f"cpu{ELSEWHERE} 1 1 1 1 1 1 1 1 1 1")
    found = busy(path)
    assert found is not None
    ticks = {"user": 120, "system": 30, "interrupts": 13, "steal": 80}
    assert found == pytest.approx({name: count * TICK for name, count in ticks.items()})


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(f"cpu{OURS} 0 0 0 0 0 0 0 0 0 0", id="a sandbox that counts nothing"),
        pytest.param(f"cpu{OURS} 1 2 3 4", id="a kernel that tells less"),
        pytest.param(f"cpu{OURS} 1 2 3 4 5 6 7 x", id="no numbers"),
        pytest.param(f"cpu{ELSEWHERE} 1 2 3 4 5 6 7 8", id="none of ours"),
    ],
)
def test_what_the_system_does_not_count_is_not_known(tmp_path: Path, line: str) -> None:
    """Zeros, other columns and other processors give nothing rather than a wrong number."""
    assert busy(_stat(tmp_path, line)) is None


def test_without_the_file_nothing_is_known(tmp_path: Path) -> None:
    """Where there is no /proc/stat, the machine's processors are not known and nothing is raised."""
    assert busy(tmp_path / "stat") is None


def test_a_count_that_goes_down_adds_nothing() -> None:
    """Between two readings, what grew counts and what the system corrected does not."""
    after, before = {"user": 5.0, "system": 3.0, "steal": 2.0}, {"user": 4.0, "system": 3.5, "steal": 2.0}
    assert grown(after, before) == {"user": 1.0, "system": 0.0, "steal": 0.0}


def test_what_this_process_computes_is_in_what_the_machine_did() -> None:
    """Half a second of this process's computation is its own, and the machine's programs had no less; a meter
    that was not asked for the machine tells the process alone.
    """
    meter, alone = ProcessorMeter(machine=True), ProcessorMeter(machine=False)
    compute(0.5)
    found, ours = meter.spent(), alone.spent()
    assert found.computed >= 0.5
    assert ours.computed >= 0.5
    assert ours.machine is None
    assert found.processors >= 1
    assert found.seconds * found.processors >= found.computed
    if busy() is not None:
        assert found.machine is not None
        assert found.machine["user"] + found.machine["system"] >= 0.8 * found.computed  # ticks are samples


def test_a_thread_sleeps_while_it_neither_runs_nor_could(tmp_path: Path) -> None:
    """A pause is slept, and no more than all is; without the kernel's count nothing is known."""
    clock = ThreadClock()
    time.sleep(0.05)
    seconds, slept = clock.read()
    if SCHEDULED.exists():
        assert slept is not None
        assert 0.04 < slept <= seconds
    with mock.patch.object(cpu_usage, "SCHEDULED", tmp_path / "none"):
        assert ThreadClock().read()[1] is None
