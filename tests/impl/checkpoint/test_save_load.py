"""A run that is loaded from a checkpoint continues bit for bit, and a save does not change the run."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from impl.checkpoint import resharding
from impl.checkpoint.save_load import CheckpointError, Loaded
from impl.codecs.codec import parse
from impl.comm.mesh import Mesh
from impl.policy.policy import Offload, Policy
from impl.policy.topology import Topology
from tests.impl.checkpoint.checkpointed import NET, ODD, POLICIES, Dropping, Run, same, written
from tests.support.params import nightly
from tests.support.ranks import each_rank, on_processes
from tests.support.strategies import EXACT, ROOMY
from tests.support.training import model


def _resumed(  # noqa: PLR0917  # thread ranks pass by position
    mesh: Mesh, folder: Path, policy: Policy, accumulation: int, net: nn.Module, into: Policy | None = None
) -> None:
    """Assert that a run loaded after two steps, with the policy ``into``, ends like a run that was not interrupted."""
    run = Run(mesh, policy, net)
    for number in range(2):
        run.step(number, accumulation)
    run.save(folder, extra={"next": 2})
    steps = run.zero.clock.step
    losses = [run.step(number, accumulation) for number in range(2, 5)]

    resumed = Run(mesh, into or policy, net)
    with torch.no_grad():
        for unit in resumed.zero.units:
            unit.master_shard.master.add_(1.0)  # all values of the new model must be overwritten
    loaded = resumed.load(folder)
    assert loaded == Loaded({"next": 2}, steps, ())
    assert losses == [resumed.step(number, accumulation) for number in range(loaded.extra["next"], 5)]
    assert policy.loss_scale is None or 0 < run.zero.scaler.skipped < 5
    assert resumed.zero.scaler.state_dict() == run.zero.scaler.state_dict()
    assert same(resumed.state(), run.state())


RESUMED = ["exact", "zeropp", "zero1", "feedback", "sdp4bit", "budget", "local"]


@pytest.mark.parametrize("name", [*RESUMED, *nightly(*(name for name in POLICIES if name not in RESUMED))])
@each_rank(2, 2)
def test_a_resumed_run_equals_an_uninterrupted_one(mesh: Mesh, tmp_path: Path, name: str) -> None:
    """With every preset, loss scale, feedback and noise, losses and weights are equal bit for bit."""
    _resumed(mesh, tmp_path, POLICIES[name], 1, model(tied=True))


@pytest.mark.parametrize("shares", [(0, 1), (1, 0), (0.5, 1)], ids=str)
@each_rank(2, 2)
def test_a_run_may_be_offloaded_from_here_on(mesh: Mesh, tmp_path: Path, shares: tuple[float, float]) -> None:
    """A run continues bit for bit with other shares of its optimizer and weights on the host."""
    before, after = (
        replace(POLICIES["zeropp"], offload=Offload(optimizer=share, weights=share)) for share in shares
    )
    _resumed(mesh, tmp_path, before, 1, model(), after)


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(1, 3)], ids=str)
@pytest.mark.parametrize("group", [0, 1])
@each_rank()
def test_frozen_weights_keep_their_codes(mesh: Mesh, tmp_path: Path, topology: Topology, group: int) -> None:
    """Weights that are kept as codes are restored as the same codes, not encoded again."""
    policy = Policy(group=group, frozen=parse("int4:8:asym"), memory=ROOMY)
    run, resumed = (Run(mesh, policy, ODD, width=7) for _ in range(2))
    run.step(0)
    run.save(tmp_path)
    codes = [unit.master_shard.held.clone() for unit in run.zero.units]
    loss = run.step(1)
    assert resumed.load(tmp_path).dropped == ()
    for unit, before in zip(resumed.zero.units, codes, strict=True):
        assert torch.equal(unit.master_shard.held, before)
    assert resumed.step(1) == loss
    assert same(resumed.state(), run.state())


@each_rank(2, 2)
def test_a_run_of_another_policy_loads_the_first_group(mesh: Mesh, tmp_path: Path) -> None:
    """Between meetings of local steps, a run without them gets the first group's weights, and is told so."""
    run, other = Run(mesh, POLICIES["local"], NET), Run(mesh, Policy(memory=ROOMY), NET)
    run.step(0)
    run.save(tmp_path)
    mine = run.zero.full_state_dict()["head.weight"]
    first, *_ = mesh_rows(run, mine)
    assert torch.equal(first, mine) == (mesh.rank < 2)
    loaded = other.load(tmp_path)
    assert any("state of local steps, so weights and optimizer states are" in line for line in loaded.dropped)
    assert torch.equal(other.zero.full_state_dict()["head.weight"], first)


