"""Tests of the probe that finds out by small steps which optimizers may step shards."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import Optimizer

from impl.comm.mesh import Mesh
from impl.engine.elementwise_probe import ELEMENTWISE, elementwise, why_not
from impl.policy.topology import Topology
from impl.zero import ZeroError, shard
from tests.support import optimizers as own
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import EXACT
from tests.support.training import batch, close, model, single, update

SIZES = (37, 5, 0, 1, 130)  # of shards: of no elements too


def tensors() -> list[nn.Parameter]:
    return list(map(nn.Parameter, map(torch.ones, SIZES)))


Make = Callable[[Any], Optimizer]
TORCH = sorted((k for k in ELEMENTWISE if k.__module__.startswith("torch.")), key=lambda k: k.__name__)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"foreach": True},
    {"foreach": False},
    {"maximize": True},
    {"lr": torch.tensor(0.01), "foreach": False},
    {"lr": 0.0},
    {"lr": 1e-8},
    {"weight_decay": 0.1},
    {"fused": True},
    {"amsgrad": True},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "centered": True},
    {"initial_accumulator_value": 0.1, "lr_decay": 0.1},
    {"decoupled_weight_decay": True, "weight_decay": 0.1},
    {"t0": 1.0, "lambd": 0.1},
)


@pytest.mark.parametrize("kind", TORCH)
def test_those_of_torch_that_are_not_tried_would_pass(kind: type[Any]) -> None:
    """The optimizers of torch that the engine does not test would pass the test with every option."""
    tried = 0
    for options in OPTIONS:
        try:
            optimizer = kind(tensors(), **options)
        except (TypeError, RuntimeError):  # an option of others
            continue
        assert why_not(optimizer) is None, options
        tried += 1
    assert tried >= 6


PASSING: dict[str, Make] = {
    "lion": own.Lion,
    "lion without a rate yet": lambda params: own.Lion(params, lr=0.0),
    "sign": own.SignSGD,
    "in place": lambda params: own.HalvesGradients(params, lr=0.1, momentum=0.9),
    "data": own.ThroughData,
    "schedule-free": own.ScheduleFree,
    "lookahead": lambda params: own.Lookahead(optim.AdamW(params)),
    "lookahead of one's own": lambda params: own.Lookahead(own.Lion(params)),
    "state by id": own.StateById,
    "state in lists": own.StateInLists,
    "names": lambda params: own.ByName([(str(number), p) for number, p in enumerate(params)]),
    **{
        f"of {kind.__name__}": lambda params, kind=kind: type("Derived", (kind,), {})(params, lr=0.1)
        for kind in TORCH
    },
    "arguments": lambda params: own.OwnArguments(params, 0.1, limit=0.5),
    "counter": own.CountsForAll,
    "groups": lambda params: own.Lion([{"params": params[:2]}, {"params": params[2:], "lr": 1.0}]),
}


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("make", PASSING.values(), ids=PASSING)
def test_elementwise_optimizers_pass(make: Make, closure: bool) -> None:
    """Elementwise optimizers pass, wherever they keep their state; they and random numbers are left unchanged."""
    optimizer = make(params := tensors())
    before = [(p._version, p.grad) for p in params], torch.get_rng_state().tolist(), random.getstate()
    state = {key: dict(value) for key, value in optimizer.state.items()}
    assert why_not(optimizer, closure=closure) is None
    assert before == (
        [(p._version, p.grad) for p in params],
        torch.get_rng_state().tolist(),
        random.getstate(),
    )
    assert {key: dict(value) for key, value in optimizer.state.items()} == state
    assert own.CountsForAll.steps == 0


def _groups(params: Any, kind: Any) -> Optimizer:
    """Make an optimizer of which only the last group is not elementwise."""

    class Mixed(own.OneByOne):
        def update(self, group: Any, p: Any, grad: Any, state: Any) -> None:
            (kind.update if group.get("trusts") else own.Lion.update)(self, group, p, grad, state)

    return Mixed([{"params": params[:2]}, {"params": params[2:], "trusts": True}])


def _scheduled(params: Any) -> Optimizer:
    """Make an optimizer at the start of a warm-up, whose scheduler has replaced the instance's ``step``."""
    optimizer = own.Lamb(params)
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    return optimizer


