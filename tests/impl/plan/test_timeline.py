"""Simulated passes obey what holds for any cluster, and the lower bound is never above the prediction."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.codecs.codec import parse
from impl.plan.prefetch_schedule import Schedule
from impl.plan.step_time import CodecCost, Machine, Step, step_of
from impl.plan.timeline import Collective, Load, TimedHop, in_chunks, least_pass_seconds, pass_time
from impl.plan.traffic import passes, predict
from impl.policy.policy import Policy
from impl.policy.shard_layout import ParameterSpec, UnitGeometry, lay_out
from impl.policy.topology import Topology
from tests.support.strategies import policies, topologies

SECONDS = st.floats(0, 10)
HOPS = st.builds(TimedHop, adapter=SECONDS, inside=SECONDS, latency=SECONDS, before=SECONDS)
COLLECTIVES = st.builds(Collective, hops=st.lists(HOPS, max_size=3).map(tuple), after=SECONDS)
LOAD = st.builds(
    Load,
    **dict.fromkeys(("forward", "backward", "engine"), SECONDS),
    **dict.fromkeys(("gather", "regather", "reduce"), COLLECTIVES),
)
LOADS = st.lists(LOAD, min_size=2, max_size=7)
AHEAD = st.integers(0, 4)
MACHINE = Machine(
    name="m", source="s", fixed=1e-9, per_token=1e-11, efficiency=1, fewest=1, most=1e9, overlap="schedule"
)


def _schedule(units: int, prefetch: int = 1 << 40, *, paired: bool = False) -> Schedule:
    """A schedule in which unit 0 is the root's and all units have one element; ``paired``: all blocks are small."""
    order = tuple(range(1, units))
    return Schedule([1] * units, order, (0,), prefetch, small=frozenset(order) if paired else frozenset())


def _bare(collective: Collective) -> Collective:
    """The same loads, but only the adapter takes time."""
    return Collective(hops=tuple(TimedHop(adapter=hop.adapter) for hop in collective.hops))


