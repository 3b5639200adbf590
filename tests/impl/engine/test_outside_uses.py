"""Tests of users' saved-tensor hooks: they see the activations that plain torch shows them, and no weights."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.utils.checkpoint import checkpoint

from impl.comm.mesh import Mesh
from impl.parameters.access import Gradient
from impl.policy.policy import Offload, Policy
from impl.policy.topology import Topology
from impl.zero import ZeroError, shard
from tests.impl.test_zero_models import WIDTH, Layer, Stack, data, of_data
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import EXACT
from tests.support.training import model, sgd, single, train

Where = Callable[[], AbstractContextManager[Any]]


class Seen:
    """Saved-tensor hooks that copy the tensors that they get, and record their shapes."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def pack(self, tensor: Tensor) -> tuple[Tensor, str]:
        self.shapes.append(tuple(tensor.shape))
        return tensor.detach().clone(), "copied"

    def __call__(self) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(self.pack, lambda packed: packed[0])


class InHooks(Stack):
    """Layers under hooks that are entered around their call or inside of it, with or without a checkpoint."""

    class Inner(Layer):
        inside: Where = staticmethod(contextlib.nullcontext)

        def forward(self, x: Tensor) -> Tensor:
            with self.inside():
                return super().forward(x)

    around: Where = staticmethod(contextlib.nullcontext)
    checkpointed = False

    def enter(self, where: str, context: Where) -> None:
        for module in [self] if where == "around" else self.blocks:
            setattr(module, where, context)

    def apply(self, block: nn.Module, x: Tensor) -> Tensor:
        with self.around():
            return checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)


def kept_as_it_is() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _within(context: Where) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss_of(net: nn.Module, x: Tensor) -> Tensor:
        with context():
            return net(x)  # backward comes after the context

    return loss_of


def _first_of_two(net: nn.Module, x: Tensor) -> Tensor:
    with Seen()():
        loss = net(x)
    return loss + net(2 * x)


def _nested(net: nn.Module, x: Tensor) -> Tensor:
    with kept_as_it_is(), Seen()():
        return net(x)


def _root_in_a_checkpoint(net: nn.Module, x: Tensor) -> Tensor:
    with Seen()():
        return checkpoint(net, x.requires_grad_(), use_reentrant=False)


def _hooks_in_a_checkpoint(net: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(_within(Seen()), net, x.requires_grad_(), use_reentrant=False)


def _blocks_alone(net: Any, x: Tensor) -> Tensor:
    with Seen()():
        return net.middle(x).square().mean()


LOOPS: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], dict[str, Any]]] = {
    "around the model": (_within(Seen()), {}),
    "keeping tensors": (_within(kept_as_it_is), {}),
    "save_on_cpu": (_within(save_on_cpu), {}),
    "around one of two passes": (_first_of_two, {}),
    "in other hooks": (_nested, {}),
    "around blocks": (nn.Module.__call__, {"around": Seen()}),
    "around the model and blocks": (_within(Seen()), {"around": kept_as_it_is}),
    "inside blocks": (nn.Module.__call__, {"inside": Seen()}),
    "inside blocks, keeping tensors": (nn.Module.__call__, {"inside": kept_as_it_is}),
    "save_on_cpu inside blocks": (nn.Module.__call__, {"inside": save_on_cpu}),
    "around checkpointed blocks": (_within(Seen()), {"around": Seen()}),
    "inside checkpointed blocks": (nn.Module.__call__, {"inside": Seen()}),
    "around a checkpointed root": (_root_in_a_checkpoint, {}),
    "in a checkpointed root": (_hooks_in_a_checkpoint, {}),
    "around blocks alone": (_blocks_alone, {}),
}

CHECKPOINTED = ("around checkpointed blocks", "inside checkpointed blocks")


def _trained(mesh: Mesh, base: nn.Module, loss_of: Any, policy: Policy) -> dict[str, Tensor]:
    return train(mesh, base, policy, 2, optimize=sgd, loss_of=of_data(loss_of))[1]


