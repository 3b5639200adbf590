"""Tests of error feedback: lost parts of gradients are made up for, and errors are cleared when they must be."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from impl.codecs import reference
from impl.codecs.codec import parse
from impl.codecs.reference import Carried
from impl.comm.error_feedback import Errors
from impl.comm.mesh import Mesh
from impl.plan.hops import reduction_hops
from impl.policy.policy import Feedback, MemoryLimits, Policy
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.zero import Zero, ZeroError, shard
from tests.impl.comm.test_reduce_scatter import hop_error, reduced
from tests.support.ranks import each_rank, on_threads
from tests.support.strategies import blocks_of_values, engine_codecs, topologies
from tests.support.training import batch, sgd

STEPS = 40
NET = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))
INT4 = Policy(gradients=(parse("int4:8"),) * 2, memory=MemoryLimits(max_padding=1e9))


@given(blocks_of_values(finite=False), blocks_of_values(), st.sampled_from([0.0, 0.5, 0.8]), engine_codecs)
def test_the_carried_error_is_never_broken(x: Tensor, error: Tensor, decay: float, codec) -> None:  # noqa: ANN001
    """A NaN or an infinity in a gradient leaves neither in the carried error."""
    numel = min(x.numel(), error.numel())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        kept = error[:numel].clamp(-6e4, 6e4).to(dtype)
        frames = torch.empty(codec.frame_bytes(numel), dtype=torch.uint8)
        noise = reference.Noise((1, 2, 3, 4))
        reference.encode(codec, x[:numel], frames, noise=noise, carried=Carried(kept, decay))
        assert kept.isfinite().all()


@given(st.sampled_from([0.0, 0.8, 0.25]), st.integers(0, 2**31))
def test_the_carried_error_follows_its_formula(decay: float, seed: int) -> None:
    """The new error is decay * error + (1 - decay) * (x + error - decoded), for each element."""
    generator = torch.Generator().manual_seed(seed)
    codec = parse("int4:8")
    kept = torch.zeros(64)
    frames, decoded = torch.empty(codec.frame_bytes(64), dtype=torch.uint8), torch.empty(64)
    for _ in range(5):
        x, before = torch.randn(64, generator=generator), kept.double()
        reference.encode(codec, x, frames, carried=Carried(kept, decay))
        reference.decode(codec, frames, decoded)
        wanted = decay * before + (1 - decay) * (x.double() + before - decoded.double())
        assert torch.allclose(kept.double(), wanted, rtol=1e-5, atol=1e-6)


def _accumulated(mesh: Mesh, policy: Policy, seed: int) -> tuple[Tensor, list[Tensor]]:
    """Return this rank's constant gradient (world * S,), and the running sums of its shard of the mean."""
    generator = torch.Generator().manual_seed(seed + mesh.rank)
    gradient = torch.rand(mesh.topology.world * policy.grain, generator=generator) + 0.2
    hops = reduction_hops(policy, mesh.topology, policy.grain, policy.grain)
    errors = policy.feedback and Errors(policy.feedback, hops, mesh.device)
    total, sums = torch.zeros(policy.grain, dtype=torch.float64), []
    for _ in range(STEPS):
        total += reduced(mesh, policy, gradient.clone(), errors=errors).double()
        sums.append(total.clone())
    return gradient, sums


@given(topologies(6), st.sampled_from(["two_hop", "one_hop"]), st.integers(0, 1000))
def test_with_classic_feedback_the_accumulated_error_stays_bounded(
    topology: Topology, reduce: str, seed: int
) -> None:
    """After any number of steps, the sum of means is off by no more than the errors of the last encodings."""
    feedback = Feedback(hops="all")
    policy = replace(INT4, reduce=reduce, feedback=feedback)
    results = on_threads(topology, _accumulated, policy, seed)
    mean = torch.stack([gradient for gradient, _ in results]).double().mean(0).view(topology.world, -1)
    codec, top, ranks = policy.gradients[0], torch.tensor([1.2]), topology.ranks_per_node
    first = hop_error(codec, top * 1.2)  # the error itself is encoded too: within a fifth of the values
    lost = topology.world * first
    if reduce == "two_hop":
        lost += topology.nodes * hop_error(codec, ranks * top * 1.44)
    for rank, (_, sums) in enumerate(results):
        for step, total in enumerate(sums, 1):
            assert (total - step * mean[rank]).abs().max() <= lost / topology.world + 1e-4 * step


def _loss(zero: Zero, step: int, rank: int, scale: float = 1.0) -> Tensor:
    return zero.model(batch(step, rank) * scale).square().mean()


def _engine(mesh: Mesh, policy: Policy) -> Zero:
    return shard(copy.deepcopy(NET), mesh=mesh, policy=policy, seed=5)


def _any_error(zero: Zero) -> bool:
    carried = [errors.state() for unit in zero.units if (errors := unit.reduction.feedback()) is not None]
    return any(bool(v.any()) for state in carried for name, v in state.items() if name != "since")


@pytest.mark.parametrize("micro_batches", [1, 3])
@each_rank(2, 2)
def test_resets_are_counted_in_optimizer_steps(mesh: Mesh, micro_batches: int) -> None:
    """With reset=2 errors are forgotten before every second step, whatever the accumulation."""
    zero = _engine(mesh, replace(INT4, feedback=Feedback(decay=0.5, reset=2, hops="all")))
    optimizers = [sgd([group]) for group in zero.param_groups()]
    optimizers.append(optimizers[0])  # two that step after one backward pass are one step
    for step in range(5):
        assert _any_error(zero) == (step % 2 == 1)
        for _ in range(micro_batches):
            _loss(zero, step, mesh.rank).backward()
        for optimizer in optimizers:
            optimizer.step()


@each_rank(2, 2)
def test_an_overflow_clears_the_errors_of_all_ranks(mesh: Mesh) -> None:
    """When one rank's gradient is infinite, no rank carries an error into the next step."""
    zero = _engine(mesh, replace(INT4, feedback=Feedback(hops="all")))
    _loss(zero, 0, mesh.rank).backward()
    assert _any_error(zero)
    sgd(zero.param_groups()).zero_grad()
    _loss(zero, 1, mesh.rank, scale=torch.inf if mesh.rank == 3 else 1.0).backward()
    assert not zero.clip_grad_norm_(1.0).isfinite()
    assert not _any_error(zero)


SDP4BIT = preset("sdp4bit", memory=INT4.memory, differences=parse("int4:8"))


@pytest.mark.parametrize(("policy", "part"), [(replace(INT4, feedback=Feedback()), "hop"), (SDP4BIT, "copy")])
@each_rank(2, 2)
def test_state_that_does_not_fit_is_refused_whole(mesh: Mesh, policy: Policy, part: str) -> None:
    """Errors or copies of another shape raise an error that names their unit, and change nothing."""
    zero = _engine(mesh, policy)
    with torch.no_grad():
        _loss(zero, 0, mesh.rank)
    before = zero.communication_state()
    *_, last = (name for name in before if f"/{part}" in name)
    misfit = {name: value + 1 for name, value in before.items()} | {last: before[last][..., 1:]}
    with pytest.raises(ZeroError, match=r"^state of unit '"):
        zero.load_communication_state(misfit)
    after = zero.communication_state()
    assert all(torch.equal(before[name], after[name]) for name in before)
