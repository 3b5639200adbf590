"""Tests of meshes over groups and device meshes, and of the end of process groups."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from impl.checkpoint.save_load import CheckpointError, load, save
from impl.comm.mesh import Mesh, MeshError, default_group, make_mesh
from impl.comm.watchdog import WireError
from impl.comm.wire import Wire
from impl.errors import ZeroError
from impl.parameters.gathered import GatheredParameters
from impl.parameters.init import Init
from impl.plan.traffic import Tag
from impl.policy.policy import MemoryLimits
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.quantized_collectives import quantized_all_gather, quantized_reduce_scatter
from impl.zero import shard
from tests.golden import record
from tests.support.models import Block
from tests.support.params import nightly
from tests.support.ranks import on_processes, on_threads
from tests.support.training import model, single, train

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the loopback interface, as gloo would otherwise look the machine's name up."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


_ENDS = """
import os
import torch
import torch.distributed as dist
from torch import nn
from impl.comm.mesh import Mesh
from impl.policy.policy import MemoryLimits
from impl.policy.presets import preset
from impl.policy.topology import Topology
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
    """No thread of gloo survives: it might drop a tensor too late and abort. Torch holds groups made before dynamo."""
    done = subprocess.run(
        [sys.executable, "-c", _ENDS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["True", "0"], done.stderr


def test_a_group_that_was_destroyed_says_so() -> None:
    """After destroy_process_group() the use of a group raises an error that says so."""
    with default_group("gloo", rank=0, world_size=1, store=dist.HashStore()):
        mesh = Mesh.create(Topology(1, 1))
        group = mesh.group(mesh.topology.world_axis)
        assert group.process_group.size() == 1
    assert not dist.is_initialized()
    with pytest.raises(MeshError, match=r"process group of ranks \(0,\) along world was destroyed"):
        _ = group.process_group


def test_a_failure_leaves_the_default_group_as_it_is() -> None:
    """After an error the group is not ended, since that would wait for ranks that may never answer."""
    with (
        pytest.raises(ValueError, match="boom"),
        default_group("gloo", rank=0, world_size=1, store=dist.HashStore()),
    ):
        raise ValueError("boom")
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_a_group_that_does_not_fit_is_refused() -> None:
    """A group of another size than the topology is refused, and so is a topology of another type."""
    with default_group("gloo", rank=0, world_size=1, store=dist.HashStore()):
        with pytest.raises(MeshError, match="topology 1x2 needs 2 ranks, but the process group has 1"):
            Mesh.create(Topology(1, 2))
        with pytest.raises(MeshError, match="topology '2x2' is a str: expected a Topology"):
            Mesh.create("2x2")  # type: ignore[arg-type]  # the claim


# Meshes over some of the ranks

EXACT = preset("exact", memory=MemoryLimits(max_padding=99.0))
NET = model()
Groups = Sequence[Sequence[int]]
Runs = dict[str, Any]  # what record.run() says, by policy

LAYOUTS: list[tuple[Groups, list[Topology]]] = [
    ([[0, 1], [2, 3]], [Topology(1, 2), Topology(2, 1)]),
    ([[0, 2], [1, 3]], [Topology(2, 1), Topology(1, 2)]),
    ([[0], [1, 2, 3]], [Topology(1, 1), Topology(3, 1)]),
    ([[0, 2, 3, 5], [1, 4]], [Topology(2, 2), Topology(1, 2)]),
]
QUICK = ["exact", "zero1", "zeropp", "ring", "flat", "loco", "offloaded", "small parameters stay"]


def _all(mesh: Mesh, names: Sequence[str], transport: str = "backend") -> Runs:
    policies = record.policies()
    return {name: record.run(mesh, transport, policies[name], ragged=False) for name in names}


def _in_groups(mesh: Mesh, groups: Groups, topologies: list[Topology], *arguments: Any) -> Runs:
    number = next(number for number, ranks in enumerate(groups) if mesh.rank in ranks)
    made = [dist.new_group(list(ranks)) for ranks in groups]
    return _all(Mesh.create(topologies[number], group=made[number]), *arguments)


@pytest.mark.parametrize("names", [QUICK, *nightly([*record.policies()])], ids=len)
@pytest.mark.parametrize(("groups", "topologies"), LAYOUTS, ids=str)
def test_groups_side_by_side_do_what_they_do_alone(
    groups: Groups, topologies: list[Topology], names: list[str]
) -> None:
    """Two groups in one job, of any ranks and sizes, have the losses and ledgers that they have alone."""
    world = Topology(1, sum(map(len, groups)))
    found = on_threads(world, _in_groups, groups, topologies, names, backend="threaded")
    for ranks, topology in zip(groups, topologies, strict=True):
        assert [found[rank] for rank in ranks] == on_threads(topology, _all, names)


@pytest.mark.parametrize("transport", ["shm", *nightly("backend", "staged")])
def test_groups_of_processes_do_so_too(transport: str) -> None:
    """Groups of interleaved processes share neither memory nor messages."""
    groups, topologies = LAYOUTS[1]
    found = on_processes(Topology(1, 4), _in_groups, groups, topologies, ["exact", "zeropp"], transport)
    for ranks, topology in zip(groups, topologies, strict=True):
        assert [found[rank] for rank in ranks] == on_threads(topology, _all, ["exact", "zeropp"])


def _overlapping(mesh: Mesh) -> list[list[float]]:
    """Return losses over ranks in different numbers of groups: [0] and [1, 2, 3], then [0, 2] and [1, 3], then all."""
    losses = []
    for ranks in ([0] if mesh.rank == 0 else [1, 2, 3], [mesh.rank % 2, mesh.rank % 2 + 2], None):
        every = [[0], [1, 2, 3], [0, 2], [1, 3]]
        made = {tuple(each): dist.new_group(each) for each in every}
        part = mesh if ranks is None else Mesh.create(group=made[tuple(ranks)])
        losses.append(train(part, NET, EXACT, 2, wire=Wire(part, transport="shm"))[0])
    return losses


def test_a_rank_may_be_in_several_meshes() -> None:
    """Models over one rank, over groups and over all ranks follow one process, in a job with overlapping groups."""
    found = on_processes(Topology(2, 2), _overlapping)
    for number, ranks in enumerate(([0], [1, 2, 3], [0, 2], [1, 3], [0, 1, 2, 3])):
        kind = (0, 0, 1, 1, 2)[number]
        means = [sum(losses) / len(ranks) for losses in zip(*(found[r][kind] for r in ranks), strict=True)]
        assert means == pytest.approx(single(model(), len(ranks), 2), rel=1e-6)


def _over_device_meshes(mesh: Mesh) -> list[tuple[Any, ...]]:
    """Return topology, rank, global ranks and losses over each device mesh, and the results of collectives."""
    device_meshes = [
        init_device_mesh("cpu", (4,)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local")),
        DeviceMesh("cpu", [[0, 2], [1, 3]]),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"],
        init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "replicate", "shard"))["replicate", "shard"],
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("local", "inter")),
    ]
    found = []
    for device_mesh in device_meshes:
        net = model()
        zero = shard(net, mesh=device_mesh, policy=EXACT)
        part = zero.wire.mesh
        assert Mesh.of(device_mesh) is part
        losses = train(part, NET, EXACT, 2)[0]
        gathered = quantized_all_gather(torch.tensor([float(mesh.rank)]), "fp32", device_mesh)
        mean = quantized_reduce_scatter(torch.arange(4.0) + mesh.rank, "fp32", device_mesh)
        found.append((part.topology, part.rank, part.global_ranks, losses, gathered.tolist(), mean.tolist()))
    return found


