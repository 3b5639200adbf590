"""The engine posts its messages, and waits for full buckets, in the order of the simulated timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from hypothesis import example, given
from hypothesis import strategies as st

from impl.comm.all_gather import FrameGather
from impl.comm.mesh import Mesh
from impl.comm.reduce_scatter import Reduction, Ring
from impl.plan.step_time import Machine, Step, passes_of
from impl.policy.policy import MemoryLimits, Offload, Policy, PolicyError
from impl.policy.presets import preset
from impl.policy.topology import Topology
from impl.unit.gradient_reduction import GradientReduction
from tests.support.ranks import on_threads
from tests.support.strategies import ROOMY, as_published, policies, topologies
from tests.support.training import Training, model

MACHINE = Machine(
    name="m", source="s", fixed=1e-9, per_token=1e-11, efficiency=1, fewest=1, most=1e9, overlap="schedule"
)
Events = list[tuple[str, str]]  # purpose of a message, or ``mean``, and the unit


@contextmanager
def _watched() -> Iterator[dict[int, Events]]:
    """Record for each rank every message that is posted, as (purpose, unit), and every mean that is taken."""
    log: dict[int, Events] = {}

    def noting(owner: type, name: str, event: Callable[[Any], tuple[int, tuple[str, str]] | None]) -> Any:
        original = getattr(owner, name)

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if (seen := event(self)) is not None:
                log.setdefault(seen[0], []).append(seen[1])
            return result

        return mock.patch.object(owner, name, noted)

    def of_gather(gather: Any) -> tuple[int, tuple[str, str]] | None:
        if gather.hops[-gather.left - 1].axis.size == 1:
            return None  # alone: nothing is sent
        purpose = "gradients" if gather._tag.purpose == "gradients" else "weights"
        return gather._wire.mesh.rank, (purpose, gather._tag.unit)

    def of_reduction(reduction: Any) -> tuple[int, tuple[str, str]]:
        return reduction.wire.mesh.rank, ("gradients", reduction.tag.unit)

    def of_mean(reduction: Any) -> tuple[int, tuple[str, str]]:
        return reduction._wire.mesh.rank, ("mean", reduction._geometry.name)

    with (
        noting(FrameGather, "start", of_gather),
        noting(FrameGather, "post_next_hop", of_gather),
        noting(Reduction, "_send_first", of_reduction),
        noting(Reduction, "_send_on", of_reduction),
        noting(Ring, "_send_step", of_reduction),
        noting(GradientReduction, "_take", of_mean),
    ):
        yield log


def _issued(mesh: Mesh, policy: Policy, options: dict[str, Any], frozen: list[str], passes: int) -> Any:
    """Run the micro-batches of a step; returns the model's units."""
    net = model(**options)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    run = Training(mesh, net, policy)
    for number in range(passes):
        run.backward(number, local=number < passes - 1)
    return [unit.geometry for unit in run.zero.units]


PARTS = ["blocks.1.", "blocks.2.up", "blocks.3.", "blocks.4.norm", "head"]
"""Blocks, parts of blocks and an outer layer that are frozen in some draws; the first layers train."""


@st.composite
def draws(draw: st.DrawFn) -> tuple[Topology, Policy, dict[str, Any], list[str], int]:
    topology = draw(topologies(4))
    offload = draw(st.sampled_from([Offload(), Offload(optimizer=1.0), Offload(optimizer=0.5, weights=0.5)]))
    policy = draw(policies(topology, offload=offload).flatmap(as_published))
    memory = replace(
        policy.memory,
        prefetch=draw(st.sampled_from([0, 200, 1500, 4000, 10**6])),
        max_live=draw(st.sampled_from([0, 3000, 6000, 10**9])),
        reduce_bucket=draw(st.sampled_from([0, 1500, 3000, 6000, 10**9])),
        persist_below=draw(st.sampled_from([0, 20, 10**9])),
    )
    policy = replace(policy, memory=memory, order_every=0)
    chunked = draw(st.sampled_from([1, 2, 3]))
    try:
        (other := replace(policy, chunks=chunked)).check(topology)
    except PolicyError:
        other = policy
    options = {"depth": draw(st.integers(1, 7)), "tied": draw(st.booleans())}
    frozen = draw(st.lists(st.sampled_from(PARTS), unique=True, max_size=4))
    return (
        topology,
        other,
        options,
        [part for part in frozen if not options["tied"] or part != "head"],
        draw(st.integers(1, 2)),
    )


def _small(**limits: Any) -> MemoryLimits:
    return replace(ROOMY, **limits)


_LATE = _small(persist_below=20, prefetch=0, max_reuse=0)  # norms' gradients come after their block's


@given(draws())
@example((Topology(2, 2), preset("zeropp", memory=_small(reduce_bucket=3000)), {"depth": 5}, [], 1))
@example((Topology(2, 2), preset("zero3", memory=_small(reduce_bucket=3000)), {"depth": 5}, PARTS, 1))
@example((Topology(1, 2), preset("hpz", memory=_small(persist_below=20)), {"depth": 2}, [], 1))
@example((Topology(1, 4), preset("zero3", memory=_small(reduce_bucket=3000)), {"depth": 4}, PARTS[:1], 2))
@example((Topology(3, 1), preset("zero3-flat", memory=_small(reduce_bucket=3000)), {"depth": 4}, [], 1))
@example((Topology(2, 2), preset("mics", memory=_small(reduce_bucket=2000)), {"depth": 4}, PARTS[:2], 1))
@example((Topology(2, 1), preset("zero2", memory=_small(persist_below=20)), {"depth": 4}, PARTS, 2))
@example((Topology(2, 2), preset("zeropp", memory=_LATE), {"depth": 4}, PARTS[4:], 1))
@example((Topology(2, 2), preset("zeropp", chunks=3, memory=_small()), {"depth": 3}, ["blocks.1.up"], 1))
def test_gathers_reductions_and_buckets_come_in_the_order_of_the_prediction(
    drawn: tuple[Topology, Policy, dict[str, Any], list[str], int],
) -> None:
    """On every rank, all messages of weights and gradients, and all waits for a mean, come in the predicted order.

    This holds with units that are frozen in whole or in part, kept, persistent, tied, offloaded, in chunks, in
    rings and in groups, at all stages.
    """
    topology, policy, options, frozen, micro_batches = drawn
    with _watched() as log:
        units, *_ = on_threads(topology, _issued, policy, options, frozen, micro_batches)
    step = Step(
        policy=policy, topology=topology, units=units, parameters=1e4, tokens=4, micro_batches=micro_batches
    )
    names = [unit.name for unit in units]
    expected = [(what, names[unit]) for run in passes_of(MACHINE, step) for what, unit in run.events]
    for rank in range(topology.world):
        assert log.get(rank, []) == expected
