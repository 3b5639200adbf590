"""Tests of external parameters: the tutorial's three patterns, without a call and registered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from impl.comm.mesh import Mesh
from impl.errors import ZeroError
from impl.parameters.external import register_external_parameter, register_forward_method
from impl.policy.policy import MemoryLimits, Policy, Stage
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import Zero, shard
from tests.support.models import Net
from tests.support.ranks import each_rank, on_threads
from tests.support.training import batch, booked, close, mean_losses, model, sgd, single, train, update


class ParallelLinear(nn.Module):
    """Multiplies, and returns its bias instead of adding it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs) / 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, self.weight), self.bias


class ParallelMLP(nn.Module):
    """Adds the first bias itself, twice, and returns the second one."""

    def __init__(self, width: int, *, registered: bool) -> None:
        super().__init__()
        self.dense_h_to_4h = ParallelLinear(width, 4 * width)
        self.dense_4h_to_h = ParallelLinear(4 * width, width)
        if registered:
            register_external_parameter(self, self.dense_h_to_4h.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden, bias = self.dense_h_to_4h(x)
        return self.dense_4h_to_h(F.gelu(hidden + bias) + bias)


class ParallelTransformerLayer(nn.Module):
    """Adds the two biases that its parts return."""

    def __init__(self, width: int, *, registered: bool) -> None:
        super().__init__()
        self.input_norm, self.post_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dense = ParallelLinear(width, width)  # in the place of attention
        self.mlp = ParallelMLP(width, registered=registered)
        if registered:
            register_external_parameter(self, self.dense.bias)
            register_external_parameter(self, self.mlp.dense_4h_to_h.bias)

    def forward(self, x: Tensor) -> Tensor:
        mixed, bias = self.dense(self.input_norm(x))
        x = x + mixed + bias
        out, mlp_bias = self.mlp(self.post_norm(x))
        return x + out + mlp_bias


class OwnLinear(torch.autograd.Function):
    """x W^T with a backward pass of its own, like Megatron's linear layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


# How logits are made of (batch, tokens, width) and the word embedding.
LOGITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "function": OwnLinear.apply,
    "checkpoint": partial(checkpoint, F.linear, use_reentrant=False),
    "reentrant checkpoint": partial(checkpoint, F.linear, use_reentrant=True),
}


class GPT2Model(nn.Module):
    """Uses the word embedding a second time, for the logits."""

    def __init__(
        self,
        vocabulary: int = 24,
        width: int = 16,
        depth: int = 2,
        *,
        registered: bool = False,
        logits: str = "linear",
    ) -> None:
        super().__init__()
        self.logits = logits
        self.word_embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            ParallelTransformerLayer(width, registered=registered) for _ in range(depth)
        )
        if registered:
            register_external_parameter(self, self.word_embeddings.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token from those before it, for (batch, tokens)."""
        x = self.word_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = LOGITS[self.logits](x, self.word_embeddings.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


UNITS = (nn.Embedding, ParallelLinear)  # the smallest units: every use is then of another unit


STEPS = 2
EXACT = preset("exact", memory=MemoryLimits(max_padding=9.0, prefetch=0))
momentum = partial(sgd, momentum=0.9)


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(24, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def _loss(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x)
    out = out[0] + out[1] if isinstance(out, tuple) else out
    return out if out.dim() == 0 else out.square().mean()


def follows(
    make: Callable[[], nn.Module],
    data: Callable[[int, int], Tensor],
    policy: Policy = EXACT,
    kinds: tuple[type[nn.Module], ...] = UNITS,
) -> list[Zero]:
    """Assert that sharded training follows one process within 1e-5, and return the engines."""

    def sharded(mesh: Mesh) -> tuple[dict[str, Tensor], Zero]:
        net = make()
        zero = shard(net, mesh=mesh, policy=policy, blocks=[m for m in net.modules() if isinstance(m, kinds)])
        optimizer = momentum(zero.param_groups())
        for step in range(STEPS):
            update(optimizer, _loss(net, data(step, mesh.rank)))
        with torch.no_grad():
            _loss(net, data(0, mesh.rank))
        return zero.full_state_dict(), zero

    results, alone = on_threads(Topology(2, 2), sharded), make()
    single(alone, 4, STEPS, optimize=momentum, loss_of=lambda net, step, rank: _loss(net, data(step, rank)))
    for name, value in alone.state_dict().items():
        assert (results[0][0][name] - value).abs().max() <= 1e-5, name
    return [zero for _, zero in results]


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("name", ["zero3", "hpz"])
def test_word_embeddings_used_in_the_parent_for_logits(name: str, *, registered: bool) -> None:
    """Pattern 1, GPT2Model: a model with all three patterns trains as in one process, also with hpZ."""
    policy = EXACT if name == "zero3" else replace(EXACT, secondary=2)
    for zero in follows(partial(model, GPT2Model, registered=registered), tokens, policy):
        gathers = sum(
            sent.messages
            for key, sent in zero.wire.ledger.rows().items()
            if key.unit == "word_embeddings" and key.phase == "forward" and key.link == "intra"
        )
        assert gathers == STEPS * (1 if registered else 2)  # registered, it stays for its second use


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("kind", [ParallelMLP, ParallelTransformerLayer])
def test_biases_returned_to_the_parent_and_used_by_it(kind: type[nn.Module], *, registered: bool) -> None:
    """Patterns 2 and 3, ParallelMLP and ParallelTransformerLayer, train as in one process."""
    follows(partial(model, kind, width=16, registered=registered), lambda step, rank: batch(step, rank)[None])


class Borrows(nn.Module):
    """A model whose middle block uses the weight of the last block, before that block has run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[0](x) @ self.blocks[2].weight)
        return self.blocks[2](torch.tanh(self.blocks[1](x))).square().mean()


def test_a_parameter_used_ahead_of_its_module_is_gathered_once_and_booked() -> None:
    """It is gathered at its use, stays to the end of the pass, and the ledger counts the gather."""
    for zero in follows(partial(model, Borrows), batch, kinds=(nn.Linear,)):
        forward, evaluate = (
            booked(zero, purpose="weights", unit="blocks.2", phase=phase) for phase in ("forward", "evaluate")
        )
        assert forward == evaluate * STEPS > 0


@each_rank(1, 2)
def test_registering_a_sharded_parameter_gathers_it_for_that_module_alone(mesh: Mesh) -> None:
    """A parameter registered after shard() is gathered before the module runs, and resharded after it."""
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    zero = shard(net, mesh=mesh, policy=EXACT)
    register_external_parameter(net[0], net[2].weight)
    seen: list[bool] = []
    net[0].register_forward_hook(lambda *_: seen.append(zero.units[-1].in_use), prepend=True)
    net[1].register_forward_pre_hook(lambda *_: seen.append(zero.units[-1].in_use), prepend=True)
    with torch.no_grad():
        net(batch(0, mesh.rank))
    assert seen == [True, False]


@pytest.mark.parametrize("stage", [1, 2, 3])
@each_rank(1, 2)
def test_clipping_the_modules_parameters_is_an_error_at_every_stage(mesh: Mesh, stage: int) -> None:
    """``clip_grad_norm_(model.parameters())`` would clip nothing, so it raises an error that names the right call."""
    net = model(Borrows)
    shard(net, mesh=mesh, policy=replace(EXACT, stage=stage))
    net(batch(0, mesh.rank)).backward()
    with pytest.raises(ZeroError, match=r"Zero\.clip_grad_norm_\(\)"):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    with pytest.raises(ZeroError, match="outside of a forward pass"):
        nn.init.zeros_(net.blocks[0].weight)


@pytest.mark.parametrize(
    ("logits", "stage"), [("function", 0), ("function", 3), ("checkpoint", 3), ("reentrant checkpoint", 3)]
)
def test_a_parameter_given_to_a_function_of_autograd_brings_its_gradient(logits: str, stage: int) -> None:
    """Another module's parameter is trained if it is an argument of an ``autograd.Function``."""
    follows(partial(model, GPT2Model, logits=logits), tokens, replace(EXACT, stage=stage))


class Captures(nn.Module):
    """Passes its first block's weight, as an object, to the next pass or to its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
        self.blocks[0].register_forward_hook(self._capture)
        self.captured: list[Tensor] = []

    def _capture(self, block: nn.Module, *_: object) -> None:
        self.captured[:] = [block.get_parameter("weight")]

    def forward(self, x: Tensor) -> Tensor:
        if self.captured:
            x = x @ self.captured[0]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x @ self.captured[0]).square().mean()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_parameter_captured_in_a_pass_has_its_values_of_now_in_every_later_use(stage: int) -> None:
    """A parameter that was captured in a pass has the present values when it is used later, or in the next pass."""

    def captured(mesh: Mesh) -> list[float]:
        optimize = partial(sgd, lr=0.5)
        losses, _, zero = train(mesh, model(Captures), replace(EXACT, stage=stage), 3, optimize=optimize)
        with pytest.raises(ZeroError, match=r"'blocks.0.weight' is used outside of a forward pass"):
            zero.model.captured[0].sum()
        return losses

    (losses,) = on_threads(Topology(1, 1), captured)
    wanted = single(model(Captures), 1, 3, optimize=partial(sgd, lr=0.5))
    assert losses == pytest.approx(wanted, rel=1e-5)


class Tied(Net):
    """Computes its loss in chunks with the embedding's weight as head; has entry points besides forward."""

    def __init__(self) -> None:
        super().__init__(tied=True)

    def encode(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    def chunked(self, hidden: Tensor) -> Tensor:
        return torch.stack([(part @ self.head.weight.t()).square().mean() for part in hidden.chunk(2)]).mean()

    def loss(self, x: Tensor) -> Tensor:
        return self.chunked(self.encode(x))


def _by_entry(mesh: Mesh, how: str, policy: Policy) -> tuple[list[float], dict[str, Tensor]]:
    zero = shard(net := model(Tied), mesh=mesh, policy=policy)
    optimizer = sgd(zero.param_groups())
    for name in {"context": (), "method": ("loss",), "nested": ("encode", "loss")}[how]:
        register_forward_method(net, name)
    losses = []
    for step in range(3):
        x = batch(step, mesh.rank)
        with zero.unsharded() if how == "context" else contextlib.nullcontext():
            loss = net.chunked(net.encode(x)) if how == "context" else net.loss(x)
        losses.append(update(optimizer, loss))
    zero.hooks.check_idle("access")
    return losses, zero.full_state_dict()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("how", ["context", "method", "nested"])
def test_entry_points_beside_forward_train_as_in_one_process(how: str, stage: Stage) -> None:
    """A chunked loss with a tied head, as a registered method or in a context, gives the losses and weights of one
    process.
    """
    results, net = on_threads(Topology(1, 2), _by_entry, how, replace(EXACT, stage=stage)), model(Tied)
    wanted = single(net, 2, 3, optimize=sgd, loss_of=lambda net, step, rank: net.loss(batch(step, rank)))
    assert mean_losses(results) == pytest.approx(wanted, rel=1e-5)
    assert close(results[0][1], dict(net.state_dict()), 1e-4)


@each_rank(1, 1)
def test_entry_points_cast_inputs_and_recover_from_errors(mesh: Mesh) -> None:
    """A registered method behaves as a call of the model; so does a block's; a method of anything else is refused
    by name.
    """
    zero = shard(net := model(Tied), mesh=mesh, policy=replace(EXACT, compute="bf16"))
    register_forward_method(net, "encode")
    register_forward_method(net.blocks[0], "body")
    assert net.encode(batch(0, 0)).dtype == torch.bfloat16
    assert net.blocks[0].body(batch(0, 0)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError):
        net.encode(torch.ones(3, 3))
    zero.hooks.check_idle("access")
    with pytest.raises(ZeroError, match="is used outside of a forward pass"):
        net.chunked(batch(0, 0))
    with pytest.raises(ZeroError, match="Tied has no method 'nothing'"):
        register_forward_method(net, "nothing")
    with pytest.raises(ZeroError, match="register 'forward' after shard"):
        register_forward_method(nn.Linear(2, 2), "forward")
    register_forward_method(net.blocks[1].up, "forward")
    with pytest.raises(ZeroError, match="Linear is neither the sharded model nor one of its blocks"):
        net(batch(0, 0))
