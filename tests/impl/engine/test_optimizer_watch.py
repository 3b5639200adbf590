"""Tests of the hooks and guards that engines install in torch, and of their removal after the last engine."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizer

from impl.comm.mesh import Mesh
from impl.engine import optimizer_watch
from impl.zero import Zero, ZeroError, shard
from tests.support.ranks import each_rank
from tests.support.strategies import EXACT
from tests.support.training import batch, model, update

Found = tuple[Any, ...]


def found() -> Found:
    """Return everything in torch that an engine may change."""
    return (
        utils.clip_grad_norm_,
        utils.get_total_norm,
        clip_grad._get_total_norm,
        GradScaler._unscale_grads_,
        *torch_optimizer._global_optimizer_pre_hooks.values(),
        *torch_optimizer._global_optimizer_post_hooks.values(),
    )


def engine(mesh: Mesh) -> Zero:
    zero = shard(net := model(), mesh=mesh, policy=EXACT)
    update(torch.optim.SGD(zero.param_groups()), net(batch(0, mesh.rank)))
    return zero


def refuses(zero: Zero) -> bool:
    """Return whether torch's norm refuses this rank's shards."""
    zero.model(batch(0, 0)).backward()
    gradients = [master.grad for master in zero.masters if master.grad is not None]
    try:
        utils.get_total_norm(gradients)
    except ZeroError:
        return True
    return False


@each_rank(1, 2, processes=True)
def test_after_the_last_engine_torch_is_as_before(mesh: Mesh) -> None:
    """After the last engine, and not before, torch has its own functions and no hooks; twice in a row."""
    before = found()
    for _ in range(2):
        first, second = engine(mesh), engine(mesh)
        during = found()
        assert during[0] is before[0]
        assert len(during) == len(before) + 2
        del first
        gc.collect()
        assert found() == during
        assert refuses(second)
        del second
        gc.collect()
        assert not optimizer_watch.engines()
        assert found() == before


def other_models(clip: Callable[..., Tensor]) -> list[Any]:
    """Return what torch's functions give for models without an engine."""
    results: list[Any] = []
    for options in ({}, {"foreach": False}, {"norm_type": torch.inf}, {"error_if_nonfinite": True}):
        parameters = [nn.Parameter(torch.ones(n)) for n in (3, 70)]
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, number + 1.7)
        results.append(clip((p for p in parameters), 0.3, **options))
        results += [parameter.grad for parameter in parameters]
        results += [clip(parameters[0], 0.1, **options), clip([], 0.1, **options)]
        results.append(utils.get_total_norm((p.grad for p in parameters), **options))
        results.append(utils.get_total_norm(tensors=parameters[0].grad, **options))
    endless = nn.Parameter(torch.ones(3))
    endless.grad = torch.full((3,), torch.nan)
    with pytest.raises(RuntimeError, match="is non-finite") as error:
        clip(endless, 0.1, error_if_nonfinite=True)
    with pytest.warns(UserWarning, match="empty generator") as warned:
        clip((p for p in ()), 0.1)
    results += [str(error.value), warned[0].filename]
    for overflows in (False, True):
        scaler, parameter = GradScaler("cpu", init_scale=4.0), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter])
        scaler.scale(parameter.sum() * (torch.inf if overflows else 1.0)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        results += [parameter.detach(), scaler.get_scale()]
    return results


@each_rank(1, 2, processes=True)
def test_other_models_see_nothing_of_an_engine(mesh: Mesh) -> None:
    """Models without an engine get the same bits, errors and warnings, and may be compiled as a whole."""
    before = other_models(utils.clip_grad_norm_)
    zero = engine(mesh)
    during = other_models(utils.clip_grad_norm_)
    for mine, wanted in zip(during, before, strict=True):
        same = torch.equal(mine, wanted) if isinstance(mine, Tensor) else mine == wanted
        assert same, (mine, wanted)
    gradients = [torch.ones(3), torch.ones(2)]
    compiled = torch.compile(utils.get_total_norm, backend="eager", fullgraph=True)
    assert torch.equal(compiled(gradients), utils.get_total_norm(gradients))
    assert refuses(zero)


@each_rank(1, 2, processes=True)
def test_what_others_replace_meanwhile_is_theirs(mesh: Mesh) -> None:
    """If other code replaces a guarded function, its replacement stays and works, and masters are refused through
    it while there is an engine. When the other code undoes it, torch is as before.
    """
    before, calls = found(), 0
    zero = engine(mesh)
    under = clip_grad._get_total_norm

    def theirs(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return under(*args, **kwargs)

    clip_grad._get_total_norm = theirs
    del zero
    gc.collect()
    assert clip_grad._get_total_norm is theirs
    plain = nn.Parameter(torch.ones(4))
    plain.grad = torch.full((4,), 2.0)
    assert utils.clip_grad_norm_([plain], 1.0) == 4.0
    assert calls == 1
    zero = engine(mesh)
    zero.model(batch(0, mesh.rank)).backward()
    with pytest.raises(ZeroError, match="are this rank's shards"):
        utils.clip_grad_norm_(list(zero.masters), 1.0)
    del zero
    gc.collect()
    assert clip_grad._get_total_norm is theirs
    clip_grad._get_total_norm = under
    utils.clip_grad_norm_([plain], 1.0)
    assert found() == before


@each_rank(1, 2, processes=True)
def test_an_engine_may_end_inside_a_step_of_another_optimizer(mesh: Mesh) -> None:
    """Hooks are not removed while torch iterates over them in a step, but at the next opportunity."""
    before = found()
    kept = [engine(mesh)]

    def ends(*_: Any) -> None:
        kept.clear()
        gc.collect()

    handles = [torch_optimizer.register_optimizer_step_pre_hook(hook) for hook in (ends, lambda *_: None)]
    plain = nn.Parameter(torch.ones(3))
    plain.grad = torch.ones(3)
    torch.optim.SGD([plain]).step()
    assert not optimizer_watch.engines()
    for handle in handles:
        handle.remove()
    utils.clip_grad_norm_([plain], 1.0)
    assert found() == before
