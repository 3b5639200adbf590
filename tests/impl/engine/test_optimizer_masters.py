"""Tests of the norms, groups and gradients of masters, which optimizers step."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import starmap
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_

from impl.codecs.codec import IntCodec
from impl.comm.mesh import Mesh
from impl.policy.policy import LossScale, Offload, Policy
from impl.policy.presets import PRESETS, preset
from impl.policy.topology import Topology
from impl.zero import Zero, ZeroError, shard
from tests.impl.test_zero_models import Stack, data
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import EXACT, ROOMY
from tests.support.training import batch, close, model, single, update


def _p_normed(mesh: Mesh, norm_type: float) -> tuple[float, float, float, float | None]:
    zero = shard(net := model(), mesh=mesh, policy=EXACT)
    net(batch(0, mesh.rank)).backward()
    before = zero.clip_grad_norm_(0.01, norm_type).item()
    clipped = zero.grad_norm(norm_type).item()
    stepped = zero.step(torch.optim.SGD(zero.param_groups()), max_norm=0.005, norm_type=norm_type)
    return before, clipped, zero.grad_norm(norm_type).item(), stepped.norm


@pytest.mark.parametrize("norm_type", [2.0, torch.inf, 1.0, 3.0])
def test_norms_are_those_of_the_whole_gradient(norm_type: float) -> None:
    """Both ways to clip use torch's p-norm of the whole mean gradient, with the same bits on all ranks."""
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
@each_rank(1, 2)
def test_a_norm_that_would_not_be_one_is_refused(mesh: Mesh, norm_type: float) -> None:
    """Powers at which fp64 overflows, or that name no norm, are refused with what is allowed."""
    net = model()
    zero = shard(net, mesh=mesh, policy=EXACT)
    net(batch(0, mesh.rank)).backward()
    with pytest.raises(ZeroError, match="expected inf, or a number above 0 and at most 8"):
        zero.grad_norm(norm_type)


@each_rank(1, 2)
def test_clipping_masters_by_a_local_norm_is_refused(mesh: Mesh) -> None:
    """Torch's ``clip_grad_norm_()`` refuses masters, which are one rank's shards; with other tensors it works."""
    zero = shard(net := model(), mesh=mesh, policy=EXACT)
    net(batch(0, mesh.rank)).backward()
    before = zero.grad_norm()
    with pytest.raises(ZeroError, match=r"use zero\.step\(max_norm=\) or zero\.clip_grad_norm_\(\)"):
        clip_grad_norm_((p for group in zero.param_groups() for p in group["params"]), 0.01)
    assert torch.equal(zero.grad_norm(), before)
    plain = torch.nn.Parameter(torch.ones(4))
    plain.grad = torch.full((4,), 2.0)
    assert clip_grad_norm_(plain, 1.0) == 4.0
    assert plain.grad.norm().item() == pytest.approx(1.0)


@each_rank(1, 2)
def test_what_torch_finds_in_one_ranks_shards_is_refused(mesh: Mesh) -> None:
    """``get_total_norm()`` and ``GradScaler`` refuse masters; with other tensors both work."""
    zero = shard(net := model(), mesh=mesh, policy=EXACT)
    net(batch(0, mesh.rank)).backward()
    optimizer = torch.optim.SGD(zero.param_groups())
    with pytest.raises(ZeroError, match="their norm is not the model's"):
        torch.nn.utils.get_total_norm([master.grad for master in zero.masters if master.grad is not None])
    plain = torch.nn.Parameter(torch.ones(4))
    for call, fused in ((GradScaler.unscale_, False), (GradScaler.step, False), (GradScaler.step, True)):
        for held in (optimizer.param_groups, [plain]):
            scaler = GradScaler("cpu")
            scaler.scale(plain.sum()).backward()
            refused = pytest.raises(ZeroError, match=r"policy's loss_scale and zero\.step")
            with contextlib.nullcontext() if held == [plain] else refused:
                call(scaler, torch.optim.AdamW(held, fused=fused))


