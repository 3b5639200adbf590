"""Tests of gathered weights that are written during a pass, interrupted, or unused by one rank."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from impl.comm.exchanges import Distributed, InMemory
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.errors import WrittenError
from impl.parameters.gathered import GatheredParameters
from impl.policy.policy import Policy
from impl.policy.topology import Topology
from impl.zero import Zero, ZeroError, shard
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import EXACT, ROOMY
from tests.support.training import batch, model, sgd, update

PAIR = Topology(1, 2)
TRANSPORTS = pytest.mark.parametrize("transport", ["backend", "shm"])


def _engine(mesh: Mesh, net: nn.Module, policy: Policy = EXACT, transport: Any = "shm") -> Zero:
    return shard(net, mesh=mesh, policy=policy, wire=Wire(mesh, transport=transport, timeout=30))


class _Half(nn.Module):
    """A unit with two weights, one of which some ranks do not use: there it stays gathered until the pass ends."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2))
        self.uses = True

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight)
        return y * (x @ self.other) if self.uses else y


@contextlib.contextmanager
def interrupted(kind: Any, purpose: str | None = None) -> Iterator[threading.local]:
    """Raise KeyboardInterrupt on a thread rank after ``waits`` waits for messages, of one purpose or of all."""
    left, wait = threading.local(), kind.wait

    def waiting(exchange: Any) -> Tensor:
        if purpose in (None, *exchange._step[1]):
            left.waits = getattr(left, "waits", 0) - 1
            if left.waits == 0:
                raise KeyboardInterrupt
        return wait(exchange)

    with mock.patch.object(kind, "wait", waiting):
        yield left


@TRANSPORTS
@pytest.mark.parametrize("waits", [2, 4])
def test_a_gather_that_was_interrupted_is_not_there(waits: int, transport: Any) -> None:
    """The weights of an interrupted gather are never computed with: the next pass gathers them again."""

    @each_rank(1, 2, backend="threaded")
    def interrupts(mesh: Mesh) -> None:
        zero = _engine(mesh, net := model(depth=3), transport=transport)
        left.waits = waits
        with pytest.raises(KeyboardInterrupt):
            net(batch(0, mesh.rank))
        zero.drop_gradients()
        assert net(batch(0, mesh.rank)).item() == pytest.approx(model(depth=3)(batch(0, mesh.rank)).item())

    with interrupted(InMemory if transport == "shm" else Distributed) as left:
        interrupts()


def _half() -> nn.Module:
    return nn.Sequential(_Half(), *(nn.Linear(8, 8) for _ in range(3)))


def test_a_parameter_that_one_rank_does_not_use_delays_no_other() -> None:
    """The unit stays gathered on that rank until the pass ends; the next passes are right on all ranks."""

    def body(mesh: Mesh, transport: Any) -> list[float]:
        net = model(_half)
        net[0].uses = mesh.rank == 0
        zero = _engine(mesh, net, transport=transport)
        optimizer, losses = sgd(zero.param_groups()), []
        for step in range(3):
            losses.append(update(optimizer, net(batch(step, mesh.rank, 8)).square().mean()))
            assert not zero.units[0].gathered
        return losses

    shared, backend = (on_threads(PAIR, body, way, backend="threaded") for way in ("shm", "backend"))
    assert shared == backend


class _Writes(nn.Module):
    """A model that writes its own weight, which is in use around a block."""

    def __init__(self, write: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.weight, self.blocks = nn.Parameter(torch.randn(8, 8)), nn.ModuleList([nn.Linear(8, 8)])
        self.write, self.seen = write, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight.detach().clone())
        with torch.no_grad():
            self.write(self.weight)
        return self.blocks[0](x @ self.weight)  # type: ignore[no-any-return]


def _replace(weight: nn.Parameter) -> None:
    """Assign other data to a weight, as layers do that limit their weight's norm."""
    weight.data = torch.renorm(weight.data, 2, 0, 0.5)


WRITES = {
    "in place": lambda weight: weight.clamp_(-1, 1),
    "as an embedding": lambda weight: nn.functional.embedding(torch.arange(8), weight, max_norm=0.1),
    "through data": _replace,
}


