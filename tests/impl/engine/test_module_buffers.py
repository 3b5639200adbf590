"""Tests that persistent buffers become equal on all ranks, while graphs keep the old values that they need."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from impl.comm.mesh import Mesh
from impl.engine.module_buffers import difference
from impl.policy.policy import Policy
from impl.policy.topology import Topology
from impl.zero import ZeroError, shard
from tests.support.ranks import each_rank, on_processes, on_threads
from tests.support.strategies import EXACT
from tests.support.training import model, sgd

WIDTH = 6
STEPS = 2
TOPOLOGY = Topology(1, 3)


class Scaled(nn.Module):
    """Two blocks whose outputs are multiplied by a buffer; subclasses make, change and use others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.make()

    def make(self) -> None:
        self.register_buffer("table", torch.rand(4, WIDTH))

    def change(self, x: Tensor) -> None:
        """Change the buffer by amounts that depend on the rank's data."""

    def use(self) -> Tensor:
        return self.table

    def forward(self, x: Tensor) -> Tensor:
        self.change(x)
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.use()
        return x.square().mean()


class Assigned(Scaled):
    def change(self, x: Tensor) -> None:
        self.table = 0.9 * self.table + 0.1 * x


class ViewsOfAssigned(Assigned):
    def use(self) -> Tensor:
        return self.table[:, 1:2] + self.table[:1]


class Counts(Scaled):
    def make(self) -> None:
        self.register_buffer("table", torch.arange(WIDTH))

    def change(self, x: Tensor) -> None:
        self.table = self.table + int(10 * x[0, 0])


class InDoubles(Assigned):
    def make(self) -> None:
        self.register_buffer("table", torch.rand(4, WIDTH, dtype=torch.float64))

    def use(self) -> Tensor:
        return self.table.float()


class InEightBits(Scaled):
    def make(self) -> None:
        self.register_buffer("table", torch.rand(4, WIDTH).to(torch.float8_e4m3fn))

    def change(self, x: Tensor) -> None:
        self.table = x.to(torch.float8_e4m3fn)

    def use(self) -> Tensor:
        return self.table.float()


class Mask(Scaled):
    def make(self) -> None:
        self.register_buffer("table", torch.rand(4, WIDTH) > 0.5)

    def change(self, x: Tensor) -> None:
        self.table = x > 0


class Conjugate(Scaled):
    def make(self) -> None:
        self.register_buffer("table", torch.polar(torch.ones(4, WIDTH), torch.rand(4, WIDTH)).conj())

    def change(self, x: Tensor) -> None:
        self.table = (self.table * torch.polar(torch.ones_like(x), x)).conj()

    def use(self) -> Tensor:
        return self.table.imag + self.table.real


class Expanded(Scaled):
    def make(self) -> None:
        self.register_buffer("table", torch.rand(1, WIDTH).expand(4, WIDTH))

    def change(self, x: Tensor) -> None:
        self.table = (self.table[:1] + x.mean()).expand(4, WIDTH)


class Transposed(Scaled):
    def make(self) -> None:
        self.register_buffer("table", torch.rand(WIDTH, 4).t())

    def change(self, x: Tensor) -> None:
        self.table = (self.table + x).t().contiguous().t()


class InTwoModules(Scaled):
    def make(self) -> None:
        table = torch.rand(WIDTH)
        for block in self.blocks:
            block.register_buffer("table", table)

    def change(self, x: Tensor) -> None:
        self.blocks[0].table = self.blocks[1].table = self.blocks[1].table + x.mean(0)

    def use(self) -> Tensor:
        return self.blocks[0].table + self.blocks[1].table


class ComesLate(Scaled):
    def make(self) -> None:
        pass

    def change(self, x: Tensor) -> None:
        if not hasattr(self, "table"):
            self.register_buffer("table", x[0])


class ComesInPlaceOfNone(ComesLate):
    def make(self) -> None:
        self.register_buffer("table", None)

    def change(self, x: Tensor) -> None:
        if self.table is None:
            self.table = x[0]


