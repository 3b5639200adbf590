"""Values behind a parameter, whole and local."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from impl.comm.mesh import Mesh
from impl.errors import ZeroError
from impl.parameters import access
from impl.plan.policy import MemoryLimits, preset
from impl.plan.topology import Topology
from impl.zero import shard
from tests.support.models import Hollow, Net
from tests.support.ranks import each_rank, on_threads
from tests.support.training import batch, model

EXACT = preset("exact", memory=MemoryLimits(max_padding=9.0))
NET = model(Net)


@pytest.mark.parametrize(("stage", "group"), [(3, 0), (3, 2), (2, 0)])
@each_rank(2, 2)
def test_full_values_are_those_of_the_unsharded_model(mesh: Mesh, stage: int, group: int) -> None:
    """Weights, gradients and Adam's moments of every parameter, by name, equal those of one process."""
    alone = model(Net)
    wanted = torch.optim.Adam(alone.parameters())
    (sum(alone(batch(0, rank)) for rank in range(4)) / 4).backward()
    wanted.step()
    net = model(Net)
    zero = shard(net, mesh=mesh, policy=replace(EXACT, stage=stage, group=group))
    optimizer = torch.optim.Adam(zero.param_groups())
    net(batch(0, mesh.rank)).backward()
    optimizer.step()
    for name, parameter in alone.named_parameters():
        gradient = access.full_fp32_grad(zero, name)
        assert torch.allclose(gradient, parameter.grad, atol=1e-6)
        moment = access.full_optimizer_state(zero, net.get_parameter(name), optimizer, "exp_avg")
        assert torch.allclose(moment, wanted.state[parameter]["exp_avg"], atol=1e-6)
        assert torch.equal(access.full_fp32_param(zero, name), zero.full_state_dict()[name])
        assert access.full_optimizer_state(zero, name, optimizer, "step") == 1


def test_what_is_set_is_got_and_trained_with() -> None:
    """Full and local: a set is seen by its get and touches one parameter; local parts make the whole."""

    def body(mesh: Mesh) -> tuple[int, int]:
        zero = shard(net := model(), mesh=mesh, policy=EXACT)
        optimizer = torch.optim.Adam(zero.param_groups())
        net(batch(0, mesh.rank)).backward()
        optimizer.step()
        name, before = "blocks.1.up.weight", zero.full_state_dict()
        value = torch.arange(640.0).view(40, 16)
        access.set_full_fp32_param(zero, name, value)
        assert torch.equal(access.full_fp32_param(zero, name), value)
        access.set_local_fp32_param(zero, name, access.local_fp32_param(zero, name) * 2)
        after = zero.full_state_dict()
        assert torch.equal(after.pop(name), value * 2)
        assert all(torch.equal(after[other], before[other]) for other in after)
        access.set_full_fp32_grad(zero, name, value)
        local = access.local_fp32_grad(zero, name)
        access.set_local_fp32_grad(zero, name, local + 1)
        assert torch.equal(access.full_fp32_grad(zero, name), value + 1)
        access.set_full_optimizer_state(zero, name, value, optimizer, "exp_avg")
        part = access.local_optimizer_state(zero, name, optimizer, "exp_avg")
        access.set_local_optimizer_state(zero, name, part - 1, optimizer, "exp_avg")
        assert torch.equal(access.full_optimizer_state(zero, name, optimizer, "exp_avg"), value - 1)
        return local.numel(), part.numel()

    results = on_threads(Topology(1, 3), body)
    assert [sum(sizes) for sizes in zip(*results, strict=True)] == [640, 640]


@each_rank(1, 2)
def test_what_is_not_there_is_a_clear_error(mesh: Mesh) -> None:
    """Unknown names, frozen parameters, wrong shapes, states that an optimizer has not."""
    net = model(Net)
    net.get_parameter("head.bias").requires_grad_(requires_grad=False)
    zero = shard(net, mesh=mesh, policy=EXACT)
    optimizer = torch.optim.Adam(zero.param_groups())
    assert access.full_fp32_grad(zero, "embed.weight") is None
    with pytest.raises(ZeroError, match="no parameter 'nobody'"):
        access.full_fp32_param(zero, "nobody")
    with pytest.raises(ZeroError, match=r"'head\.bias' is frozen"):
        access.full_fp32_grad(zero, "head.bias")
    with pytest.raises(ZeroError, match=r"is \(2,\), expected \(16, 16\)"):
        access.set_full_fp32_param(zero, "embed.weight", torch.zeros(2))
    with pytest.raises(ZeroError, match=r"Adam has no state 'exp_avg' of 'embed.weight'; it has: none"):
        access.full_optimizer_state(zero, "embed.weight", optimizer, "exp_avg")
    with pytest.raises(ZeroError, match="not one of this sharded model"):
        access.full_fp32_param(zero, NET.get_parameter("embed.weight"))


@each_rank(1, 2)
def test_parameters_without_elements_are_known(mesh: Mesh) -> None:
    """Also where nothing else of their block or the root has any: their values and gradients are empty."""
    zero = shard(net := model(Hollow), mesh=mesh, policy=EXACT)
    net(batch(0, mesh.rank)).backward()
    for name in ("nothing", "blocks.1.weight"):
        shape = net.get_parameter(name).shape
        assert access.full_fp32_param(zero, net.get_parameter(name)).shape == shape
        gradient = access.full_fp32_grad(zero, name)
        assert gradient.shape == shape
        access.set_full_fp32_param(zero, name, torch.empty(shape))
        assert zero.full_state_dict()[name].shape == shape
