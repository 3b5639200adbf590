"""Topologies and the axes of hierarchical gathers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given

from impl.policy.topology import Topology
from tests.support.strategies import secondaries, topologies


@given(topologies(12))
def test_axes_number_the_world(topology: Topology) -> None:
    """The digits along a gather's axes distinguish all ranks, for every hpZ group size."""
    for secondary in secondaries(topology):
        axes, _ = topology.gather_axes(secondary)
        digits = {tuple(axis.digit(rank) for axis in axes) for rank in range(topology.world)}
        assert len(digits) == topology.world == math.prod(axis.size for axis in axes)


@given(topologies(12))
def test_later_hops_stay_inside_the_secondary_group(topology: Topology) -> None:
    """The hops after those that hpZ saves stay within consecutive ranks of the group."""
    for secondary in secondaries(topology)[1:]:
        axes, spared = topology.gather_axes(secondary)
        assert math.prod(axis.size for axis in axes[spared:]) == secondary
        for rank in range(topology.world):
            reached = {rank}
            for axis in axes[spared:]:
                reached = {other for member in reached for other in axis.group(member)}
            assert reached == set(range(rank // secondary * secondary, (rank // secondary + 1) * secondary))


@pytest.mark.parametrize("ranks", [3, 5, 6, 9, 13, -1])
def test_group_size_that_does_not_fit_is_refused_with_numbers(ranks: int) -> None:
    """A group size that divides neither node nor world is refused, and the error names all three numbers."""
    with pytest.raises(ValueError, match=rf"{ranks} ranks does not fit 2 nodes x 4 ranks.*4.*8"):
        Topology(2, 4).check_group("a group", ranks)


@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (-1, 1)])
def test_empty_topology_is_refused(shape: tuple[int, int]) -> None:
    """A topology without nodes or ranks is refused."""
    with pytest.raises(ValueError, match="at least 1 node"):
        Topology(*shape)
