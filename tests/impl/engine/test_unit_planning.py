"""Models are cut into units at their blocks, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from impl.comm.mesh import Mesh
from impl.policy.policy import MemoryLimits
from impl.policy.presets import preset
from impl.policy.shard_layout import GeometryError, PaddingError
from impl.policy.topology import Topology
from impl.zero import ZeroError, find_blocks, plan_units, shard
from tests.support.models import Net
from tests.support.ranks import each_rank
from tests.support.strategies import EXACT


def test_blocks_are_the_children_of_containers() -> None:
    """Children of ModuleList and Sequential are blocks; a container inside a block is not searched."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ReLU())
    assert find_blocks(net) == [net[0], net[1]]
    assert find_blocks(nn.Linear(2, 2)) == []


def test_overlapping_blocks_are_refused() -> None:
    """A block inside another, or foreign to the model, is refused."""
    net = Net()
    with pytest.raises(ZeroError, match="overlap"):
        plan_units(net, Topology(1, 1), EXACT, blocks=[net.blocks, net.blocks[0]])
    with pytest.raises(ZeroError, match="not a submodule"):
        plan_units(net, Topology(1, 1), EXACT, blocks=[nn.Linear(2, 2)])


def test_padding_of_tiny_units_is_refused_by_default() -> None:
    """Blocks far larger than a unit are refused, naming the unit and the codecs whose blocks they are."""
    with pytest.raises(
        GeometryError, match=r"unit .root.*blocks of 2048 \(the common multiple of int8:2048, int4:256:clip\)"
    ):
        plan_units(Net(), Topology(2, 2), preset("zeropp"))


def test_one_refusal_names_the_padding_of_all_units() -> None:
    """The unit with the largest share of padding is named, so a limit of that share admits all units."""
    net = nn.Sequential(nn.Linear(500, 8), nn.Linear(2, 2))
    with pytest.raises(PaddingError, match="unit '1'") as caught:
        plan_units(net, Topology(2, 2), preset("zeropp"))
    roomy = preset("zeropp", memory=MemoryLimits(max_padding=caught.value.needed))
    assert len(plan_units(net, Topology(2, 2), roomy)) == 2


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@each_rank(1, 1)
def test_lazy_modules_without_shapes_are_refused_by_name(mesh: Mesh, kind: str) -> None:
    """The error advises to call the model once; after that the model can be sharded."""
    norm = nn.LazyBatchNorm1d(affine=kind == "parameter")
    net = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4) if kind == "parameter" else norm)
    name = r"'1\.weight'" if kind == "parameter" else r"'1\.running_mean'"
    with pytest.raises(ZeroError, match=rf"{name} of a lazy module has no shape yet: call the model once"):
        shard(net, mesh=mesh, policy=EXACT)
    with torch.no_grad():
        net(torch.ones(2, 4))
    shard(net, mesh=mesh, policy=EXACT)
    net(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("group", [None, "decay", 0.5])
def test_a_group_that_is_no_number_is_refused_by_name(group: Any) -> None:
    """A ``group_of`` without a return statement is refused with the parameter for which it was called."""
    with pytest.raises(
        ZeroError, match=rf"^group_of= returned {group!r} for parameter 'head\.weight': return the num"
    ):
        plan_units(
            Net(), Topology(1, 1), EXACT, group_of=lambda name, _: group if name == "head.weight" else 0
        )
