"""Process groups end when torch's call says so, whoever holds the mesh; after a failure nobody waits."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from impl.comm.mesh import Mesh, MeshError, default_group
from impl.errors import ZeroError
from impl.parameters.init import Init
from impl.plan.policy import MemoryLimits, Policy, preset
from impl.plan.topology import Topology
from impl.zero import shard
from tests.support.models import Block
from tests.support.ranks import on_processes, on_threads
from tests.support.training import batch, model

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
    """A thread that lives on may drop a tensor after the interpreter's end, and abort (status -6).

    Torch itself holds a group for ever if dynamo, which engines import, is imported after the group was made.
    """
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


MODEL = model()  # threads share a random generator: making it there would be a race


def _losses(mesh: Mesh, net: nn.Module, policy: Policy) -> list[float]:
    zero = shard(net, mesh=mesh, policy=policy)
    optimizer = torch.optim.SGD(zero.param_groups(), lr=0.1)
    found = []
    for step in range(3):
        loss = net(batch(step, mesh.rank))
        loss.backward()
        zero.finish_backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def _plain(mesh: Mesh, policy: Policy) -> list[float]:
    return _losses(mesh, copy.deepcopy(MODEL), policy)


def _in_a_group_of_its_own(mesh: Mesh, policy: Policy) -> list[float]:
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    init = Init(data_parallel_group=groups[mesh.rank % 2], policy=policy, blocks=Block)
    with init:
        net = model()
    assert (init.mesh.topology, init.mesh.rank) == (Topology(2, 1), mesh.rank // 2)
    return _losses(init.mesh, net, policy)


def _in_a_node_of_its_own(mesh: Mesh, policy: Policy) -> list[float]:
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    part = Mesh.create(Topology(1, 2), group=groups[mesh.rank // 2])
    if mesh.rank < 2:  # the others' turn comes later, or never
        dist.barrier(groups[0])
    return _losses(part, model(), policy)


@pytest.mark.parametrize("body", [_in_a_group_of_its_own, _in_a_node_of_its_own])
def test_data_parallel_groups_train_beside_each_other(body: Callable[[Mesh, Policy], list[float]]) -> None:
    """Two groups of two of four ranks, across nodes or inside them, each train as two ranks alone do."""
    policy = preset("exact", memory=MemoryLimits(max_padding=1.0))
    found = on_processes(Topology(2, 2), body, policy)
    topology = Topology(2, 1) if body is _in_a_group_of_its_own else Topology(1, 2)
    wanted = on_threads(topology, _plain, policy)
    for rank, losses in enumerate(found):
        place = rank // 2 if body is _in_a_group_of_its_own else rank % 2
        assert losses == pytest.approx(wanted[place], rel=1e-6)


def _refusals(mesh: Mesh) -> list[str]:
    said = []
    other = dist.new_group([0, 1, 2])
    for make in (
        lambda: Mesh.create(Topology(1, 2), group=other),
        lambda: Mesh.of_group(other),
        lambda: Init(policy=preset("exact")),
        lambda: Init(policy=preset("exact"), mesh=mesh, data_parallel_group=other),
        lambda: Mesh.create("2x2"),  # type: ignore[arg-type]  # the claim
    ):
        try:
            make()
            said.append("")
        except (MeshError, ZeroError, ValueError) as error:
            said.append(str(error))
    return said


def _of_nodes(mesh: Mesh, said: str) -> str:
    del mesh
    os.environ["LOCAL_WORLD_SIZE"] = said
    assert dist.group.WORLD is not None
    try:
        Mesh.of_group(dist.group.WORLD)
    except MeshError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("said", ["0", "-1", "two"])
def test_a_size_of_nodes_that_is_none_is_refused(said: str) -> None:
    """Naming the variable."""
    for found in on_processes(Topology(1, 2), _of_nodes, said):
        assert found == f"LOCAL_WORLD_SIZE='{said}': expected a node's number of ranks, from 1"


def test_groups_that_do_not_fit_are_refused() -> None:
    """Of another size, unevenly on nodes, without this rank, and beside a mesh."""
    first, *_, last = on_processes(Topology(2, 2), _with_two_a_node)
    assert "needs 2 ranks, the process group has 3" in first[0]
    assert "[0, 1, 2] stand as {0: 2, 1: 1} on nodes of 2" in first[1]
    assert all("one of them" in words for words in first[2:4])
    assert first[4] == "topology '2x2' is a str: expected a Topology"
    assert "rank 3 is not in the group" in last[0]


def _with_two_a_node(mesh: Mesh) -> list[str]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return _refusals(mesh)
