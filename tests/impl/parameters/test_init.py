"""Tests of models that are cut while they are constructed."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from impl.comm.mesh import Mesh
from impl.engine.unit_planning import find_blocks
from impl.errors import ZeroError
from impl.parameters.gathered import GatheredParameters
from impl.parameters.init import Init, active, give_values
from impl.parameters.presharded import cut_of
from impl.policy.policy import MemoryLimits, Policy
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import shard
from tests.support.models import Block, Net
from tests.support.ranks import each_rank, on_processes, on_threads
from tests.support.training import DRAWING, batch, model

EXACT = preset("exact", memory=MemoryLimits(max_padding=99.0))


def held(parameter: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.untyped_storage().nbytes()


def inside(mesh: Mesh, policy: Policy = EXACT, **options: Any) -> nn.Module:
    with Init(mesh=mesh, policy=policy, **options):
        return Net()


def compare(mesh: Mesh, policy: Policy, blocks: tuple[type[nn.Module], ...], *, decay: bool) -> None:
    """Compare values and layout of a model made inside Init and of one made plainly."""
    options: Any = {"group_of": lambda _, parameter: int(parameter.dim() == 1)} if decay else {}
    plain = shard(model(Net), mesh=mesh, policy=policy, **options)
    net = model(partial(inside, mesh, policy, blocks=blocks, whole_below=20))
    assert all(held(p) == 4 for p in net.parameters() if cut_of(p) is not None)
    assert cut_of(net.get_parameter("embed.weight")) is not None
    zero = shard(net, mesh=mesh, policy=policy, **options)
    for unit, wanted in zip(zero.units, plain.units, strict=True):
        assert unit.geometry == wanted.geometry
        assert torch.equal(unit.master_shard.master, wanted.master_shard.master)
        if unit.geometry.block.startswith("blocks") and blocks == (Block,) and not decay:
            assert not [key for key in zero.wire.ledger.rows() if key.unit == unit.geometry.name]
    net(batch(0, mesh.rank)).backward()


POLICIES = [
    EXACT,
    replace(EXACT, stage=2),
    replace(EXACT, memory=MemoryLimits(max_padding=99.0, persist_below=50)),
    preset("zeropp", memory=MemoryLimits(max_padding=999.0), secondary=1),
]


@settings(max_examples=12, deadline=None)
@given(
    topology=st.sampled_from([Topology(1, 1), Topology(1, 3), Topology(2, 2), Topology(3, 1)]),
    policy=st.sampled_from(POLICIES),
    blocks=st.sampled_from([(), (Block,), (nn.Linear,)]),
    decay=st.booleans(),
)
def test_values_and_layout_are_those_of_plain_construction(
    topology: Topology, policy: Policy, blocks: tuple[type[nn.Module], ...], *, decay: bool
) -> None:
    """Values are bit-equal for any ranks, policy, optimizer groups and blocks."""
    on_threads(topology, lambda mesh: compare(mesh, policy, blocks, decay=decay))


def resets(module: nn.Module) -> None:
    """What gives a module of :class:`Net` its values; it has a buffer that resets itself in no way."""
    if isinstance(module, Net):
        module.scale.fill_(0.5)  # type: ignore[operator]
    else:
        module.reset_parameters()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("topology", "tied"),
    [(Topology(1, 1), False), (Topology(1, 3), False), (Topology(2, 2), False), (Topology(1, 1), True)],
    ids=str,
)
@each_rank()
def test_a_meta_model_is_given_the_values_of_plain_construction(
    mesh: Mesh, topology: Topology, *, tied: bool
) -> None:
    """Values are given block by block in the order of construction, bit-equal, with at most one block whole."""
    plain = shard(model(Net, depth=2), mesh=mesh, policy=EXACT)
    with Init(mesh=mesh, policy=EXACT, remote_device="meta"):
        net = Net(depth=2, tied=tied)
    assert all(parameter.is_meta for parameter in net.parameters())
    most = 0

    def initialise(module: nn.Module) -> None:
        nonlocal most
        resets(module)
        most = max(most, sum(held(p) for p in net.parameters() if not p.is_meta))

    model(lambda: give_values(net, find_blocks(net), mesh, EXACT, initialise) or net)
    assert most < sum(4 * p.numel() for p in net.parameters()) / 2
    zero = shard(net, mesh=mesh, policy=EXACT)
    for unit, wanted in zip(zero.units, plain.units, strict=True):
        assert tied or torch.equal(unit.master_shard.master, wanted.master_shard.master)
    net(batch(0, mesh.rank)).backward()


@each_rank(1, 1)
def test_shard_gives_a_meta_model_its_values_and_names_modules_that_cannot(mesh: Mesh) -> None:
    """``reset_parameters()`` is used by default; an error names a module without it."""
    with torch.device("meta"):
        good, bad = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Net()
    zero = shard(good, mesh=mesh, policy=EXACT)
    assert all(value.abs().sum() > 0 for value in zero.full_state_dict().values())
    with pytest.raises(ZeroError, match=r"the model \(Net\) has 'scale' on the meta device and no reset_par"):
        shard(bad, mesh=mesh, policy=EXACT)


class Initialised(nn.Module):
    """A model whose constructor initialises all weights again, in the ways of published models."""

    def __init__(self, how: str, modifier: int) -> None:
        super().__init__()
        self.position_embeddings = nn.Embedding(12, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.generator = torch.Generator().manual_seed(3)
        match how:
            case "apply":
                self.apply(self.initialise)
            case "named_parameters":
                for name, parameter in self.named_parameters():
                    if name.endswith("weight"):
                        torch.nn.init.normal_(parameter, std=0.3, generator=self.generator)
            case "copies":  # held over the use of another one
                first, last = self.blocks[0].weight, self.blocks[2].weight
                with torch.no_grad():
                    last.copy_(first * 2 + self.blocks[1].weight.t())
                    view = first[0]
                    last.mul_(2)
                    view.zero_()
                self.blocks[1].weight = self.blocks[0].weight  # tied
            case "a view over a later constructor":
                view = self.blocks[0].weight.data
                self.later = nn.Linear(8, 8)
                view.fill_(3.0)
            case "a call":  # of a layer, whose weight and bias were cut together
                self.later = nn.Linear(self.blocks[0](torch.zeros(1, 16)).shape[-1], 4)
            case "gathered":
                with GatheredParameters(self.position_embeddings.weight, modifier_rank=modifier):
                    nn.init.normal_(self.position_embeddings.weight, generator=self.generator)
            case _:
                raise AssertionError(how)

    def initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(std=0.2, generator=self.generator)
        if isinstance(module, nn.Linear):
            module.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        x = self.position_embeddings(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


HOW = ("apply", "named_parameters", "copies", "a view over a later constructor", "a call", "gathered")


def _constructs(mesh: Mesh) -> list[bool]:
    equal = []
    for how in HOW:
        torch.manual_seed(5)
        plain = Initialised(how, 0).state_dict()
        torch.manual_seed(5)
        with Init(mesh=mesh, policy=EXACT, blocks=nn.Linear, whole_below=0):
            net = Initialised(how, 1)
        assert all(cut_of(parameter) is not None for parameter in net.parameters())
        zero = shard(net, mesh=mesh, policy=EXACT)
        net(torch.arange(4)).backward()
        state = zero.full_state_dict()
        equal.append(all(torch.equal(state[name], value) for name, value in plain.items()))
    return equal


def test_constructors_may_use_what_was_cut() -> None:
    """Gathering in constructors, automatic or as in the tutorial, gives the values of plain construction."""
    assert on_processes(Topology(1, 2), _constructs) == [[True] * len(HOW)] * 2


@each_rank(1, 2)
def test_after_init_a_use_is_an_error_and_gathered_parameters_work(mesh: Mesh) -> None:
    """Between Init and shard(), values can be read and changed only under GatheredParameters."""
    net = model(partial(inside, mesh, blocks=Block))
    weight = net.get_parameter("blocks.1.up.weight")
    for use in (weight.zero_, weight.sum, lambda: net(batch(0, 0))):
        with pytest.raises(ZeroError, match="was cut to slices by Init, and is used outside"):
            use()
    with torch.no_grad():
        with GatheredParameters(net.get_submodule("blocks.1").parameters(), modifier_rank=1):
            weight.fill_(mesh.rank)
        changed = pytest.raises(
            ZeroError, match=r"parameters were changed \(1 of 1; ranks: 0\): set modifier_rank"
        )
        with changed, GatheredParameters(weight):
            weight.add_(mesh.rank == 0)
    state = shard(net, mesh=mesh, policy=EXACT).full_state_dict()
    assert (state["blocks.1.up.weight"] == 1).all()
    assert torch.equal(state["blocks.0.up.weight"], model(Net).state_dict()["blocks.0.up.weight"])


@each_rank(1, 2)
def test_a_backward_pass_before_the_model_is_sharded_is_an_error(mesh: Mesh) -> None:
    """Gradients before shard() are refused, inside Init and after it, also while two threads define classes."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, 3))
            trained(self.weight)

    def trained(weight: nn.Parameter) -> None:
        with GatheredParameters(weight):
            with pytest.raises(ZeroError, match=r"reached parameter '.*' before the model is sharded: call"):
                weight.square().sum().backward()
            assert weight.grad is None

    with Init(mesh=mesh, policy=EXACT, blocks=Own):
        net = nn.Sequential(Own(), Own())
        trained(net[0].weight)
    trained(net[1].weight)
    zero = shard(net, mesh=mesh, policy=EXACT)
    assert zero.full_state_dict()["0.weight"].eq(1).all()