def test_padding_is_not_part_of_the_norm() -> None:
    """An asymmetric gradient codec, which decodes padding to values other than 0, does not change the norm."""

    def squares(mesh: Mesh) -> tuple[float, float]:
        codec, unpadded = IntCodec(4, 256, asymmetric=True), 0.0
        policy = replace(EXACT, gradients=(codec, codec))
        zero = shard(net := model(Stack), mesh=mesh, policy=policy)
        net(data(0, mesh.rank)).backward()
        for unit in zero.units:
            inside = torch.ones(unit.geometry.shard, dtype=torch.bool)
            for start, end in unit.geometry.pads(mesh.rank):
                inside[start:end] = False
            unpadded += unit.master_shard.mean_gradient()[inside].double().square().sum().item()
        return zero.grad_norm().item(), unpadded

    results = on_threads(Topology(2, 2), squares)
    assert results[0][0] == pytest.approx(sum(part for _, part in results) ** 0.5, rel=1e-9)


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize(("where", "value"), [("gradient", torch.nan), ("weight", torch.inf)])
@each_rank(2, 2)
def test_nonfinite_values_reach_the_norm_on_all_ranks(
    mesh: Mesh, name: str, where: str, value: float
) -> None:
    """A NaN or an infinity on one rank makes the norm non-finite on every rank, for every preset."""
    zero = shard(model(), mesh=mesh, policy=preset(name, memory=ROOMY))
    x = batch(0, mesh.rank)
    if where == "weight" and mesh.rank == 1:
        unit = zero.units[1]
        low, _ = unit.geometry.bounds(mesh.rank)
        first = next(s for s in unit.geometry.slots if s.end > low and len(s.spec.shape) > 1)
        unit.master_shard.master[max(first.offset - low, 0)] = value
    if where == "gradient" and mesh.rank == 2:
        x[0, 0] = value
    zero.model(x).backward()
    assert not torch.isfinite(zero.grad_norm())


def _decayed(mesh: Mesh) -> dict[str, Tensor]:
    zero = shard(net := model(), mesh=mesh, policy=EXACT, group_of=lambda _, p: int(p.ndim < 2))
    groups = zero.param_groups({0: {"weight_decay": 0.3}, 1: {"weight_decay": 0.0, "lr": 0.02}})
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for step in range(3):
        update(optimizer, net(batch(step, mesh.rank)))
    return zero.full_state_dict()


