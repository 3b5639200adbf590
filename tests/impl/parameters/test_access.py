"""Tests of access to a parameter's values, full and local."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from impl.comm.mesh import Mesh
from impl.errors import ZeroError
from impl.parameters import access
from impl.policy.policy import MemoryLimits
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import shard
from tests.support.models import Net
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
        gradient = access.Gradient(zero, name).full()
        assert torch.allclose(gradient, parameter.grad, atol=1e-6)
        moment = access.OptimizerState(zero, net.get_parameter(name), optimizer, "exp_avg").full()
        assert torch.allclose(moment, wanted.state[parameter]["exp_avg"], atol=1e-6)
        assert torch.equal(access.Weights(zero, name).full(), zero.full_state_dict()[name])
        assert access.OptimizerState(zero, name, optimizer, "step").full() == 1


def test_what_is_set_is_got_and_trained_with() -> None:
    """Full and local values that are set can be read, change one parameter, and are trained with."""

    def body(mesh: Mesh) -> tuple[int, int]:
        zero = shard(net := model(), mesh=mesh, policy=EXACT)
        optimizer = torch.optim.Adam(zero.param_groups())
        net(batch(0, mesh.rank)).backward()
        optimizer.step()
        name, before = "blocks.1.up.weight", zero.full_state_dict()
        value = torch.arange(640.0).view(40, 16)
        access.Weights(zero, name).set_full(value)
        assert torch.equal(access.Weights(zero, name).full(), value)
        access.Weights(zero, name).set_local(access.Weights(zero, name).local() * 2)
        after = zero.full_state_dict()
        assert torch.equal(after.pop(name), value * 2)
        assert all(torch.equal(after[other], before[other]) for other in after)
        access.Gradient(zero, name).set_full(value)
        local = access.Gradient(zero, name).local()
        access.Gradient(zero, name).set_local(local + 1)
        assert torch.equal(access.Gradient(zero, name).full(), value + 1)
        moment = access.OptimizerState(zero, name, optimizer, "exp_avg")
        moment.set_full(value)
        part = moment.local()
        moment.set_local(part - 1)
        assert torch.equal(moment.full(), value - 1)
        return local.numel(), part.numel()

    results = on_threads(Topology(1, 3), body)
    assert [sum(sizes) for sizes in zip(*results, strict=True)] == [640, 640]


@each_rank(1, 2)
def test_what_is_not_there_is_a_clear_error(mesh: Mesh) -> None:
    """Unknown names, frozen parameters, wrong shapes, and states that an optimizer does not have raise an error."""
    net = model(Net)
    net.get_parameter("head.bias").requires_grad_(requires_grad=False)
    zero = shard(net, mesh=mesh, policy=EXACT)
    optimizer = torch.optim.Adam(zero.param_groups())
    assert access.Gradient(zero, "embed.weight").full() is None
    with pytest.raises(ZeroError, match="no parameter 'nobody'"):
        access.Weights(zero, "nobody").full()
    with pytest.raises(ZeroError, match=r"'head\.bias' is frozen"):
        access.Gradient(zero, "head.bias").full()
    with pytest.raises(ZeroError, match=r"has shape \(2,\), expected \(16, 16\)"):
        access.Weights(zero, "embed.weight").set_full(torch.zeros(2))
    for kind, value in {
        "complex": torch.zeros(16, 16) * 1j,
        "on the meta device": torch.zeros(16, 16, device="meta"),
    }.items():
        with pytest.raises(ZeroError, match=f"'embed.weight' is {kind}: pass a real tensor"):
            access.Weights(zero, "embed.weight").set_full(value)
    with pytest.raises(
        ZeroError, match=r"Adam has no state 'exp_avg' of parameter 'embed.weight' \(its states: none\)"
    ):
        access.OptimizerState(zero, "embed.weight", optimizer, "exp_avg").full()
    with pytest.raises(ZeroError, match="does not belong to this sharded model"):
        access.Weights(zero, NET.get_parameter("embed.weight")).full()
