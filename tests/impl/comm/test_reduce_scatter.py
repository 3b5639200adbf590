"""Tests that reductions along any axes give each rank the right mean."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impl.codecs.codec import BF16, FP32, Codec, parse
from impl.codecs.rounding_noise import Clock
from impl.comm.error_feedback import Errors
from impl.comm.mesh import Mesh
from impl.comm.reduce_scatter import reduction_of
from impl.comm.wire import Wire
from impl.plan.traffic import Tag
from impl.policy.policy import Policy
from impl.policy.topology import Axis, Topology
from tests.support.params import nightly
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import as_published, policies, topologies

GRADIENTS = Tag("backward", "gradients", "u")


def reduced(
    mesh: Mesh, policy: Policy, gradient: torch.Tensor, wire: Wire | None = None, errors: Errors | None = None
) -> torch.Tensor:
    """Return this rank's shard of the mean."""
    shard = gradient.numel() // mesh.topology.world
    reduction = reduction_of(policy, wire or Wire(mesh), GRADIENTS, shard, policy.grain)
    key = Clock(7).gradients("u", mesh.rank)
    reduction.start(gradient, key=key, errors=errors)
    return reduction.finish()


SHAPES = [Topology(n, r) for n, r in itertools.product(range(1, 7), repeat=2)]


@pytest.mark.parametrize(
    "topology", [t for t in SHAPES if t.world <= 12] + nightly(*(t for t in SHAPES if t.world > 12)), ids=str
)
@pytest.mark.parametrize("reduce", ["two_hop", "one_hop", "ring"])
@each_rank()
def test_each_rank_receives_its_own_partition(mesh: Mesh, topology: Topology, reduce: Any) -> None:
    """If each partition is filled with its own index, rank r ends with r, for every topology."""
    gradient = torch.arange(topology.world).repeat_interleave(32).float()
    got = reduced(mesh, Policy(gradients=(FP32, FP32), reduce=reduce), gradient)
    assert got.tolist() == [mesh.rank] * 32


def values(mesh: Mesh, numel: int, seed: int = 0) -> torch.Tensor:
    """Return a rank's gradient."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed + mesh.rank))


def _mean_and_bound(mesh: Mesh, policy: Policy, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    gradient = values(mesh, mesh.topology.world * policy.grain, seed)
    return gradient.clone(), reduced(mesh, policy, gradient)


def hop_error(codec: Codec, x: torch.Tensor) -> float:
    """Return the largest error of one encoding of values of magnitude up to max |x|."""
    top = x.abs().max().item()
    return codec.error_bound(-top, top)


@given(st.data(), st.integers(0, 1000))
def test_every_reduction_is_the_mean_within_the_bound_of_its_hops(data: st.DataObject, seed: int) -> None:
    """Flat, one-hop and two-hop reductions in any codecs stay within the error bound of their hops together."""
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


@pytest.mark.parametrize("transport", ["backend", "shm"])
@pytest.mark.parametrize("reduce", ["two_hop", "one_hop", "ring"])
@each_rank(2, 2, processes=True)
def test_the_mean_is_exact_on_processes(mesh: Mesh, reduce: str, transport: str) -> None:
    """With powers of two as gradients, the mean over real processes is exact."""
    policy, gradient = Policy(gradients=(BF16, BF16), reduce=reduce), torch.full((4 * 32,), 2.0**mesh.rank)
    got = reduced(mesh, policy, gradient, Wire(mesh, transport=transport))
    assert got.tolist() == [15 / 4] * 32


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
@each_rank()
def test_chunks_change_no_bit(mesh: Mesh, topology: Topology, texts: tuple[str, str]) -> None:
    """However a shard is cut into chunks, the mean has the same bits, also with stochastic rounding."""
    gradient, codecs = values(mesh, topology.world * 7 * 64), (parse(texts[0]), parse(texts[1]))
    whole, *others = (
        reduced(mesh, Policy(gradients=codecs, chunks=chunks), gradient.clone()) for chunks in (1, 2, 3, 8)
    )
    assert all(torch.equal(other, whole) for other in others)


@pytest.mark.parametrize(("chunks", "before"), [(1, 1), (2, 3), (4, 7)])
@each_rank(2, 2)
def test_a_chunk_goes_on_while_later_ones_are_encoded(mesh: Mesh, chunks: int, before: int) -> None:
    """A chunk's second hop is posted right after the next chunk's first hop; then the gradient's memory is free."""
    wire, codecs = Wire(mesh), (parse("int8:64"), parse("int4:32"))
    gradient = values(mesh, mesh.topology.world * 8 * 64)
    expected = reduced(mesh, Policy(gradients=codecs), gradient.clone())
    opened: list[str] = []
    all_to_all = wire.all_to_all

    def noted(axis: Axis, *rest: Any, **named: Any) -> Any:
        opened.append(axis.name)
        return all_to_all(axis, *rest, **named)

    wire.all_to_all = noted  # type: ignore[method-assign]
    under_way = reduction_of(Policy(gradients=codecs, chunks=chunks), wire, GRADIENTS, 8 * 64, 64)
    under_way.start(gradient)
    assert len(opened) == before
    gradient.fill_(math.nan)
    assert torch.equal(under_way.finish(), expected)
    assert opened == ["local", *["local", "node"] * (chunks - 1), "node"]


def _ring_and_hops(mesh: Mesh) -> list[float]:
    gradient, codecs = values(mesh, mesh.topology.world * 512), (parse("int4:64"),) * 2
    every = [Policy(gradients=codecs, reduce=reduce) for reduce in ("ring", "two_hop")]
    exact = reduced(mesh, Policy(gradients=(FP32, FP32)), gradient.clone())
    return [float((reduced(mesh, policy, gradient.clone()) - exact).square().mean()) for policy in every]


def test_a_quantised_ring_errs_more_than_two_hops() -> None:
    """11 encodings err more than twice as much as 2: N (N - 1) / 2 times one encoding's squared error against 2 N
    (paper 3.3).
    """
    ring, hops = torch.tensor(on_threads(Topology(4, 3), _ring_and_hops)).mean(0)
    assert ring > 2 * hops


@pytest.mark.parametrize("texts", [("fp32", "fp32"), ("int8:32", "int8:32"), ("fp32", "int8:32")])
@each_rank(2, 2)
def test_a_sum_beyond_fp16_arrives_as_no_number(mesh: Mesh, texts: tuple[str, str]) -> None:
    """Sums in fp16 overflow where DeepSpeed's do: casts become infinite, encoded blocks NaN; in fp32 the mean is
    right.
    """
    gradient, codecs = torch.ones(mesh.topology.world * 64), (parse(texts[0]), parse(texts[1]))
    gradient[::32] = 40_000.0  # of two ranks beyond 65504
    top, beside = reduced(mesh, Policy(gradients=codecs, sums="fp16"), gradient.clone())[:2].tolist()
    assert not math.isfinite(top)
    assert math.isfinite(beside) == (texts[1] == "fp32")
    mean = reduced(mesh, Policy(gradients=codecs, sums="fp32"), gradient)
    assert float(mean[0]) == pytest.approx(40_000, rel=0.02)
