"""Tests of the engine's lifetime, of misuse that it refuses, and of its state."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from impl.comm.mesh import Mesh
from impl.engine.engine import find
from impl.parameters.gathered import GatheredParameters
from impl.policy.policy import Stage
from impl.policy.topology import Topology
from impl.zero import Zero, ZeroError, shard
from tests.impl.checkpoint.checkpointed import NET, POLICIES, Dropping, same
from tests.impl.test_zero_models import WIDTH, Stack, data
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import EXACT
from tests.support.training import Training, batch, model, sgd, update


@each_rank(1, 1)
def test_an_engine_that_nobody_keeps_lives_as_long_as_its_model(mesh: Mesh) -> None:
    """Parameters and optimizers still find the engine after a function that returns only its model."""
    net = model()
    optimizer = torch.optim.SGD(shard(net, mesh=mesh, policy=EXACT).param_groups(), lr=0.1)
    gc.collect()
    owner = find(net.head.weight)
    net(batch(0, 0)).backward()
    optimizer.step()
    del owner
    gc.collect()
    net.zero_grad()
    assert all(master.grad is None for group in optimizer.param_groups for master in group["params"])
    with GatheredParameters(net.head.weight, modifier_rank=0):
        net.head.weight.data.zero_()


@pytest.mark.parametrize("passes", ["none", "forward", "both"])
def test_a_dropped_engine_is_freed(passes: str) -> None:
    """Without references to them, model, engine and masters are freed: no hook or graph keeps them alive."""

    def body(mesh: Mesh) -> weakref.ref[Zero]:
        zero = shard(net := Stack(), mesh=mesh, policy=EXACT)
        loss = net(data(0, 0)) if passes != "none" else None
        if passes == "both":
            loss.backward()
        return weakref.ref(zero)

    [reference] = on_threads(Topology(1, 1), body)
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("frozen", [False, True])
@each_rank(1, 1)
def test_a_graph_that_outlives_its_engine_leads_back_to_the_inputs(mesh: Mesh, frozen: bool) -> None:
    """Backward through such a graph still reaches the inputs; the gradient of a weight raises an error."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).requires_grad_(not frozen)
    x = torch.randn(2, 8, requires_grad=True)
    (wanted,) = torch.autograd.grad(net(x).square().sum(), x)
    zero = shard(net, mesh=mesh, policy=EXACT)
    loss = net(x).square().sum()
    hooks = weakref.ref(zero.hooks)
    for module in net.modules():  # whoever takes them off lets go of the engine
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    del zero, net, module
    gc.collect()
    assert hooks() is None
    torch.testing.assert_close(torch.autograd.grad(loss, x, retain_graph=True)[0], wanted)
    if not frozen:
        with pytest.raises(ZeroError, match="a sharded model whose engine is gone"):
            loss.backward()


def _loop(mesh: Mesh, stage: Stage, *, calls: bool) -> list[Tensor]:
    """Return the masters after steps that accumulate and clip; the loop may call ``finish_backward()``."""
    zero = shard(net := model(), mesh=mesh, policy=replace(EXACT, stage=stage, reduce_every="step"))
    optimizer = sgd(zero.param_groups())
    for number in range(4):
        zero.accumulate(on=number == 2)
        net(batch(number, mesh.rank)).backward()
        for _ in range(2 if calls else 0):
            zero.finish_backward()
        if number != 2:
            zero.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [master.detach() for master in zero.masters]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loop_ends_its_backward_passes_by_itself(stage: Stage) -> None:
    """With accumulation and clipping; calling finish_backward(), also twice, changes no bit."""
    for plain, called in zip(
        *(on_threads(Topology(1, 2), partial(_loop, stage=stage, calls=on)) for on in (False, True)),
        strict=True,
    ):
        assert all(map(torch.equal, plain, called))


class _Boom(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, __: Tensor) -> Tensor:
        raise ValueError("boom")


def _after_a_failed_pass(net: nn.Module, use: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="boom"):
        net(_Boom.apply(data(0, 0).requires_grad_())).backward()
    use()