@pytest.mark.parametrize(
    "policy",
    [
        EXACT,
        replace(EXACT, stage=0),
        replace(EXACT, secondary="node"),
        replace(EXACT, offload=Offload(optimizer=1, weights=1)),
    ],
    ids=["stage 3", "stage 0", "hpz", "offload"],
)
@pytest.mark.parametrize("loop", LOOPS)
def test_training_in_a_users_hooks_is_as_in_one_process(loop: str, policy: Policy) -> None:
    """Wherever hooks are entered, training is right, although backward runs after they were left."""
    loss_of, options = LOOPS[loop]
    base = model(InHooks)
    base.checkpointed = loop in CHECKPOINTED
    for where, context in options.items():
        base.enter(where, context)
    got = on_threads(Topology(1, 2), _trained, base, loss_of, policy)
    single(wanted := copy.deepcopy(base), 2, 2, optimize=sgd, loss_of=of_data(loss_of))
    for state in got:
        for name, value in wanted.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("where", ["around the model", "around blocks", "inside blocks"])
@each_rank(1, 1)
def test_hooks_see_what_they_see_in_plain_torch_but_weights(mesh: Mesh, where: str) -> None:
    """Hooks see all activations in order; hooks entered inside of a block also see weights."""
    shapes = []
    for sharded in (False, True):
        net, seen = model(InHooks), Seen()
        if where != "around the model":
            net.enter(where.removesuffix(" blocks"), seen)
        if sharded:
            shard(net, mesh=mesh, policy=EXACT)
        with seen() if where == "around the model" else contextlib.nullcontext():
            loss = net(data(0, 0))
        loss.backward()
        shapes.append(seen.shapes)
    plain, ours = shapes
    weights = {(WIDTH, WIDTH), (WIDTH,)}
    assert len(set(plain) & weights) == 2
    assert ours == (plain if where == "inside blocks" else [shape for shape in plain if shape not in weights])


@each_rank(1, 1)
def test_a_checkpointed_root_keeps_no_activations(mesh: Mesh) -> None:
    """The engine does not hide a checkpoint's hooks, so backward recomputes the model."""
    shard(net := model(Stack), mesh=mesh, policy=EXACT)
    calls = []
    net.head.register_forward_hook(lambda *_: calls.append(1))
    loss = checkpoint(net, data(0, 0).requires_grad_(), use_reentrant=False)
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2


def _fails(_: object) -> Any:
    raise KeyError("mine")


@each_rank(1, 2)
def test_errors_of_hooks_come_through(mesh: Mesh) -> None:
    """After an error in a user's hook, the engine can run the next pass, and torch's stack of hooks is as before."""
    zero = shard(net := model(Stack), mesh=mesh, policy=EXACT)
    x = data(0, mesh.rank)
    with pytest.raises(KeyError, match="mine"), saved_tensors_hooks(_fails, _fails):
        net(x)
    with saved_tensors_hooks(lambda tensor: tensor, _fails):
        loss = net(x)
    with pytest.raises(KeyError, match="mine"):
        loss.backward()
    zero.drop_gradients()
    zero.finish_backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    net(x).backward()


@each_rank(1, 1)
def test_disabled_hooks_are_refused_where_they_are_needed(mesh: Mesh) -> None:
    """The error repeats the reason that whoever disabled hooks gave; evaluation needs no hooks."""
    shard(net := model(Stack), mesh=mesh, policy=EXACT)
    with disable_saved_tensors_hooks("by me"):
        with pytest.raises(ZeroError, match=r"hooks are disabled \(by me\).*outside of disable_saved_tens"):
            net(data(0, 0))
        with torch.no_grad():
            net(data(0, 0))
    net(data(0, 0)).backward()


class _Modifies(Stack):
    def middle(self, x: Tensor) -> Tensor:
        y = torch.exp(x)
        z = y * 2
        y.add_(1)
        return z


