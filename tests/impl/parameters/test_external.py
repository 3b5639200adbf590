"""External parameters: the tutorial's three patterns, found by themselves and registered."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from impl.comm.mesh import Mesh
from impl.errors import ZeroError
from impl.parameters.external import register_external_parameter, register_forward_method
from impl.plan.policy import MemoryLimits, Policy, Stage, preset
from impl.plan.topology import Topology
from impl.zero import Zero, shard
from tests.support.megatron import UNITS, GPT2Model, ParallelMLP, ParallelTransformerLayer
from tests.support.models import Net
from tests.support.ranks import on_threads
from tests.support.training import batch, close, model

STEPS = 2
EXACT = preset("exact", memory=MemoryLimits(max_padding=9.0, prefetch=0))


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(24, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def alone(net: nn.Module, data: Callable[[int, int], Tensor], world: int) -> dict[str, Tensor]:
    """What a single process makes of all ranks' batches."""
    net = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for rank in range(world):
            (_loss(net, data(step, rank)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(net.state_dict())


def _loss(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x)
    out = out[0] + out[1] if isinstance(out, tuple) else out
    return out if out.dim() == 0 else out.square().mean()


def sharded(
    mesh: Mesh,
    make: Callable[[], nn.Module],
    data: Callable[[int, int], Tensor],
    policy: Policy,
    kinds: tuple[type[nn.Module], ...],
) -> tuple[dict[str, Tensor], Zero]:
    net = make()
    zero = shard(net, mesh=mesh, policy=policy, blocks=[m for m in net.modules() if isinstance(m, kinds)])
    optimizer = torch.optim.SGD(zero.param_groups(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        _loss(net, data(step, mesh.rank)).backward()
        zero.finish_backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        _loss(net, data(0, mesh.rank))
    return zero.full_state_dict(), zero


def follows(
    make: Callable[[], nn.Module],
    data: Callable[[int, int], Tensor],
    policy: Policy = EXACT,
    kinds: tuple[type[nn.Module], ...] = UNITS,
) -> Sequence[Zero]:
    """Whether training in shards is training alone, within 1e-5; the engines."""
    topology = Topology(2, 2)
    wanted = alone(make(), data, topology.world)
    results = on_threads(topology, sharded, make, data, policy, kinds)
    for name, value in wanted.items():
        assert (results[0][0][name] - value).abs().max() <= 1e-5, name
    return [zero for _, zero in results]


def values_of(make: Callable[..., nn.Module], *args: int, registered: bool) -> Callable[[], nn.Module]:
    """A maker of equal models: thread ranks share torch's random numbers, so values are drawn once."""
    torch.manual_seed(0)
    values = make(*args, registered=registered).state_dict()

    def again() -> nn.Module:
        net = make(*args, registered=registered)
        net.load_state_dict(values)
        return net

    return again


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("name", ["zero3", "hpz"])
def test_word_embeddings_used_in_the_parent_for_logits(name: str, *, registered: bool) -> None:
    """Pattern 1, GPT2Model: with all three patterns in one model, also under hpZ, training is as alone."""
    policy = EXACT if name == "zero3" else replace(EXACT, secondary=2)
    for zero in follows(values_of(GPT2Model, registered=registered), tokens, policy):
        gathers = sum(
            sent.messages
            for key, sent in zero.wire.ledger.rows().items()
            if key.unit == "word_embeddings" and key.phase == "forward" and key.link == "intra"
        )
        assert gathers == STEPS * (1 if registered else 2)  # registered, it stays for its second use


@pytest.mark.parametrize("registered", [False, True])
def test_a_bias_returned_to_parallel_mlp_and_used_by_it(*, registered: bool) -> None:
    """Pattern 2, ParallelMLP: the returned bias, used twice, trains as alone."""
    follows(values_of(ParallelMLP, 16, registered=registered), batch)


@pytest.mark.parametrize("registered", [False, True])
def test_two_biases_returned_to_parallel_transformer_layer(*, registered: bool) -> None:
    """Pattern 3, ParallelTransformerLayer: both returned biases train as alone."""
    make = values_of(ParallelTransformerLayer, 16, registered=registered)
    follows(make, lambda step, rank: batch(step, rank)[None])


class Borrows(nn.Module):
    """The middle block uses the last block's weight, before that has run."""

    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.registered = registered

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[0](x) @ self.blocks[2].weight)
        return self.blocks[2](torch.tanh(self.blocks[1](x))).square().mean()


def test_a_parameter_used_ahead_of_its_module_is_gathered_once_and_booked() -> None:
    """What nobody foresaw is gathered where it is used, kept to the pass's end, and stands in the ledger."""
    zeros = follows(values_of(Borrows, registered=False), batch, kinds=(nn.Linear,))
    for zero in zeros:
        by_phase: dict[str, int] = {}
        for key, sent in zero.wire.ledger.rows().items():
            if key.purpose == "weights" and key.unit == "blocks.2":
                by_phase[key.phase] = by_phase.get(key.phase, 0) + sent.bytes
        assert by_phase["forward"] == by_phase["evaluate"] * STEPS


def test_registering_a_sharded_parameter_gathers_it_for_that_module_alone() -> None:
    """After shard(), too: the unit is there in the module's pass, and released after it."""

    def body(mesh: Mesh) -> None:
        net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        zero = shard(net, mesh=mesh, policy=EXACT)
        register_external_parameter(net[0], net[2].weight)
        seen: list[bool] = []
        net[0].register_forward_hook(lambda *_: seen.append(zero.units[-1].in_use), prepend=True)
        net[1].register_forward_pre_hook(lambda *_: seen.append(zero.units[-1].in_use), prepend=True)
        with torch.no_grad():
            net(batch(0, mesh.rank))
        assert seen == [True, False]

    on_threads(Topology(1, 2), body)


def test_registering_a_foreign_parameter_is_refused_when_the_model_is_sharded() -> None:
    """What is not the model's cannot be gathered with it: the error names the module."""

    def body(mesh: Mesh) -> None:
        net = make()
        register_external_parameter(net.blocks[0], nn.Linear(3, 3).weight)
        with pytest.raises(ZeroError, match="registered for Linear, but is not a parameter of the model"):
            shard(net, mesh=mesh, policy=EXACT)

    make = values_of(Borrows, registered=False)
    on_threads(Topology(1, 1), body)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping_the_modules_parameters_is_an_error_at_every_stage(stage: int) -> None:
    """``clip_grad_norm_(model.parameters())`` would clip nothing: it says what clips."""

    def body(mesh: Mesh) -> None:
        net = make()
        zero = shard(net, mesh=mesh, policy=replace(EXACT, stage=stage))
        net(batch(0, mesh.rank)).backward()
        zero.finish_backward()
        with pytest.raises(ZeroError, match=r"Zero\.clip_grad_norm_\(\)"):
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with pytest.raises(ZeroError, match="outside of a forward pass"):
            nn.init.zeros_(net.blocks[0].weight)

    make = values_of(Borrows, registered=False)
    on_threads(Topology(1, 2), body)


@pytest.mark.parametrize(
    ("logits", "stage"), [("function", 0), ("function", 3), ("checkpoint", 3), ("reentrant checkpoint", 3)]
)
def test_a_parameter_given_to_a_function_of_autograd_brings_its_gradient(logits: str, stage: int) -> None:
    """An ``autograd.Function`` that is given another module's parameter trains it as an operation does."""
    base = model(GPT2Model, logits=logits)
    follows(lambda: copy.deepcopy(base), tokens, replace(EXACT, stage=stage))


class Captures(nn.Module):
    """Hands its first block's weight, as an object, to the next pass or to its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
        self.blocks[0].register_forward_hook(self._capture)
        self.captured: list[Tensor] = []

    def _capture(self, block: nn.Module, *_: object) -> None:
        self.captured[:] = [block.get_parameter("weight")]

    def forward(self, x: Tensor) -> Tensor:
        """(..., 16) to (); uses what it captured after the block's unit was released, and before."""
        if self.captured:
            x = x @ self.captured[0]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x @ self.captured[0]).square().mean()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_parameter_captured_in_a_pass_has_its_values_of_now_in_every_later_use(stage: int) -> None:
    """A parameter outlives its unit's values; used later in a pass, or in the next, it has the true ones."""

    def body(mesh: Mesh) -> None:
        net = copy.deepcopy(base)
        zero = shard(net, mesh=mesh, policy=replace(EXACT, stage=stage))
        optimizer = torch.optim.SGD(zero.param_groups(), lr=0.5)
        for _ in range(3):
            loss = net(x)
            losses.append(loss.item())
            loss.backward()
            zero.finish_backward()
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(ZeroError, match=r"'blocks.0.weight' is used outside of a forward pass"):
            net.captured[0].sum()

    base, x = model(Captures), batch(0, 0)
    losses: list[float] = []
    single = copy.deepcopy(base)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.5)
    wanted = []
    for _ in range(3):
        loss = single(x)
        wanted.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    on_threads(Topology(1, 1), body)
    assert losses == pytest.approx(wanted, rel=1e-5)


class Tied(Net):
    """A loss in chunks with the embedding's weight as its head; entry points beside forward."""

    def __init__(self) -> None:
        super().__init__(tied=True)

    def encode(self, x: Tensor) -> Tensor:
        """(batch, width) to the same."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    def chunked(self, hidden: Tensor) -> Tensor:
        """(batch, width) to a loss."""
        return torch.stack([(part @ self.head.weight.t()).square().mean() for part in hidden.chunk(2)]).mean()

    def loss(self, x: Tensor) -> Tensor:
        """(batch, width) to a loss."""
        return self.chunked(self.encode(x))


def _by_entry(mesh: Mesh, base: nn.Module, how: str, policy: Policy) -> tuple[list[float], dict[str, Tensor]]:
    zero = shard(net := copy.deepcopy(base), mesh=mesh, policy=policy)
    optimizer = torch.optim.SGD(zero.param_groups(), lr=0.1)
    if how != "context":
        for name in ("encode", "loss") if how == "nested" else ("loss",):
            register_forward_method(net, name)
    losses = []
    for step in range(3):
        if how == "context":
            with zero.unsharded():
                loss = net.chunked(net.encode(batch(step, mesh.rank)))
        else:
            loss = net.loss(batch(step, mesh.rank))
        loss.backward()
        zero.finish_backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    zero.hooks.check_idle("access")
    return losses, zero.full_state_dict()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("how", ["context", "method", "nested"])
def test_entry_points_beside_forward_train_as_in_one_process(how: str, stage: Stage) -> None:
    """A chunked loss with a tied head, as a registered method and in a context: losses and weights."""
    results = on_threads(Topology(1, 2), _by_entry, model(Tied), how, replace(EXACT, stage=stage))
    net = model(Tied)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        losses = [net.loss(batch(step, rank)) for rank in range(2)]
        (sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        for (got, _), wanted in zip(results, losses, strict=True):
            assert got[step] == pytest.approx(wanted.item(), rel=1e-5)
    assert close(results[0][1], dict(net.state_dict()), 1e-4)


def test_entry_points_cast_inputs_and_recover_from_errors() -> None:
    """As a call of the model does; a block's method is one too, and what is neither is refused by name."""

    def body(mesh: Mesh) -> None:
        zero = shard(net := copy.deepcopy(base), mesh=mesh, policy=replace(EXACT, compute="bf16"))
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

    base = model(Tied)
    on_threads(Topology(1, 1), body)


def test_layout_of_a_released_parameter_is_that_of_its_values() -> None:
    """Strides come from the shape, not from the memory that is not there."""

    def body(mesh: Mesh) -> None:
        net = nn.Sequential(nn.Linear(8, 16))
        shard(net, mesh=mesh, policy=EXACT)
        assert net[0].weight.stride() == (8, 1)
        assert net[0].weight.is_contiguous()

    on_threads(Topology(1, 1), body)
