"""Checkpoints of one layout are loaded by another: nothing is lost, and what is left is said."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from impl.checkpoint.manifest import Parts, checkpoints, read_manifest
from impl.checkpoint.save_load import CheckpointError, load, save
from impl.comm.mesh import Mesh
from impl.plan.policy import LossScale, Policy
from impl.plan.topology import Topology
from impl.zero import Zero
from tests.impl.checkpoint.checkpointed import (
    EXACT,
    NET,
    ODD,
    POLICIES,
    Run,
    contents,
    same,
    written,
)
from tests.support.ranks import on_threads
from tests.support.strategies import policies, topologies
from tests.support.training import model


def _passed_on(mesh: Mesh, folder: Path, policy: Policy, net: nn.Module, blocks: bool) -> tuple[str, ...]:
    options = {} if blocks else {"blocks": []}
    run = Run(mesh, policy, net, **options)
    dropped = load(folder, run.zero, run.optimizers).dropped
    save(folder, run.zero, run.optimizers)
    run.step(2)  # and it trains on
    return dropped


def test_resharding_loses_nothing(tmp_path: Path) -> None:
    """2x2 -> 1x4 -> 3x2 -> 1, by ZeRO++, one unit of stage 1, MiCS: all equal by name."""
    on_threads(Topology(2, 2), written, tmp_path, POLICIES["zero3"], model(tied=True), 16)
    hops = [
        (Topology(1, 4), POLICIES["zeropp"], True),
        (Topology(3, 2), POLICIES["zero1"], False),
        (Topology(2, 2), POLICIES["mics"], True),
        (Topology(1, 1), POLICIES["zero3"], True),
    ]
    for topology, policy, blocks in hops:
        on_threads(topology, _passed_on, tmp_path, policy, model(tied=True), blocks)
    first, *others = [contents(path) for path in checkpoints(tmp_path)]
    assert len(others) == len(hops)
    for tensors, numbers in others:
        assert same(tensors, first[0])
        assert numbers == first[1]


@st.composite
def two_layouts(draw: st.DrawFn) -> list[tuple[Topology, Policy]]:
    """Two topologies with a policy of each; frozen weights in fp32, since codes are not kept."""
    pairs = []
    for _ in range(2):
        topology = draw(topologies(6))
        pairs.append((topology, replace(draw(policies(topology)), frozen=None)))
    return pairs


def _odd_passed_on(mesh: Mesh, folder: Path, policy: Policy) -> None:
    run = Run(mesh, policy, ODD, width=7)
    load(folder, run.zero, run.optimizers)
    save(folder, run.zero, run.optimizers)


@given(two_layouts())
@settings(max_examples=15)
def test_any_layout_hands_on_to_any_other(
    tmp_path_factory: pytest.TempPathFactory, layouts: list[tuple[Topology, Policy]]
) -> None:
    """Whatever the worlds, stages, groups, blocks and codecs: what is loaded and saved again is the same."""
    folder = tmp_path_factory.mktemp("any")
    (first, policy), (second, other) = layouts
    on_threads(first, written, folder, policy, ODD, 7)
    on_threads(second, _odd_passed_on, folder, other)
    (tensors, numbers), (again, numbers_again) = [contents(path) for path in checkpoints(folder)]
    assert same(again, tensors)
    assert numbers_again == numbers
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
        torch.optim.Adagrad,
        torch.optim.NAdam,
        lambda groups, lr: torch.optim.AdamW(groups, lr=torch.tensor(lr), amsgrad=True, betas=(0.8, 0.9)),
    ],
    ids=["sgd", "momentum", "adagrad", "nadam", "tensor_lr"],
)
def test_every_elementwise_optimizer_is_saved(tmp_path: Path, optimizer: Any) -> None:
    """States by element, numbers, tensors among options: another world goes on with the same state."""
    on_threads(Topology(2, 1), _optimizer, tmp_path, optimizer, False)
    on_threads(Topology(1, 3), _optimizer, tmp_path, optimizer, True)
    (tensors, numbers), (again, numbers_again) = [contents(path) for path in checkpoints(tmp_path)]
    assert same(again, tensors)
    assert numbers_again == numbers


def _optimizer(mesh: Mesh, folder: Path, optimizer: Any, loads: bool) -> None:
    run = Run(mesh, EXACT, NET, optimizer=optimizer)
    if loads:
        load(folder, run.zero, run.optimizers)
    else:
        run.step(0)
    save(folder, run.zero, run.optimizers)
    run.step(1)


def _split(zero: Zero, at: int, lr: float = 1e-2) -> torch.optim.Optimizer:
    """AdamW with the engine's first group in two dicts, as where some of its masters lie on the host."""
    first, *rest = zero.param_groups({1: {"weight_decay": 0.0}})
    masters = first["params"]
    halves = [{"params": masters[:at], "lr": lr}, {"params": masters[at:]}]
    return torch.optim.AdamW([*halves, *rest], lr=1e-2)