@given(
    LOADS,
    st.tuples(AHEAD, st.booleans()),
    st.frozensets(st.integers(0, 6)),
    st.integers(0, 4),
    st.integers(1, 3),
)
def test_a_pass_takes_its_longest_resource_at_least_and_all_in_a_row_at_most(
    loads: list[Load], ahead: tuple[int, bool], frozen: frozenset[int], bucket: int, together: int
) -> None:
    """A pass takes at least the time of each resource and its bound, and at most the sum; overlap never costs time.

    This holds whichever units are frozen, run together or are gathered in pairs, and however many elements may be in
    reduction.
    """
    frozen &= {*range(len(loads))}
    blocks = [str(unit // together) for unit in range(len(loads))]
    prefetch, paired = ahead
    schedule = replace(_schedule(len(loads), prefetch, paired=paired), frozen=frozen, blocks=blocks)
    loads = [
        replace(load, reduce=Collective()) if unit in frozen else load for unit, load in enumerate(loads)
    ]
    bare = [
        replace(
            load, **{name: _bare(getattr(load, name)) for name in ("gather", "regather", "reduce")}, engine=0
        )
        for load in loads
    ]
    run, bound = pass_time(schedule, loads, bucket=bucket), least_pass_seconds(schedule, bare)
    collectives = [collective for load in loads for collective in (load.gather, load.regather, load.reduce)]
    hops = [hop for collective in collectives for hop in collective.hops]
    computing = sum(load.forward + load.backward for load in loads)
    everything = computing + sum(2 * load.engine for load in loads)
    everything += sum(collective.after for collective in collectives)
    everything += sum(hop.adapter + hop.inside + hop.latency + hop.before for hop in hops)
    worked = everything - sum(hop.adapter + hop.inside + hop.latency for hop in hops)
    assert run.seconds - run.exposed == pytest.approx(worked)
    assert max(worked, run.adapter, sum(hop.inside for hop in hops), bound) - 1e-9 <= run.seconds
    assert run.seconds <= everything + 1e-6
    assert run.adapter == pytest.approx(sum(hop.adapter for hop in hops))
    assert bound >= max(computing, run.adapter) - 1e-9


@given(LOADS, AHEAD, st.integers(0, 4), st.booleans())
def test_a_pass_lists_what_it_does(loads: list[Load], prefetch: int, bucket: int, paired: bool) -> None:
    """Stretches of work and waits fill the pass, in order, and each message begins and arrives after its posting."""
    run = pass_time(_schedule(len(loads), prefetch, paired=paired), loads, bucket=bucket)
    worked = [(float(each.begin), float(each.end)) for each in run.stretches]
    assert math.fsum(end - begin for begin, end in worked) + run.exposed == pytest.approx(run.seconds)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(worked))
    assert [(each.purpose, each.unit) for each in run.messages] == [
        event for event in run.events if event[0] != "mean"
    ]
    for each in run.messages:
        assert each.posted <= each.begin <= each.arrival - max(each.hop.adapter, each.hop.inside) + 1e-6


def test_a_pass_by_hand() -> None:
    """Two blocks in which everything takes a second: gathers, computation, and backward with reductions, by hand."""
    second = Collective(hops=(TimedHop(adapter=1),))
    block = Load(forward=1, backward=1, gather=second, reduce=second)
    # forward: gathered at 1 and 2, computed until 3; backward: until 5, reduced at 5 and 6
    loads = [Load(forward=0, backward=0), block, block]
    assert pass_time(_schedule(3), loads).seconds == pytest.approx(6)
    assert least_pass_seconds(_schedule(3), loads) == pytest.approx(6)


def test_a_pair_is_posted_by_one_call_and_ready_at_once() -> None:
    """Blocks 2 and 3 are a pair: one call posts both, 2 waits for the messages of both, and 3 waits no more."""
    gather = Collective(hops=(TimedHop(adapter=1, latency=0.5, before=0.25, call=0.25),), after=0.5)
    block = Load(forward=1, backward=0, gather=gather)
    loads = [Load(forward=0, backward=0), *[block] * 4]
    # Alone: posted at 0.25, 0.5, 0.75 and 1; arrived at 1.75, 2.75, 3.75, 4.75; computed from 2.25, 3.75, 5.25, 6.75.
    alone = pass_time(_schedule(5), loads)
    assert (alone.seconds, alone.exposed) == pytest.approx((7.75, 0.75))
    # In pairs: posted at 0.25, 0.5, 0.5 and 0.75; arrived at the same times; 2 and 3 are both decoded from 3.75 on, and
    # computed from 4.75 and 5.75; 4 is decoded from 6.75 on.
    run = pass_time(_schedule(5, paired=True), loads)
    assert [message.posted for message in run.messages] == pytest.approx([0.25, 0.5, 0.5, 0.75])
    assert [message.arrival for message in run.messages] == pytest.approx([1.75, 2.75, 3.75, 4.75])
    begun = [
        stretch.begin for stretch in run.stretches if stretch.work == "forward" and stretch.units != (0,)
    ]
    assert begun == pytest.approx([2.25, 4.75, 5.75, 7.25])
    assert (run.seconds, run.exposed) == pytest.approx((8.25, 1.5))


def test_the_hops_of_a_pair_are_posted_together() -> None:
    """The second hops of 2 and 3 follow both of their first hops, when 2 is waited for; those of 1 and 4 their own."""
    hops = TimedHop(adapter=1, before=0.5, call=0.5), TimedHop(adapter=0, inside=1, before=0.5, call=0.5)
    block = Load(forward=0, backward=0, gather=Collective(hops=hops))
    run = pass_time(_schedule(5, paired=True), [Load(forward=0, backward=0), *[block] * 4])
    assert [message.unit for message in run.messages] == [1, 2, 3, 4, 1, 2, 3, 4]
    # First hops are on the adapter from 0.5 on, a second each, and second hops inside a node from 2, 4 and 6.5 on.
    assert [message.posted for message in run.messages] == pytest.approx([0.5, 1, 1, 1.5, 2, 4, 4, 6.5])
    assert [message.arrival for message in run.messages] == pytest.approx([1.5, 2.5, 3.5, 4.5, 3, 5, 6, 7.5])
    assert run.seconds == pytest.approx(7.5)


@given(LOADS, AHEAD)
def test_without_two_small_blocks_in_a_row_nothing_changes(loads: list[Load], prefetch: int) -> None:
    """A schedule in which every other block is small has no pairs, and its pass is bit-equal."""
    schedule = _schedule(len(loads), prefetch)
    other = replace(schedule, small=frozenset(schedule.order[::2]))
    assert not other.pairs
    run, changed = pass_time(schedule, loads), pass_time(other, loads)
    assert (run.seconds, run.exposed, run.messages) == (changed.seconds, changed.exposed, changed.messages)


def test_the_second_hop_of_a_reduction_waits_for_the_next_gradient() -> None:
    """It is posted after a third of the next unit's backward pass; the last unit's is posted at once, at the end."""
    two = Collective(hops=(TimedHop(adapter=0), TimedHop(adapter=1)))
    loads = [Load(forward=0, backward=0), *[Load(forward=0, backward=3, reduce=two)] * 2]
    # computed until 3; posted at 4, gone at 5; computed until 6, gone at 7
    run = pass_time(_schedule(3), loads)
    assert run.seconds == pytest.approx(7)
    assert run.exposed == pytest.approx(1)


def test_frozen_units_take_no_place_among_the_reductions() -> None:
    """However large frozen units are, 90 thousand trained elements fit into a bucket of 500 thousand."""
    topology, policy = Topology(2, 2), Policy()
    how: Any = {"grain": 32, "world": 4, "max_padding": 1}
    units = [lay_out("root", [ParameterSpec("e", (1024, 64))], **how)]
    for block in range(6):
        units.append(lay_out(f"b{block}", [ParameterSpec("w", (64, 64))], **how))
        frozen = [ParameterSpec("f", (1024, 1024))]
        units.append(lay_out(f"b{block}.frozen", frozen, trainable=False, **how))
    assert sum(unit.padded for unit in units if unit.trainable) < 10**5
    seconds, few = (
        step_of(
            MACHINE,
            Step(
                policy=replace(policy, memory=replace(policy.memory, reduce_bucket=bucket)),
                topology=topology, units=units, parameters=7e6, tokens=1000, rate=1e7,
            ),
        ).seconds
        for bucket in (5 * 10**8, 5 * 10**5)
    )  # fmt: skip
    assert few == seconds


def test_a_full_bucket_waits_for_the_first_of_its_reductions() -> None:
    """With three blocks and room for one in the bucket, each reduction starts after the one before has ended."""
    second = Collective(hops=(TimedHop(adapter=1),), after=1)
    loads = [Load(forward=0, backward=0), *[Load(forward=0, backward=0, reduce=second)] * 3]
    # sent until 1, decoded until 2, three times over; else sent until 3, the last one decoded until 4
    assert pass_time(_schedule(4), loads, bucket=1).seconds == pytest.approx(6)
    assert pass_time(_schedule(4), loads, bucket=3).seconds == pytest.approx(4)


def test_a_pass_that_accumulates_reduces_nothing() -> None:
    """A pass that only accumulates gradients takes just its computation."""
    loads = [Load(forward=1, backward=1, reduce=Collective(hops=(TimedHop(adapter=9),)))] * 3
    assert pass_time(_schedule(3), loads, reduces=False).seconds == pytest.approx(6)


def test_chunks_are_sent_on_both_hops_at_once() -> None:
    """A chunk is sent between nodes once the next chunk was posted inside the node; the last one at the next event."""
    inside, between = TimedHop(adapter=0, inside=1), TimedHop(adapter=1)
    hops = in_chunks([[inside] * 3, [between] * 3])
    assert [hop.adapter for hop in hops] == [0, 0, 1, 0, 1, 1]
    assert [hop.follows for hop in hops] == [0, 0, 2, 0, 3, 2]
    assert [hop.at_once for hop in hops] == [False, True, True, True, True, False]
    loads = [Load(forward=0, backward=0), Load(forward=0, backward=0, reduce=Collective(hops=hops))]
    # inside until 1, 2 and 3; between nodes from 1, 2 and 3 on
    assert pass_time(_schedule(2), loads).seconds == pytest.approx(4)
    assert in_chunks([]) == ()


def test_a_rings_steps_follow_one_another() -> None:
    """On four ranks each step of a ring waits for the one before: three latencies in place of one."""
    policy, topology = Policy(gather="flat", reduce="ring"), Topology(4, 1)
    step = Step(policy=policy, topology=topology, units=_units(topology, policy), parameters=1e4, tokens=1)
    late, later = (step_of(replace(MACHINE, latency=seconds), step).seconds for seconds in (1.0, 2.0))
    assert later - late >= 3 - 1e-6  # of the last unit none is hidden


def _units(topology: Topology, policy: Policy) -> list[UnitGeometry]:
    how: Any = {"grain": policy.grain, "world": topology.world, "group": policy.group_ranks(topology)}
    return [
        lay_out(name, [ParameterSpec("w", (size,))], max_padding=1e9, **how)
        for name, size in {"root": 1000, "block0": 2000, "block1": 3000, "block2": 4000}.items()
    ]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Draw a step of any policy on any topology, without differences, which the first step does not send."""
    topology = draw(topologies())
    policy = replace(draw(policies(topology)), order_every=0, differences=None, refresh=0)
    return Step(
        policy=policy,
        topology=topology,
        units=_units(topology, policy),
        parameters=1e4,
        tokens=draw(st.integers(1, 1000)),
        micro_batches=draw(st.integers(1, 3)),
        rate=draw(st.floats(1e3, 1e9)),
    )


COSTLY = replace(
    MACHINE,
    **dict.fromkeys(("element", "sent", "optimizer"), 1e-9),
    **dict.fromkeys(("latency", "unit"), 1e-4),
    inside=1e9,
    processors=2,
    codecs={"int8:128": CodecCost(encode=1e-9, decode=2e-9), "bf16": CodecCost(encode=1e-10, decode=1e-10)},
)


@given(steps())
def test_what_the_model_sends_is_what_is_predicted_to_the_byte(step: Step) -> None:
    """At one byte a second the adapter is busy for as many seconds as :func:`predict` counts bytes."""
    events, ranks = passes(step.policy, micro_batches=step.micro_batches), range(step.topology.ranks_per_node)
    books = [predict(step.policy, step.topology, step.units, rank, events) for rank in ranks]
    sent = sum(sent.bytes for book in books for key, sent in book.sent.items() if key.link == "inter")
    assert step_of(MACHINE, replace(step, rate=1.0)).wire == pytest.approx(sent, rel=1e-9)


@pytest.mark.parametrize("text", ["bf16", "int4:128"])
def test_differences_are_decoded_to_be_added_whatever_the_type_of_the_copy(text: str) -> None:
    """A gather of differences decodes those of all nodes, in addition to what a gather of weights decodes."""
    topology, cost = Topology(2, 2), CodecCost(encode=1.0, decode=1.0)
    machine = replace(MACHINE, codecs={"bf16": cost, text: cost})
    weights = Policy(secondary="node", align=128)
    differences = replace(weights, differences=parse(text))
    units = _units(topology, differences)
    without, with_differences = (
        step_of(machine, Step(policy=policy, topology=topology, units=units, parameters=1e4, tokens=1))
        for policy in (weights, differences)
    )
    expected = cost.decode * topology.nodes * sum(unit.shard for unit in units)
    assert with_differences.seconds - without.seconds == pytest.approx(expected)


@given(steps(), st.floats(1, 100))
def test_more_bandwidth_or_faster_codecs_never_lengthen_a_step(step: Step, factor: float) -> None:
    """Neither do fewer tokens, lower latency, a faster engine, or more processors."""
    faster = {
        text: CodecCost(encode=cost.encode / factor, decode=cost.decode / factor)
        for text, cost in COSTLY.codecs.items()
    }
    most = step_of(COSTLY, step).seconds * (1 + 1e-9)
    for better in ({"rate": step.rate * factor}, {"tokens": step.tokens / factor}):
        assert step_of(COSTLY, replace(step, **better)).seconds <= most
    for better in (
        {"codecs": faster},
        {"latency": COSTLY.latency / factor},
        {"unit": COSTLY.unit / factor},
        {"inside": COSTLY.inside * factor},
        {"processors": 64},
    ):
        assert step_of(replace(COSTLY, **better), step).seconds <= most


@given(steps())
def test_with_infinite_bandwidth_a_step_is_its_computation_and_overhead(step: Step) -> None:
    """If messages take no time, the rank never waits and no link is busy."""
    unlimited = step_of(replace(COSTLY, latency=0.0, inside=0.0), replace(step, rate=math.inf))
    assert (unlimited.wire, unlimited.exposed) == (0.0, 0.0)
    assert unlimited.critical == "processor"
    free = step_of(replace(MACHINE, optimizer=0.0), replace(step, rate=math.inf))
    assert free.seconds == pytest.approx(free.compute)
