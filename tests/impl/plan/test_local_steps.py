"""Local steps: when groups meet, what they send and hold then, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.codecs.codec import BF16, FP32, parse
from impl.plan.hops import outer_hops, reduction_hops
from impl.plan.local_steps import fragments_of, meeting_steps, meets
from impl.plan.memory import memory
from impl.plan.step_time import Machine, Step, step_of
from impl.plan.traffic import Event, LedgerKey, Sent, passes, predict
from impl.policy.policy import Feedback, LossScale, Offload, Policy, PolicyError
from impl.policy.shard_layout import ParameterSpec, UnitGeometry, lay_out
from impl.policy.topology import Topology

MICS = Policy(group="node", gradients=(BF16, parse("int4:64")))
TOPOLOGY = Topology(2, 2)


def units_of(policy: Policy, topology: Topology = TOPOLOGY, count: int = 3) -> list[UnitGeometry]:
    specs, group = [ParameterSpec("w", (1 << 10,))], policy.group_ranks(topology)
    where = {"grain": 64, "world": topology.world, "max_padding": 1.0, "group": group}
    return [lay_out(f"u{number}", specs, **where) for number in range(count)]


def sent(policy: Policy, topology: Topology, steps: int, rank: int = 0) -> dict[LedgerKey, Sent]:
    events: list[Event] = passes(policy, norms=1) * steps
    return predict(policy, topology, units_of(policy, topology), rank, events).sent


@given(st.integers(1, 12), st.data())
def test_every_fragment_is_exchanged_once_in_a_round(steps: int, data: st.DataObject) -> None:
    """In any ``local_steps`` steps in a row each fragment is due once, and no two fragments are due after one step."""
    fragments = data.draw(st.integers(1, steps))
    policy = replace(MICS, local_steps=steps, local_fragments=fragments)
    first = data.draw(st.integers(1, 30))
    due = [[f for f in range(fragments) if meets(policy, first + i, f)] for i in range(steps)]
    assert sorted(fragment for each in due for fragment in each) == [*range(fragments)]
    assert all(len(each) <= 1 for each in due)
    assert len(meeting_steps(policy)) == fragments


def test_fragments_are_spread_over_a_round() -> None:
    """With 8 steps and 2 fragments, units of even number are exchanged after step 8, others after 4, 12 and so on."""
    policy = replace(MICS, local_steps=8, local_fragments=2)
    assert fragments_of(policy, units_of(policy)) == [0, 1, 0]
    assert [step for step in range(1, 25) if meets(policy, step, 0)] == [8, 16, 24]
    assert [step for step in range(1, 25) if meets(policy, step, 1)] == [4, 12, 20]
    frozen = replace(units_of(policy)[0], trainable=False)
    assert fragments_of(policy, [frozen, *units_of(policy)]) == [None, 0, 1, 0]
    assert fragments_of(MICS, units_of(policy)) == [None] * 3


@pytest.mark.parametrize(
    ("topology", "group"),
    [(Topology(2, 2), "node"), (Topology(4, 1), 1), (Topology(4, 1), 2), (Topology(3, 2), 1), (Topology(2, 4), 2)],
    ids=str,
)  # fmt: skip
def test_hops_inside_and_between_groups_are_those_of_mics(topology: Topology, group: Any) -> None:
    """Both reductions together have the axes and codecs of the one over all ranks, and sum over the same numbers."""
    mics = replace(MICS, group=group)
    whole = reduction_hops(mics, topology, 64, 64)
    apart = replace(mics, local_steps=5)
    inside, between = (hops(apart, topology, 64, 64) for hops in (reduction_hops, outer_hops))
    ranks = mics.group_ranks(topology)
    assert [(hop.axis, hop.codec) for hop in (*inside, *between)] == [(hop.axis, hop.codec) for hop in whole]
    assert all(hop.numel == 64 * topology.world // ranks for hop in inside)
    assert all(hop.numel == 64 for hop in between)
    assert between[0].frames * between[0].axis.size == topology.world // ranks
    assert outer_hops(mics, topology, 64, 64) == ()


def test_between_meetings_nothing_crosses_nodes() -> None:
    """Steps without a meeting send nothing between nodes; a meeting sends what a step of MiCS sends there."""
    apart = replace(MICS, local_steps=4)

    def between(policy: Policy, steps: int) -> int:
        return sum(row.bytes for key, row in sent(policy, TOPOLOGY, steps).items() if key.link == "inter")

    norms = 2 * 8 * 4  # of MiCS, to two ranks of the other node in each step
    assert [between(apart, steps) for steps in (1, 3)] == [0, 0]
    assert between(apart, 4) == (between(MICS, 4) - norms) // 4
    assert between(apart, 8) == 2 * between(apart, 4)
    (gradients,) = {key[:2] for key in sent(apart, TOPOLOGY, 4) if key.link == "inter"}
    assert gradients == ("step", "gradients")


def test_anchor_and_momentum_are_in_the_predicted_memory() -> None:
    """A rank holds 4 bytes for the anchor and 4 for the momentum of each element of its shards, and carried errors."""
    apart = replace(MICS, local_steps=4)
    units = units_of(apart)
    shard = sum(unit.shard for unit in units)
    assert memory(apart, TOPOLOGY, units)["outer"] == 8 * shard
    assert memory(replace(apart, outer_momentum=0.0), TOPOLOGY, units)["outer"] == 4 * shard
    assert "outer" not in memory(MICS, TOPOLOGY, units)
    carried = {
        hops: memory(replace(apart, feedback=Feedback(hops=hops)), TOPOLOGY, units)["feedback"]
        for hops in ("last", "all")
    }
    assert carried == {"last": 4 * shard, "all": 4 * (shard + 2 * shard)}


def test_a_predicted_step_is_the_mean_of_a_round() -> None:
    """On a slow link, 10 local steps take away nine tenths of the time between nodes."""
    machine = Machine(
        name="m",
        source="",
        fixed=1e-9,
        per_token=1e-9,
        efficiency=1.0,
        fewest=0,
        most=1e9,
        overlap="schedule",
    )

    def predicted(policy: Policy) -> Any:
        step = Step(
            policy=policy, topology=TOPOLOGY, units=units_of(policy), parameters=3e3, tokens=1.0, rate=1e6
        )
        return step_of(machine, step)

    one, ten = (predicted(replace(MICS, local_steps=steps)) for steps in (1, 10))
    assert ten.wire == pytest.approx(one.wire / 10)
    assert one.wire == pytest.approx(predicted(MICS).wire)
    assert one.seconds - ten.seconds == pytest.approx(0.9 * one.wire, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_steps": 0}, "local_steps=0: expected 1 or more; remove local_steps"),
        ({"local_steps": 4, "group": 0}, "local_steps=4 needs groups of ranks .* set group='node'"),
        ({"local_steps": 4, "group": 0, "stage": 0}, "local_steps=4 needs groups of ranks .* stage 0"),
        ({"local_steps": 4, "local_fragments": 5}, "local_fragments=5: expected 1 to local_steps=4"),
        ({"local_steps": 4, "local_fragments": 0}, "local_fragments=0: expected 1 to local_steps=4"),
        ({"local_fragments": 2}, "local_fragments=2 has no effect without local_steps"),
        ({"outer_momentum": 0.5}, "outer_momentum=0.5 has no effect without local_steps"),
        ({"local_steps": 4, "outer_rate": 0.0}, "outer_rate=0, outer_momentum=0.9: expected a rate above 0"),
        ({"local_steps": 4, "outer_momentum": 1.0}, "expected a rate above 0, and a momentum of 0 or more"),
        (
            {"local_steps": 4, "compute": "fp16", "loss_scale": LossScale()},
            "local_steps=4 does not allow loss_scale: after an overflow",
        ),
        ({"local_steps": 4, "offload": Offload(optimizer=1.0)}, "local_steps=4 does not allow offload"),
        (
            {"local_steps": 4, "reduce": "examples.sign_vote:SignVote"},
            "local_steps=4 does not allow reduce: reduce='examples.sign_vote:SignVote' averages over all ranks",
        ),
        ({"local_steps": 4, "stage": 1, "reduce_every": "micro_batch"}, "reduce_every='micro_batch' needs the"),
    ],
)  # fmt: skip
def test_what_groups_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    """Values out of range, and fields that need all ranks in every step, are refused in one line."""
    with pytest.raises(PolicyError, match=message) as error:
        replace(MICS, **changes)
    assert "\n" not in str(error.value)


def test_local_steps_need_two_groups_and_units_for_all_fragments() -> None:
    """One group of all ranks, and more fragments than trained units, are refused in one line."""
    with pytest.raises(
        PolicyError, match="needs two groups or more, but group='node' on 1x4 makes one group"
    ):
        replace(MICS, local_steps=4).check(Topology(1, 4))
    policy = replace(MICS, local_steps=8, local_fragments=4)
    with pytest.raises(PolicyError, match=r"local_fragments=4 is more than the number of .*: set at most 3"):
        fragments_of(policy, units_of(policy))


def test_feedback_of_the_last_hop_is_that_of_meetings() -> None:
    """Errors of the last hop are carried between meetings; errors of all hops in every step too."""
    for hops, kept in (("last", [False]), ("all", [True])):
        policy = replace(MICS, local_steps=2, feedback=Feedback(hops=hops), gradients=(FP32, FP32))
        assert [hop.keeps == "errors" for hop in reduction_hops(policy, TOPOLOGY, 64, 64)] == kept
        summed, gathered = outer_hops(policy, TOPOLOGY, 64, 64)
        assert (summed.keeps, gathered.keeps) == ("errors", "nothing")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("local_steps", 1.5), ("local_steps", "2"), ("local_steps", True), ("local_fragments", 1.5),
        ("local_fragments", None), ("outer_rate", "0.7"), ("outer_rate", None), ("outer_momentum", "x"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("steps", [None, 2])
def test_a_value_of_another_type_is_refused(name: str, value: Any, steps: int | None) -> None:
    """With and without local steps, a text, None or half a step is refused in one line that names the field."""
    with pytest.raises(PolicyError, match=rf"^{name} = .*: expected a (whole )?number( or None)?$"):
        replace(MICS, **({"local_steps": steps} | {name: value}))


def test_a_long_round_is_not_walked_through() -> None:
    """The meetings of a round of 10^15 steps are known at once."""
    policy = replace(MICS, local_steps=3 * 10**15, local_fragments=3)
    assert meeting_steps(policy) == [10**15, 2 * 10**15, 3 * 10**15]
    assert meeting_steps(MICS) == []
