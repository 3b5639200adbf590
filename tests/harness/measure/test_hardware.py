"""How processors and GPUs are joined is read as the system says it."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from harness.measure import hardware


def test_two_sockets_with_threads(tmp_path: Path) -> None:
    """Sockets, cores and threads are counted; NUMA nodes have their processors."""
    for cpu in range(8):
        folder = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu // 4}\n", encoding="ascii")
        (folder / "core_id").write_text(f"{cpu // 2}\n", encoding="ascii")
    for node in range(2):
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "node" / f"node{node}" / "cpulist").write_text(
            f"{4 * node}-{4 * node + 3}\n", encoding="ascii"
        )
    found = hardware.processors(tmp_path)
    assert (found.sockets, found.cores, found.threads) == (2, 4, 8)
    assert found.numa == {"0": "0-3", "1": "4-7"}


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    """What is not there is None."""
    found = hardware.processors(tmp_path)
    assert (found.sockets, found.cores, found.threads, found.numa) == (None, None, None, {})


def test_adapters_that_work_are_listed_by_number(tmp_path: Path) -> None:
    """Those with an active port, the tenth after the second; none without InfiniBand."""
    assert hardware.hcas(tmp_path / "none") == []
    states = {
        "mlx5_10": ["4: ACTIVE"],
        "mlx5_2": ["1: DOWN", "4: ACTIVE"],
        "mlx5_3": ["1: DOWN"],
        "hfi1_0": [],
    }
    for name, ports in states.items():
        (tmp_path / name).mkdir()
        for number, state in enumerate(ports, 1):
            folder = tmp_path / name / "ports" / str(number)
            folder.mkdir(parents=True)
            (folder / "state").write_text(f"{state}\n", encoding="ascii")
    assert hardware.hcas(tmp_path) == ["mlx5_2", "mlx5_10"]


@given(st.sets(st.integers(0, 300)))
def test_ranges_name_every_number_once(numbers: set[int]) -> None:
    """A list of processors read back is the one that was written."""
    read: list[int] = []
    for part in filter(None, hardware.ranges(numbers).split(",")):
        first, _, last = part.partition("-")
        read += range(int(first), int(last or first) + 1)
    assert read == sorted(numbers)