def _steps_between(net: nn.Module, zero: Zero) -> None:
    first, second = net(data(0, 0)), net(data(1, 0))
    first.backward()
    sgd(zero.param_groups()).step()
    second.backward()


def _asks_for_second_derivatives(net: nn.Module, _: Zero) -> None:
    x = data(0, 0).requires_grad_()
    torch.autograd.grad(net(x), x, create_graph=True)


def _freezes_later(net: nn.Module, _: Zero) -> None:
    net.head.weight.requires_grad_(requires_grad=False)
    net(data(0, 0))


Misuse = Callable[[Any, Zero], object]
OUTSIDE = "is used outside of a forward pass, where its values are sharded"
TABLE = r"param_groups\(options=\.\.\.\): expected a table"
MISUSE: list[tuple[str, Misuse]] = [
    ("a forward pass follows a backward pass that failed and was not ended: call",
     lambda net, _: _after_a_failed_pass(net, lambda: net(data(1, 0)))),
    (r"optimizer.step\(\) is refused after a backward pass that failed: call",
     lambda net, zero: _after_a_failed_pass(net, sgd(zero.param_groups()).step)),
    (r"grad_norm\(\) is refused after a backward pass that failed: call",
     lambda net, zero: _after_a_failed_pass(net, zero.grad_norm)),
    ("Adafactor is not elementwise",
     lambda net, zero: update(torch.optim.Adafactor(zero.param_groups()), net(data(0, 0)))),
    (r"construct the optimizer with Zero.param_groups\(\)",
     lambda net, _: update(torch.optim.AdamW(net.parameters()), net(data(0, 0)))),
    ("changed between its forward and its backward pass", _steps_between),
    ("asks for gradients of gradients, which a sharded model does not support", _asks_for_second_derivatives),
    ("parameter 'head.weight' was trained when the model was sharded and is now frozen", _freezes_later),
    (OUTSIDE + ": to compute a loss with the parameter, use zero.unsharded.*use GatheredParameters",
     lambda net, _: net.head.weight + 1),
    (OUTSIDE, lambda net, _: torch.exp(net.head(net.middle(torch.ones(2, WIDTH))))),  # past its own forward
    (r"deepcopy\(\) of a sharded model", lambda net, _: copy.deepcopy(net)),
    (r"deepcopy\(\) of a sharded model", lambda net, _: copy.deepcopy(net.blocks[1])),
    (TABLE, lambda _, zero: zero.param_groups([{"lr": 0.1}])),
    (TABLE, lambda _, zero: zero.param_groups({0: [("lr", 0.1)]})),
    (TABLE, lambda _, zero: zero.param_groups("lr")),
    ("has options for group '0', but the model's groups are 0, as",
     lambda _, zero: zero.param_groups({"0": {"lr": 1.0}})),
    ("has options for group 1, but the model's groups are 0, as", lambda _, zero: zero.param_groups({1: {"lr": 1.0}})),
    ("has an option 'params', which would replace", lambda _, zero: zero.param_groups({0: {"params": []}})),
    (r"accumulate\(on='yes'\): expected True or False", lambda _, zero: zero.accumulate(on="yes")),
]  # fmt: skip


@pytest.mark.parametrize(("message", "misuse"), MISUSE)
@each_rank(1, 2)
def test_what_would_train_something_else_raises(mesh: Mesh, message: str, misuse: Misuse) -> None:
    """Misuse that plain torch would notice, or that would silently do nothing, is a clear error."""
    zero = shard(net := model(Stack), mesh=mesh, policy=EXACT)
    with pytest.raises((ZeroError, RuntimeError), match=message):
        misuse(net, zero)


