"""Gathers and reductions along any axes put the right values at the right ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impl import reference
from impl.codec import BF16, FP32, Codec
from impl.collectives import Transfer, gather_frames, placed, reduce_gradients, ring_reduce
from impl.mesh import Mesh
from impl.policy import Policy
from impl.topology import Topology
from impl.wire import Tag, Wire
from tests.ranks import on_processes, on_threads
from tests.strategies import policies, topologies

GRADIENTS = Tag("backward", "gradients", "u")
WEIGHTS = Tag("forward", "weights", "u")


def finish(steps):  # noqa: ANN001, ANN201
    """Run a collective to its end and return its result."""
    result = []

    def run():  # noqa: ANN202
        result.append((yield from steps))

    Transfer(run()).wait()
    return result[0]


def reduced(mesh: Mesh, policy: Policy, gradient: torch.Tensor) -> torch.Tensor:
    """This rank's shard of the mean."""
    wire = Wire(mesh)
    hops = policy.reduce_axes(mesh.topology)
    if policy.reduce == "flat":
        return finish(ring_reduce(wire, *hops[0], gradient, GRADIENTS))
    return finish(reduce_gradients(wire, hops, gradient, GRADIENTS))


ALL_SHAPES = [Topology(n, r) for n, r in itertools.product(range(1, 7), repeat=2)]


def _partition_indices(mesh: Mesh, reduce: str) -> list[float]:
    gradient = torch.arange(mesh.topology.world).repeat_interleave(32).float()
    return reduced(mesh, Policy(gradients=(FP32, FP32), reduce=reduce), gradient).tolist()


@pytest.mark.parametrize(
    "topology", [t for t in ALL_SHAPES if t.world <= 12], ids=str
)  # larger ones: nightly
@pytest.mark.parametrize("reduce", ["two_hop", "one_hop", "flat"])
def test_each_rank_receives_its_own_partition(topology: Topology, reduce: str) -> None:
    """With partitions filled with their own index, rank r ends with r, for every shape."""
    for rank, got in enumerate(on_threads(topology, _partition_indices, reduce)):
        assert got == [rank] * 32


@pytest.mark.nightly
@pytest.mark.parametrize("topology", [t for t in ALL_SHAPES if t.world > 12], ids=str)
def test_each_rank_receives_its_own_partition_at_large(topology: Topology) -> None:
    """The same up to 6 x 6."""
    for rank, got in enumerate(on_threads(topology, _partition_indices, "two_hop")):
        assert got == [rank] * 32


def test_without_the_transpose_values_end_at_wrong_ranks() -> None:
    """Hopping over slices in rank order, rank r = (n, g) would get partition g * nodes + n (facts A9)."""
    topology = Topology(2, 4)
    axes = [topology.local_axis, topology.node_axis]
    naive = torch.arange(8).view(4, 2, 1)  # (local, node, shard) without the transpose
    right = placed(torch.arange(8), axes, 1)
    landed = {topology.ranks_per_node * n + g: int(naive[g, n]) for g in range(4) for n in range(2)}
    assert [landed[rank] for rank in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert [int(right[rank % 4, rank // 4]) for rank in range(8)] == list(range(8))


def _mean_and_bound(mesh: Mesh, policy: Policy, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + mesh.rank)
    gradient = torch.randn(mesh.topology.world * policy.grain, generator=generator)
    return gradient.clone(), reduced(mesh, policy, gradient)


def hop_error(codec: Codec, x: torch.Tensor) -> float:
    """Largest error that one encoding of values up to max |x| may make."""
    top = x.abs().max().item()
    return codec.error_bound(-top, top)


@given(st.data(), st.integers(0, 1000))
def test_every_reduction_is_the_mean_within_the_bound_of_its_hops(data: st.DataObject, seed: int) -> None:
    """Flat, one-hop and two-hop reductions of any codecs stay within the bound composed from their hops."""
    topology = data.draw(topologies(6))
    policy = data.draw(policies(topology))
    results = on_threads(topology, _mean_and_bound, policy, seed)
    gradients = torch.stack([gradient for gradient, _ in results])  # (rank, world * S)
    mean = gradients.double().mean(0).view(topology.world, -1)
    world, ranks = topology.world, topology.ranks_per_node
    first, second = policy.gradients
    error = hop_error(first, gradients)
    if policy.reduce == "two_hop":
        # Each of the node's sums errs by up to ranks * error, then once more for hop 2.
        partial = ranks * (gradients.abs().max() + error)
        bound = ranks * topology.nodes * error + topology.nodes * hop_error(second, partial.view(1))
    elif policy.reduce == "one_hop":
        bound = world * error
    else:
        bound = world * hop_error(first, world * gradients.abs().max().view(1))
    bound = bound / world * (1 + 1e-4) + 1e-6
    for rank, (_, got) in enumerate(results):
        assert (got.double() - mean[rank]).abs().max().item() <= bound


def _gathered(mesh: Mesh, policy: Policy) -> torch.Tensor:
    shard = policy.grain
    generator = torch.Generator().manual_seed(mesh.rank)
    mine = torch.randn(shard, generator=generator)
    axes, _ = policy.gather_axes(mesh.topology)
    frame = policy.weights.frame_bytes(shard)
    exchange = finish(
        gather_frames(
            Wire(mesh),
            axes,
            lambda out: reference.encode(policy.weights, mine, out),
            frame,
            WEIGHTS,
            ring=policy.gather == "flat",
        )
    )
    order = list(reversed(axes))
    flat = torch.empty(mesh.topology.world * shard)
    frames = exchange.wait().unflatten(1, (*(axis.size for axis in order[1:]), frame))
    reference.decode(policy.weights, frames, placed(flat, order, shard))
    return flat


@given(st.data())
def test_gathered_weights_are_every_ranks_shard_bit_equal_everywhere(data: st.DataObject) -> None:
    """Any gather gives all ranks the same bits: each shard encoded and decoded once, in rank order."""
    topology = data.draw(topologies(8))
    policy = data.draw(policies(topology))
    results = on_threads(topology, _gathered, policy)
    parts = []
    for rank in range(topology.world):
        mine = torch.randn(policy.grain, generator=torch.Generator().manual_seed(rank))
        frame = torch.empty(policy.weights.frame_bytes(policy.grain), dtype=torch.uint8)
        reference.encode(policy.weights, mine, frame)
        parts.append(torch.empty(policy.grain))
        reference.decode(policy.weights, frame, parts[-1])
    for got in results:
        assert torch.equal(got, torch.cat(parts))


def _exactly_summable(mesh: Mesh, reduce: str, transport: str) -> list[float]:
    gradient = torch.full((mesh.topology.world * 32,), float(2**mesh.rank))
    wire = Wire(mesh, transport=transport)
    hops = Policy(gradients=(BF16, BF16), reduce=reduce).reduce_axes(mesh.topology)
    if reduce == "flat":
        return finish(ring_reduce(wire, *hops[0], gradient, GRADIENTS)).tolist()
    return finish(reduce_gradients(wire, hops, gradient, GRADIENTS)).tolist()


@pytest.mark.parametrize("transport", ["backend", "shm"])
@pytest.mark.parametrize("reduce", ["two_hop", "one_hop", "flat"])
def test_the_mean_is_exact_on_processes(reduce: str, transport: str) -> None:
    """With powers of two as gradients the mean over real processes has no error at all."""
    for got in on_processes(Topology(2, 2), _exactly_summable, reduce, transport):
        assert got == [15 / 4] * 32
