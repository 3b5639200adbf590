"""Tests of unusual models that the engine trains; each once crashed or gave a wrong result."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.policy.policy import MemoryLimits, Policy
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import shard
from tests.support.ranks import each_rank, on_processes, on_threads
from tests.support.strategies import EXACT, ROOMY
from tests.support.training import LossOf, model, sgd, single, train

WIDTH = 8


class Layer(nn.Module):
    """A weight and an elementwise gain, whose backward reads freed memory first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) * self.gain


class Stack(nn.Module):
    """An embedding, layers and a head; subclasses apply the layers, or one layer, in other ways."""

    Inner: Callable[[], nn.Module] = Layer

    def __init__(self, layer: Callable[[], nn.Module] | None = None, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList((layer or type(self).Inner)() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def apply(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.apply(block, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(x))).square().mean()


class SameBlockInARow(Stack):
    def middle(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.blocks[0](x)
        return self.blocks[1](x)


class ParallelBranches(Stack):
    def middle(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        left, right = first(x), first(2 * x)
        return first(left * right) + second(left)


class ReturnsItsBias(Stack):
    class Inner(Layer):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return x @ self.weight, self.gain

    def apply(self, block: nn.Module, x: Tensor) -> Tensor:
        y, bias = block(x)
        return x + torch.tanh(y + bias) + bias


class HidesItsOutput(Stack):
    class Box:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    class Inner(Layer):
        def forward(self, x: Tensor) -> Any:
            return HidesItsOutput.Box(super().forward(x))

    def apply(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x).x


class UsesADetachedCopy(Stack):
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * self.weight.detach()) + self.weight


class LossOnTheSide(Stack):
    class Inner(Layer):
        aux: Tensor

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.aux = (torch.tanh(y * self.gain) * self.gain).sum() * 0.01
            return y

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(block.aux for block in self.blocks)


class TakesTheRootsParameter(Stack):
    class Inner(Layer):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + bias) + bias

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def apply(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x, self.bias)


class ListsOfLists(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([Layer(), Layer()]) for _ in range(2))

    def apply(self, block: nn.ModuleList, x: Tensor) -> Tensor:
        return x + block[1](block[0](x))


class CheckpointSpansBlocks(Stack):
    def __init__(self) -> None:
        super().__init__(depth=4)

    def middle(self, x: Tensor) -> Tensor:
        for i in (0, 2):
            x = checkpoint(lambda y, i=i: self.blocks[i + 1](self.blocks[i](y)), x, use_reentrant=False)
        return x


class ChecksPointsOfADetachedCopy(UsesADetachedCopy):
    reentrant = False

    def apply(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=self.reentrant)


class ReentrantPointsOfADetachedCopy(ChecksPointsOfADetachedCopy):
    reentrant = True


class OneCheckpointOfDetachedCopies(UsesADetachedCopy):
    def middle(self, x: Tensor) -> Tensor:
        return checkpoint(super().middle, x, use_reentrant=False)


class ComplexWeights(Stack):
    """A model whose weights are read as conjugates and imaginary parts, which torch computes when they are read."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 2))

        def forward(self, x: Tensor) -> Tensor:
            conjugate = torch.view_as_complex(self.weight).conj()
            turned = torch.view_as_complex(torch.stack([x, x.sin()], -1)) * conjugate
            return torch.view_as_real(turned).sum(-1) + x.cos() * conjugate.imag


class PassesASparseTensorOn(Stack):
    class Inner(Layer):
        def forward(self, graph: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return graph, torch.sparse.mm(graph, super().forward(x))

    def middle(self, x: Tensor) -> Tensor:
        graph = torch.ones(len(x), len(x)).tril().to_sparse()
        for block in self.blocks:
            graph, x = block(graph, x)
        return x


class ComputesWithANestedTensor(Stack):
    class Inner(Layer):
        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.tensor([0, 1, len(x)])
            return torch.tanh(torch.nested.nested_tensor_from_jagged(x, lengths) @ self.weight).values()


class HasSparseGradients(Stack):
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, WIDTH, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table((x.sum(-1) > 0).long()) + self.table(torch.tensor(3))


class Recurrent(Stack):
    Inner = functools.partial(nn.LSTM, WIDTH, WIDTH, batch_first=True)

    def apply(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x.unsqueeze(1))[0].squeeze(1)


def data(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def inference_first(net: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        net(x)
    return net(x)


def _weights(mesh: Mesh, base: nn.Module, loss_of: Any, policy: Policy, transport: Any) -> dict[str, Tensor]:
    wire = Wire(mesh, transport=transport)
    return train(mesh, base, policy, 3, optimize=sgd, loss_of=of_data(loss_of), wire=wire)[1]


def of_data(loss_of: Callable[[nn.Module, Tensor], Tensor]) -> LossOf:
    return lambda net, step, rank: loss_of(net, data(step, rank))


def check(
    base: nn.Module, loss_of: Any = nn.Module.__call__, policy: Policy = EXACT, *, transport: str = "backend"
) -> None:
    """Assert that three steps on four thread ranks change the weights as one process does; with shm, on one node."""
    topology = Topology(2, 2) if transport == "backend" else Topology(1, 4)
    got = on_threads(topology, _weights, base, loss_of, policy, transport, backend="threaded")
    wanted = copy.deepcopy(base)
    single(wanted, 4, 3, optimize=sgd, loss_of=of_data(loss_of))
    for state in got:
        for name, value in wanted.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-4, atol=1e-6), name


KINDS = [
    *(Stack, SameBlockInARow, ParallelBranches, ReturnsItsBias, HidesItsOutput, UsesADetachedCopy),
    *(LossOnTheSide, TakesTheRootsParameter, ListsOfLists, CheckpointSpansBlocks),
    *(ChecksPointsOfADetachedCopy, ReentrantPointsOfADetachedCopy, OneCheckpointOfDetachedCopies, Recurrent),
    *(ComplexWeights, PassesASparseTensorOn, ComputesWithANestedTensor, HasSparseGradients),
]


HOW = pytest.mark.parametrize(("secondary", "transport"), [("node", "backend"), (0, "shm")])


@pytest.mark.parametrize("kind", KINDS)
@HOW
def test_models_train_as_in_one_process(kind: type[nn.Module], secondary: Any, transport: str) -> None:
    """However a model uses its blocks and parameters, it trains as in one process."""
    check(model(kind), policy=replace(EXACT, secondary=secondary), transport=transport)


LOOPS = {
    "a checkpointed root": lambda net, x: checkpoint(net, x.requires_grad_(), use_reentrant=False),
    "leaf inputs": lambda net, x: net(x.requires_grad_()),
    "inference mode before training": inference_first,
    "two forward passes": lambda net, x: net(x) + net(2 * x),
}


@HOW
@pytest.mark.parametrize("loop", LOOPS)
def test_loops_train_as_in_one_process(loop: str, secondary: Any, transport: str) -> None:
    """However a loop calls a model, the model trains as in one process."""
    check(model(Stack), LOOPS[loop], replace(EXACT, secondary=secondary), transport=transport)


@pytest.mark.parametrize("transport", ["backend", "shm"])
@pytest.mark.parametrize("kind", [Stack, HidesItsOutput, UsesADetachedCopy])
def test_blocks_may_be_called_by_themselves(kind: type[nn.Module], transport: str) -> None:
    """Blocks may be called without the model's forward pass; backward finds the weights that autograd saved."""
    check(model(kind), lambda net, x: net.middle(x).square().mean(), transport=transport)


@pytest.mark.parametrize("changes", [{"secondary": "node"}, {"gather": "flat", "reduce": "one_hop"}], ids=str)
def test_many_blocks_never_wait_for_themselves_in_shared_memory(changes: dict[str, Any]) -> None:
    """With more blocks than slots of the arena, all prefetched, training does not block and is right."""
    rest = model(Stack, depth=24), nn.Module.__call__, preset("exact", memory=ROOMY, **changes)
    topology = Topology(2, 2) if "secondary" in changes else Topology(1, 3)
    shared = on_processes(topology, _weights, *rest, "shm")[0]
    for name, value in on_threads(topology, _weights, *rest, "backend")[0].items():
        assert torch.allclose(shared[name], value, atol=1e-5)


class _Looks(Layer):
    """A model that keeps a view of its weight after its forward pass."""

    seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.weight.detach().t()
        return super().forward(x)


@pytest.mark.parametrize("transport", ["backend", "shm"])
@each_rank(1, 2, backend="threaded")
def test_a_view_that_somebody_holds_never_shows_another_units_weights(mesh: Mesh, transport: Any) -> None:
    """Memory of resharded weights is reused, but not while somebody holds a view of it."""
    base, net = (model(Stack, layer=_Looks, depth=4) for _ in range(2))
    policy = preset("exact", memory=MemoryLimits(prefetch=0, max_padding=9))
    shard(net, mesh=mesh, policy=policy, wire=Wire(mesh, transport=transport))
    for _ in range(2):  # again with what the first pass left
        with torch.no_grad():
            net(data(0, mesh.rank))
        for block, original in zip(net.blocks, base.blocks, strict=True):
            assert torch.equal(block.seen, original.weight.detach().t())
