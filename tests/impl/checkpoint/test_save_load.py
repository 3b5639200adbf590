"""Checkpoints: a run goes on bit for bit, and is not held up by a save."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from impl.checkpoint import resharding
from impl.checkpoint.commit import checkpoints
from impl.checkpoint.manifest import read_manifest
from impl.checkpoint.save_load import MESSAGE_BYTES, CheckpointError, Loaded, load, save
from impl.codecs.codec import parse
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.plan.policy import PRESETS, LossScale, Offload, Policy
from impl.plan.topology import Topology
from impl.zero import shard
from tests.impl.checkpoint.checkpointed import (
    EXACT,
    NET,
    NOISY,
    ODD,
    POLICIES,
    Dropping,
    Run,
    same,
)
from tests.support.params import nightly
from tests.support.ranks import on_processes, on_threads
from tests.support.strategies import ROOMY
from tests.support.training import model

# Going on


def _resumed(  # noqa: PLR0917  # thread ranks pass by position
    mesh: Mesh, folder: Path, policy: Policy, accumulation: int, net: nn.Module, into: Policy | None = None
) -> bool:
    """Whether a run that is loaded after two steps, ``into`` another policy, ends as the one that went on."""
    run = Run(mesh, policy, net)
    for number in range(2):
        run.step(number, accumulation)
    save(folder, run.zero, run.optimizers, extra={"next": 2})
    done = run.zero.clock.step
    losses = [run.step(number, accumulation) for number in range(2, 5)]

    again = Run(mesh, into or policy, net)
    with torch.no_grad():
        for unit in again.zero.units:
            unit.master_shard.master.add_(1.0)  # nothing of the new model's own may be left
    loaded = load(folder, again.zero, again.optimizers)
    assert loaded == Loaded({"next": 2}, done, ())
    same_losses = losses == [again.step(number, accumulation) for number in range(loaded.extra["next"], 5)]
    if policy.loss_scale is not None:
        assert 0 < run.zero.scaler.skipped < 5
    scales = again.zero.scaler.state_dict() == run.zero.scaler.state_dict()
    return same_losses and scales and same(again.state(), run.state())


RESUMED = ["exact", "zeropp", "zero1", "feedback", "sdp4bit"]


@pytest.mark.parametrize("name", [*RESUMED, *nightly(*(name for name in POLICIES if name not in RESUMED))])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, name: str) -> None:
    """Under every preset, loss scale, feedback and noise: losses and weights are equal bit for bit."""
    assert all(on_threads(Topology(2, 2), _resumed, tmp_path, POLICIES[name], 1, model(tied=True)))


def _dropped(mesh: Mesh, folder: Path, into: Policy) -> tuple[str, ...]:
    run = Run(mesh, POLICIES["sdp4bit"], model())
    run.step(0)
    save(folder, run.zero, run.optimizers)
    again = Run(mesh, into, model())
    dropped = load(folder, again.zero, again.optimizers).dropped
    again.step(1)
    return dropped


@pytest.mark.parametrize("changes", [{"secondary_format": "fp32"}, {"differences": None}])
def test_copies_of_another_type_are_left_with_a_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A policy with other copies, or with no differences, loads the weights, and says what it left."""
    into = replace(POLICIES["sdp4bit"], **changes)
    for dropped in on_threads(Topology(2, 2), _dropped, tmp_path, into):
        assert dropped[0].startswith("copies that differences of weights begin with: it was saved with")


@pytest.mark.parametrize("shares", [(0, 1), (1, 0), (0.5, 1)], ids=str)
def test_a_run_may_be_offloaded_from_here_on(tmp_path: Path, shares: tuple[float, float]) -> None:
    """A run goes on bit for bit with another share of its optimizer and weights on the host."""
    before, after = (
        replace(PRESETS["zeropp"], memory=ROOMY, offload=Offload(optimizer=share, weights=share))
        for share in shares
    )
    assert all(on_threads(Topology(2, 2), _resumed, tmp_path, before, 1, model(), after))


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(1, 3)], ids=str)
@pytest.mark.parametrize("group", [0, 1])
def test_frozen_weights_keep_their_codes(tmp_path: Path, topology: Topology, group: int) -> None:
    """Weights held as codes come back as these codes, which encoding them again might not give."""
    policy = Policy(group=group, frozen=parse("int4:8:asym"), memory=ROOMY)
    assert all(on_threads(topology, _resumed_odd, tmp_path, policy, ODD))