def test_a_device_mesh_is_understood_where_a_mesh_is_expected() -> None:
    """A device mesh has one dimension, or two (nodes and their ranks, by position or by name), and ranks in any order.

    It may be a part of a larger one.
    """
    found = on_processes(Topology(1, 4), _over_device_meshes)
    everyone = (0, 1, 2, 3)
    wanted = [
        (Topology(1, 4), everyone),
        (Topology(2, 2), everyone),
        (Topology(2, 2), (0, 2, 1, 3)),
        (Topology(1, 2), None),  # ranks of equal parity
        (Topology(2, 2), everyone),
        (Topology(2, 2), (0, 2, 1, 3)),  # the first dimension is inside a node
    ]
    for number, (topology, members) in enumerate(wanted):
        for rank, per_mesh in enumerate(found):
            got, place, ranks, _, gathered, mean = per_mesh[number]
            assert (got, ranks) == (topology, members or (rank % 2, rank % 2 + 2))
            assert ranks[place] == rank
            assert gathered == [[float(other)] for other in ranks]
            middle, part = sum(ranks) / len(ranks), 4 // len(ranks)
            assert mean == [middle + element for element in range(place * part, place * part + part)]
        pair = members or (0, 2)
        losses = (found[rank][number][3] for rank in pair)
        means = [sum(each) / len(pair) for each in zip(*losses, strict=True)]
        assert means == pytest.approx(single(model(), len(pair), 2), rel=1e-6)


