"""Messages that go through host memory train to the same bits, with the same ledger; a GPU is shared so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.plan.policy import MemoryLimits, preset
from impl.plan.topology import Topology
from impl.zero import shard
from tests.golden import record
from tests.support.ranks import each_rank, on_processes, on_threads
from tests.support.training import batch, model, sgd, train


def _all_policies(mesh: Mesh, transport: str, names: tuple[str, ...]) -> dict[str, Any]:
    torch.set_num_threads(1)
    policies = record.policies()
    return {
        name: record.run(mesh, transport, policies[name], ragged=False, steps=1) for name in names or policies
    }


@pytest.mark.nightly
def test_every_policy_trains_as_without_staging() -> None:
    """Every preset and algorithm: ledgers and losses of each rank are the same to the bit."""
    staged, plain = (on_threads(Topology(2, 2), _all_policies, way, ()) for way in ("staged", "backend"))
    assert staged == plain


def test_over_gloo_too() -> None:
    """Between processes, point to point."""
    names = ("zero3-flat", "zeropp", "ring", "two_hop in 4 chunks", "loco", "offloaded")
    found, wanted = (
        on_processes(Topology(2, 2), _all_policies, transport, names) for transport in ("staged", "backend")
    )
    assert found == wanted


@each_rank(2, 2, processes=True)
def test_the_record_says_so(mesh: Mesh) -> None:
    """Whatever carried a message, it went through host memory."""
    wire = Wire(mesh, transport="staged")
    shard(model(), mesh=mesh, policy=preset("exact", memory=record.policies()["exact"].memory), wire=wire)
    wire.check_order()
    assert all(words.endswith("through host memory") for words in wire.describe().values())


def _losses(mesh: Mesh, name: str, wire: Wire, delay: int = 0) -> list[float]:
    """Of six steps, with ``delay`` of a GPU's cycles spent here and there on its stream."""

    def loss_of(net: nn.Module, number: int, rank: int) -> Tensor:
        if delay:
            torch.cuda._sleep(delay * (1 + (number + rank) % 3))
        return net(batch(number, rank, 256).to(mesh.device))

    net = model(width=256, hidden=512, depth=6).to(mesh.device)
    policy = preset(name, memory=MemoryLimits(max_padding=1.0))
    losses = train(mesh, net, policy, 6, optimize=sgd, loss_of=loss_of, wire=wire)[0]
    wire.close()
    return losses


def _on_cpu(mesh: Mesh, name: str) -> list[float]:
    return _losses(mesh, name, Wire(mesh))


def _on_one_gpu(mesh: Mesh, name: str, delay: int) -> list[float]:
    torch.cuda.set_device(0)
    there = Mesh.create(mesh.topology, torch.device("cuda", 0))
    return _losses(there, name, Wire(there, transport="staged"), delay)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["exact", "zeropp"])
def test_ranks_share_a_gpu(name: str) -> None:
    """2x2 ranks on one GPU learn the same to the bit, however long its stream takes, and what CPUs learn."""
    topology = Topology(2, 2)
    found = [on_processes(topology, _on_one_gpu, name, delay) for delay in (0, 10_000_000)]
    assert found[0] == found[1]
    wanted = on_threads(topology, _on_cpu, name)
    for mine, theirs in zip(found[0], wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3 if name == "exact" else 0.05)
