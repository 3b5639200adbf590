"""Facts about the machine are plain data, and the pool key follows those that matter."""

from __future__ import annotations

import getpass
import json
import platform
from pathlib import Path

import pytest

from harness.measure import machine


def test_facts_are_plain() -> None:
    """Facts survive JSON and name neither the host nor a path of it."""
    facts = machine.facts()
    text = json.dumps(facts)
    assert json.loads(text) == facts
    assert facts["cores"] >= 1
    assert facts["memory_gib"] > 0
    assert facts["packages"]["torch"]
    assert str(machine.ROOT) not in text
    assert platform.node() not in text.split('"')
    assert getpass.getuser() not in text.split('"')


def test_code() -> None:
    """The code is named by its version and the digest of its sources."""
    code = machine.code()
    assert code["version"]
    assert code["source"] == machine.source_digest()


def test_source_digest(tmp_path: Path) -> None:
    """The digest follows content and name of sources, and nothing else."""
    (tmp_path / "impl").mkdir()
    (tmp_path / "impl" / "a.py").write_text("1")
    first = machine.source_digest(tmp_path)
    (tmp_path / "impl" / "notes.txt").write_text("x")
    (tmp_path / "report.py").write_text("x")
    assert machine.source_digest(tmp_path) == first
    (tmp_path / "impl" / "a.py").write_text("2")
    assert machine.source_digest(tmp_path) != first


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"cpu": "another"}, False),
        ({"cores": 99}, False),
        ({"packages": {"torch": "0"}}, False),
        ({"shared_memory_gib": 0.0}, True),
        ({"packages": {"torch": "2", "rich": "1"}}, True),
    ],
)
def test_pool_key_follows_the_machine(change: dict[str, object], same: bool) -> None:
    """Records pool only where processor, cores, memory, kernel, Python, torch and GPUs agree."""
    facts = {"cpu": "one", "cores": 2, "packages": {"torch": "2"}}
    code = {"source": "s"}
    assert (machine.pool_key(facts, code) == machine.pool_key(facts | change, code)) == same


def test_pool_key_follows_the_sources() -> None:
    """Records pool over commits that leave the sources alone, and not over others."""
    one = machine.pool_key({}, {"source": "s", "commit": "a"})
    assert one == machine.pool_key({}, {"source": "s", "commit": "b"})
    assert one != machine.pool_key({}, {"source": "t", "commit": "a"})