def _ranks_in_any_form(mesh: Mesh) -> list[tuple[Any, ...]]:
    """Return what the mesh of each form is, and the mean that a reduce-scatter over it gives."""
    everyone, pair = dist.group.WORLD, [dist.new_group([0, 2]), dist.new_group([1, 3])][mesh.rank % 2]
    found = []
    for form in (None, everyone, pair, Topology(2, 2), make_mesh(2), make_mesh(2, 1, group=pair)):
        zero = shard(model(), mesh=form, policy=EXACT)
        part = zero.wire.mesh
        assert Mesh.of(form) is part
        mean = quantized_reduce_scatter(torch.full((4,), float(mesh.rank)), "fp32", form or part)
        found.append((part.topology, part.global_ranks, part.device.type, mean.unique().tolist()))
    with Init(policy=EXACT, blocks=Block) as init:  # all ranks by default, as shard()
        net = model()
    alike = Mesh.of(), Mesh.of(everyone), Mesh.of(Topology(1, 4)), Mesh.of(init_device_mesh("cpu", (4,)))
    assert all(each is init.mesh for each in alike)
    shard(net, policy=EXACT)
    return found


def test_ranks_may_be_given_as_a_process_group_a_topology_or_not_at_all() -> None:
    """Forms of the same ranks on the same nodes give one mesh, so that they share process groups."""
    for rank, found in enumerate(on_processes(Topology(1, 4), _ranks_in_any_form)):
        pair, everyone = (rank % 2, rank % 2 + 2), (0, 1, 2, 3)
        assert found == [
            (Topology(1, 4), everyone, "cpu", [1.5]),
            (Topology(1, 4), everyone, "cpu", [1.5]),
            (Topology(1, 2), pair, "cpu", [sum(pair) / 2]),
            (Topology(2, 2), everyone, "cpu", [1.5]),
            (Topology(2, 2), everyone, "cpu", [1.5]),
            (Topology(2, 1), pair, "cpu", [sum(pair) / 2]),
        ]


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (MeshError, ZeroError, WireError) as error:
        return str(error)
    return ""


def _refusals(mesh: Mesh) -> dict[str, str]:
    """Return the errors for groups that are no mesh."""
    group = dist.new_group([0, 1, 2])
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    said = {
        "outside": _said(lambda: Mesh.create(Topology(1, 3), group=group)),
        "outside shard": _said(lambda: shard(model(), mesh=DeviceMesh("cpu", [0, 1, 2]), policy=EXACT)),
        "non-member": _said(
            lambda: shard(model(), mesh=dist.GroupMember.NON_GROUP_MEMBER, policy=EXACT)  # type: ignore[arg-type]
        ),
        "text": _said(lambda: shard(model(), mesh="2x2", policy=EXACT)),  # type: ignore[arg-type]
        "names": _said(lambda: Mesh.of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "dp")))),
        "numbers": _said(lambda: make_mesh(3)),
        "no nodes": _said(lambda: make_mesh(0)),
        "size": _said(lambda: Mesh.create(Topology(1, 2), group=group)),
        "list": _said(lambda: Mesh.create(Topology(1, 3), group=[0, 1, 2])),  # type: ignore[arg-type]
        "tensor parallel": _said(lambda: Mesh.create(halves)),
        "three dimensions": _said(lambda: Mesh.create(init_device_mesh("cpu", (1, 2, 2)))),
        "twice": _said(lambda: Mesh.create(halves["dp"], group=group)),
        "wire": _said(lambda: shard(model(), mesh=mesh, policy=EXACT, wire=Wire(halves["dp"]))),
    }
    for name, per_node in (("uneven", "2"), ("no number", "two")):
        os.environ["LOCAL_WORLD_SIZE"] = per_node  # as torchrun does
        said[name] = _said(lambda: Mesh.create(group=group))
    return said


REFUSED = {
    "size": "topology 1x2 needs 2 ranks, but the process group has 3",
    "list": "group is a list: expected a process group, as dist.new_group",
    "text": "mesh is a str: expected zeropp.mesh(...), torch's DeviceMesh, a process group, or a Topology",
    "names": "the device mesh has dimensions 'node' and 'dp': name the dimension between nodes 'node', 'inter', "
    "'replicate' or 'dp_replicate', and the dimension inside a node 'local', 'intra', 'shard' or 'dp_shard', or pass ",
    "numbers": "topology 3x1 needs 3 ranks, but the process group has 4",
    "no nodes": "nodes=0: expected a number of 1 or more",
    "tensor parallel": "the device mesh has a dimension 'tp', along which ranks hold different parts of a model",
    "three dimensions": "the device mesh of shape (1, 2, 2) has 3 dimensions, expected one, or two (nodes, ranks of a ",
    "twice": "topology is a DeviceMesh, which determines the ranks: leave group= out",
    "wire": "wire= is over the mesh 1x2 of global ranks 0, 2 on cpu, but mesh= is 2x2 of global ranks 0, 1, 2, 3",
    "uneven": "global ranks 0, 1, 2 are on nodes 0, 0, 1 (LOCAL_WORLD_SIZE=2), but each node must have",
    "no number": "LOCAL_WORLD_SIZE='two': set it to the number of ranks on a node, 1 or more",
}


