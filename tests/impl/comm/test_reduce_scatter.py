"""Reductions along any axes put the right mean at the right ranks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impl.codecs.codec import BF16, FP32, Codec, Sums, parse
from impl.codecs.rounding_noise import Clock
from impl.comm.all_gather import placed
from impl.comm.error_feedback import Errors
from impl.comm.mesh import Mesh
from impl.comm.reduce_scatter import Average, Reduction
from impl.comm.wire import Wire
from impl.plan.policy import Policy
from impl.plan.shard_layout import chunked
from impl.plan.topology import Topology
from impl.plan.traffic import Tag
from tests.support.ranks import on_processes, on_threads
from tests.support.strategies import as_published, policies, topologies

GRADIENTS = Tag("backward", "gradients", "u")


def reduced(
    mesh: Mesh, policy: Policy, gradient: torch.Tensor, wire: Wire | None = None, errors: Errors | None = None
) -> torch.Tensor:
    """This rank's shard of the mean."""
    shard = gradient.numel() // mesh.topology.world
    how = Reduction(
        wire=wire or Wire(mesh),
        hops=policy.reduce_axes(mesh.topology),
        tag=GRADIENTS,
        piece=shard,
        ring=policy.reduce == "ring",
        chunks=chunked(shard, policy.chunks, policy.grain),
        sums=policy.sums,
    )
    key = Clock(7).gradients("u", mesh.rank)
    return Average(how, gradient, key=key, errors=errors).finish()


ALL_SHAPES = [Topology(n, r) for n, r in itertools.product(range(1, 7), repeat=2)]


def _partition_indices(mesh: Mesh, reduce: str) -> list[float]:
    gradient = torch.arange(mesh.topology.world).repeat_interleave(32).float()
    return reduced(mesh, Policy(gradients=(FP32, FP32), reduce=reduce), gradient).tolist()


@pytest.mark.parametrize(
    "topology", [t for t in ALL_SHAPES if t.world <= 12], ids=str
)  # larger ones: nightly
@pytest.mark.parametrize("reduce", ["two_hop", "one_hop", "ring"])
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
    policy = data.draw(as_published(data.draw(policies(topology, whole_world=True))))
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
    if policy.sums == "fp16":  # terms of both hops, and their sums, are rounded
        rounded = (1 + 2.0**-11) ** (topology.nodes + ranks) - 1
        bound += rounded * (world * gradients.abs().max().item() + bound) + world * 2.0**-22
    bound = bound / world * (1 + 1e-4) + 1e-6
    for rank, (_, got) in enumerate(results):
        assert (got.double() - mean[rank]).abs().max().item() <= bound


def _exactly_summable(mesh: Mesh, reduce: str, transport: str) -> list[float]:
    gradient = torch.full((mesh.topology.world * 32,), float(2**mesh.rank))
    policy = Policy(gradients=(BF16, BF16), reduce=reduce)
    return reduced(mesh, policy, gradient, Wire(mesh, transport=transport)).tolist()


@pytest.mark.parametrize("transport", ["backend", "shm"])
@pytest.mark.parametrize("reduce", ["two_hop", "one_hop", "ring"])
def test_the_mean_is_exact_on_processes(reduce: str, transport: str) -> None:
    """With powers of two as gradients the mean over real processes has no error at all."""
    for got in on_processes(Topology(2, 2), _exactly_summable, reduce, transport):
        assert got == [15 / 4] * 32


def _by_chunks(mesh: Mesh, codecs: tuple[Codec, Codec]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(mesh.rank)
    gradient = torch.randn(mesh.topology.world * 7 * 64, generator=generator)
    policies = [Policy(gradients=codecs, chunks=chunks) for chunks in (1, 2, 3, 8)]
    return [reduced(mesh, policy, gradient.clone()) for policy in policies]


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(3, 2), Topology(1, 3)], ids=str)
@pytest.mark.parametrize(
    "texts",
    [
        ("bf16", "bf16"),
        ("int8:64", "int4:32"),
        ("int4:64:stochastic", "mxfp4:stochastic"),
        ("int4:64:hadamard32", "int4:32:asym:stochastic"),
    ],
)
def test_chunks_change_no_bit(topology: Topology, texts: tuple[str, str]) -> None:
    """However a shard is cut into chunks, the mean has the same bits, also with stochastic rounding."""
    codecs = parse(texts[0]), parse(texts[1])
    for whole, *others in on_threads(topology, _by_chunks, codecs):
        for other in others:
            assert torch.equal(other, whole)


