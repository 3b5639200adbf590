"""Facts about the machine are plain data, and the pool key depends on those that affect measurements."""

from __future__ import annotations

import getpass
import json
import platform
import re
from pathlib import Path
from typing import Any

import pytest

from harness.measure import machine


def test_facts_are_plain() -> None:
    """Facts survive JSON, and contain neither the host's name nor a path."""
    facts = machine.facts()
    text = json.dumps(facts)
    assert json.loads(text) == facts
    assert facts["cores"] >= 1
    assert facts["memory_gib"] > 0
    assert facts["packages"]["torch"]
    assert str(machine.ROOT) not in text
    assert platform.node() not in text.split('"')
    assert getpass.getuser() not in text.split('"')


def test_a_start_of_the_machine_is_known_by_a_hash(tmp_path: Path) -> None:
    """Equal until the next start, without the boot id itself; None where the kernel has none."""
    path = tmp_path / "boot_id"
    assert machine.boot(path) is None
    path.write_text("5a5a0000-0000-4000-8000-000000000001\n", encoding="ascii")
    first = machine.boot(path)
    assert first == machine.boot(path)
    assert first is not None
    assert re.fullmatch(r"[0-9a-f]{12}", first)
    path.write_text("5a5a0000-0000-4000-8000-000000000002\n", encoding="ascii")
    assert machine.boot(path) != first


def test_source_digest(tmp_path: Path) -> None:
    """The digest depends on the names and contents of sources, and on nothing else."""
    (tmp_path / "impl").mkdir()
    (tmp_path / "impl" / "a.py").write_text("1")
    first = machine.source_digest(tmp_path)
    (tmp_path / "impl" / "notes.txt").write_text("x")
    (tmp_path / "report.py").write_text("x")
    assert machine.source_digest(tmp_path) == first
    digests = {first}
    for name in ("a.py", "cpu/kernels.cpp", "cpu/rounding.hpp", "cuda/codec.cu", "cuda/codec.cuh"):
        (tmp_path / "impl" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "impl" / name).write_text("2")
        digests.add(machine.source_digest(tmp_path))
    assert len(digests) == 6


def test_every_file_of_code_counts() -> None:
    """The digest includes every kind of file that holds code."""
    kinds = {path.suffix for folder in machine.SOURCES for path in (machine.ROOT / folder).rglob("*.*")}
    assert kinds - {".pyc", ".toml", ".md", ".txt"} <= machine.SOURCE_SUFFIXES


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"cpu": "another"}, False),
        ({"packages": {"torch": "0"}}, False),
        ({"source": "t"}, False),
        ({"shared_memory_gib": 0.0, "commit": "b", "packages": {"torch": "2", "rich": "1"}}, True),
    ],
)
def test_pool_key_follows_machine_and_sources(change: dict[str, object], same: bool) -> None:
    """Records pool only where processor, cores, memory, kernel, Python, torch, GPUs and sources agree."""
    facts = {"cpu": "one", "cores": 2, "packages": {"torch": "2"}, "source": "s", "commit": "a"}
    assert (machine.pool_key(facts, facts) == machine.pool_key(facts | change, facts | change)) == same


@pytest.mark.needs("c++")
@pytest.mark.parametrize("change", [{"FLAGS": ("-O1",)}, {"COMPILERS": ("no-such-compiler",)}])
def test_pool_key_follows_the_kernels(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that were made with other compiler flags, or without a compiler, are not pooled."""
    code = machine.code()
    for name, value in change.items():
        monkeypatch.setattr(machine.build, name, value)
    changed = machine.code()
    assert changed["source"] == code["source"]
    assert machine.pool_key({}, changed) != machine.pool_key({}, code)


def test_adapters_that_work_are_listed_by_number(tmp_path: Path) -> None:
    """Only adapters with an active port are listed, sorted by number; without InfiniBand none is.

    Bytes that they have sent are those of the active ports whose counter, in units of 4 bytes, can be read.
    """
    assert machine.hcas(tmp_path / "none") == []
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
            (folder / "counters").mkdir()
            (folder / "counters" / "port_xmit_data").write_text(f"{1000 * number}\n", encoding="ascii")
    assert machine.hcas(tmp_path) == ["mlx5_2", "mlx5_10"]
    assert machine.hca_sent_bytes(devices=tmp_path) == {"mlx5_2/2": 8000, "mlx5_10/1": 4000}
    assert machine.hca_sent_bytes(["mlx5_10"], tmp_path) == {"mlx5_10/1": 4000}
    (tmp_path / "mlx5_10" / "ports" / "1" / "counters" / "port_xmit_data").unlink()
    assert machine.hca_sent_bytes(devices=tmp_path) == {"mlx5_2/2": 8000}