def test_nested_disabled_and_failing_contexts() -> None:
    """Init inside Init is refused; ``enabled=False`` does nothing; an exception leaves nothing behind."""

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)
            raise KeyError("mine")

    def body(mesh: Mesh) -> None:
        with Init(mesh=mesh, policy=EXACT, enabled=False) as init:
            assert cut_of(nn.Linear(64, 64).weight) is None
            assert active() is None
        with Init(mesh=mesh, policy=EXACT), init, pytest.raises(ZeroError, match="Init inside Init"):
            Init(mesh=mesh, policy=EXACT).__enter__()
        with pytest.raises(KeyError, match="mine"), Init(mesh=mesh, policy=EXACT):
            Fails()
        assert active() is None
        assert cut_of(nn.Linear(64, 64).weight) is None

    before = nn.Linear.__init__
    on_threads(Topology(1, 2), body)
    assert nn.Linear.__init__ is before
    assert "__init_subclass__" not in vars(nn.Module)


@each_rank(1, 2)
def test_a_seed_is_of_the_context_alone(mesh: Mesh) -> None:
    """All ranks get the same values, and random numbers after the context are as if nothing had been drawn."""
    with DRAWING:
        torch.manual_seed(mesh.rank)
        wanted = torch.rand(())
        torch.manual_seed(mesh.rank)
        with Init(mesh=mesh, policy=EXACT, seed=11):
            net = nn.Linear(40, 40)
        assert torch.rand(()) == wanted
        torch.manual_seed(11)
        plain = nn.Linear(40, 40)
    with GatheredParameters(net.weight):
        assert torch.equal(net.weight, plain.weight)


