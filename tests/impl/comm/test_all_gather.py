"""Gathers along any axes put the right values at the right ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impl.codecs import reference
from impl.codecs.codec import parse
from impl.codecs.rounding_noise import Clock, Noise
from impl.comm.all_gather import FrameGather, placed
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.plan.policy import Policy
from impl.plan.traffic import Tag
from tests.support.ranks import on_threads
from tests.support.strategies import policies, topologies

WEIGHTS = Tag("forward", "weights", "u")


def weights_noise(policy: Policy, rank: int) -> Noise:
    """Random bits of a rank's shard of weights."""
    return Clock(7).weights("u").noise(rank * policy.grain)


def _gathered(mesh: Mesh, policy: Policy) -> torch.Tensor:
    shard = policy.grain
    generator = torch.Generator().manual_seed(mesh.rank)
    mine = torch.randn(shard, generator=generator)
    axes, _ = policy.gather_axes(mesh.topology)
    frame = policy.weights.frame_bytes(shard)
    gather = FrameGather(Wire(mesh), axes, frame, ring=policy.gather == "flat")
    message = gather.open(WEIGHTS)
    reference.encode(policy.weights, mine, message, noise=weights_noise(policy, mesh.rank))
    gather.post()
    flat = torch.empty(mesh.topology.world * shard)
    reference.decode(policy.weights, gather.finish(), placed(flat, axes[::-1], shard))
    return flat


@given(st.data())
def test_gathered_weights_are_every_ranks_shard_bit_equal_everywhere(data: st.DataObject) -> None:
    """Any gather gives all ranks the same bits: each shard encoded and decoded once, in rank order."""
    topology = data.draw(topologies(8))
    policy = data.draw(policies(topology, whole_world=True))
    results = on_threads(topology, _gathered, policy)
    parts = []
    for rank in range(topology.world):
        mine = torch.randn(policy.grain, generator=torch.Generator().manual_seed(rank))
        frame = torch.empty(policy.weights.frame_bytes(policy.grain), dtype=torch.uint8)
        reference.encode(policy.weights, mine, frame, noise=weights_noise(policy, rank))
        parts.append(torch.empty(policy.grain))
        reference.decode(policy.weights, frame, parts[-1])
    for got in results:
        assert torch.equal(got, torch.cat(parts))


@pytest.mark.parametrize("text", ["int8:64:stochastic", "mxfp8:stochastic", "int4:32:hadamard16:stochastic"])
def test_stochastic_weights_do_not_depend_on_the_world(text: str) -> None:
    """The weights of a unit are rounded alike whether 1, 2, 3 or 6 ranks share it."""
    whole, codec = torch.randn(6 * 192, generator=torch.Generator().manual_seed(0)), parse(text)
    found = []
    for world in (1, 2, 3, 6):
        out = torch.empty_like(whole)
        for rank, (mine, decoded) in enumerate(zip(whole.chunk(world), out.chunk(world), strict=True)):
            frame = torch.empty(codec.frame_bytes(len(mine)), dtype=torch.uint8)
            noise = Clock(3).weights("u").noise(rank * len(mine))
            reference.encode(codec, mine, frame, noise=noise)
            reference.decode(codec, frame, decoded)
        found.append(out)
    assert all(torch.equal(other, found[0]) for other in found[1:])
