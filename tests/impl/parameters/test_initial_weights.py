"""Tests that ranks which start from different weights raise an error, and others do not."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impl.codecs.codec import parse
from impl.comm.mesh import Mesh
from impl.parameters.init import Init
from impl.parameters.initial_weights import difference, sums
from impl.policy.topology import Topology
from impl.zero import ZeroError, shard
from tests.support.models import Net
from tests.support.ranks import on_processes, on_threads
from tests.support.strategies import EXACT
from tests.support.training import model


@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.integers(2, 5))
def test_a_single_value_that_differs_is_found(data: st.DataObject, dtype: torch.dtype, ranks: int) -> None:
    """One different element on one rank is found, in any layout, and the error names the parameter and the rank."""
    numbers = []
    odd = data.draw(st.integers(0, ranks))  # ranks: none
    for rank in range(ranks):
        values = torch.arange(12, dtype=dtype).view(3, 4)
        values = values.t().contiguous().t() if data.draw(st.booleans()) else values
        if rank == odd:
            values[1, 2] += 1
        numbers.append(sums({"same": torch.ones(3), "w": values, "empty": torch.empty(0, 3)}))
    sentence = difference(numbers)
    if odd == ranks:
        assert sentence is None
    else:
        assert "'w'" in sentence
        assert (f"rank {odd} " if odd else "rank") in sentence


def test_a_negated_view_counts_by_its_values() -> None:
    """Torch's bit that marks a view as negated is taken into account."""
    assert sums({"w": torch._neg_view(torch.ones(3))}) == sums({"w": -torch.ones(3)})


def test_other_parameters_are_told() -> None:
    """A rank with one parameter more, or one less, is named."""
    first = sums({"w": torch.ones(3)})
    for other in ({}, {**first, "b": 0}):
        assert "rank 1 " in difference([first, other])


def _seeded(mesh: Mesh, cut: bool) -> list[str]:
    errors = []
    for seed in (0, mesh.rank):
        torch.manual_seed(seed)
        try:
            with Init(mesh=mesh, policy=EXACT) if cut else contextlib.nullcontext():
                net = Net()
            shard(net, mesh=mesh, policy=EXACT).full_state_dict()
            errors.append("")
        except ZeroError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("cut", [False, True])
def test_ranks_that_drew_other_weights_are_refused(cut: bool) -> None:
    """Models of other seeds are refused on all ranks, naming parameter and rank; equal seeds are not."""
    for alike, apart in on_processes(Topology(1, 2), _seeded, cut):
        assert alike == ""
        assert "starts from other values on rank 1 than on rank 0" in apart
        assert "seed all ranks alike" in apart


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            {"memory": replace(EXACT.memory, pair_below=0)},
            "memory.pair_below is 4000000 on rank 0, but 0 on ranks 1",
        ),
        (
            {"memory": replace(EXACT.memory, prefetch=7)},
            "memory.prefetch is 50000000 on rank 0, but 7 on ranks 1",
        ),
        ({"weights": parse("int8:32")}, "weights is fp32 on rank 0, but int8:32 on ranks 1"),
    ],
)
def test_ranks_with_other_policies_are_refused(change: dict[str, Any], found: str) -> None:
    """All ranks are told the name of the setting and its values; with equal policies nothing is refused."""

    def sharded(mesh: Mesh) -> list[str]:
        errors = []
        for policy in (EXACT, replace(EXACT, **change)):
            try:
                shard(model(), mesh=mesh, policy=policy if mesh.rank else EXACT)
                errors.append("")
            except ZeroError as error:
                errors.append(str(error))
        return errors

    for alike, apart in on_threads(Topology(1, 3), sharded):
        assert alike == ""
        assert apart.startswith(f"the policies of the ranks differ: {found} and 2, so that")
        assert apart.endswith("give all ranks the same policy")
