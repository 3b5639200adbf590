"""Two planes of weights: forward computes with blocks of rows, backward with blocks of columns."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from impl.codecs import reference
from impl.codecs.codec import FP32, parse
from impl.comm.mesh import Mesh
from impl.errors import ZeroError
from impl.plan.policy import Policy, preset
from impl.plan.topology import Topology
from impl.zero import shard
from tests.support.models import Net
from tests.support.ranks import on_threads
from tests.support.strategies import ROOMY
from tests.support.training import batch

MXFP8 = parse("mxfp8")
# Parameters start on 64 rows of 64: shards cut no band.
PLANES = preset("mxfp8-planes", memory=ROOMY, align=64 * 64, gradients=(FP32, FP32))


def through(rows: Tensor) -> Tensor:
    """(n, m) what MXFP8 makes of rows of whole blocks."""
    frames = torch.empty((len(rows), MXFP8.frame_bytes(rows.shape[1])), dtype=torch.uint8)
    out = torch.empty_like(rows)
    reference.encode(MXFP8, rows.contiguous(), frames)
    reference.decode(MXFP8, frames, out)
    return out


def _linear(mesh: Mesh, net: nn.Module, policy: Policy) -> tuple[Tensor, ...]:
    net = copy.deepcopy(net)
    zero = shard(net, mesh=mesh, policy=policy)
    x = torch.eye(64 * mesh.topology.world, 64, requires_grad=True)
    out = net(x)  # (N, N), whose first 64 rows are the weight, turned
    out.backward(torch.eye(len(x)))
    zero.finish_backward()
    kept = {key: sent.bytes for key, sent in zero.wire.ledger.rows().items() if key.purpose == "weights"}
    assert x.grad is not None
    return out.detach()[:64].T, x.grad, torch.tensor(sum(kept.values()))


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(1, 1), Topology(1, 3)], ids=str)
@pytest.mark.parametrize("group", [0, "node"])
def test_forward_computes_with_rows_and_backward_with_columns(topology: Topology, group: str | int) -> None:
    """Of a matrix that shards cut into whole bands, outputs are of its rows in MXFP8, and gradients of inputs
    of its columns in MXFP8, equal to the bit on all ranks; a gather sends both planes, codes and scales.
    """
    torch.manual_seed(0)
    linear = nn.Linear(64, 64 * topology.world, bias=False)
    weight = torch.randn_like(linear.weight.data).pow_(3)  # scales differ between rows, and between columns
    linear.weight.data.copy_(weight)
    net = nn.Sequential(linear)
    policy = replace(PLANES, group=group)  # type: ignore[arg-type]
    for forward, backward, sent in on_threads(topology, _linear, net, policy):
        assert torch.equal(forward, through(weight))
        assert torch.equal(backward, through(weight.T).T)
        assert not torch.equal(forward, backward)
        if topology == Topology(1, 3):
            assert int(sent) == 2 * 2 * 2 * MXFP8.frame_bytes(64 * 64)  # passes, planes, ranks


def test_a_block_that_runs_again_in_backward_is_refused() -> None:
    """Its forward plane is not gathered again: one line says so."""

    class Again(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x).square().mean()  # type: ignore[no-any-return]

    def trained(mesh: Mesh) -> None:
        net = Again()
        shard(net, mesh=mesh, policy=replace(PLANES, align=1))
        net(batch(0, mesh.rank)).backward()

    with pytest.raises(ZeroError, match="runs again in backward, for which planes = 2"):
        on_threads(Topology(1, 1), trained)