def _opened_in_order(mesh: Mesh, chunks: int) -> tuple[list[str], int, bool]:
    """Axes of the exchanges in the order of opening, how many when it is made, and whether the mean
    survives that the gradient is overwritten there.
    """
    wire, codecs = Wire(mesh), (parse("int8:64"), parse("int4:32"))
    gradient = torch.randn(mesh.topology.world * 8 * 64, generator=torch.Generator().manual_seed(mesh.rank))
    expected = reduced(mesh, Policy(gradients=codecs), gradient.clone())
    opened: list[str] = []
    all_to_all = wire.all_to_all
    wire.all_to_all = lambda axis, *rest, **named: (
        opened.append(axis.name),
        all_to_all(axis, *rest, **named),
    )[1]  # type: ignore[method-assign,assignment]
    how = Reduction(
        wire=wire,
        hops=Policy(gradients=codecs).reduce_axes(mesh.topology),
        tag=GRADIENTS,
        piece=8 * 64,
        chunks=chunked(8 * 64, chunks, 64),
    )
    average = Average(how, gradient)
    before = len(opened)
    gradient.fill_(math.nan)
    return opened, before, torch.equal(average.finish(), expected)


@pytest.mark.parametrize(("chunks", "before"), [(1, 1), (2, 3), (4, 7)])
def test_a_chunk_goes_on_while_later_ones_are_encoded(chunks: int, before: int) -> None:
    """Each chunk's second hop is posted right after the first hop of the chunk behind it, on all ranks alike;
    once it is made all first hops are posted, and the gradient is the caller's again.
    """
    order = ["local", *["local", "node"] * (chunks - 1), "node"]
    assert on_threads(Topology(2, 2), _opened_in_order, chunks) == [(order, before, True)] * 4


def _ring_and_hops(mesh: Mesh) -> list[float]:
    generator = torch.Generator().manual_seed(mesh.rank)
    gradient = torch.randn(mesh.topology.world * 512, generator=generator)
    codecs = (parse("int4:64"),) * 2
    every = [Policy(gradients=codecs, reduce=reduce) for reduce in ("ring", "two_hop")]
    exact = reduced(mesh, Policy(gradients=(FP32, FP32)), gradient.clone())
    return [float((reduced(mesh, policy, gradient.clone()) - exact).square().mean()) for policy in every]


def test_a_quantised_ring_errs_more_than_two_hops() -> None:
    """Encoding at each of 11 steps errs more than twice as much as encoding twice (paper section 3.3).

    Squared errors of growing sums add up to N (N - 1) / 2 of one encoding's in a ring, to 2 N in two hops.
    """
    ring, hops = torch.tensor(on_threads(Topology(4, 3), _ring_and_hops)).mean(0)
    assert ring > 2 * hops


def _beyond_fp16(mesh: Mesh, codecs: tuple[Codec, Codec], sums: Sums) -> tuple[float, float]:
    gradient = torch.ones(mesh.topology.world * 64)
    gradient[::32] = 40_000.0  # of two ranks beyond 65504
    mean = reduced(mesh, Policy(gradients=codecs, sums=sums), gradient)
    return float(mean[0]), float(mean[1])


@pytest.mark.parametrize("texts", [("fp32", "fp32"), ("int8:32", "int8:32"), ("fp32", "int8:32")])
def test_a_sum_beyond_fp16_arrives_as_no_number(texts: tuple[str, str]) -> None:
    """Where DeepSpeed's sums overflow ours do: what was cast is infinite, a block that was encoded NaN; in
    fp32 the mean is there.
    """
    codecs = parse(texts[0]), parse(texts[1])
    for top, beside in on_threads(Topology(2, 2), _beyond_fp16, codecs, "fp16"):
        assert not math.isfinite(top)
        assert math.isfinite(beside) == (texts[1] == "fp32")
    for top, _ in on_threads(Topology(2, 2), _beyond_fp16, codecs, "fp32"):
        assert top == pytest.approx(40_000, rel=0.02)
