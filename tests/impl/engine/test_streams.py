"""Late streams and poisoned memory change no bit of what an engine learns."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from impl.comm.exchanges import Distributed
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.policy.policy import Offload, Policy
from impl.policy.topology import Topology
from impl.zero import shard
from tests.golden.record import _NETS, policies
from tests.support.params import nightly
from tests.support.ranks import on_processes, on_threads
from tests.support.shaken import Late, computing_late, shaken

ALL = Offload(optimizer=1, weights=1)
POLICIES = policies()
NAMES = ("zero2", "zero3", "zeropp", "ring", "two_hop in 4 chunks", "loco", "offloaded", "kept for backward")
LOSSES = 11


def _losses(mesh: Mesh, transport: str, policy: Policy, seed: int | None) -> list[str]:
    """Return the losses of a run whose streams are delayed and whose freed memory is poisoned by ``seed``, if any."""
    if seed is None:
        return _trained(mesh, transport, policy)
    with shaken(mesh.device, seed) as late:
        losses = _trained(mesh, transport, policy, late)
    assert late.delays > 20
    return losses


def _trained(mesh: Mesh, transport: str, policy: Policy, late: Late | None = None) -> list[str]:
    """Return the losses of ten micro-batches, two a step, and of the final weights."""
    torch.set_num_threads(1)
    wire, net = Wire(mesh, transport=transport), copy.deepcopy(_NETS[0]).to(mesh.device)  # type: ignore[arg-type]
    if late is not None:
        computing_late(net, late, mesh.device)
    zero = shard(net, mesh=mesh, policy=policy, wire=wire, seed=7)
    optimizer = torch.optim.SGD(zero.param_groups(), lr=0.05)
    losses: list[Tensor] = []
    for number in range(LOSSES - 1):
        if not policy.reduces_each_micro_batch:
            zero.accumulate(on=number % 2 == 0)
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(100 * number + mesh.rank))
        loss = net(x.to(mesh.device))
        zero.scaler.scaled(loss).backward()
        losses.append(loss.detach())  # read later: nothing here waits for the device
        if number % 2:
            zero.step(optimizer)
            optimizer.zero_grad()
    state = zero.full_state_dict()
    wire.close()
    return [float(loss).hex() for loss in (*losses, sum(value.double().sum() for value in state.values()))]


def _together(mesh: Mesh, transport: str) -> dict[str, list[str]]:
    """Train on thread ranks, undisturbed or disturbed by the test."""
    return {name: _trained(mesh, transport, POLICIES[name]) for name in NAMES}


@pytest.mark.long
def test_poisoned_memory_changes_nothing() -> None:
    """On CPUs, 2x2: no rank reads memory that was given back, however late it is."""
    calm = on_threads(Topology(2, 2), _together, "backend", backend="threaded")
    with shaken(torch.device("cpu"), 1) as late:
        assert on_threads(Topology(2, 2), _together, "backend", backend="threaded") == calm
    assert late.delays > 100
    assert all(len(losses) == LOSSES for losses in calm[0].values())


def test_poison_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange that gives buffers back before they were read changes the training, or makes it fail."""
    wait = Distributed.wait

    def too_early(self: Distributed) -> Tensor:
        rows = wait(self)
        for buffer in self._taken:
            self._buffers.give_back(buffer)
        self._taken = []
        return rows

    calm = on_threads(Topology(2, 2), _trained, "backend", POLICIES["zeropp"], backend="threaded")
    monkeypatch.setattr(Distributed, "wait", too_early)
    with shaken(torch.device("cpu"), 1):
        assert on_threads(Topology(2, 2), _trained, "backend", POLICIES["zeropp"], backend="threaded") != calm


CUDA = pytest.param("cuda:0", marks=pytest.mark.gpu)


def _staged(mesh: Mesh, device: str, seed: int | None) -> dict[str, list[str]]:
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    mesh = Mesh.create(mesh.topology, place)
    return {name: _losses(mesh, "staged", POLICIES[name], seed) for name in NAMES}


@pytest.mark.parametrize("device", [*nightly("cpu"), CUDA])
def test_ranks_that_share_a_device_wait_for_what_they_need(device: str) -> None:
    """2x2 ranks, staged: with random delays of copies, messages and computation the losses have the same bits."""
    calm = on_processes(Topology(2, 2), _staged, device, None)
    assert on_processes(Topology(2, 2), _staged, device, 1) == calm


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", ["zero2", "zero3", "zeropp"])
def test_copies_on_streams_of_their_own_are_waited_for(name: str, device: str) -> None:
    """One rank with everything offloaded: with random delays of copies and computation the losses have the same
    bits.
    """
    policy = replace(POLICIES[name], offload=ALL)
    backend = "nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = Mesh.create(Topology(1, 1), torch.device(device))
        calm = _losses(mesh, "backend", policy, None)
        assert [_losses(mesh, "backend", policy, seed) for seed in (1, 2, 3)] == [calm] * 3
    finally:
        dist.destroy_process_group()