def test_what_is_no_mesh_is_refused_in_one_line() -> None:
    """Other sizes and dimensions, and a rank outside, are refused on every rank alike; the error names the numbers."""
    found = on_processes(Topology(2, 2), _refusals)
    for name, text in REFUSED.items():
        assert found[0][name].startswith(text), name
    assert found[0]["outside"] == found[0]["outside shard"] == ""
    assert found[3]["outside"] == "global rank 3 is not in the group: call this on the group's ranks alone"
    assert found[3]["outside shard"].startswith(
        "global rank 3 is not in the device mesh of ranks 0, 1 and 2: "
    )
    for rank, said in enumerate(found):
        assert said["non-member"].startswith(f"global rank {rank} is not in the group")
        assert not any("\n" in text for text in said.values())


def _in_halves(mesh: Mesh, folder: str) -> dict[str, str]:
    """Return the errors in a group of every other rank; both groups save to one folder, one after the other."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    part = Mesh.create(Topology(1, 2), group=halves[mesh.rank % 2])
    net = model()
    with torch.no_grad():
        net.head.weight.add_(mesh.rank > 1)
    said = {"start": _said(lambda: shard(net, mesh=part, policy=EXACT))}
    zero = train(part, NET, EXACT, 1)[2]
    weight = zero.model.get_parameter("embed.weight")
    said["modifier"] = _said(GatheredParameters(weight, modifier_rank=2).__enter__)
    if mesh.rank % 2:
        dist.barrier()
    else:
        save(folder, zero)
        load(folder, zero)
        dist.barrier()
    try:
        save(folder, zero)
    except CheckpointError as error:
        said["save"] = str(error)
    wire = Wire(part, timeout=2)
    exchange = wire.all_gather(part.topology.world_axis, 64, Tag("forward", "weights", "ab"[mesh.rank > 1]))
    exchange.send.zero_()
    exchange.post()
    said["parted"] = _said(exchange.wait)
    return said


def test_errors_in_a_group_say_how_ranks_are_counted(tmp_path: Path) -> None:
    """Errors count ranks from 0 in the group and name the global ranks; a folder belongs to one group."""
    counted = "(ranks as counted in the mesh of global ranks 1, 3)"
    for number, said in enumerate(on_processes(Topology(1, 4), _in_halves, str(tmp_path / "run"))):
        mine = counted if number % 2 else counted.replace("1, 3", "0, 2")
        assert "starts from other values on rank 1 than on rank 0" in said["start"]
        assert said["modifier"] == f"modifier_rank=2 on 2 ranks: expected 0 to 1, or None {mine}"
        assert "rank 0 started all_gather of 64 B" in said["parted"]
        assert all(said[name].endswith(mine) for name in ("start", "parted"))
        if number % 2:
            assert re.search(
                "run: is already the folder of the checkpoints of global ranks 0 and 2 of this job",
                said["save"],
            )
        else:
            assert "save" not in said


def _deepspeed(mesh: Mesh) -> list[float]:
    """Run the tutorial's Init inside two groups of two ranks, on virtual nodes of two."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[mesh.rank % 2]
    with Init(
        data_parallel_group=mine,
        remote_device="cpu",
        enabled=True,
        policy=EXACT,
        blocks=Block,
    ) as init:
        net = model()
    assert (init.mesh.topology, init.mesh.rank) == (Topology(2, 1), mesh.rank // 2)
    zero = shard(net, mesh=init.mesh, policy=EXACT)
    assert not zero.wire.ledger.rows()  # taken over without a message
    return train(init.mesh, NET, EXACT, 2)[0]


def test_init_takes_deepspeed_s_data_parallel_group() -> None:
    """Each group cuts its model among its own ranks, on the nodes that torchrun's variable gives."""
    found = on_processes(Topology(2, 2), _deepspeed)
    wanted = single(model(), 2, 2)
    for first in (0, 1):
        means = [sum(pair) / 2 for pair in zip(found[first], found[first + 2], strict=True)]
        assert means == pytest.approx(wanted, rel=1e-6)


def test_groups_keep_nccl_s_rules() -> None:
    """Process groups are made and used as NCCL requires, and training has the same bits."""
    groups, topologies = LAYOUTS[1]
    names = ["zeropp", "flat"]
    found = on_threads(Topology(1, 4), _in_groups, groups, topologies, names, backend="nccl_rules")
    for ranks, topology in zip(groups, topologies, strict=True):
        assert [found[rank] for rank in ranks] == on_threads(topology, _all, names)
