"""Tests of two planes of weights: forward computes with blocks of rows, backward with blocks of columns."""

from __future__ import annotations

from collections import Counter
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
from impl.policy.policy import Policy
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import shard
from tests.support.models import Net
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import ROOMY
from tests.support.training import Training, batch, booked, model, train

MXFP8 = parse("mxfp8")
# Parameters start on 64 rows of 64: shards cut no band.
PLANES = preset("mxfp8-planes", memory=ROOMY, align=64 * 64, gradients=(FP32, FP32))
SMALL = replace(PLANES, align=1)
PHASE_HPZ: dict[str, Any] = {"planes": "phase", "secondary": "node"}


def through(rows: Tensor) -> Tensor:
    """Return rows of whole blocks (n, m) after encoding and decoding in MXFP8."""
    frames = torch.empty((len(rows), MXFP8.frame_bytes(rows.shape[1])), dtype=torch.uint8)
    out = torch.empty_like(rows)
    reference.encode(MXFP8, rows.contiguous(), frames)
    reference.decode(MXFP8, frames, out)
    return out


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(1, 1), Topology(1, 3)], ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"group": "node"}, {"planes": "phase"}, {"planes": "phase", "group": "node"}, PHASE_HPZ],
    ids=str,
)
@each_rank()
def test_forward_computes_with_rows_and_backward_with_columns(
    mesh: Mesh, topology: Topology, changes: dict[str, Any]
) -> None:
    """Outputs use MXFP8 rows and inputs' gradients columns, with equal bits on all ranks; gathers send both or one."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(64 * topology.world, 64, generator=random).pow_(3)  # scales differ, both ways
    net = nn.Sequential(nn.Linear(64, len(weight), bias=False))
    net[0].weight.data.copy_(weight)
    zero = shard(net, mesh=mesh, policy=replace(PLANES, **changes))
    x = torch.eye(len(weight), 64, requires_grad=True)
    out = net(x)  # (N, N), whose first 64 rows are the weight, turned
    out.backward(torch.eye(len(x)))
    forward, backward = out.detach()[:64].T, x.grad
    assert torch.equal(forward, through(weight))
    assert torch.equal(backward, through(weight.T).T)
    assert not torch.equal(forward, backward)
    if topology == Topology(1, 3):
        passes, planes, others = 2, 1 if "planes" in changes else 2, 2
        assert booked(zero, purpose="weights") == passes * planes * others * MXFP8.frame_bytes(64 * 64)


STEPS, MICRO_BATCHES = 3, 2


def evaluated(mesh: Mesh, policy: Policy) -> tuple[list[float], list[Tensor], Counter[str]]:
    """Train three steps of two micro-batches with an evaluation after each.

    Returns all losses, the final weights, and this rank's bytes of weights by phase and link.
    """
    run, losses = Training(mesh, model(depth=3), policy), list[float]()
    for number in range(STEPS):
        losses.append(run.step(number, MICRO_BATCHES))
        with torch.no_grad():
            losses.append(float(run.net(batch(-1, mesh.rank))))
    sent = Counter[str]()
    for key, row in run.zero.wire.ledger.rows().items():
        if key.purpose == "weights":
            sent[f"{key.phase}, {key.link}"] += row.bytes
    return losses, [*run.zero.full_state_dict().values()], sent


@pytest.mark.parametrize(
    "topology", [Topology(2, 2), Topology(1, 3), Topology(3, 1), Topology(2, 3)], ids=str
)
def test_the_plane_of_a_phase_trains_as_both_planes_with_half_the_bytes(topology: Topology) -> None:
    """Losses and weights equal those of both planes to the bit, also with hpZ; gathers send half as many bytes."""
    both, phase, hpz = (
        on_threads(topology, evaluated, replace(SMALL, **changes))
        for changes in ({}, {"planes": "phase"}, PHASE_HPZ)
    )
    for (losses, weights, sent), *others in zip(both, phase, hpz, strict=True):
        assert sum(sent.values()) > 0
        for other_losses, other_weights, _ in others:
            assert losses == other_losses
            assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))
        assert {name: 2 * nbytes for name, nbytes in others[0][2].items()} == sent


def test_hpz_keeps_the_columns_and_backward_sends_nothing_between_nodes() -> None:
    """Between nodes, a step's first forward sends both planes, each other pass but backward the rows; hpZ keeps one."""
    topology = Topology(2, 2)
    (_, _, phase), *_ = on_threads(topology, evaluated, replace(SMALL, planes="phase"))
    (_, _, hpz), *_ = on_threads(topology, evaluated, replace(SMALL, **PHASE_HPZ))
    plane = phase["evaluate, inter"] // STEPS  # of all units, in one pass
    assert phase["forward, inter"] == phase["backward, inter"] == STEPS * MICRO_BATCHES * plane
    assert hpz["forward, inter"] == STEPS * (MICRO_BATCHES + 1) * plane
    assert hpz["evaluate, inter"] == STEPS * plane
    assert hpz["backward, inter"] == 0
    assert all(
        hpz[f"{name}, intra"] == phase[f"{name}, intra"] for name in ("forward", "backward", "evaluate")
    )
    (_, _, zero), *_ = on_threads(topology, train, model(depth=3), replace(SMALL, **PHASE_HPZ), 1)
    wanted = sum(topology.nodes * unit.policy.weights.frame_bytes(unit.geometry.shard) for unit in zero.units)
    assert zero.memory()["secondary"] == wanted


@pytest.mark.parametrize("planes", [2, "phase"])
@each_rank(1, 1)
def test_a_block_that_runs_again_in_backward_is_refused(mesh: Mesh, planes: Any) -> None:
    """Recomputing a block in backward is refused in one line, since backward decodes the plane of columns."""

    class Again(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x).square().mean()

    shard(net := Again(), mesh=mesh, policy=replace(PLANES, align=1, planes=planes))
    with pytest.raises(ZeroError, match=f"is recomputed in the backward pass .* planes={planes!r} does not"):
        net(batch(0, mesh.rank)).backward()