@TRANSPORTS
@pytest.mark.parametrize("where", ["block", "block alone", "root"])
@pytest.mark.parametrize("how", WRITES)
@each_rank(1, 2, backend="threaded")
def test_a_pass_in_which_weights_were_written_has_ended(
    mesh: Mesh, how: str, where: str, transport: Any
) -> None:
    """An error names the weight that was written, and nothing stays gathered or changed."""
    written = model(_Writes, write=WRITES[how])
    net = written if where == "root" else nn.Sequential(written, nn.Linear(8, 8))
    zero = _engine(mesh, net, transport=transport)
    for step in range(2):
        with pytest.raises(ZeroError, match=r"written in place or .*: '\S*weight'; .* Gathered"):
            (net if where == "block" else written)(batch(step, mesh.rank, 8))
        assert not any(unit.gathered for unit in zero.units)
        assert not zero.hooks.saved.active
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    values = zero.full_state_dict()["weight" if where == "root" else "0.weight"]
    assert all(torch.equal(seen, values) for seen in written.seen)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("how", WRITES)
@each_rank(1, 2, backend="threaded")
def test_weights_that_stay_gathered_are_not_written_either(mesh: Mesh, how: str, stage: Any) -> None:
    """Below stage 3 a write is refused too; the next pass has the weights from before it."""
    written = model(_Writes, write=WRITES[how])
    zero = _engine(mesh, nn.Sequential(written, nn.Linear(8, 8)), replace(EXACT, stage=stage))
    for step in range(2):
        with pytest.raises(WrittenError, match=r"pass: '0\.weight'; the write would be lost"):
            zero.model(batch(step, mesh.rank, 8))
    values = zero.full_state_dict()["0.weight"]
    assert all(torch.equal(seen, values) for seen in written.seen)


class _ClampsAll(nn.Module):
    """Blocks, and a step after they have run that writes all their weights, as an average of weights does."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            for block in self.blocks:
                block.weight.mul_(0.5)
        return x


@TRANSPORTS
@pytest.mark.parametrize(
    ("blocks", "named"),
    [
        (1, "pass: 'blocks.0.weight'; the write"),
        (3, "pass: ('blocks.[012].weight'(, )?){3}; the write"),
        (6, "pass: ('blocks.[0-5].weight'(, )?){4} and 2 more; the write"),
    ],
)
@each_rank(1, 2, backend="threaded")
def test_all_weights_that_were_written_are_named(mesh: Mesh, blocks: int, named: str, transport: Any) -> None:
    """One error for several units names up to four weights, and counts the others."""
    kept = replace(EXACT, memory=replace(EXACT.memory, max_reuse=10**9, max_live=10**9))
    _engine(mesh, net := _ClampsAll(blocks), kept, transport=transport)
    with pytest.raises(ZeroError, match=named) as caught:
        net(batch(0, mesh.rank, 8)).sum().backward()
    assert isinstance(caught.value, WrittenError)
    assert sorted(caught.value.names) == [f"blocks.{index}.weight" for index in range(blocks)]


@TRANSPORTS
@each_rank(1, 2, backend="threaded")
def test_reading_a_weight_between_passes_is_no_write(mesh: Mesh, transport: Any) -> None:
    """Showing a parameter whole is no write to it, also where units stay gathered for backward."""
    net = model(_half)
    zero = _engine(mesh, net, replace(EXACT, memory=replace(ROOMY, max_reuse=10**9)), transport)
    loss = net(batch(0, mesh.rank, 8)).square().mean()
    assert all(unit.gathered for unit in zero.units)
    with GatheredParameters(net.get_parameter("0.weight")):
        pass
    loss.backward()


@TRANSPORTS
def test_a_backward_pass_in_which_weights_were_written_has_ended(transport: Any) -> None:
    """Its end reports the write, and the pass is over: the next passes train as if nothing was written."""

    def body(mesh: Mesh, writes: bool) -> list[float]:
        net, losses = model(_half), []
        net[0].uses = False
        zero = _engine(mesh, net, transport=transport)
        optimizer = sgd(zero.param_groups())

        def write(_: Tensor) -> None:
            with torch.no_grad():  # gathered to the end, as it gets no gradient
                net.get_parameter("0.other").mul_(2)

        for step in range(3):
            writing = net[0].register_forward_hook(lambda _, __, out: out.register_hook(write) and None)
            if not writes or step != 1:
                writing.remove()
            loss = net(batch(step, mesh.rank, 8)).square().mean()
            writing.remove()
            losses.append(loss.item())
            if writes and step == 1:
                with pytest.raises(ZeroError, match=r"pass: '0\.other'; the write"):
                    loss.backward()
                assert not any(unit.gathered for unit in zero.units)
                loss = torch.zeros((), requires_grad=True)
            update(optimizer, loss)
        return losses

    assert on_threads(PAIR, body, True, backend="threaded") == on_threads(
        PAIR, body, False, backend="threaded"
    )
