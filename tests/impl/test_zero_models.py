"""Models that people write and the engine must survive: each was a crash or a wrong result once."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from impl.codec import IntCodec
from impl.gathered import GatheredParameters
from impl.mesh import Mesh
from impl.policy import MemoryLimits, Policy, preset
from impl.topology import Topology
from impl.wire import Wire
from impl.zero import Zero, ZeroError, shard
from tests.ranks import on_processes, on_threads
from tests.strategies import ROOMY

WIDTH = 8
EXACT = preset("exact", memory=ROOMY)


class Layer(nn.Module):
    """A weight and an elementwise gain: the gain's backward reads freed memory first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) * self.gain


class Stack(nn.Module):
    """An embedding, layers, a head; how the layers are applied is the subclass's matter."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(layer() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
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

    def __init__(self) -> None:
        super().__init__(self.Inner)

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y, bias = block(x)
            x = x + torch.tanh(y + bias) + bias
        return x


class HidesItsOutput(Stack):
    class Box:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    class Inner(Layer):
        def forward(self, x: Tensor) -> Any:
            return HidesItsOutput.Box(super().forward(x))

    def __init__(self) -> None:
        super().__init__(self.Inner)

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).x
        return x


class UsesADetachedCopy(Stack):
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * self.weight.detach()) + self.weight

    def __init__(self) -> None:
        super().__init__(self.Inner)


class LossOnTheSide(Stack):
    class Inner(Layer):
        aux: Tensor

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.aux = (torch.tanh(y * self.gain) * self.gain).sum() * 0.01
            return y

    def __init__(self) -> None:
        super().__init__(self.Inner)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(block.aux for block in self.blocks)


class TakesTheRootsParameter(Stack):
    class Inner(Layer):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + bias) + bias

    def __init__(self) -> None:
        super().__init__(self.Inner)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.bias)
        return x


class ListsOfLists(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([Layer(), Layer()]) for _ in range(2))

    def middle(self, x: Tensor) -> Tensor:
        for first, second in self.blocks:
            x = x + second(first(x))
        return x


class CheckpointSpansBlocks(Stack):
    def __init__(self) -> None:
        super().__init__(depth=4)

    def middle(self, x: Tensor) -> Tensor:
        for i in (0, 2):
            x = checkpoint(lambda y, i=i: self.blocks[i + 1](self.blocks[i](y)), x, use_reentrant=False)
        return x


class ChecksPointsOfADetachedCopy(UsesADetachedCopy):
    reentrant = False

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class ReentrantPointsOfADetachedCopy(ChecksPointsOfADetachedCopy):
    reentrant = True


class OneCheckpointOfDetachedCopies(UsesADetachedCopy):
    def middle(self, x: Tensor) -> Tensor:
        return checkpoint(super().middle, x, use_reentrant=False)


class ComplexWeights(Stack):
    """Conjugates and their imaginary parts are views whose values are computed when they are read."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 2))

        def forward(self, x: Tensor) -> Tensor:
            conjugate = torch.view_as_complex(self.weight).conj()
            turned = torch.view_as_complex(torch.stack([x, x.sin()], -1)) * conjugate
            return torch.view_as_real(turned).sum(-1) + x.cos() * conjugate.imag

    def __init__(self) -> None:
        super().__init__(self.Inner)


