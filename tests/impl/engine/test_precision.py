"""Types: masters in fp32 whatever is computed in, one loss scale for all ranks, weights kept as codes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from impl.codecs.codec import parse
from impl.codecs.reference import DTYPES
from impl.comm.mesh import Mesh
from impl.engine.masters import LossScaleError, LossScaler
from impl.policy.policy import Dtype, LossScale, Stage
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import ZeroError, shard
from tests.support.history import History
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import EXACT, ROOMY
from tests.support.training import Training, batch, mean_losses, model, sgd, single, train


@pytest.mark.parametrize(("dtype", "compute"), [("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "bf16")])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_may_be_computed_in_16_bits(dtype: Dtype, compute: Dtype, stage: Stage) -> None:
    """Weights, activations and gradients have the compute type, masters are fp32, and losses within 2 %."""
    scale = LossScale(initial=1024.0) if compute == "fp16" else None
    policy = preset("zero3", stage=stage, compute=compute, loss_scale=scale, memory=ROOMY)
    net = model().to(DTYPES[dtype])
    loss_of = lambda net, number, rank: net(batch(number, rank).to(DTYPES[dtype]))  # noqa: E731
    results = on_threads(Topology(2, 2), partial(train, loss_of=loss_of), net, policy, 4, 2)
    assert mean_losses(results) == pytest.approx(single(model(), 4, 4, 2), rel=0.02)
    _, state, zero = results[0]
    assert all(master.dtype == torch.float32 for master in zero.masters)
    assert state["embed.weight"].dtype == torch.float32
    assert zero.units[0].members[0].parameter.dtype == DTYPES[compute]


@pytest.mark.parametrize("codec", ["fp16", "int8:32", "int4:32:asym", "fp8e5m2:32"])
@each_rank(2, 2)
def test_an_overflow_on_one_rank_skips_the_step_on_all(mesh: Mesh, codec: str) -> None:
    """Through every gradient codec: no rank steps, the scale halves everywhere, and training goes on."""
    scale = LossScale(initial=4.0, window=2)
    policy = preset("zero3", gradients=(parse(codec),) * 2, loss_scale=scale, memory=ROOMY)
    history, scales, weights = History(mesh, model(), policy, max_norm=1.0), [], []
    for step in range(4):
        history.act("spike" if step == 1 and mesh.rank == 1 else "train", step)
        scales.append(history.zero.scaler.scale)
        weights.append(torch.cat([unit.master_shard.master.clone() for unit in history.zero.units]))
    assert [stepped.done for stepped in history.seen[1::2]] == [True, False, True, True]
    assert scales == [4.0, 2.0, 2.0, 4.0]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert all(masters.isfinite().all() for masters in weights)


def test_the_scale_moves_as_it_says() -> None:
    """It doubles after a window of steps, and halves at an overflow, an error at the least; or is fixed."""
    scaler = LossScaler(LossScale(initial=4.0, window=2, least=2.0))
    assert scaler.factor(2.0, 1.0) == pytest.approx(0.25 * 0.5, rel=1e-6)
    scaler.stepped()
    assert scaler.factor(2.0, None) == 0.25
    scaler.stepped()
    assert scaler.scale == 8.0
    assert scaler.factor(math.nan, None) is None
    resumed = LossScaler(LossScale(initial=4.0, window=2, least=2.0))
    resumed.load_state_dict(scaler.state_dict())
    assert (resumed.scale, resumed.skipped) == (4.0, 1)
    assert resumed.factor(math.inf, None) is None
    with pytest.raises(LossScaleError, match="loss scale of 2, the smallest"):
        resumed.factor(math.inf, None)
    fixed = LossScaler(LossScale(initial=512.0, window=0))
    assert fixed.factor(math.inf, None) is None
    assert (fixed.scale, fixed.skipped) == (512.0, 1)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(2)
        )
        self.register_buffer("derived", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _buffers(mesh: Mesh) -> Any:
    run = Training(mesh, model(Normed), EXACT)
    run.net.derived.fill_(mesh.rank)
    for number in range(2):
        run.step(number)
    local = {name: buffer.clone() for name, buffer in run.net.named_buffers()}
    with torch.no_grad():
        loss = run.net.eval()(batch(9, 0)).item()
    return local, dict(run.net.named_buffers()), loss, run.zero.full_state_dict()


def test_buffers_are_kept_equal() -> None:
    """Before the next pass all ranks hold the mean of running statistics; derived buffers stay their own."""
    results = on_threads(Topology(2, 2), _buffers)
    for rank, (local, equal, loss, state) in enumerate(results):
        assert torch.equal(equal.pop("derived"), torch.full_like(local["derived"], rank))
        for name, value in equal.items():
            assert torch.equal(value, results[0][3][name])
            mean = torch.stack([buffers[name].double() for buffers, *_ in results]).mean(0)
            assert torch.allclose(value.double(), mean, rtol=1e-6)
            assert torch.equal(state[name], value)
        assert loss == results[0][2]


@pytest.mark.parametrize("part", ["", "blocks.0"])
def test_buffers_are_kept_equal_after_any_pass_that_changes_them(part: str) -> None:
    """Also one that records no gradient, as that of ``update_bn()``, and one of blocks by themselves."""

    def body(mesh: Mesh) -> dict[str, Tensor]:
        zero = Training(mesh, model(Normed), EXACT).zero
        zero.full_state_dict()
        with torch.set_grad_enabled(bool(part)):
            zero.model.get_submodule(part)(batch(0, mesh.rank))
        return zero.full_state_dict()

    first, second = on_threads(Topology(1, 2), body)
    assert all(torch.equal(first[name], second[name]) for name in first)


@each_rank(1, 2)
def test_scaled_gradients_are_unscaled_once(mesh: Mesh) -> None:
    """Several optimizers step together under one scale; one alone, or clipping before, is refused."""
    policy = replace(EXACT, loss_scale=LossScale(initial=8.0))
    zero = shard(model(), mesh=mesh, policy=policy, group_of=lambda name, _: int("head" in name))
    optimizers = [sgd([group]) for group in zero.param_groups()]
    zero.scaler.scaled(zero.model(batch(0, mesh.rank))).backward()
    with pytest.raises(ZeroError, match="pass all optimizers to one call of step"):
        zero.step(optimizers[0])
    with pytest.raises(ZeroError, match="give max_norm to step"):
        zero.clip_grad_norm_(1.0)
    before = torch.cat([unit.master_shard.master.clone() for unit in zero.units])
    assert zero.step(*optimizers, max_norm=1e9).done
    moved = torch.cat([unit.master_shard.master for unit in zero.units]) - before
    gradient = torch.cat([unit.master_shard.mean_gradient() for unit in zero.units])
    assert torch.allclose(moved, -0.1 * gradient, atol=1e-6)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "policy", [{"stage": 0}, {"stage": 1}, {"stage": 3, "reduce_every": "step"}], ids=str
)
@each_rank(1, 2)
def test_micro_batches_add_up_in_fp32(mesh: Mesh, policy: dict[str, Any], compute: Dtype) -> None:
    """Sums that no 16-bit type holds on the way arrive: 4096 + 1 + 1 + 1 - 4096 = 3, as do 64 thirds."""
    third = torch.tensor(1 / 3).to({"bf16": torch.bfloat16, "fp16": torch.float16}[compute])
    for gradients, total in (([4096.0, 1.0, 1.0, 1.0, -4096.0], 3.0), ([1 / 3] * 64, 64 * float(third))):
        zero = shard(net := nn.Linear(8, 8), mesh=mesh, policy=replace(EXACT, compute=compute, **policy))
        for number, gradient in enumerate(gradients):
            zero.accumulate(on=number < len(gradients) - 1)
            (net(torch.eye(8)) * gradient).sum().backward()
        means = torch.cat([unit.master_shard.mean_gradient() for unit in zero.units])
        assert {total, 8 * total} & set(means.tolist())  # of weights, or of the bias, in this rank's shard


@each_rank(1, 2)
def test_a_loss_that_was_not_scaled_is_noticed(mesh: Mesh) -> None:
    """Its gradients would be divided by the scale: step() refuses, of each pass of a step, until dropped."""
    policy = replace(EXACT, loss_scale=LossScale(initial=8.0))
    zero = shard(net := model(), mesh=mesh, policy=policy)
    optimizer = torch.optim.SGD(zero.param_groups(), lr=0.1)
    for scaled in ((True, False), (False, True), (True, True)):
        for scales in scaled:
            loss = net(batch(0, mesh.rank))
            (zero.scaler.scaled(loss / 2) if scales else loss / 2).backward()
        if all(scaled):
            assert zero.step(optimizer).done
        else:
            with pytest.raises(
                ZeroError, match=r"scale of 8, but .* 1 backward pass whose .*: drop the gradients"
            ):
                zero.step(optimizer)
            net.zero_grad()