@each_rank(1, 2)
def test_a_full_state_is_loaded_with_extra_states(mesh: Mesh) -> None:
    """load_full_state_dict(), and so model.load_state_dict(), loads a full_state_dict() with extra states."""
    zero = shard(model(Dropping), mesh=mesh, policy=EXACT)
    for factor, load in ((2, zero.load_full_state_dict), (3, zero.model.load_state_dict)):
        state = zero.full_state_dict()
        weights = {name: w * factor for name, w in state.items() if isinstance(w, Tensor)}
        load({**state, **weights, "_extra_state": {**state["_extra_state"], "passes": factor}})
        assert zero.model.passes == factor
        loaded = zero.full_state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in weights.items())
    with pytest.raises(ZeroError, match=r"load_state_dict\(assign=True\) of a sharded model"):
        zero.model.load_state_dict(state, assign=True)


@each_rank(1, 2)
def test_a_full_state_of_any_layout_is_loaded(mesh: Mesh) -> None:
    """Views are loaded as their values; all ranks refuse values that the model could not hold."""
    zero = shard(torch.nn.Linear(4, 4, bias=False), mesh=mesh, policy=EXACT)
    values = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for value in (
        values[:, ::2],
        values[:, :4].t(),
        values[:1, :4].expand(4, 4),
        torch._neg_view(values[:, 4:]),
        torch.complex(values, values).conj().imag[:, 3:7],
        torch.arange(16).view(4, 4),
        values[:, :4].bfloat16().t(),
    ):
        zero.load_full_state_dict({"weight": value})
        assert torch.equal(zero.full_state_dict()["weight"], value.float())
    for value, message in (
        (
            torch.zeros(4, 4, dtype=torch.complex64),
            "is torch.complex64, .* is real: load value.real",
        ),
        (torch.zeros(4, 4).to_sparse(), "is sparse_coo, expected a dense tensor with values"),
        (torch.zeros(4, 4, device="meta"), "is on the meta device, expected a dense tensor with values"),
        ([1.0], "is a list, expected a tensor"),
    ):
        with pytest.raises(ZeroError, match=f"state 'weight' {message}"):
            zero.load_full_state_dict({"weight": value})


def _fail_in(run: Training, place: str) -> None:
    """Run a pass of a rehearsal that raises a ValueError in ``place``: in forward, in backward, or after the pass."""
    block = run.net.blocks[0]
    if place == "forward":
        handle = block.register_forward_pre_hook(lambda *_: _Boom.backward(None, torch.zeros(())))
    elif place == "backward":
        handle = block.register_forward_hook(lambda _module, _inputs, output: _Boom.apply(output))
    try:
        run.backward(7)
        raise ValueError("boom")
    finally:
        if place != "afterwards":
            handle.remove()


@pytest.mark.parametrize("place", ["forward", "backward", "afterwards"])
@pytest.mark.parametrize("name", ["feedback", "differences", "budget", "zero1", "own"])
@each_rank(2, 2)
def test_a_rehearsal_that_fails_changes_nothing(mesh: Mesh, name: str, place: str) -> None:
    """After an error in any pass of a rehearsal, training continues bit for bit as without the rehearsal."""
    run, other = (Training(mesh, NET, POLICIES[name]) for _ in range(2))
    for each in (run, other):
        each.step(0)
        each.step(1)
    with contextlib.suppress(ValueError), run.zero.rehearsing():
        run.backward(6)
        _fail_in(run, place)
    assert all(master.grad is None for master in run.zero.masters)
    assert same(run.zero.communication_state(), other.zero.communication_state())
    assert [run.step(number) for number in (2, 3)] == [other.step(number) for number in (2, 3)]


@each_rank(2, 2)
def test_a_rehearsal_that_fails_on_one_rank_sends_what_the_others_wait_for(mesh: Mesh) -> None:
    """If backward raises on one rank, the rehearsal ends on all, and training continues bit for bit."""
    policy = replace(POLICIES["feedback"], stage=1)
    run, other = (Training(mesh, NET, policy) for _ in range(2))
    assert run.step(0) == other.step(0)
    with contextlib.suppress(ValueError), run.zero.rehearsing():
        if mesh.rank == 1:
            _fail_in(run, "backward")
        run.backward(7)
    assert same(run.zero.communication_state(), other.zero.communication_state())
    assert [run.step(number) for number in (1, 2)] == [other.step(number) for number in (1, 2)]