@each_rank(1, 1)
def test_what_a_users_hooks_allow_in_place_is_allowed(mesh: Mesh) -> None:
    """Changes in place are checked only where the user has no hooks, as in torch."""
    net, plain = model(_Modifies), model(_Modifies)
    zero = shard(net, mesh=mesh, policy=EXACT)
    with allow_mutation_on_saved_tensors():
        net(data(0, 0)).backward()
        plain(data(0, 0)).backward()
    optimizer = sgd(zero.param_groups())
    optimizer.step()
    sgd(plain.parameters()).step()
    state = zero.full_state_dict()
    assert all(torch.allclose(state[name], value) for name, value in plain.state_dict().items())
    optimizer.zero_grad()
    with pytest.raises(ZeroError, match="modified by an inplace operation"):
        net(data(0, 0)).backward()


class _Holds(nn.Module):
    """Passes a weight of its own to a model that another engine has sharded."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.inner = [inner]  # no submodule

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.inner[0](torch.tanh(x @ self.weight))
            + self.inner[0](x).square() * self.weight.square().sum()
        )


@each_rank(1, 2)
def test_one_engines_hooks_hand_anothers_weights_on(mesh: Mesh) -> None:
    """One engine's hooks pass another engine's weights on to it, and both pass activations to the user's hooks."""
    inner, plain = model(Stack), model(Stack)
    outer, seen = _Holds(inner), Seen()
    engines = [shard(net, mesh=mesh, policy=EXACT) for net in (inner, outer)]
    for net in (outer, _Holds(plain)):
        with seen():
            loss = net(data(0, 0))
        loss.backward()
    for zero in engines:
        sgd(zero.param_groups()).step()
    sgd(plain.parameters()).step()
    state = engines[0].full_state_dict()
    assert all(torch.allclose(state[name], value, atol=1e-6) for name, value in plain.state_dict().items())
    assert seen.shapes


class _Tables(Stack):
    """Multiplies by a buffer that each rank changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        self.table = self.table + x.detach().mean()
        return super().middle(x) * self.table


@pytest.mark.parametrize("hooks", [kept_as_it_is, save_on_cpu, Seen()])
@each_rank(1, 2)
def test_a_buffer_that_is_written_is_not_what_a_users_hook_keeps(mesh: Mesh, hooks: Where) -> None:
    """If the engine makes buffers equal between two passes, the first graph keeps the values that it used."""
    states = []
    for context in (contextlib.nullcontext, hooks):
        zero = shard(net := model(_Tables), mesh=mesh, policy=EXACT)
        with context():
            first = net(data(0, mesh.rank))
        (first + net(data(1, mesh.rank))).backward()
        sgd(zero.param_groups()).step()
        states.append(zero.full_state_dict())
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


@pytest.mark.parametrize("hooked", [False, True])
@each_rank(1, 2)
def test_passes_of_two_engines_nest(mesh: Mesh, *, hooked: bool) -> None:
    """One engine's hooks pass tensors on to the other's once, and to a user's hooks around both."""
    nets = [model(nn.Linear, in_features=8, out_features=8) for _ in range(2)]
    alone = [model(nn.Linear, in_features=8, out_features=8) for _ in range(2)]
    x = torch.ones(2, 8)
    (alone[1](alone[0](x)).square().mean() + sum(net.weight.square().sum() for net in alone)).backward()
    zeros = [shard(net, mesh=mesh, policy=EXACT) for net in nets]
    packed: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor

    around = saved_tensors_hooks(pack, lambda tensor: tensor) if hooked else contextlib.nullcontext()
    with around, zeros[0].unsharded(), zeros[1].unsharded():
        loss = nets[1](nets[0](x)).square().mean() + sum(net.weight.square().sum() for net in nets)
    loss.backward()
    for zero, wanted in zip(zeros, alone, strict=True):
        torch.testing.assert_close(Gradient(zero, "weight").full(), wanted.weight.grad)
    assert bool(packed) is hooked
