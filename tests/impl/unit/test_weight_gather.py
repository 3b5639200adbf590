"""Tests of two planes of weights: forward computes with blocks of rows, backward with blocks of columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from impl.codecs import reference
from impl.codecs.codec import FP32, parse
from impl.comm.mesh import Mesh
from impl.errors import ZeroError
from impl.plan.policy import preset
from impl.plan.topology import Topology
from impl.zero import shard
from tests.support.models import Net
from tests.support.ranks import each_rank
from tests.support.strategies import ROOMY
from tests.support.training import batch, booked

MXFP8 = parse("mxfp8")
# Parameters start on 64 rows of 64: shards cut no band.
PLANES = preset("mxfp8-planes", memory=ROOMY, align=64 * 64, gradients=(FP32, FP32))


def through(rows: Tensor) -> Tensor:
    """Return rows of whole blocks (n, m) after encoding and decoding in MXFP8."""
    frames = torch.empty((len(rows), MXFP8.frame_bytes(rows.shape[1])), dtype=torch.uint8)
    out = torch.empty_like(rows)
    reference.encode(MXFP8, rows.contiguous(), frames)
    reference.decode(MXFP8, frames, out)
    return out


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(1, 1), Topology(1, 3)], ids=str)
@pytest.mark.parametrize("group", [0, "node"])
@each_rank()
def test_forward_computes_with_rows_and_backward_with_columns(
    mesh: Mesh, topology: Topology, group: Any
) -> None:
    """Outputs use MXFP8 rows and inputs' gradients use columns, with equal bits on all ranks; a gather sends both."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(64 * topology.world, 64, generator=random).pow_(3)  # scales differ, both ways
    net = nn.Sequential(nn.Linear(64, len(weight), bias=False))
    net[0].weight.data.copy_(weight)
    zero = shard(net, mesh=mesh, policy=replace(PLANES, group=group))
    x = torch.eye(len(weight), 64, requires_grad=True)
    out = net(x)  # (N, N), whose first 64 rows are the weight, turned
    out.backward(torch.eye(len(x)))
    forward, backward = out.detach()[:64].T, x.grad
    assert torch.equal(forward, through(weight))
    assert torch.equal(backward, through(weight.T).T)
    assert not torch.equal(forward, backward)
    if topology == Topology(1, 3):
        passes, planes, others = 2, 2, 2
        assert booked(zero, purpose="weights") == passes * planes * others * MXFP8.frame_bytes(64 * 64)


@each_rank(1, 1)
def test_a_block_that_runs_again_in_backward_is_refused(mesh: Mesh) -> None:
    """Recomputing a block in backward is refused in one line, since its plane of rows is not gathered again."""

    class Again(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x).square().mean()

    shard(net := Again(), mesh=mesh, policy=replace(PLANES, align=1))
    with pytest.raises(ZeroError, match="runs again in the backward pass, where planes = 2"):
        net(batch(0, mesh.rank)).backward()
