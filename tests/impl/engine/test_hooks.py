"""Passes that are refused, interrupted or compiled."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from impl.comm.exchanges import InMemory
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.parameters.gathered import GatheredParameters
from impl.plan.policy import Stage, preset
from impl.plan.topology import Topology
from impl.zero import ZeroError, shard
from tests.impl.test_zero_models import WIDTH, Stack, data
from tests.support.models import Net
from tests.support.ranks import on_threads
from tests.support.strategies import ROOMY
from tests.support.training import batch, mean_losses, model, single, train

EXACT = preset("exact", memory=ROOMY)


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


def test_after_an_interrupted_pass_dropping_gradients_leads_out_of_it() -> None:
    """KeyboardInterrupt passes hooks by: what is refused says what to call, and then works."""

    def body(mesh: Mesh) -> None:
        net = model(Net)
        zero = shard(net, mesh=mesh, policy=EXACT)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        handle = net.get_submodule("blocks.1").register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            net(batch(0, 0))
        handle.remove()
        with pytest.raises(ZeroError, match=r"interrupted: call drop_gradients\(\)"):
            zero.hooks.check_idle("access")
        zero.drop_gradients()
        zero.hooks.check_idle("access")
        net(batch(0, 0)).backward()
        zero.finish_backward()

    on_threads(Topology(1, 1), body)


def test_an_interrupted_reduction_is_never_taken_for_a_finished_one() -> None:
    """finish_backward() after one that was interrupted says what is lost and what to call, which works."""
    base, left, wait = model(Net), threading.local(), InMemory.wait

    def interrupted(exchange: InMemory) -> Tensor:
        if "gradients" in exchange._step[1]:
            left.waits = getattr(left, "waits", 0) - 1
            if left.waits == 0:
                raise KeyboardInterrupt
        return wait(exchange)

    def body(mesh: Mesh) -> tuple[float, float]:
        zero = shard(net := copy.deepcopy(base), mesh=mesh, policy=EXACT, wire=Wire(mesh, transport="shm"))
        net(batch(0, 0)).backward()
        zero.finish_backward()
        wanted = float(zero.grad_norm())
        net.zero_grad()
        loss = net(batch(0, 0))
        left.waits = 1
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        with pytest.raises(ZeroError, match=r"interrupted cannot be finished.*call drop_gradients\(\)"):
            zero.finish_backward()
        zero.drop_gradients()
        zero.finish_backward()
        net.zero_grad()
        net(batch(0, 0)).backward()
        zero.finish_backward()
        return float(zero.grad_norm()), wanted

    with mock.patch.object(InMemory, "wait", interrupted):
        for got, wanted in on_threads(Topology(1, 2), body):
            assert got == wanted


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # torch's compiler looks at it
def test_compiled_blocks_train_as_blocks_that_are_not() -> None:
    """``block.compile()`` compiles what lies between the engine's hooks, which run as they are."""

    def body(mesh: Mesh, *, compiled: bool) -> list[float]:
        net = copy.deepcopy(base)
        zero = shard(net, mesh=mesh, policy=EXACT)
        for block in net if compiled else ():
            block.compile(backend="eager")
        optimizer = torch.optim.SGD(zero.param_groups(), lr=0.5)
        losses = []
        for _ in range(3):
            loss = net(batch(0, 0)).square().mean()
            losses.append(loss.item())
            loss.backward()
            zero.finish_backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses

    base = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    plain, compiled = (on_threads(Topology(1, 1), partial(body, compiled=on))[0] for on in (False, True))
    assert plain == pytest.approx(compiled, rel=1e-5)