def _resumed_odd(mesh: Mesh, folder: Path, policy: Policy, net: nn.Module) -> bool:
    run = Run(mesh, policy, net, width=7)
    run.step(0)
    save(folder, run.zero, run.optimizers)
    held = [unit.master_shard.held.clone() for unit in run.zero.units]
    loss = run.step(1)
    again = Run(mesh, policy, net, width=7)
    assert load(folder, again.zero, again.optimizers).dropped == ()
    codes = [
        torch.equal(unit.master_shard.held, before)
        for unit, before in zip(again.zero.units, held, strict=True)
    ]
    return all(codes) and again.step(1) == loss and same(again.state(), run.state())


def _frozen_resumed(mesh: Mesh, folder: Path, policy: Policy) -> bool:
    net = copy.deepcopy(NET)
    net.blocks[1].requires_grad_(requires_grad=False)
    return _resumed(mesh, folder, policy, 1, net)


@pytest.mark.parametrize(
    "policy",
    [
        replace(PRESETS["zeropp"], weights=NOISY, memory=ROOMY),
        replace(PRESETS["zero2"], weights=NOISY, memory=ROOMY),
        replace(PRESETS["zeropp"], weights=NOISY, memory=ROOMY, offload=Offload(optimizer=1, weights=1)),
    ],
    ids=["hpz", "stage2", "offload"],
)
def test_frozen_weights_keep_their_noise(tmp_path: Path, policy: Policy) -> None:
    """What was gathered of them by a stochastic codec at the first step is gathered again by a later one."""
    assert all(on_threads(Topology(2, 2), _frozen_resumed, tmp_path, policy))


@pytest.mark.parametrize("name", ["zero1", "feedback"])
def test_resuming_at_a_boundary_of_accumulation(tmp_path: Path, name: str) -> None:
    """With micro-batches added up locally, or in shards, a run that is saved between steps goes on alike."""
    assert all(on_threads(Topology(1, 2), _resumed, tmp_path, POLICIES[name], 3, NET))


class _Unready(Dropping):
    """Its extra state can be saved once it has run."""

    before: object = object()

    def get_extra_state(self) -> Any:
        return super().get_extra_state() if self.passes else self.before


@pytest.mark.parametrize(
    "before", [object(), torch.zeros(1, dtype=torch.complex128)], ids=["object", "tensor"]
)
def test_what_a_fresh_model_has_of_extra_state_need_not_be_saved(tmp_path: Path, before: object) -> None:
    """A load asks for no form of an extra state that it replaces; a save of it is refused by its name."""

    def body(mesh: Mesh) -> None:
        run = Run(mesh, EXACT, net)
        with pytest.raises(CheckpointError, match="_extra_state"):
            save(tmp_path, run.zero, run.optimizers)
        run.step(0)
        save(tmp_path, run.zero, run.optimizers)
        again = Run(mesh, EXACT, net)
        load(tmp_path, again.zero, again.optimizers)
        assert again.net.passes == run.net.passes == 1

    net = model(_Unready)
    net.before = before
    on_threads(Topology(1, 2), body)


