"""Where ranges lie, and that checkpoints of one layout are loaded by another without loss."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from impl.checkpoint.commit import CheckpointError, checkpoints
from impl.checkpoint.manifest import file_name
from impl.checkpoint.resharding import Parts, write_tensors
from impl.comm.mesh import Mesh
from impl.plan.policy import LossScale, Policy
from impl.plan.topology import Topology
from tests.impl.checkpoint.checkpointed import EMPTY, NET, ODD, POLICIES, Run, contents, same, written
from tests.support.ranks import on_threads
from tests.support.strategies import policies, topologies


@given(st.lists(st.integers(0, 4), max_size=5), st.integers(0, 20), st.integers(0, 20))
def test_any_range_is_read_out_of_the_saved_ones(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], start: int, end: int
) -> None:
    """Whatever files hold its elements: those of [start, end) come back, or it is said that some lack."""
    path, values = tmp_path_factory.mktemp("files"), torch.arange(float(sum(sizes)))
    files, at = [], 0
    for number, size in enumerate(sizes):
        name, at = f"weight/a@b@{at}", at + size
        files.append(
            write_tensors(path / file_name(number), [(name, values[at - size : at])] if size else [])
        )
    parts = Parts(path, replace(EMPTY, files=files))
    if start <= end <= len(values):
        assert torch.equal(parts.read("weight", "a@b", start, end), values[start:end])
    elif start < end:
        with pytest.raises(CheckpointError, match=rf"of elements {start} to {end} of weight of 'a@b'"):
            parts.read("weight", "a@b", start, end)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """Cut short, of another format, or not there: one line."""
    nbytes, _ = written = write_tensors(tmp_path / file_name(0), [("values", torch.ones(9))])
    data = (tmp_path / file_name(0)).read_bytes()
    for content in (data[: nbytes - 1], data[:4], b"\x02" + bytes(7) + b"[]"):
        (tmp_path / file_name(0)).write_bytes(content)
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            Parts(tmp_path, replace(EMPTY, files=[written]))


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
    """Topologies, with a policy of each; frozen weights in fp32, since codes are not kept."""
    pairs = []
    for _ in range(2):
        topology = draw(topologies(6))
        pairs.append((topology, replace(draw(policies(topology)), frozen=None)))
    return pairs


@given(two_layouts(), st.booleans())
@settings(max_examples=15)
def test_any_layout_hands_on_to_any_other(
    tmp_path_factory: pytest.TempPathFactory, layouts: list[tuple[Topology, Policy]], blocks: bool
) -> None:
    """Whatever worlds, stages, groups, codecs, units: what is loaded and saved is the same, and trains."""
    folder = tmp_path_factory.mktemp("any")
    (first, policy), (second, other) = layouts
    on_threads(first, written, folder, policy, ODD, 7)
    on_threads(second, _passed_on, folder, other, ODD, blocks, 7)
    (tensors, numbers), (again, numbers_again) = [contents(path) for path in checkpoints(folder)]
    assert same(again, tensors)
    assert numbers_again == numbers
    shutil.rmtree(folder)


def test_what_is_left_is_said(tmp_path: Path) -> None:
    """On another topology carried errors, random states and another loss scale are dropped, a line each."""
    policy = replace(POLICIES["feedback"], loss_scale=LossScale(initial=8.0))
    on_threads(Topology(2, 2), written, tmp_path, policy, NET)
    other = replace(policy, loss_scale=None)
    (dropped,) = set(on_threads(Topology(1, 2), _passed_on, tmp_path, other, NET, True))
    assert dropped == (
        "loss scale LossScale(initial=8.0, window=1000, least=1.0): here None",
        "state of feedback: it was saved with topology 2x2, here 1x2",
        "random states of 4 ranks: here 2",
    )
