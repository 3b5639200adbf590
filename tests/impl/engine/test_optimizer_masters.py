"""What an optimizer steps: norms, groups and gradients of the masters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from impl.codecs.codec import IntCodec
from impl.comm.mesh import Mesh
from impl.plan.policy import PRESETS, Policy, preset
from impl.plan.topology import Topology
from impl.zero import ZeroError, shard
from tests.impl.test_zero_models import Stack, data
from tests.support.ranks import on_threads
from tests.support.strategies import ROOMY
from tests.support.training import batch, close, model

EXACT = preset("exact", memory=ROOMY)
MODEL = model()


# Norms


def _clipped(mesh: Mesh) -> tuple[float, float]:
    net = copy.deepcopy(MODEL)
    zero = shard(net, mesh=mesh, policy=EXACT)
    net(batch(0, mesh.rank)).backward()
    zero.finish_backward()
    before = zero.clip_grad_norm_(0.01).item()
    return before, zero.grad_norm().item()


def test_clipping_uses_the_global_norm() -> None:
    """The norm is that of the whole mean gradient, bit-equal on all ranks, and clipping reaches it."""
    results = on_threads(Topology(2, 2), _clipped)
    net = model()
    for rank in range(4):
        (net(batch(0, rank)) / 4).backward()
    wanted = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]).item()
    assert len(set(results)) == 1
    assert results[0][0] == pytest.approx(wanted, rel=1e-5)
    assert results[0][1] == pytest.approx(0.01, rel=1e-3)


def _p_normed(mesh: Mesh, norm_type: float) -> tuple[float, float, float, float | None]:
    net = copy.deepcopy(MODEL)
    zero = shard(net, mesh=mesh, policy=EXACT)
    net(batch(0, mesh.rank)).backward()
    zero.finish_backward()
    before = zero.clip_grad_norm_(0.01, norm_type).item()
    clipped = zero.grad_norm(norm_type).item()
    stepped = zero.step(torch.optim.SGD(zero.param_groups()), max_norm=0.005, norm_type=norm_type)
    return before, clipped, zero.grad_norm(norm_type).item(), stepped.norm


@pytest.mark.parametrize("norm_type", [torch.inf, 1.0, 3.0])
def test_other_norms_are_those_of_the_whole_gradient(norm_type: float) -> None:
    """``norm_type`` means what it does in torch, of the whole mean gradient, in both ways to clip."""
    results = on_threads(Topology(2, 2), _p_normed, norm_type)
    net = model()
    for rank in range(4):
        (net(batch(0, rank)) / 4).backward()
    wanted = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()], norm_type).item()
    assert len(set(results)) == 1
    before, clipped, again, stepped = results[0]
    assert before == pytest.approx(wanted, rel=1e-5)
    assert stepped == clipped == pytest.approx(0.01, rel=1e-3)
    assert again == pytest.approx(0.005, rel=1e-3)


@pytest.mark.parametrize("norm_type", [0.0, -1.0, 9.0, -torch.inf, torch.nan])
def test_a_norm_that_would_not_be_one_is_refused(norm_type: float) -> None:
    """Powers at which fp64 overflows, or that name no norm, are refused with what is allowed."""

    def body(mesh: Mesh) -> None:
        net = copy.deepcopy(MODEL)
        zero = shard(net, mesh=mesh, policy=EXACT)
        net(batch(0, mesh.rank)).backward()
        zero.finish_backward()
        with pytest.raises(ZeroError, match="expected inf, or above 0 and at most 8"):
            zero.grad_norm(norm_type)

    on_threads(Topology(1, 2), body)


def test_clipping_masters_by_a_local_norm_is_refused() -> None:
    """Torch's clip_grad_norm_() would take this rank's shards for the model; of other tensors it works."""

    def body(mesh: Mesh) -> None:
        zero = shard(net := copy.deepcopy(MODEL), mesh=mesh, policy=EXACT)
        net(batch(0, mesh.rank)).backward()
        zero.finish_backward()
        before = zero.grad_norm()
        with pytest.raises(ZeroError, match=r"use zero\.step\(max_norm=\) or zero\.clip_grad_norm_\(\)"):
            clip_grad_norm_((one for group in zero.param_groups() for one in group["params"]), 0.01)
        assert torch.equal(zero.grad_norm(), before)
        plain = torch.nn.Parameter(torch.ones(4))
        plain.grad = torch.full((4,), 2.0)
        assert clip_grad_norm_(plain, 1.0) == 4.0
        assert plain.grad.norm().item() == pytest.approx(1.0)

    on_threads(Topology(1, 2), body)


def test_padding_is_not_part_of_the_norm() -> None:
    """An asymmetric gradient codec, whose offset makes something of padding, adds nothing to the norm."""

    def body(mesh: Mesh) -> tuple[float, float]:
        net = copy.deepcopy(base)
        codec = IntCodec(4, 256, asymmetric=True)
        zero = shard(net, mesh=mesh, policy=preset("exact", memory=ROOMY, gradients=(codec, codec)))
        net(data(0, mesh.rank)).backward()
        zero.finish_backward()
        unpadded = 0.0
        for unit in zero.units:
            mean = unit.master_shard.mean_gradient()
            assert mean is not None
            inside = torch.ones(unit.geometry.shard, dtype=torch.bool)
            for start, end in unit.geometry.pads(mesh.rank):
                inside[start:end] = False
            unpadded += mean[inside].double().square().sum().item()
        return zero.grad_norm().item(), unpadded

    torch.manual_seed(0)
    base = Stack()
    results = on_threads(Topology(2, 2), body)
    assert results[0][0] == pytest.approx(sum(part for _, part in results) ** 0.5, rel=1e-9)


def _broken(mesh: Mesh, policy: Policy, value: float, where: str) -> tuple[float, bool]:
    net = copy.deepcopy(MODEL)
    zero = shard(net, mesh=mesh, policy=policy)
    if where == "weight" and mesh.rank == 1:
        unit = zero.units[1]
        low, _ = unit.geometry.bounds(mesh.rank)
        first = next(s for s in unit.geometry.slots if s.end > low and len(s.spec.shape) > 1)
        unit.master_shard.master[max(first.offset - low, 0)] = value
    x = batch(0, mesh.rank)
    if where == "gradient" and mesh.rank == 2:
        x[0, 0] = value
    net(x).backward()
    zero.finish_backward()
    return zero.grad_norm().item(), zero.overflowed()


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize(("where", "value"), [("gradient", float("nan")), ("weight", float("inf"))])
def test_nonfinite_values_reach_the_norm_on_all_ranks(name: str, where: str, value: float) -> None:
    """A NaN or an infinity on one rank makes the norm non-finite on every rank, for every preset."""
    for norm, overflowed in on_threads(Topology(2, 2), _broken, preset(name, memory=ROOMY), value, where):
        assert not torch.isfinite(torch.tensor(norm))
        assert overflowed


# Groups and gradients


def _decayed(mesh: Mesh) -> dict[str, Tensor]:
    net = copy.deepcopy(MODEL)
    zero = shard(net, mesh=mesh, policy=EXACT, group_of=lambda _, p: int(p.ndim < 2))
    groups = zero.param_groups({0: {"weight_decay": 0.3}, 1: {"weight_decay": 0.0, "lr": 0.02}})
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for step in range(3):
        net(batch(step, mesh.rank)).backward()
        zero.finish_backward()
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict()


def test_optimizer_groups_keep_their_options() -> None:
    """Weight decay and learning rate by group do what they do in one process."""
    got = on_threads(Topology(2, 2), _decayed)[0]
    net = model()
    groups = [
        {"params": [p for p in net.parameters() if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in net.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for step in range(3):
        for rank in range(4):
            (net(batch(step, rank)) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert close(got, net.state_dict(), 1e-4)


def _cleared(mesh: Mesh, base: nn.Module, set_to_none: bool) -> tuple[float, float, float]:
    """Norms of a gradient, after ``model.zero_grad()``, and after halving the masters' gradients."""
    net = copy.deepcopy(base)
    zero = shard(net, mesh=mesh, policy=EXACT)
    norms = []
    for clear in (True, False):
        net(data(0, mesh.rank)).backward()
        zero.finish_backward()
        norms.append(zero.grad_norm().item())
        if clear:
            net.zero_grad(set_to_none=set_to_none)
            norms.append(zero.grad_norm().item())
    for unit in zero.units:
        for _, master in unit.master_shard.masters:
            master.grad = None if master.grad is None else master.grad / 2
    assert norms[2] == norms[0]
    return norms[0], norms[1], zero.grad_norm().item()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_the_masters(set_to_none: bool) -> None:
    """``model.zero_grad()`` clears them, and the norm is of what the optimizer would read."""
    torch.manual_seed(0)
    for norm, cleared, half in on_threads(Topology(2, 2), _cleared, Stack(), set_to_none):
        assert cleared == 0.0
        assert half == pytest.approx(norm / 2)