class Grows(Scaled):
    def make(self) -> None:
        self.register_buffer("table", torch.ones(1))

    def change(self, x: Tensor) -> None:
        self.table = torch.cat([self.table, x[0, :1]])

    def use(self) -> Tensor:
        return self.table[-1]


class HoldsItsResult(Scaled):
    def change(self, x: Tensor) -> None:
        self.table = self.blocks[0](x + self.table.detach())  # with its graph

    def use(self) -> Tensor:
        return torch.exp(self.table)


class NeverSaved(Assigned):
    """A model whose buffer is not persistent, so each rank keeps its own."""

    def make(self) -> None:
        self.register_buffer("table", torch.rand(4, WIDTH), persistent=False)


class Normalised(Scaled):
    def make(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](torch.relu(self.norm(self.blocks[0](x)))).square().mean()


class NormalisedInACheckpoint(Normalised):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=False)


KINDS = [
    *(
        Scaled,
        Assigned,
        ViewsOfAssigned,
        Counts,
        InDoubles,
        InEightBits,
        Mask,
        Conjugate,
        Expanded,
        Transposed,
    ),
    *(InTwoModules, ComesLate, ComesInPlaceOfNone, Grows, HoldsItsResult, NeverSaved, Normalised),
]


def data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return two batches: a chosen and a rejected answer."""
    first, second = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return first, second


def compared(first: Tensor, second: Tensor) -> Tensor:
    return nn.functional.softplus(first - second)


def _trained(mesh: Mesh, base: nn.Module, policy: Policy) -> dict[str, Tensor]:
    zero = shard(net := copy.deepcopy(base), mesh=mesh, policy=policy)
    optimizer = sgd(zero.param_groups())
    for step in range(STEPS):
        first, second = data(step, mesh.rank)
        loss = net(first)
        with torch.no_grad():
            net(second)
        compared(loss, net(second)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict()


def _make_equal(nets: list[nn.Module]) -> None:
    """Do to the buffers of several models in one process what the engine promises, with fresh tensors."""
    for name, module in nets[0].named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or key in module._non_persistent_buffers_set:
                continue
            held = [net.get_submodule(name)._buffers[key].detach() for net in nets]
            averaged = buffer.is_floating_point() and buffer.itemsize > 1
            value = torch.stack(held).double().mean(0).to(buffer.dtype) if averaged else held[0]
            for net in nets:
                net.get_submodule(name)._buffers[key] = value.clone()


def expected(base: nn.Module, ranks: int) -> dict[str, Tensor]:
    """Return the state after the same passes of ``ranks`` models in one process."""
    nets = [copy.deepcopy(base) for _ in range(ranks)]
    for step in range(STEPS):
        batches = [data(step, rank) for rank in range(ranks)]

        def passed(which: int, batches: Any = batches) -> list[Tensor]:
            _make_equal(nets)
            return [net(batch[which]) for net, batch in zip(nets, batches, strict=True)]

        first = passed(0)
        with torch.no_grad():
            passed(1)
        for left, right in zip(first, passed(1), strict=True):
            compared(left, right).backward()
        for parameters in zip(*(net.parameters() for net in nets), strict=True):
            mean = torch.stack([parameter.grad for parameter in parameters]).mean(0)
            for parameter in parameters:
                parameter.grad = mean.clone()
        for net in nets:
            sgd(net.parameters()).step()
            net.zero_grad()
    _make_equal(nets)
    return nets[0].state_dict()


def check_near(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        got = state[name]
        if value.is_floating_point():
            got, value = got.double(), value.double()  # noqa: PLW2901
        assert torch.allclose(got, value, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("kind", KINDS)
def test_two_passes_before_a_backward_pass_train_as_in_one_process(kind: type[nn.Module]) -> None:
    """However buffers are held, changed and used, each graph has the values that its forward pass used."""
    base = model(kind)
    wanted = expected(base, TOPOLOGY.world)
    for state in on_threads(TOPOLOGY, _trained, base, EXACT):
        check_near(state, wanted)


@pytest.mark.parametrize(
    "policy",
    [replace(EXACT, stage=0), replace(EXACT, stage=2), replace(EXACT, secondary="node")],
    ids=["stage 0", "stage 2", "hpz"],
)
@pytest.mark.parametrize("kind", [Assigned, Normalised])
def test_so_they_do_under_every_policy(policy: Policy, kind: type[nn.Module]) -> None:
    """Under every policy, units that are kept, resharded or gathered again train as in one process."""
    base = model(kind)
    wanted = expected(base, 4)
    for state in on_threads(Topology(2, 2), _trained, base, policy):
        check_near(state, wanted)


@each_rank(1, 2)
def test_a_checkpoint_computes_with_batch_statistics_again(mesh: Mesh) -> None:
    """Activation checkpointing of batch norm works, since recomputing uses no running statistics."""
    states = [_trained(mesh, model(kind), EXACT) for kind in (Normalised, NormalisedInACheckpoint)]
    first, second = ({name: state[name] for name in ("blocks.1.weight", "norm.bias")} for state in states)
    check_near(first, second)
    assert not torch.equal(first["norm.bias"], torch.zeros(WIDTH))


@each_rank(1, 2)
def test_equal_buffers_are_not_written(mesh: Mesh) -> None:
    """Equal buffers are not written, so that a graph recorded outside of passes can still run backward."""
    shard(net := model(Scaled), mesh=mesh, policy=EXACT)
    version = net.table._version
    loss = (net(data(0, 0)[0]) * net.table).sum()
    (loss + net(data(0, mesh.rank)[1])).backward()
    assert net.table._version == version


@each_rank(1, 2)
def test_buffers_that_differ_are_written_in_place(mesh: Mesh) -> None:
    """References to a buffer and views of it show its new values, even if a graph needs the old ones."""

    class Views(Scaled):
        def make(self) -> None:
            self.register_buffer("both", torch.rand(2, 4, WIDTH))
            self.register_buffer("table", self.both[0])
            self.own = self.both[1]

        def change(self, x: Tensor) -> None:
            self.both.data.add_(x)

    shard(net := model(Views), mesh=mesh, policy=EXACT)
    held, x = net.both, torch.full((4, WIDTH), float(mesh.rank))
    loss = net(x)
    before = held.clone()
    (loss + net(torch.zeros(4, WIDTH))).backward()
    assert net.both is held
    assert torch.allclose(held, before - mesh.rank + 0.5)
    assert torch.equal(torch.stack([net.table, net.own]), held)


@each_rank(1, 2)
def test_a_users_own_change_in_place_is_an_error_still(mesh: Mesh) -> None:
    """A user's change of a saved buffer raises in backward, although the engine writes the buffer later."""
    shard(net := model(Scaled), mesh=mesh, policy=EXACT)
    loss = net(data(0, 0)[0])
    net.table.add_(mesh.rank)
    with pytest.raises(ZeroError, match="modified by an inplace operation"):
        (loss + net(data(0, 0)[1])).backward()