PIECES, SHAPE = "two pieces of a tensor differ from those on the whole", r"of {} dimensions differ from"
RANDOM, UNKNOWN = "it draws random numbers", "is not known to be elementwise: "
REFUSED: dict[str, tuple[Make, str]] = {
    "lamb": (own.Lamb, PIECES),
    "lamb in a warm-up": (_scheduled, PIECES),
    "lamb in a group": (partial(_groups, kind=own.Lamb), PIECES),
    "lookahead of lamb": (lambda params: own.Lookahead(own.Lamb(params)), PIECES),
    "lars": (own.Lars, PIECES),
    "novograd": (own.NovoGrad, PIECES),
    "largest": (own.LargestOne, PIECES),
    "adafactor": (optim.Adafactor, PIECES),
    "lbfgs": (optim.LBFGS, PIECES),
    "mean": (own.MeanOverAll, PIECES),
    **{f"clip {most:g}": (partial(own.Clips, most=most), PIECES) for most in (1e-2, 1.0, 30.0, 500.0)},
    **{f"blocks of {n}": (partial(own.Blockwise, block=n), PIECES) for n in (16, 64, 256, 2048)},
    "large blocks": (partial(own.Blockwise, block=256, smallest=4096), PIECES),
    "prodigy": (own.Prodigy, PIECES),
    "sam": (own.SAM, PIECES),
    "own noise": (own.OwnNoise, PIECES),
    "noise": (own.Langevin, RANDOM),
    "random": (own.RandomRate, RANDOM),
    "centralised": (own.Centralised, SHAPE.format(2)),
    "convolutions": (own.CentralisedConvolutions, SHAPE.format(4)),
    "decay by shape": (own.DecaysMatrices, SHAPE.format(2)),
    "muon": (
        lambda _: optim.Muon([nn.Parameter(torch.ones(4, 4))]),
        "on 1-D tensors, as shards are, its step",
    ),
    "idle": (own.DoesNothing, UNKNOWN + "8 steps on small tensors changed nothing"),
    "raising": (own.Raises, UNKNOWN + "its steps on small tensors raised ValueError: no curvature was given"),
    "sparse": (optim.SparseAdam, UNKNOWN + "its steps on small tensors raised RuntimeError"),
    "lock": (own.HasALock, UNKNOWN + "copying it raised TypeError"),
}


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize(("make", "why"), REFUSED.values(), ids=REFUSED)
def test_others_are_refused_with_the_reason(make: Make, why: str, closure: bool) -> None:
    """Other optimizers are refused in one line; they, their tensors and random numbers are left unchanged."""
    optimizer = make(params := tensors())
    before = [p._version for p in params], torch.get_rng_state().tolist(), random.getstate()
    refusal = why_not(optimizer, closure=closure)
    assert refusal is not None
    assert why in refusal
    assert "\n" not in refusal
    assert before == ([p._version for p in params], torch.get_rng_state().tolist(), random.getstate())
    assert all(p.grad is None for p in params)


def _untouched_hooks(params: Any) -> tuple[Optimizer, list[Any]]:
    calls: list[Any] = []
    optimizer = own.HalvesGradients(params, lr=0.1)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda *_: calls.append(_))
    return optimizer, calls


def test_hooks_of_the_optimizer_are_not_called() -> None:
    """A user's hooks do not see the steps of the test."""
    optimizer, calls = _untouched_hooks(tensors())
    assert why_not(optimizer) is None
    assert not calls


def test_a_state_that_was_loaded_is_tried_too() -> None:
    """The state of an optimizer that resumes from a checkpoint is part of the test."""
    for make, passes in ((own.Lion, True), (own.Lamb, False), (own.StateById, True)):
        optimizer = make(params := tensors())
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert (why_not(optimizer) is None) is passes


def _trained(mesh: Mesh, make: Make) -> dict[str, torch.Tensor]:
    zero = shard(net := model(), mesh=mesh, policy=EXACT)
    optimizer = make(zero.param_groups())
    for step in range(3):
        update(optimizer, net(batch(step, mesh.rank)))
    return zero.full_state_dict()


