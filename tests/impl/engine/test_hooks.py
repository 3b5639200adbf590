"""Tests of forward and backward passes that are refused, interrupted or compiled."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from impl.comm.exchanges import InMemory
from impl.comm.mesh import Mesh
from impl.parameters.gathered import GatheredParameters
from impl.policy.policy import Stage
from impl.policy.topology import Topology
from impl.zero import ZeroError, shard
from tests.impl.test_zero_models import WIDTH, Stack, data
from tests.impl.unit.test_flat_buffer import interrupted
from tests.support.models import Net
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import EXACT
from tests.support.training import batch, mean_losses, model, sgd, single, train, update


@each_rank(1, 1)
def test_a_model_that_refused_to_be_called_is_not_running(mesh: Mesh) -> None:
    """After a call that was refused, also of a block alone, the engine counts as outside of passes."""
    net = Stack()
    shard(net, mesh=mesh, policy=EXACT)
    block = net.blocks[0]
    held, block.weight = block.weight, nn.Parameter(torch.zeros(WIDTH, WIDTH))
    for called in (net, block):
        with pytest.raises(ZeroError, match="was replaced by another object"):
            called(data(0, 0))
    block.weight = held
    with GatheredParameters(block.weight, modifier_rank=0):
        block.weight.data.zero_()
    assert not block(data(0, 0)).any()


@each_rank(1, 1)
def test_after_an_interrupted_pass_dropping_gradients_leads_out_of_it(mesh: Mesh) -> None:
    """After KeyboardInterrupt the error says what to call, and after that call training goes on."""
    zero = shard(net := model(), mesh=mesh, policy=EXACT)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for name, use in (
        ("blocks.1", lambda: zero.hooks.check_idle("access")),
        ("head", lambda: net(batch(0, 0)).backward()),
    ):
        handle = net.get_submodule(name).register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            net(batch(0, 0))
        handle.remove()
        with pytest.raises(ZeroError, match=r"interrupted: call drop_gradients\(\)"):
            use()
        zero.drop_gradients()
        zero.hooks.check_idle("access")
        net(batch(0, 0)).backward()


def test_an_interrupted_reduction_is_never_taken_for_a_finished_one() -> None:
    """After an interruption ``finish_backward()`` says what is lost and what to call, and that works."""

    @each_rank(1, 2)
    def interrupts(mesh: Mesh) -> None:
        zero = shard(net := model(), mesh=mesh, policy=EXACT)
        net(batch(0, 0)).backward()
        wanted = zero.grad_norm()
        net.zero_grad()
        loss = net(batch(0, 0))
        left.waits = 1
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        with pytest.raises(ZeroError, match=r"interrupted cannot be finished.*call zero\.drop_gradients\(\)"):
            zero.finish_backward()
        zero.drop_gradients()
        zero.finish_backward()
        net.zero_grad()
        net(batch(0, 0)).backward()
        assert zero.grad_norm() == wanted

    with interrupted(InMemory, "gradients") as left:
        interrupts()


# torch's compiler looks at it
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_blocks_train_as_blocks_that_are_not() -> None:
    """``block.compile()`` compiles the code between the engine's hooks, and trains to the same weights."""

    def losses(mesh: Mesh, *, compiled: bool) -> list[float]:
        net = model(lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
        zero = shard(net, mesh=mesh, policy=EXACT)
        for block in net if compiled else ():
            block.compile(backend="eager")
        optimizer = sgd(zero.param_groups(), lr=0.5)
        return [update(optimizer, net(batch(0, 0)).square().mean()) for _ in range(3)]

    plain, compiled = (on_threads(Topology(1, 1), partial(losses, compiled=on))[0] for on in (False, True))
    assert plain == pytest.approx(compiled, rel=1e-5)


class Recursive(Net):
    """Calls itself before its head."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        loss = (self.head(x) * self.scale).square().mean()
        return loss if not depth else loss + self(x, depth - 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_that_calls_itself_trains_as_in_one_process(stage: Stage) -> None:
    """A model's calls of itself are part of one pass: losses are right, and the pass ends with the outer call."""
    policy = replace(EXACT, stage=stage)
    results = on_threads(Topology(1, 2), train, model(Recursive), policy, 3)
    assert mean_losses(results) == pytest.approx(single(model(Recursive), 2, 3), rel=1e-5)
    for _, _, zero in results:
        zero.hooks.check_idle("access")


@pytest.mark.parametrize("how", ["vmap", "grad", "jvp", "functional_call", "block"])
@each_rank(1, 1)
def test_transforms_of_torch_func_are_refused(mesh: Mesh, how: str) -> None:
    """A transform of ``torch.func`` raises an error in one line, where it used to crash; then the model trains."""
    shard(net := model(Net), mesh=mesh, policy=EXACT)
    x, func = batch(0, mesh.rank), torch.func
    weights = {name: torch.zeros(w.shape) for name, w in model(Net).named_parameters()}
    calls = {
        "vmap": lambda: func.vmap(net)(x[None]),
        "grad": lambda: func.grad(net)(x),
        "jvp": lambda: func.jvp(net, (x,), (x,)),
        "functional_call": lambda: func.grad(lambda w: func.functional_call(net, w, (x,)))(weights),
        "block": lambda: func.vmap(net.blocks[0])(x[None]),
    }
    with pytest.raises(ZeroError, match=r"of a sharded model is called under a transform of torch\.func"):
        calls[how]()
    net(x).backward()


@each_rank(1, 1)
def test_what_is_attached_after_sharding_is_refused_at_the_next_pass(mesh: Mesh) -> None:
    """Parameters added later are refused, since each rank would train its own; modules without any may be added."""
    shard(net := model(Net), mesh=mesh, policy=EXACT)
    net(batch(0, 0))
    net.blocks[0].act = nn.Tanh()
    net(batch(0, 0))
    net.blocks[0].act = nn.Linear(2, 2)
    with pytest.raises(ZeroError, match=r"'blocks\.0\.act\.weight' was added to the model after"):
        net(batch(0, 0))
    net.blocks[0].act = nn.Tanh()
    net.head.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(ZeroError, match=r"'head\.extra' was added to the model after"):
        net(batch(0, 0))
    del net.head.extra
    net(batch(0, 0))


def _halve(gradient: Tensor) -> Tensor:
    return gradient / 2


@pytest.mark.parametrize("how", ["register_hook", "register_post_accumulate_grad_hook"])
@each_rank(1, 1)
def test_gradient_hooks_are_refused_and_never_vanish(mesh: Mesh, how: str) -> None:
    """Set before shard() or on a placeholder: refused at once; on a weight in a pass: at the next one."""
    hooked = model(Net)
    handle = getattr(hooked.head.weight, how)(_halve)
    with pytest.raises(ZeroError, match=r"'head\.weight' has a gradient hook, _halve,"):
        shard(hooked, mesh=mesh, policy=EXACT)
    handle.remove()
    shard(hooked, mesh=mesh, policy=EXACT)
    with pytest.raises(ZeroError, match=rf"{how}\(\) was called on parameter 'head\.weight'"):
        getattr(hooked.head.weight, how)(_halve)
    block = hooked.blocks[1]
    inside = block.register_forward_pre_hook(lambda *_: getattr(block.up.weight, how)(_halve) and None)
    hooked(batch(0, 0))
    inside.remove()
    with pytest.raises(ZeroError, match=r"'blocks\.1\.up\.weight' has a gradient hook, _halve,"):
        hooked(batch(0, 0))


@each_rank(1, 1)
def test_attributes_of_parameters_stay(mesh: Mesh) -> None:
    """Attributes that a user set on a parameter before shard() can be read inside and outside of passes."""
    net = model(Net)
    net.head.weight.no_decay = True
    groups = {name: getattr(p, "no_decay", False) for name, p in net.named_parameters()}
    shard(net, mesh=mesh, policy=EXACT, group_of=lambda name, p: int(groups[name] and p.no_decay))
    seen = []
    net.head.register_forward_hook(lambda head, *_: seen.append(head.weight.no_decay))
    net(batch(0, 0))
    assert net.head.weight.no_decay
    net.head.weight.no_decay = False
    net(batch(0, 0))
    assert seen == [True, False]
    assert not hasattr(net.embed.weight, "no_decay")


@each_rank(1, 1)
def test_a_parameter_of_another_class_is_refused(mesh: Mesh) -> None:
    """A parameter of a subclass is refused, since the engine would lose what the class does."""

    class Special(nn.Parameter):
        pass

    net = nn.Linear(4, 4)
    net.weight = Special(torch.zeros(4, 4))
    with pytest.raises(ZeroError, match="parameter 'weight' is a Special: only plain"):
        shard(net, mesh=mesh, policy=EXACT)


@each_rank(1, 1)
def test_in_place_changes_of_activations_are_still_noticed(mesh: Mesh) -> None:
    """The engine's saved-tensor hooks keep torch's check of activations modified in place."""

    class Modifies(Stack):
        def middle(self, x: Tensor) -> Tensor:
            y = torch.exp(x)
            z = y * 2
            y.add_(1)
            return z

    net = Modifies()
    shard(net, mesh=mesh, policy=EXACT)
    with pytest.raises(ZeroError, match="modified by an inplace operation"):
        net(data(0, 0)).backward()


@each_rank(1, 1)
def test_autocast_is_warned_of_once(mesh: Mesh) -> None:
    """The warning names the policy's setting; none comes if the policy computes in autocast's type already."""
    net, cast = model(), model()
    shard(net, mesh=mesh, policy=EXACT)
    shard(cast, mesh=mesh, policy=replace(EXACT, compute="bf16"))
    with warnings.catch_warnings(record=True) as caught, torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("always")
        for number in range(2):
            net(batch(number, 0)).backward()
            cast(batch(number, 0)).backward()
    (warning,) = caught
    assert "a bfloat16 cast of every weight until backward" in str(warning.message)
    assert "set compute='bf16' in the policy" in str(warning.message)
