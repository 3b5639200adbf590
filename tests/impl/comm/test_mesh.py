"""Process groups end when torch's call says so, whoever holds the mesh; after a failure nobody waits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from impl.comm.mesh import Mesh, MeshError, default_group
from impl.plan.topology import Topology

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else gloo looks the machine's name up."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


_ENDS = """
import os
import torch
import torch.distributed as dist
from torch import nn
from impl.comm.mesh import Mesh
from impl.plan.policy import MemoryLimits, preset
from impl.plan.topology import Topology
from impl.zero import shard

def gloo():
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    return sum("gloo" in name for name in names)

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = Mesh.create(Topology(1, 1))
net = nn.Linear(4, 4)
zero = shard(net, mesh=mesh, policy=preset("exact", memory=MemoryLimits(max_padding=1e9)))
for axis in (mesh.topology.world_axis, mesh.topology.node_axis):
    dist.barrier(group=mesh.group(axis).process_group)
net(torch.ones(1, 4)).sum().backward()
zero.finish_backward()
before = gloo()
dist.destroy_process_group()
print(before > 0, gloo())
"""


def test_destroying_ends_every_thread_of_gloo_though_model_and_mesh_live_on() -> None:
    """A living thread may drop a tensor too late, and abort; torch holds groups made before dynamo."""
    done = subprocess.run(
        [sys.executable, "-c", _ENDS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["True", "0"], done.stderr


def test_a_group_that_was_destroyed_says_so() -> None:
    """The handle of a group is torch's: after its end there is none."""
    with default_group("gloo", rank=0, world_size=1, store=dist.HashStore()):
        mesh = Mesh.create(Topology(1, 1))
        group = mesh.group(mesh.topology.world_axis)
        assert group.process_group.size() == 1
    assert not dist.is_initialized()
    with pytest.raises(MeshError, match=r"process group of ranks \(0,\) along world was destroyed"):
        _ = group.process_group


def test_a_failure_leaves_the_default_group_as_it_is() -> None:
    """Ending it would wait for messages of ranks that may never come."""
    with (
        pytest.raises(ValueError, match="boom"),
        default_group("gloo", rank=0, world_size=1, store=dist.HashStore()),
    ):
        raise ValueError("boom")
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_a_group_that_does_not_fit_is_refused() -> None:
    """Of another size than the topology, and what is no topology."""
    with default_group("gloo", rank=0, world_size=1, store=dist.HashStore()):
        with pytest.raises(MeshError, match="topology 1x2 needs 2 ranks, the process group has 1"):
            Mesh.create(Topology(1, 2))
        with pytest.raises(MeshError, match="topology '2x2' is a str: expected a Topology"):
            Mesh.create("2x2")  # type: ignore[arg-type]  # the claim