class Recursive(Net):
    """Calls itself before its head."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        """(batch, width) to a loss."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        loss = (self.head(x) * self.scale).square().mean()
        return loss if not depth else loss + self(x, depth - 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_that_calls_itself_trains_as_in_one_process(stage: Stage) -> None:
    """Calls inside a pass are part of it: losses are right, and the engine is outside of passes after it."""
    policy = replace(EXACT, stage=stage)
    results = on_threads(Topology(1, 2), train, model(Recursive), policy, 3)
    assert mean_losses(results) == pytest.approx(single(model(Recursive), 2, 3), rel=1e-5)
    for _, _, zero in results:
        zero.hooks.check_idle("access")


@pytest.mark.parametrize("how", ["vmap", "grad", "jvp", "functional_call", "block"])
def test_transforms_of_torch_func_are_refused(how: str) -> None:
    """In one line, where a crash was; afterwards the model trains."""

    def body(mesh: Mesh) -> None:
        shard(net := copy.deepcopy(base), mesh=mesh, policy=EXACT)
        x, func = batch(0, mesh.rank), torch.func
        weights = {name: torch.zeros(one.shape) for name, one in base.named_parameters()}
        calls = {
            "vmap": lambda: func.vmap(net)(x[None]),
            "grad": lambda: func.grad(net)(x),
            "jvp": lambda: func.jvp(net, (x,), (x,)),
            "functional_call": lambda: func.grad(lambda w: func.functional_call(net, w, (x,)))(weights),
            "block": lambda: func.vmap(net.blocks[0])(x[None]),
        }
        with pytest.raises(ZeroError, match=r"of a sharded model under a transform of torch\.func"):
            calls[how]()
        net(x).backward()

    base = model(Net)
    on_threads(Topology(1, 1), body)


def test_what_is_attached_after_sharding_is_refused_at_the_next_pass() -> None:
    """A module or parameter that came later would train by itself on each rank; others may come."""

    def body(mesh: Mesh) -> None:
        shard(net := copy.deepcopy(base), mesh=mesh, policy=EXACT)
        net(batch(0, 0))
        net.blocks[0].act = nn.Tanh()
        net(batch(0, 0))
        net.blocks[0].act = nn.Linear(2, 2)
        with pytest.raises(ZeroError, match=r"'blocks\.0\.act\.weight' came to the model after"):
            net(batch(0, 0))
        net.blocks[0].act = nn.Tanh()
        net.head.extra = nn.Parameter(torch.zeros(2))
        with pytest.raises(ZeroError, match=r"'head\.extra' came to the model after"):
            net(batch(0, 0))
        del net.head.extra
        net(batch(0, 0))

    base = model(Net)
    on_threads(Topology(1, 1), body)


def _halve(gradient: Tensor) -> Tensor:
    return gradient / 2


@pytest.mark.parametrize("how", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_are_refused_and_never_vanish(how: str) -> None:
    """Set before shard(): refused there; on a placeholder: at once; on a weight in a pass: at the next
    one.
    """

    def body(mesh: Mesh) -> None:
        hooked = copy.deepcopy(base)
        handle = getattr(hooked.head.weight, how)(_halve)
        with pytest.raises(ZeroError, match=r"'head\.weight' has a gradient hook, _halve,"):
            shard(hooked, mesh=mesh, policy=EXACT)
        handle.remove()
        shard(hooked, mesh=mesh, policy=EXACT)
        with pytest.raises(ZeroError, match=rf"{how}\(\) on parameter 'head\.weight'"):
            getattr(hooked.head.weight, how)(_halve)
        block = hooked.blocks[1]
        inside = block.register_forward_pre_hook(lambda *_: getattr(block.up.weight, how)(_halve) and None)
        hooked(batch(0, 0))
        inside.remove()
        with pytest.raises(ZeroError, match=r"'blocks\.1\.up\.weight' has a gradient hook, _halve,"):
            hooked(batch(0, 0))

    base = model(Net)
    on_threads(Topology(1, 1), body)


def test_attributes_of_parameters_stay() -> None:
    """What was said of a parameter before shard() is read inside and outside of passes."""

    def body(mesh: Mesh) -> None:
        net = copy.deepcopy(base)
        net.head.weight.no_decay = True
        groups = {name: getattr(one, "no_decay", False) for name, one in net.named_parameters()}
        shard(net, mesh=mesh, policy=EXACT, group_of=lambda name, one: int(groups[name] and one.no_decay))
        seen = []
        net.head.register_forward_hook(lambda head, *_: seen.append(head.weight.no_decay))
        net(batch(0, 0))
        assert net.head.weight.no_decay
        net.head.weight.no_decay = False
        net(batch(0, 0))
        assert seen == [True, False]
        assert not hasattr(net.embed.weight, "no_decay")

    base = model(Net)
    on_threads(Topology(1, 1), body)


def test_a_parameter_of_another_class_is_refused() -> None:
    """What its class does to it would be lost."""

    class Special(nn.Parameter):
        pass

    def body(mesh: Mesh) -> None:
        net = nn.Linear(4, 4)
        net.weight = Special(torch.zeros(4, 4))
        with pytest.raises(ZeroError, match="parameter 'weight' is a Special: only plain"):
            shard(net, mesh=mesh, policy=EXACT)

    on_threads(Topology(1, 1), body)


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