def _other_split(mesh: Mesh, folder: Path, at: int) -> str:
    run = Run(mesh, EXACT, NET)
    run.optimizers = [_split(run.zero, 1)]
    run.step(0)
    save(folder, run.zero, run.optimizers)
    loss = run.step(1)
    again = Run(mesh, EXACT, NET)
    again.optimizers = [_split(again.zero, at)] if at else again.optimizers
    load(folder, again.zero, again.optimizers)
    assert again.step(1) == loss
    assert same(again.state(), run.state())
    save(folder, again.zero, [_split(again.zero, 2, lr=0.5)])
    with pytest.raises(CheckpointError) as told:
        load(folder, again.zero, again.optimizers)
    return str(told.value)


@pytest.mark.parametrize("at", [0, 3])
def test_a_group_may_lie_on_two_devices(tmp_path: Path, at: int) -> None:
    """Whether, and where, an engine's group is two of the optimizer's makes no difference to a checkpoint;
    unless they have different options, which one group cannot take over.
    """
    (told,) = set(on_threads(Topology(1, 2), _other_split, tmp_path, at))
    assert "share options here, but not in it" in told


def test_groups_that_hold_copies_save_once(tmp_path: Path) -> None:
    """MiCS: every element is in one file alone, and all ranks write a part."""
    on_threads(Topology(2, 2), written, tmp_path, POLICIES["mics"], NET, 16)
    manifest = read_manifest(tmp_path / "checkpoint-000001")
    elements = 0
    parts = Parts(tmp_path / "checkpoint-000001", manifest)
    for number in range(4):
        weights = [e.numel for key, e in parts.file(number).entries.items() if key.startswith("weight/")]
        assert weights
        elements += sum(weights)
    assert elements == manifest.numel


def test_what_is_left_is_said(tmp_path: Path) -> None:
    """On another topology carried errors, random states and another loss scale are dropped, a line each."""
    policy = replace(POLICIES["feedback"], loss_scale=LossScale(initial=8.0))
    on_threads(Topology(2, 2), written, tmp_path, policy, NET, 16)
    other = replace(policy, loss_scale=None)
    (dropped,) = set(on_threads(Topology(1, 2), _passed_on, tmp_path, other, NET, True))
    assert dropped == (
        "loss scale of dynamic:from8: here none",
        "errors that gradient codecs carried: it was saved with topology 2x2, here 1x2",
        "random states of 4 ranks: here 2",
    )


class Hollow(nn.Module):
    """Parameters without elements: alone in a block, and beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(0, 0, bias=False), nn.Linear(16, 16)])

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 16) to a loss."""
        return self.blocks[2](self.blocks[0](x)).square().mean()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_parameters_without_elements_go_between_layouts(tmp_path: Path) -> None:
    """They are parameters whether or not a unit holds them: one unit hands on to one per block, and back."""
    net = model(Hollow)
    on_threads(Topology(1, 2), written, tmp_path, EXACT, net, 16)
    for blocks in (False, True):
        assert on_threads(Topology(1, 1), _passed_on, tmp_path, EXACT, net, blocks)
    for path in checkpoints(tmp_path):
        assert {one.kind for one in read_manifest(path).state} == {"parameter"}