@each_rank(1, 2)
def test_buffers_assigned_in_inference_mode_are_made_equal(mesh: Mesh) -> None:
    """Such a tensor cannot be written outside of that mode, nor be saved for a backward pass."""
    shard(net := model(Assigned), mesh=mesh, policy=EXACT)
    with torch.inference_mode():
        net(data(0, mesh.rank)[0])
        assert net.table.is_inference()
    compared(net(data(1, mesh.rank)[0]), net(data(1, mesh.rank)[1])).backward()


class Unused(Scaled):
    def use(self) -> Tensor:
        return torch.ones(())


Change = Callable[[Any, int], object]
CHANGES: list[tuple[str, Change]] = [
    (r"'table' is \(1,\) float32 on rank 0, \(2,\) float32 on rank 1: give it one shape and type",
     lambda net, rank: net.register_buffer("table", torch.zeros(1 + rank))),
    (r"'table' is \(4, 6\) float32 on rank 0, \(4, 6\) float64 on rank 1",
     lambda net, rank: net.register_buffer("table", net.table.double() if rank else net.table)),
    (r"'table' is \(4, 6\) float32 on rank 0, none on rank 1",
     lambda net, rank: net.register_buffer("table", None if rank else net.table)),
    (r"'table' is \(4, 6\) float32 on rank 0, none on rank 1",
     lambda net, rank: net.register_buffer("table", torch.empty(0) if rank else net.table)),
    (r"'more' is none on rank 0, \(1,\) float32 on rank 1",
     lambda net, rank: net.register_buffer("more", torch.zeros(1) if rank else None)),
    (r"'table' is \(4, 6\) float32 on rank 0, \(3, 3\) float32 sparse_coo on rank 1",
     lambda net, rank: net.register_buffer("table", torch.eye(3).to_sparse() if rank else net.table)),
    (r"'table' is \(3, 3\) float32 sparse_coo, which cannot be made equal on all ranks",
     lambda net, _: net.register_buffer("table", torch.eye(3).to_sparse())),
    (r"'table' is \(3,\) float32 on meta, which cannot be made equal on all ranks",
     lambda net, _: net.register_buffer("table", torch.empty(3, device="meta"))),
]  # fmt: skip