@pytest.mark.parametrize("name", ["lion", "in place", "lookahead", "state by id", "data"])
@pytest.mark.parametrize("topology", [Topology(1, 2), Topology(1, 3), Topology(2, 2)])
def test_what_passes_trains_as_one_process(name: str, topology: Topology) -> None:
    """An optimizer that passes trains a sharded model as it does in one process."""
    wanted = model()
    single(wanted, topology.world, 3, optimize=PASSING[name])
    for state in on_threads(topology, _trained, PASSING[name]):
        assert close(state, wanted.state_dict(), 1e-4)


@pytest.mark.parametrize("name", ["lamb", "lamb in a group", "raising", "adafactor", "centralised"])
@each_rank(1, 2)
def test_the_engine_refuses_by_name(mesh: Mesh, name: str) -> None:
    """All ranks refuse at the first step, before any weight changes, in ``optimizer.step()`` and in
    ``zero.step()``.
    """
    make, why = REFUSED[name]
    zero = shard(net := model(), mesh=mesh, policy=EXACT)
    params = zero.param_groups()[0]["params"]
    optimizer = make(params)
    before = [p.detach().clone() for p in params]
    net(batch(0, mesh.rank)).backward()
    for step in (optimizer.step, lambda: zero.step(optimizer, max_norm=1.0)):
        with pytest.raises(
            ZeroError, match=f"{type(optimizer).__name__} is not (known to be )?elementwise: "
        ) as e:
            step()
        assert why in str(e.value)
    assert all(starmap(torch.equal, zip(params, before, strict=True)))


@each_rank(1, 2)
def test_a_user_may_vouch_for_a_class(mesh: Mesh) -> None:
    """A class that a user vouches for is not tested; its subclasses are."""

    @elementwise
    class Vouched(own.Langevin): ...

    class Derived(Vouched): ...

    zero = shard(net := model(), mesh=mesh, policy=EXACT)
    update(Vouched(zero.param_groups()), net(batch(0, mesh.rank)))
    with pytest.raises(ZeroError, match=r"declare this with zeropp\.elementwise\(Derived\)"):
        update(Derived(zero.param_groups()), net(batch(0, mesh.rank)))
    ELEMENTWISE.discard(Vouched)


@each_rank(1, 2)
def test_an_optimizer_is_tried_once_or_when_its_switches_change(mesh: Mesh) -> None:
    """A new learning rate causes no further test; a boolean option that changes the algorithm does."""

    class Switched(own.OneByOne):
        def update(self, group: Any, p: Any, grad: Any, state: Any) -> None:
            (own.Lamb if group["trusts"] else own.Lion).update(self, group, p, grad, state)  # type: ignore[arg-type]

    zero = shard(net := model(), mesh=mesh, policy=EXACT)
    optimizer = Switched(zero.param_groups(), trusts=False)
    update(optimizer, net(batch(0, mesh.rank)))
    optimizer.param_groups[0]["lr"] = 0.5
    update(optimizer, net(batch(1, mesh.rank)))
    optimizer.param_groups[0]["trusts"] = True
    with pytest.raises(ZeroError, match="Switched is not elementwise"):
        update(optimizer, net(batch(2, mesh.rank)))


@each_rank(1, 2)
def test_weights_that_an_optimizer_swaps_are_gathered_anew(mesh: Mesh) -> None:
    """A schedule-free optimizer writes its averages to the masters between steps."""
    zero = shard(net := model(), mesh=mesh, policy=EXACT)
    optimizer = own.ScheduleFree(zero.param_groups())
    for step in range(2):
        update(optimizer, net(batch(step, mesh.rank)))
    with torch.no_grad():
        trained = net(batch(9, 0)).item()
        optimizer.swap(trains=False)
        averaged = net(batch(9, 0)).item()
        optimizer.swap(trains=True)
        assert net(batch(9, 0)).item() == pytest.approx(trained, rel=1e-5)
    assert averaged != pytest.approx(trained, rel=1e-4)
    optimizer.swap(trains=False)
    with pytest.raises(RuntimeError, match="swap"):
        update(optimizer, net(batch(3, mesh.rank)))