def test_optimizer_groups_keep_their_options() -> None:
    """Weight decay and learning rate of each group act as they do in one process."""
    net = model()
    groups = [
        {"params": [p for p in net.parameters() if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in net.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]
    single(net, 4, 3, optimize=lambda _: torch.optim.AdamW(groups, lr=0.01))
    assert close(on_threads(Topology(2, 2), _decayed)[0], net.state_dict(), 1e-4)


@pytest.mark.parametrize("set_to_none", [True, False])
@each_rank(2, 2)
def test_gradients_are_the_masters(mesh: Mesh, set_to_none: bool) -> None:
    """``model.zero_grad()`` clears the masters' gradients, and the norm uses the gradients that optimizers read."""
    zero = shard(net := model(Stack), mesh=mesh, policy=EXACT)
    net(data(0, mesh.rank)).backward()
    norm = zero.grad_norm()
    assert norm > 0
    net.zero_grad(set_to_none=set_to_none)
    assert zero.grad_norm() == 0
    net(data(0, mesh.rank)).backward()
    assert zero.grad_norm() == norm
    for unit in zero.units:
        for _, master in unit.master_shard.masters:
            master.grad = None if master.grad is None else master.grad / 2
    assert zero.grad_norm() == pytest.approx(norm / 2)


OPTIMIZERS: dict[str, Any] = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shape", [(8, 8), (4, 8), (1,), (33,), (32, 1)])
@each_rank(1, 2)
def test_the_state_of_a_whole_models_optimizer_is_refused(
    mesh: Mesh, name: str, shape: tuple[int, ...]
) -> None:
    """The state of a whole model's optimizer is refused, since a fused step would write past its end."""
    net, make = torch.nn.Linear(8, 8, bias=False), OPTIMIZERS[name]
    zero = shard(net, mesh=mesh, policy=EXACT)  # with one master of 32 elements
    optimizer, whole = make(zero.param_groups()), torch.nn.Parameter(torch.ones(shape))
    others = make([whole])
    whole.grad = torch.ones(shape)
    others.step()
    key = next(key for key, value in others.state[whole].items() if value.dim())
    message = (
        rf"load_state_dict\(\) of \w+ got '{key}' of shape .*, but this rank's shard .* has 32 elements: "
    )
    before = repr(optimizer.state_dict())
    with pytest.raises(ZeroError, match=message):
        optimizer.load_state_dict(others.state_dict())
    assert repr(optimizer.state_dict()) == before


@each_rank(1, 2)
def test_an_optimizer_takes_its_own_state_and_what_a_hook_makes_of_others(mesh: Mesh) -> None:
    """The state is checked as users' hooks leave it; optimizers of plain parameters are left alone."""
    net = torch.nn.Linear(8, 8, bias=False)
    zero = shard(net, mesh=mesh, policy=EXACT)
    optimizer = torch.optim.AdamW(zero.param_groups())
    update(optimizer, net(torch.ones(2, 8)).sum())
    state = optimizer.state_dict()
    again = torch.optim.AdamW(zero.param_groups())
    again.load_state_dict(state)
    assert torch.equal(again.state_dict()["state"][0]["exp_avg"], state["state"][0]["exp_avg"])

    def cut(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        whole = given["state"][0]
        own = {key: value.view(-1)[:32] if value.dim() else value for key, value in whole.items()}
        return {**given, "state": {0: own}}

    alone = torch.nn.Parameter(torch.ones(8, 8))
    others = torch.optim.AdamW([alone])
    alone.grad = torch.ones(8, 8)
    others.step()
    others.load_state_dict(others.state_dict())
    again.register_load_state_dict_pre_hook(cut)
    again.load_state_dict(others.state_dict())
    assert again.state_dict()["state"][0]["exp_avg"].shape == (32,)


# One optimizer of several models


class Tied(nn.Module):
    """Models in a row; the loss is the last one's, and a pass may leave some of them out."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Net(seed) for seed in range(count))

    def forward(self, x: Tensor, used: int) -> Tensor:
        for part in self.parts[:used]:
            x = part(x)
        return x.square().mean()


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.layers(x)


def _alone(count: int, world: int, norm_type: float, used: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the norms and weights of one process that clips the gradients of all models together."""
    net, norms = model(Tied, count=count), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for step in range(3):
        (sum(net(batch(step, rank), used) for rank in range(world)) / world).backward()
        norms.append(float(clip_grad_norm_(net.parameters(), 0.1, norm_type)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, net.state_dict()


def _joined(
    mesh: Mesh, policies: list[Policy], norm_type: float, used: int, way: str
) -> tuple[list[float], dict[str, Tensor]]:
    net = model(Tied, count=len(policies))
    zeros = [shard(net.parts[i], mesh=mesh, policy=policy) for i, policy in enumerate(policies)]
    groups = [zero.param_groups() for zero in zeros]
    if way == "optimizers":
        optimizers = [torch.optim.AdamW(group, lr=0.05) for group in groups]
    else:
        optimizers = [torch.optim.AdamW([g for group in reversed(groups) for g in group], lr=0.05)]
    norms = []
    for step in range(3):
        loss = net(batch(step, mesh.rank), used)
        zeros[0].scaler.scaled(loss).backward()
        if way == "clip":
            norms.append(float(zeros[-1].clip_grad_norm_(0.1, norm_type, optimizers=optimizers)))
            optimizers[0].step()
        else:
            norms.append(zeros[step % len(zeros)].step(*optimizers, max_norm=0.1, norm_type=norm_type).norm)
        for optimizer in optimizers:
            optimizer.zero_grad()
    state = {}
    for i, zero in enumerate(zeros):
        state |= {f"parts.{i}.{name}": value for name, value in zero.full_state_dict().items()}
    return norms, state


SCALED = replace(EXACT, loss_scale=LossScale(initial=8.0))
JOINED = [
    ([EXACT, EXACT], 2.0, 2, "step"),
    ([EXACT, EXACT], torch.inf, 2, "step"),
    ([EXACT, EXACT], 1.0, 2, "optimizers"),
    ([EXACT, EXACT], 3.0, 2, "clip"),
    ([EXACT, EXACT], torch.inf, 2, "clip"),
    ([EXACT, EXACT, EXACT], 2.0, 3, "step"),
    ([EXACT, EXACT, EXACT], 2.0, 2, "step"),  # of which one has no gradient
    ([EXACT, replace(EXACT, stage=0)], 2.0, 2, "step"),
    ([replace(EXACT, stage=2), replace(EXACT, group="node")], 2.0, 2, "step"),
    ([replace(EXACT, offload=Offload(optimizer=1.0)), EXACT], 2.0, 2, "step"),
    ([SCALED, SCALED], 2.0, 2, "step"),
    ([SCALED, SCALED], torch.inf, 2, "optimizers"),
]


@pytest.mark.parametrize(("policies", "norm_type", "used", "way"), JOINED)
@pytest.mark.parametrize("topology", [Topology(1, 3), Topology(2, 2)])
def test_models_of_one_optimizer_are_clipped_as_one(
    topology: Topology, policies: list[Policy], norm_type: float, used: int, way: str
) -> None:
    """Every call that clips uses the joint norm of all models' gradients, with the same bits on all ranks. If one
    model's scaler scaled the loss, the gradients of all models are unscaled.
    """
    results = on_threads(topology, _joined, policies, norm_type, used, way)
    norms, state = _alone(len(policies), topology.world, norm_type, used)
    for mine, trained in results:
        assert mine == results[0][0]
        assert mine == pytest.approx(norms, rel=1e-5)
        assert close(trained, state, 1e-4)


@each_rank(1, 2)
def test_models_of_one_optimizer_skip_a_step_together(mesh: Mesh) -> None:
    """An overflow in one model skips the step in all, and their loss scales stay equal from then on."""
    policy = replace(EXACT, loss_scale=LossScale(initial=8.0, window=3))
    first, second = (shard(model(), mesh=mesh, policy=policy) for _ in range(2))
    apart = torch.optim.SGD(second.param_groups(), lr=0.1)
    joined = torch.optim.SGD([*first.param_groups(), *second.param_groups()], lr=0.1)
    second.scaler.scaled(second.model(batch(0, mesh.rank))).backward()
    assert second.step(apart).done
    apart.zero_grad()
    scales = []
    for step in range(5):
        x = batch(step, mesh.rank)
        for zero in (first, second):
            spike = torch.inf if step == 1 and zero is second and mesh.rank == 1 else 1.0
            zero.scaler.scaled(zero.model(x) * spike).backward()
        before = [master.detach().clone() for master in (*first.masters, *second.masters)]
        done = first.step(joined, max_norm=1.0).done
        kept = starmap(torch.equal, zip(before, [*first.masters, *second.masters], strict=True))
        assert done == (not all(kept)) == (step != 1)
        joined.zero_grad()
        assert first.scaler.scale == second.scaler.scale
        scales.append(first.scaler.scale)
    assert scales == [8.0, 4.0, 4.0, 4.0, 8.0]
    assert first.scaler.skipped == second.scaler.skipped == 1


def _joint(policies: tuple[Policy, Policy], mesh: Mesh) -> tuple[Zero, Zero, torch.optim.Optimizer]:
    first, second = (shard(model(), mesh=mesh, policy=policy) for policy in policies)
    return first, second, torch.optim.SGD([*first.param_groups(), *second.param_groups()], lr=0.1)


@each_rank(1, 2)
def test_models_that_cannot_step_as_one_are_refused(mesh: Mesh) -> None:
    """Different loss scales, a loss that no scaler scaled, and gradients that would not be clipped are refused in
    one line, with no weight changed. Without a loss scale, a step that does not clip has no such conditions.
    """
    other = replace(EXACT, loss_scale=LossScale(initial=4.0))
    for policies, scales in (
        ((SCALED, other), "8 and 4"),
        ((EXACT, SCALED), "1 and 8"),
        ((SCALED, EXACT), "8 and 1"),
    ):
        first, second, optimizer = _joint(policies, mesh)
        (first.model(batch(0, mesh.rank)) + second.model(batch(0, mesh.rank))).backward()
        with pytest.raises(
            ZeroError,
            match=f"models whose loss scales differ, {scales}: either shard all models with the same loss_scale",
        ):
            first.step(optimizer)
    first, second, optimizer = _joint((SCALED, SCALED), mesh)
    first.scaler.scaled(first.model(batch(0, mesh.rank))).backward()
    second.model(batch(0, mesh.rank)).backward()
    with pytest.raises(ZeroError, match="1 backward pass whose loss was not scaled"):
        first.step(optimizer)
    first, second, optimizer = _joint((EXACT, EXACT), mesh)
    apart = torch.optim.SGD(second.param_groups(), lr=0.1)
    with pytest.raises(ZeroError, match="only masters of other models: call it on the engine whose"):
        first.step(apart, max_norm=1.0)
    with pytest.raises(
        ZeroError,
        match=r"a Tied in place of an optimizer, and its tensors are not known: pass a torch\.optim",
    ):
        first.step(Tied(0))
    plain = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [plain]})
    (first.model(batch(0, mesh.rank)) * plain.sum()).backward()
    before = [master.detach().clone() for master in first.masters]
    with pytest.raises(
        ZeroError,
        match=r"also hold tensors outside of any sharded model \(number: 1\), whose gradients would not be clipped",
    ):
        first.step(optimizer, max_norm=1.0)
    assert all(starmap(torch.equal, zip(first.masters, before, strict=True)))
    first.step(optimizer)
    assert plain.mean() < 1


@each_rank(1, 2)
def test_clipping_one_of_two_models_leaves_the_other(mesh: Mesh) -> None:
    """Without ``optimizers=``, ``clip_grad_norm_()`` clips its own model alone."""
    first, second, _ = _joint((EXACT, EXACT), mesh)
    (first.model(batch(0, mesh.rank)) + second.model(batch(0, mesh.rank))).backward()
    norm = second.grad_norm()
    assert first.clip_grad_norm_(0.01) == norm
    assert first.grad_norm().item() == pytest.approx(0.01, rel=1e-3)
    assert second.grad_norm() == norm