@pytest.mark.parametrize(("message", "change"), CHANGES)
@each_rank(1, 2)
def test_buffers_whose_kinds_differ_are_refused_on_all_ranks(
    mesh: Mesh, message: str, change: Change
) -> None:
    """All ranks refuse at the next pass, by name, and again later; no rank waits for another's bytes."""
    zero = shard(net := model(Unused), mesh=mesh, policy=EXACT)
    net(data(0, 0)[0]).backward()
    change(net, mesh.rank)
    for use in (lambda: net(data(0, 0)[0]), zero.full_state_dict):
        with pytest.raises(ZeroError, match=message) as error:
            use()
        assert "persistent=False" in str(error.value)
    net.register_buffer("table", torch.zeros(4, WIDTH))
    net.more = None
    net(data(0, 0)[0]).backward()


def test_kinds_are_compared_by_name() -> None:
    """The first buffer that differs is named, with the ranks that have each kind."""
    same = {"a": "(1,) float32", "b": "(2,) int64"}
    assert difference([same, dict(same)]) is None
    message = difference([same, same, {"a": "(1,) float32"}])
    assert message is not None
    assert message.startswith("buffer 'b' is (2,) int64 on ranks 0 and 1, none on rank 2: ")


def _at_shard(mesh: Mesh) -> str:
    net = model(Scaled)
    net.register_buffer("table", torch.zeros(3 + mesh.rank))
    with pytest.raises(ZeroError) as error:
        shard(net, mesh=mesh, policy=EXACT)
    return str(error.value)


def test_kinds_that_differ_are_refused_when_the_model_is_sharded() -> None:
    """Buffers of different shapes are refused by ``shard()`` before any rank waits for the others."""
    for error in on_processes(Topology(1, 2), _at_shard):
        assert "buffer 'table' is (3,) float32 on rank 0, (4,) float32 on rank 1" in error


@each_rank(1, 1)
def test_a_sparse_buffer_is_refused_unless_it_is_each_ranks_own(mesh: Mesh) -> None:
    """A sparse buffer is refused in one line before the model is changed, unless it is not persistent."""
    net = model(Unused)
    net.register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(
        ZeroError, match=r"buffer 'graph' is \(3, 3\) float32 sparse_coo, .* persistent=False"
    ):
        shard(net, mesh=mesh, policy=EXACT)
    net.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)
    shard(net, mesh=mesh, policy=EXACT)
    net(data(0, 0)[0]).backward()


@each_rank(1, 2)
def test_a_rehearsal_restores_assigned_and_expanded_buffers(mesh: Mesh) -> None:
    """After a rehearsal, a buffer that a pass replaced is back with its old values."""
    for kind in (Assigned, Expanded):
        zero = shard(net := model(kind), mesh=mesh, policy=EXACT)
        table, before = net.table, net.table.clone()
        with zero.rehearsing():
            net(data(0, mesh.rank)[0]).backward()
            net(data(1, mesh.rank)[0]).backward()
        assert net.table is table
        assert torch.equal(table, before)
