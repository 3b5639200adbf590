"""What the doctor says of GPUs and of hosts."""

from __future__ import annotations

import pytest
import torch

from harness import doctor
from harness.cluster.node_supervisors import Node
from harness.cluster.port import Port
from harness.measure import machine, run_environment


@pytest.mark.parametrize(("package", "enough"), [("cupy-cuda13x", False), ("cupy-cuda12x", True)])
def test_a_v100_needs_cuda12(monkeypatch: pytest.MonkeyPatch, package: str, enough: bool) -> None:
    """CuPy for CUDA 13 is not enough for it, and the row says which GPU needs what."""
    facts = machine.facts()
    packages = facts["packages"] | {"cupy-cuda12x": None, "cupy-cuda13x": None, package: "14.0"}
    monkeypatch.setattr(machine, "facts", lambda: facts | {"packages": packages})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", ("V100", "H100").__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", ((7, 0), (9, 0)).__getitem__)
    (row,) = (row for row in doctor.examine() if row["what"] == "CuPy")
    assert row["there"] == enough
    assert ("V100 (sm_70) needs cuda12" in row["found"]) == (not enough)
    assert "H100" not in row["found"]


def test_every_host_of_a_large_cluster_has_a_name_of_its_own() -> None:
    """The 27th host is not taken for the first one, with which it would share no network."""
    facts = {"hcas": [], **run_environment.identity()}
    nodes = [Node(Port("eth0", f"10.0.0.{number}"), f"host {number % 60}", facts) for number in range(61)]
    (host,) = (row["values"] for row in doctor.compare(nodes) if row["what"] == "host")
    assert len({*host}) == 60
    assert [host[number] for number in (0, 25, 26, 52, 60)] == ["A", "Z", "AA", "BA", "A"]