@each_rank(1, 1)
def test_no_more_than_a_block_is_whole_while_a_model_is_made(mesh: Mesh) -> None:
    """At any time at most one block is whole, besides small parameters, so a model may exceed a rank's memory."""
    made: list[Tensor] = []
    most = 0

    def note(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal most
        made.append(parameter)
        most = max(most, sum(map(held, made)))

    watched = register_module_parameter_registration_hook(note)
    with DRAWING, watched, Init(mesh=mesh, policy=EXACT, blocks=Block):
        Net(width=64, hidden=128, depth=6)
    whole = sum(4 * parameter.numel() for parameter in made)
    assert most < whole / 4
    assert sum(map(held, made)) < whole / 50


@each_rank(2, 2)
def test_a_change_under_gathered_parameters_is_whole_on_all_ranks_before_sharding(mesh: Mesh) -> None:
    """Inside Init, and in an outer context, the next read sees the new values, whether parameters are cut or not."""

    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.whole = nn.Linear(8, 8), nn.Parameter(torch.zeros(5, 3))
            with torch.no_grad():
                for parameter in (self.a.weight, self.whole):
                    with GatheredParameters(parameter, modifier_rank=0):
                        parameter.fill_(1.0 + mesh.rank)
                self.seen = self.a.weight.sum().item(), self.whole.sum().item()

    with Init(mesh=mesh, policy=EXACT, whole_below=0, seed=0):
        net = Copies()
    assert net.seen == (64, 15)
    weight, bias = net.a.weight, net.a.bias
    with torch.no_grad(), GatheredParameters(bias):
        with GatheredParameters(weight, modifier_rank=1):
            weight.fill_(mesh.rank + 2.0)
        assert weight.sum() == 3 * 64
        with GatheredParameters(weight):
            twice = pytest.raises(ZeroError, match="inside another GatheredParameters of this parameter")
            with twice, GatheredParameters(weight):
                pass
    assert (shard(net, mesh=mesh, policy=EXACT).full_state_dict()["a.weight"] == 3).all()


@each_rank(1, 2)
def test_data_assigned_before_sharding_keeps_its_shape_and_type(mesh: Mesh) -> None:
    """Other strides are taken, another shape or type is refused, inside Init and after it; a new parameter may be
    larger.
    """

    def refused(parameter: nn.Parameter) -> None:
        shape = tuple(parameter.shape)
        with GatheredParameters(parameter):
            before = parameter.detach().clone()
        for data, message in (
            (torch.zeros(12, 8), f"of shape (12, 8) in place of {shape}"),
            (torch.zeros(shape).double(), "of float64 on cpu in place of float32 on cpu"),
        ):
            context = GatheredParameters(parameter, modifier_rank=0)
            with pytest.raises(ZeroError, match=re.escape(message)), context:
                parameter.data = data
            with GatheredParameters(parameter):
                assert torch.equal(parameter, before)
        with GatheredParameters(parameter, modifier_rank=0):
            parameter.data = torch.full(shape, 2.0 + mesh.rank)[:1].expand(shape)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.whole = nn.Embedding(10, 8), nn.Parameter(torch.zeros(10, 8))
            refused(self.embed.weight)
            refused(self.whole)

    with Init(mesh=mesh, policy=EXACT, whole_below=0, seed=0):
        net = Own()
        grown = nn.Embedding(12, 8)
    refused(net.whole)
    with torch.no_grad(), GatheredParameters([grown.weight, net.embed.weight], modifier_rank=0):
        grown.weight[:10] = net.embed.weight
        grown.weight[10:] = 5.0
    net.embed.weight = grown.weight
    state = shard(net, mesh=mesh, policy=EXACT).full_state_dict()
    assert (state["embed.weight"][:10] == 2).all()
    assert (state["embed.weight"][10:] == 5).all()
    assert (state["whole"] == 2).all()


class Forgets(nn.Module):
    """A module whose reset_parameters() leaves the named tensor alone."""

    def __init__(self, forgotten: str) -> None:
        super().__init__()
        self.forgotten = forgotten
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

    def reset_parameters(self) -> None:
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            if name != self.forgotten:
                tensor.data[slice(3 if self.forgotten == f"a row of {name}" else None)] = 1


@each_rank(1, 1)
def test_a_tensor_of_a_meta_model_that_nothing_wrote_is_an_error(mesh: Mesh) -> None:
    """Memory that was never written does not become weights: an error names the module and the tensor."""
    for forgotten, error in {
        "weight": "0 .Forgets.* no values for 16 of 16 elements of 'weight'",
        "a row of weight": "no values for 4 of 16 elements of 'weight'",
        "mask": "no values for 4 of 4 elements of 'mask'",
        "count": "no values for 3 of 3 elements of 'count'",
        "nothing": None,
    }.items():
        with torch.device("meta"):
            net = nn.Sequential(Forgets(forgotten))
        with pytest.raises(ZeroError, match=error) if error else contextlib.nullcontext():
            shard(net, mesh=mesh, policy=EXACT)


@each_rank(1, 1)
def test_a_parameter_that_is_resized_after_it_was_cut_is_an_error(mesh: Mesh) -> None:
    """An error names the old and the new shape."""
    resized = pytest.raises(ZeroError, match=r"'Linear.weight' had shape \(8, 8\) .* now has \(16, 8\)")
    with resized, Init(mesh=mesh, policy=EXACT, whole_below=0, seed=0):
        net = nn.Linear(8, 8)
        net.weight.data = torch.cat([net.weight.data] * 2)