@pytest.mark.parametrize("name", ["feedback", "differences", "budget", "local", "fp16", "own"])
@each_rank(2, 2)
def test_a_checkpoint_of_another_policy_leaves_nothing_of_earlier_training(
    mesh: Mesh, tmp_path: Path, name: str
) -> None:
    """An engine that has trained before continues from the checkpoint as a new engine does, bit for bit."""
    written(mesh, tmp_path, EXACT, NET)
    new, trained = (Run(mesh, POLICIES[name], NET) for _ in range(2))
    for number in range(5, 9):
        trained.step(number)
    for run in (new, trained):
        run.load(tmp_path)
    assert trained.zero.scaler.state_dict() == new.zero.scaler.state_dict()
    assert [trained.step(number) for number in range(2, 6)] == [new.step(number) for number in range(2, 6)]
    assert same(trained.state(), new.state())


def mesh_rows(run: Run, values: Tensor) -> list[Tensor]:
    """The values of all ranks."""
    return [row.view_as(values) for row in run.zero.wire.all_gather_small(values.reshape(-1))]


@pytest.mark.parametrize("name", ["zero1", "feedback"])
@each_rank(1, 2)
def test_resuming_at_a_boundary_of_accumulation(mesh: Mesh, tmp_path: Path, name: str) -> None:
    """Saved between steps, a run continues alike, with micro-batches added up locally or in shards."""
    _resumed(mesh, tmp_path, POLICIES[name], 3, NET)


def _processes(mesh: Mesh, folder: str) -> tuple[bool, int, list[bool]]:
    run, resumed = (Run(mesh, POLICIES["zeropp"], model(Dropping)) for _ in range(2))
    torch.manual_seed(mesh.rank)
    random.seed(mesh.rank)
    run.step(0)
    run.save(Path(folder))
    numbers = [torch.rand(1).item(), random.random(), np.random.random()]  # noqa: NPY002
    losses = [run.step(1), run.step(2)]
    resumed.load(Path(folder))
    numbers_again = [torch.rand(1).item(), random.random(), np.random.random()]  # noqa: NPY002
    passes = resumed.net.passes
    equal = losses == [resumed.step(1), resumed.step(2)] and same(*map(_tensors, (resumed, run)))
    return equal, passes, [x == y for x, y in zip(numbers, numbers_again, strict=True)]


def _tensors(run: Run) -> dict[str, Tensor]:
    state = run.zero.full_state_dict()
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def test_random_numbers_buffers_and_extra_state_go_on_in_processes(tmp_path: Path) -> None:
    """Over gloo, dropout, Python's and NumPy's numbers, running means and extra states continue as before."""
    for result in on_processes(Topology(2, 1), _processes, str(tmp_path)):
        assert result == (True, 1, [True, True, True])


def test_a_full_disk_of_one_rank_is_an_error_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one rank's disk is full, all ranks raise the error, and only complete checkpoints are left."""
    sync, failed = resharding.sync, set()

    def full(file: Path) -> None:
        if "rank-00001" in str(file) and "000002" in str(file) and not failed:
            failed.add(1)
            raise OSError(28, "No space left on device", str(file))
        sync(file)

    @each_rank(1, 2)
    def fills(mesh: Mesh) -> None:
        run = Run(mesh, EXACT, NET)
        run.save(tmp_path)
        with pytest.raises(
            CheckpointError,
            match=r"^rank 1: .*rank-00001.safetensors: cannot be written: No space left on device",
        ):
            run.save(tmp_path, extra="full")
        run.save(tmp_path, extra="after")
        assert run.load(tmp_path).extra == "after"

    monkeypatch.setattr(resharding, "sync", full)
    fills()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["checkpoint-000001", "checkpoint-000002"]