def _processes(mesh: Mesh, folder: str) -> tuple[bool, int, list[bool]]:
    run = Run(mesh, replace(PRESETS["zeropp"], memory=ROOMY), model(Dropping))
    torch.manual_seed(mesh.rank)
    random.seed(mesh.rank)
    run.step(0)
    save(folder, run.zero, run.optimizers)
    drawn = [torch.rand(1).item(), random.random(), np.random.random()]  # noqa: NPY002
    losses = [run.step(1), run.step(2)]
    again = Run(mesh, replace(PRESETS["zeropp"], memory=ROOMY), model(Dropping))
    load(folder, again.zero, again.optimizers)
    redrawn = [torch.rand(1).item(), random.random(), np.random.random()]  # noqa: NPY002
    passes = again.net.passes
    equal = losses == [again.step(1), again.step(2)] and same(
        _tensors(again.zero.full_state_dict()), _tensors(run.zero.full_state_dict())
    )
    return equal, passes, [one == other for one, other in zip(drawn, redrawn, strict=True)]


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def test_random_numbers_buffers_and_extra_state_go_on_in_processes(tmp_path: Path) -> None:
    """Over gloo: dropout, Python's and NumPy's numbers, running means, extra states are as before."""
    for result in on_processes(Topology(2, 1), _processes, str(tmp_path)):
        assert result == (True, 1, [True, True, True])


def _least(mesh: Mesh, folder: Path) -> tuple[str, ...]:
    for least in (1.0, 4.0):
        policy = replace(EXACT, compute="fp16", loss_scale=LossScale(initial=8.0, least=least))
        zero = shard(copy.deepcopy(NET), mesh=mesh, policy=policy)
        dropped = load(folder, zero).dropped if least > 1 else ()
        save(folder, zero)
    return dropped


def test_another_least_loss_scale_is_another_setting(tmp_path: Path) -> None:
    """The scale's state is not taken over by a run that would let it fall less far."""
    told = on_threads(Topology(1, 1), _least, tmp_path)
    settings = [f"LossScale(initial=8.0, window=1000, least={least})" for least in (1.0, 4.0)]
    assert told == [(f"loss scale {settings[0]}: here {settings[1]}",)]


# What travels, and what fails


def _full(mesh: Mesh, folder: Path) -> tuple[str, str]:
    run = Run(mesh, EXACT, NET)
    save(folder, run.zero, run.optimizers)
    try:
        save(folder, run.zero, run.optimizers, extra="full")
    except CheckpointError as error:
        save(folder, run.zero, run.optimizers, extra="after")
        return str(error), load(folder, run.zero, run.optimizers).extra
    return "accepted", ""


def test_a_full_disk_of_one_rank_is_an_error_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was complete stays, and nothing else."""
    sync, failed = resharding.sync, set()

    def full(file: Path) -> None:
        if "rank-00001" in str(file) and "000002" in str(file) and not failed:
            failed.add(1)
            raise OSError(28, "No space left on device", str(file))
        sync(file)

    monkeypatch.setattr(resharding, "sync", full)
    (told,) = set(on_threads(Topology(1, 2), _full, tmp_path))
    assert told[0].startswith("rank 1: ")
    assert told[0].endswith("rank-00001.safetensors: No space left on device")
    assert told[1] == "after"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["checkpoint-000001", "checkpoint-000002"]


def _kept(mesh: Mesh, folder: Path) -> None:
    run = Run(mesh, EXACT, NET)
    for number in range(5):
        save(folder, run.zero, run.optimizers, extra=number, keep=2)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    """keep=2 leaves the last two, under their own numbers, and nothing else."""
    on_threads(Topology(1, 2), _kept, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000004", "checkpoint-000005"]
    assert [read_manifest(path).extra for path in checkpoints(tmp_path)] == [3, 4]


def _sent(mesh: Mesh, folder: Path) -> list[tuple[str, int, int]]:
    zero = shard(copy.deepcopy(NET), mesh=mesh, policy=EXACT, wire=Wire(mesh))
    zero.buffers.make_equal()
    zero.wire.ledger.clear()
    save(folder, zero)
    load(folder, zero)
    return [(key.purpose, *sent) for key, sent in zero.wire.ledger.rows().items()]


def test_ranks_send_each_other_outcomes_alone(tmp_path: Path) -> None:
    """A save and a load are four and two small messages of purpose control to each rank: no values."""
    for rows in on_threads(Topology(1, 3), _sent, tmp_path):
        assert rows == [("control", 6 * 2 * MESSAGE_BYTES, 6 * 2)]