class PassesASparseTensorOn(Stack):
    class Inner(Layer):
        def forward(self, graph: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return graph, torch.sparse.mm(graph, super().forward(x))

    def __init__(self) -> None:
        super().__init__(self.Inner)

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

    def __init__(self) -> None:
        super().__init__(self.Inner)


class HasSparseGradients(Stack):
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, WIDTH, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table((x.sum(-1) > 0).long()) + self.table(torch.tensor(3))

    def __init__(self) -> None:
        super().__init__(self.Inner)


class Recurrent(Stack):
    def __init__(self) -> None:
        super().__init__(lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x.unsqueeze(1))[0].squeeze(1)
        return x


def data(step: int, rank: int) -> Tensor:
    """(4, WIDTH) of one rank."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def plain_loss(net: nn.Module, x: Tensor) -> Tensor:
    return net(x)


def checkpointed(net: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(net, x.requires_grad_(), use_reentrant=False)


def leaf_input(net: nn.Module, x: Tensor) -> Tensor:
    return net(x.requires_grad_())


def inference_first(net: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        net(x)
    return net(x)


def twice(net: nn.Module, x: Tensor) -> Tensor:
    return net(x) + net(2 * x)


def _weights(mesh: Mesh, base: nn.Module, loss_of: Any, policy: Policy, transport: Any) -> dict[str, Tensor]:
    net = copy.deepcopy(base)
    zero = shard(net, mesh=mesh, policy=policy, wire=Wire(mesh, transport=transport))
    optimizer = torch.optim.SGD(zero.param_groups(), lr=0.1)
    for step in range(3):
        loss_of(net, data(step, mesh.rank)).backward()
        zero.finish_backward()
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict()


def check(
    base: nn.Module, loss_of: Any = plain_loss, policy: Policy = EXACT, *, transport: str = "backend"
) -> None:
    """Three steps on four thread ranks change the weights as one process does; with shm, on one node."""
    topology = Topology(2, 2) if transport == "backend" else Topology(1, 4)
    got = on_threads(topology, _weights, base, loss_of, policy, transport)
    wanted = copy.deepcopy(base)
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(4):
            (loss_of(wanted, data(step, rank)) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in got:
        for name, value in wanted.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-4, atol=1e-6), name


KINDS = [
    Stack,
    SameBlockInARow,
    ParallelBranches,
    ReturnsItsBias,
    HidesItsOutput,
    UsesADetachedCopy,
    LossOnTheSide,
    TakesTheRootsParameter,
    ListsOfLists,
    CheckpointSpansBlocks,
    ChecksPointsOfADetachedCopy,
    ReentrantPointsOfADetachedCopy,
    OneCheckpointOfDetachedCopies,
    Recurrent,
    ComplexWeights,
    PassesASparseTensorOn,
    ComputesWithANestedTensor,
    HasSparseGradients,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("secondary", "transport"), [(0, "backend"), ("node", "backend"), (0, "shm")])
def test_models_train_as_in_one_process(kind: type[nn.Module], secondary: Any, transport: str) -> None:
    """However a model uses its blocks and parameters, it is trained as in one process.

    With shm the weights stay in shared memory: views of them outlive their units' stays there.
    """
    torch.manual_seed(0)
    check(kind(), policy=preset("exact", memory=ROOMY, secondary=secondary), transport=transport)


@pytest.mark.parametrize(("secondary", "transport"), [("node", "backend"), (0, "shm")])
@pytest.mark.parametrize("loss_of", [checkpointed, leaf_input, inference_first, twice])
def test_loops_train_as_in_one_process(loss_of: Any, secondary: Any, transport: str) -> None:
    """A checkpointed root, leaf inputs, inference mode before training, two forwards: as in one process."""
    torch.manual_seed(0)
    check(Stack(), loss_of, preset("exact", memory=ROOMY, secondary=secondary), transport=transport)


def outside(net: nn.Module, x: Tensor) -> Tensor:
    """The blocks one after the other, past the model's forward."""
    for block in net.blocks:  # type: ignore[union-attr]
        x = block(x)
        x = getattr(x, "x", x)
    return x.square().mean()


@pytest.mark.parametrize("transport", ["backend", "shm"])
@pytest.mark.parametrize("kind", [Stack, HidesItsOutput, UsesADetachedCopy])
def test_blocks_may_be_called_by_themselves(kind: type[nn.Module], transport: str) -> None:
    """Past the model's own forward pass, whatever autograd keeps of weights is there in backward."""
    torch.manual_seed(0)
    check(kind(), outside, transport=transport)


def test_a_block_that_refused_to_be_called_by_itself_is_not_running() -> None:
    """After a refused call of a block the engine is outside of passes, as the repair it names needs it."""

    def body(mesh: Mesh) -> None:
        net = Stack()
        shard(net, mesh=mesh, policy=EXACT)
        block = net.blocks[0]
        held, block.weight = block.weight, nn.Parameter(torch.zeros(WIDTH, WIDTH))
        with pytest.raises(ZeroError, match="was replaced by another object"):
            block(data(0, 0))
        block.weight = held
        with GatheredParameters(block.weight, modifier_rank=0):
            block.weight.data.zero_()
        assert not block(data(0, 0)).any()

    on_threads(Topology(1, 1), body)


@pytest.mark.parametrize("changes", [{"secondary": "node"}, {"gather": "flat", "reduce": "one_hop"}], ids=str)
def test_many_blocks_never_wait_for_themselves_in_shared_memory(changes: dict[str, Any]) -> None:
    """With more blocks than slots of the arena, all prefetched, training goes on and is right."""
    torch.manual_seed(0)
    base = Stack(depth=24)
    policy = preset("exact", memory=ROOMY, **changes)
    topology = Topology(2, 2) if "secondary" in changes else Topology(1, 3)
    shared = on_processes(topology, _weights, base, plain_loss, policy, "shm")
    threads = on_threads(topology, _weights, base, plain_loss, policy, "backend")
    for name, value in threads[0].items():
        assert torch.allclose(shared[0][name], value, atol=1e-5)


class _Boom(torch.autograd.Function):
    """A backward that fails."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, __: Tensor) -> Tensor:
        raise ValueError("boom")


def _fails(mesh: Mesh, base: nn.Module, how: str) -> str:
    net = copy.deepcopy(base)
    zero = shard(net, mesh=mesh, policy=EXACT)
    try:
        match how:
            case "backward failed":
                with pytest.raises(ValueError, match="boom"):
                    net(_Boom.apply(data(0, 0).requires_grad_())).backward()
                net(data(1, mesh.rank))
            case "module's optimizer":
                optimizer = torch.optim.AdamW(net.parameters())
                net(data(0, 0)).backward()
                zero.finish_backward()
                optimizer.step()
            case "load_state_dict":
                net.load_state_dict(base.state_dict())
            case "step between":
                first, second = net(data(0, 0)), net(data(1, 0))
                first.backward()
                zero.finish_backward()
                torch.optim.SGD(zero.param_groups(), lr=1.0).step()
                second.backward()
            case "create_graph":
                x = data(0, 0).requires_grad_()
                torch.autograd.grad(net(x), x, create_graph=True)
            case "frozen later":
                net.head.weight.requires_grad_(requires_grad=False)
                net(data(0, 0))
            case "in place":
                x = net.embed
                hidden = torch.exp(net.head(net.middle(torch.ones(2, WIDTH))))  # outside forward: refused
                return str(hidden.device) + str(x)
    except (ZeroError, RuntimeError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("backward failed", "drop its gradients with optimizer.zero_grad() if the backward pass failed"),
        ("module's optimizer", "construct it with Zero.param_groups()"),
        ("load_state_dict", "use Zero.load_full_state_dict()"),
        ("step between", "changed between its forward and its backward pass"),
        ("create_graph", "gradients of gradients are not supported"),
        ("frozen later", "parameter 'head.weight' was trained when the model was sharded and is now frozen"),
        ("in place", "is used outside of a forward pass, where its values are sharded"),
    ],
)
def test_what_would_train_something_else_raises(how: str, words: str) -> None:
    """Misuse that plain torch would notice, or that would silently do nothing, is a clear error."""
    torch.manual_seed(0)
    assert all(words in said for said in on_threads(Topology(1, 2), _fails, Stack(), how))


def test_in_place_changes_of_activations_are_still_noticed() -> None:
    """The engine's saved-tensor hooks keep torch's check of activations modified in place."""

    class Modifies(Stack):
        def middle(self, x: Tensor) -> Tensor:
            y = torch.exp(x)
            z = y * 2
            y.add_(1)
            return z

    def body(mesh: Mesh) -> None:
        net = Modifies()
        shard(net, mesh=mesh, policy=EXACT)
        with pytest.raises(ZeroError, match="modified by an inplace operation"):
            net(data(0, 0)).backward()

    on_threads(Topology(1, 1), body)


def test_a_parameter_kept_outside_its_module_cannot_be_used_unnoticed() -> None:
    """A reference kept in a plain list loses its elements: its use is an error, not no training."""

    class Keeps(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.kept = [self.head.weight]

        def forward(self, x: Tensor) -> Tensor:
            return (self.middle(self.embed(x)) @ self.kept[0]).square().mean()

    def body(mesh: Mesh) -> None:
        net = Keeps()
        shard(net, mesh=mesh, policy=EXACT)
        with pytest.raises(RuntimeError):
            net(data(0, 0))

    on_threads(Topology(1, 1), body)


def test_hand_written_updates_end_the_secondary() -> None:
    """Masters written in place, without an optimizer, are noticed: hpZ's copy is not used again."""

    def body(mesh: Mesh) -> list[float]:
        torch.manual_seed(0)
        net = copy.deepcopy(base)
        zero = shard(net, mesh=mesh, policy=preset("exact", memory=ROOMY, secondary="node"))
        losses = []
        for _ in range(3):
            loss = net(data(0, 0))
            loss.backward()
            zero.finish_backward()
            with torch.no_grad():
                for group in zero.param_groups():
                    for master in group["params"]:
                        master.sub_(0.1 * master.grad)
                        master.grad = None
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    base = Stack()
    for losses in on_threads(Topology(2, 2), body):
        assert losses[0] > losses[1] > losses[2]


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
            mean = unit.owned.mean_gradient()
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


@pytest.mark.parametrize("passes", ["none", "forward", "both"])
def test_a_dropped_engine_is_freed(passes: str) -> None:
    """Without references, model, engine and masters go: no hook and no graph keeps them."""

    def body(mesh: Mesh) -> weakref.ref[Zero]:
        net = Stack()
        zero = shard(net, mesh=mesh, policy=EXACT)
        if passes != "none":
            loss = net(data(0, 0))
        if passes == "both":
            loss.backward()
            zero.finish_backward()
        return weakref.ref(zero)

    [reference] = on_threads(Topology(1, 1), body)
    gc.collect()
    assert reference() is None


def test_other_types_than_the_policys_are_refused() -> None:
    """A float64 or bf16 model under an fp32 policy is refused by the parameter's name."""
    for dtype in (torch.float64, torch.bfloat16):

        def body(mesh: Mesh, dtype: torch.dtype = dtype) -> None:
            with pytest.raises(ZeroError, match=f"embed.weight' is {dtype}, but the policy computes in fp32"):
                shard(Stack().to(dtype), mesh=mesh, policy=EXACT)

        on_threads(Topology(1, 1), body)


def _in_bf16(mesh: Mesh) -> float:
    torch.manual_seed(0)
    net = Stack().bfloat16()
    zero = shard(net, mesh=mesh, policy=preset("zero3", memory=ROOMY, compute="bf16"))
    optimizer = torch.optim.SGD(zero.param_groups(), lr=0.1)
    for step in range(3):
        loss = net(data(step, 0).bfloat16())
        loss.backward()
        zero.finish_backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def test_a_bf16_model_trains_with_fp32_masters() -> None:
    """A policy that computes in bf16 trains a bf16 model."""
    losses = on_processes(Topology(1, 2), _in_bf16)
    assert losses[0] == losses[1]
    assert losses[0] < first_bf16_loss()


def first_bf16_loss() -> float:
    """Before any step, in one process."""
    torch.manual_seed(0)
    return Stack().bfloat16()(data(0, 0).bfloat16()).item()


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
        for _, master in unit.owned.masters:
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


class _Looks(Layer):
    """A view of its weight outlives its forward pass."""

    seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.weight.detach().t()
        return super().forward(x)


@pytest.mark.parametrize("transport", ["backend", "shm"])
def test_a_view_that_somebody_holds_never_shows_another_units_weights(transport: Any) -> None:
    """Memory of released weights is used again, but not while anyone but the unit looks at it."""
    base = Stack(_Looks, depth=4)

    def body(mesh: Mesh) -> None:
        model = copy.deepcopy(base)
        policy = preset("exact", memory=MemoryLimits(prefetch=0, max_padding=9))
        shard(model, mesh=mesh, policy=policy, wire=Wire(mesh, transport=transport))
        for _ in range(2):  # again with what the first pass left
            with torch.no_grad():
                model(data(0, mesh.rank))
            for block, original in zip(model.blocks, base.blocks, strict=True):
                assert torch.equal(block.seen, original.weight.detach().t())

    on_threads(Topology(1, 2), body)


def test_what_is_no_policy_is_refused() -> None:
    """A recipe, or a configuration, in the place of its policy: one line that says what is expected."""
    with pytest.raises(ZeroError, match=r"policy is a dict: expected an impl\.policy\.Policy"):
        shard(nn.Linear(1, 1), mesh=None, policy={"stage": 3})  # type: ignore[arg-type]
    with pytest.raises(ZeroError, match=r"mesh is a NoneType: expected an impl\.mesh\.Mesh"):
        shard(nn.Linear(1, 1), mesh=None, policy=preset("exact"))  # type: ignore[arg-type]


def test_arguments_of_other_types_are_refused() -> None:
    """By the engine, in its words."""

    def body(mesh: Mesh) -> None:
        zero = shard(nn.Linear(4, 4), mesh=mesh, policy=preset("zero1", memory=ROOMY))
        for options in ([{"lr": 0.1}], {0: [("lr", 0.1)]}, "lr"):
            with pytest.raises(ZeroError, match=r"param_groups\(options=\.\.\.\): expected a table"):
                zero.param_groups(options)  # type: ignore[arg-type]
        with pytest.raises(ZeroError, match=r"accumulate\(on='yes'\): expected True or False"):
            zero.accumulate(on="yes")  # type: ignore[arg-type]

    on_threads(Topology(1, 1), body)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_lazy_modules_without_shapes_are_refused_by_name(kind: str) -> None:
    """With the advice to call the model once; after that it is sharded as any other."""

    def body(mesh: Mesh) -> None:
        norm = nn.LazyBatchNorm1d(affine=kind == "parameter")
        net = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4) if kind == "parameter" else norm)
        name = r"'1\.weight'" if kind == "parameter" else r"'1\.running_mean'"
        with pytest.raises(
            ZeroError, match=rf"{name} of a lazy module has no shape yet: call the model once"
        ):
            shard(net, mesh=mesh, policy=preset("exact", memory=ROOMY))
        with torch.no_grad():
            net(torch.ones(2, 4))
        shard(net, mesh=mesh, policy=preset("exact", memory=ROOMY))
        net(torch.ones(2, 4)).sum().backward()

    on_threads(Topology(1, 1), body)
