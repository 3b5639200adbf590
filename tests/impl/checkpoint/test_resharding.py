"""Ranges have the right places, and a checkpoint of one layout is loaded by another without loss."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from impl.checkpoint.commit import checkpoints
from impl.comm.mesh import Mesh
from impl.policy.policy import LossScale, Policy
from impl.policy.topology import Topology
from tests.impl.checkpoint.checkpointed import NET, ODD, POLICIES, Run, contents, same, written
from tests.support.ranks import on_threads
from tests.support.strategies import policies, topologies


def _passed_on(  # noqa: PLR0917  # thread ranks pass by position
    mesh: Mesh, folder: Path, policy: Policy, net: nn.Module, blocks: bool, width: int = 16
) -> tuple[str, ...]:
    run = Run(mesh, policy, net, width=width, **({} if blocks else {"blocks": []}))
    dropped = run.load(folder).dropped
    run.save(folder)
    run.step(2)  # and it trains on
    return dropped


@st.composite
def two_layouts(draw: st.DrawFn) -> list[tuple[Topology, Policy]]:
    """Draw two topologies with a policy each; frozen weights are in fp32, since their codes would be dropped."""
    pairs = []
    for _ in range(2):
        topology = draw(topologies(6))
        pairs.append((topology, replace(draw(policies(topology)), frozen=None)))
    return pairs


@given(two_layouts(), st.booleans())
@settings(max_examples=15)
def test_any_layout_loads_checkpoints_of_any_other(
    tmp_path_factory: pytest.TempPathFactory, layouts: list[tuple[Topology, Policy]], blocks: bool
) -> None:
    """For all worlds, stages, groups, codecs and units, loading and saving keeps all values, and training continues."""
    folder = tmp_path_factory.mktemp("any")
    (first, policy), (second, other) = layouts
    on_threads(first, written, folder, policy, ODD, 7)
    on_threads(second, _passed_on, folder, other, ODD, blocks, 7)
    (tensors, numbers), (resaved, numbers_again) = [contents(path) for path in checkpoints(folder)]
    assert same(resaved, tensors)
    assert numbers_again == numbers
    shutil.rmtree(folder)


def test_state_that_cannot_be_kept_is_reported(tmp_path: Path) -> None:
    """On another topology carried errors, random states and the loss scale are dropped, with a line for each."""
    policy = replace(POLICIES["feedback"], loss_scale=LossScale(initial=8.0))
    on_threads(Topology(2, 2), written, tmp_path, policy, NET)
    other = replace(policy, loss_scale=None)
    (dropped,) = set(on_threads(Topology(1, 2), _passed_on, tmp_path, other, NET, True))
    assert dropped == (
        "loss scale: saved with LossScale(initial=8.0, window=1000, least=1.0), here None",
        "state of feedback: saved with topology 2x2, here 1x2",
        "random states: the number of ranks was 4, and is 2 here",
    )
