"""Tests that a schedule's spans cover a run, that steps have their policies, and that other spans are refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.codecs.codec import BF16, FP32, parse
from impl.plan.memory import memory
from impl.plan.step_time import Machine, Step, step_of
from impl.plan.traffic import passes, predict
from impl.plan.unit_plan import Placed, plan_units
from impl.policy.policy import BitBudget, Feedback, Offload, Policy, PolicyError
from impl.policy.presets import preset
from impl.policy.shard_layout import ParameterSpec
from impl.policy.spans import FIXED, VARYING, Span, SpanError
from impl.policy.topology import Topology

INT4, INT8 = parse("int4:8"), parse("int8:8")
FOUR = Topology(2, 2)
RAW = {"gradients": (BF16, BF16)}
PARAMETERS = [Placed(ParameterSpec(f"{block}.w", (32, 32)), block) for block in ("", "a", "b")]
MACHINE = Machine(
    name="m",
    source="test",
    fixed=1e-6,
    per_token=1e-9,
    efficiency=1.0,
    fewest=1,
    most=1000,
    overlap="schedule",
)


def scheduled(*spans: Span, **changes: Any) -> Policy:
    return Policy(schedule=spans, **changes)


@given(st.integers(1, 400), st.lists(st.integers(1, 99), max_size=4, unique=True), st.data())
def test_spans_cover_a_run_in_order(steps: int, shares: list[int], data: st.DataObject) -> None:
    """Each step has the policy of the span whose end, a share of the run to the nearest step, is the next."""
    shares = sorted(shares)
    ends = [int(share * steps / 100 + 0.5) for share in shares]
    policy = scheduled(
        *(Span(until=f"{share} %", chunks=k + 1) for k, share in enumerate(shares)), Span(chunks=8)
    )
    if len({0, *ends, steps}) < len(ends) + 2:
        with pytest.raises(PolicyError, match="is empty or overlaps"):
            policy.for_steps(steps)
        return
    whole = policy.for_steps(steps)
    step = data.draw(st.integers(0, steps - 1))
    expected = next((k + 1 for k, end in enumerate(ends) if step < end), 8)
    assert whole.policy_at(step) == replace(policy, schedule=(), chunks=expected)


def test_every_second_step_has_the_changes_and_the_others_the_own_fields() -> None:
    """Alternating steps begin with the changes at the first step of the span, wherever it begins."""
    policy = scheduled(Span(until=3), Span(every=2, gradients=(INT4, INT4)))
    assert [policy.policy_at(step).gradients[0] for step in range(7)] == [
        BF16,
        BF16,
        BF16,
        INT4,
        BF16,
        INT4,
        BF16,
    ]
    assert len(policy.phases) == 2


def test_a_schedule_of_one_span_is_the_changed_policy() -> None:
    """The only phase is the policy with the changes, and codecs that no step uses do not enter the layout's grain."""
    policy = scheduled(Span(gradients=(INT4, INT4)), gradients=(parse("int8:96"),) * 2)
    assert policy.phases == (Policy(gradients=(INT4, INT4)),)
    assert policy.grain == Policy(gradients=(INT4, INT4)).grain
    mixed = scheduled(Span(until=1), Span(gradients=(INT4, INT4)), gradients=(parse("int8:96"),) * 2)
    assert mixed.grain % 96 == 0
    assert mixed.grain % Policy(gradients=(INT4, INT4)).grain == 0


def test_without_hpz_the_fields_that_need_it_go_too() -> None:
    """A span with secondary=0 needs no further changes."""
    policy = preset("sdp4bit", schedule=(Span(until=2, secondary=0), Span()))
    assert policy.policy_at(0) == preset("sdp4bit").without_secondary()
    assert policy.policy_at(2) == preset("sdp4bit")


@pytest.mark.parametrize("name", sorted({field.name for field in fields(Policy)} - {*VARYING}))
def test_fields_that_would_move_memory_are_refused_with_the_reason(name: str) -> None:
    """Every field of a policy either may vary, or is refused in one line that names it."""
    with pytest.raises(
        SpanError, match=rf"^a schedule cannot change {name}, because .*: set {name} outside"
    ) as error:
        Span(**{name: 0})
    assert "\n" not in str(error.value)
    assert {*FIXED, *VARYING} >= {field.name for field in fields(Policy)}


WRONG = [
    (
        (Span(until="60 %"), Span(until="40 %"), Span()),
        {},
        "span 2 of schedule (until 40 %) is empty or overlaps",
    ),
    ((Span(until=5), Span(until=5), Span()), {}, "span 2 of schedule (until 5) is empty or overlaps"),
    ((Span(), Span()), {}, "span 1 of schedule has no 'until', so that span 2 never begins"),
    ((Span(until="50 %"),), {}, "the last span of schedule ends at 50 % of the run"),
    ((Span(until=2, secondary="node"), Span(secondary=2)), {}, "whose copies lie on different ranks"),
    (
        (Span(until=2, secondary_format="bf16"), Span()),
        {},
        "span 1 of schedule: secondary_format='bf16' needs hpZ",
    ),
    (
        (Span(until=2, feedback=Feedback()), Span(feedback=Feedback(hops="all"))),
        {"gradients": (INT4, INT4)},
        "whose kept errors differ",
    ),
    ((Span(until=2), Span(reduce="one_hop")), {"feedback": Feedback()}, "schedule changes reduce"),
    ((Span(until=2), Span(reduce="mine:Own")), {}, "a class of your own, which keeps a state"),
    ((Span(until=2), Span(weights=INT8)), {"offload": Offload(weights=1.0)}, "offload keeps encoded weights"),
    (
        (Span(until=2), Span(weights=INT8)),
        {"budget": BitBudget(codecs=(INT4,), gradients=0.0)},
        "chooses codecs by itself, and so does schedule",
    ),
    (("int8",), {}, "expected a tuple of Span"),
]


@pytest.mark.parametrize(("spans", "changes", "message"), WRONG)
def test_impossible_schedules_are_refused(spans: Any, changes: dict[str, Any], message: str) -> None:
    """Spans that overlap, leave steps out, contradict one another or would move memory: one line says why."""
    with pytest.raises(PolicyError) as error:
        Policy(schedule=spans, **changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("until", [0, -1, True, "50", "0 %", "120 %", 1.5])
def test_an_impossible_until_is_refused(until: Any) -> None:
    """An end is a step of 1 or more, or a share above 0 and at most 100 %."""
    with pytest.raises(SpanError, match=r"^until = "):
        Span(until=until)


def test_a_schedule_and_a_run_that_do_not_fit_are_refused() -> None:
    """An end beyond the run, an empty span and a last span that ends too early are named with the steps."""
    with pytest.raises(
        PolicyError, match=r"span 1 of schedule \(until 700\) ends beyond the run of 500 steps"
    ):
        scheduled(Span(until=700), Span(**RAW)).for_steps(500)
    with pytest.raises(PolicyError, match=r"until step 0 of 5\) is empty"):
        scheduled(Span(until="5 %"), Span(**RAW)).for_steps(5)
    with pytest.raises(PolicyError, match="the last span of schedule ends at step 3 of 5"):
        scheduled(Span(until=3)).for_steps(5)
    assert scheduled(Span(until=5)).for_steps(5).policy_at(99) == Policy()
    with pytest.raises(PolicyError, match=r"the run's length is not known: use policy\.for_steps"):
        scheduled(Span(until="5 %"), Span(**RAW)).check(FOUR)
    with pytest.raises(PolicyError, match="the last span of schedule ends at step 5, and the steps after it"):
        scheduled(Span(until=5)).check(FOUR)


def test_a_schedule_reads_as_a_sentence() -> None:
    """Spans are joined by "then"; spans without changes are left out at both ends."""
    policy = scheduled(Span(until="50 %", gradients=(INT4, INT4)), Span(**RAW))
    assert policy.schedule_in_words == "gradients int4:8 until 50 %, then gradients bf16"
    assert scheduled(Span(until="50 %"), Span(**RAW)).schedule_in_words == "gradients bf16 from 50 %"
    assert scheduled(Span(until=7, **RAW), Span()).schedule_in_words == "gradients bf16 until step 7"
    assert scheduled(Span(every=2, **RAW)).schedule_in_words == "gradients bf16 in every 2nd step"
    assert Policy().schedule_in_words == "none"


def test_each_step_sends_what_its_span_sends() -> None:
    """The bytes of each step are those of the policy of its span alone, and memory is that of the largest span."""
    other = {"weights": INT8, "gradients": (INT4, INT4), "secondary": "node"}
    policy = replace(scheduled(Span(until=2, **other), Span()), align=8)
    units = plan_units(PARAMETERS, ["a", "b"], FOUR, policy)
    total, sent = {"inter": 0, "intra": 0}, []
    for step in predict(policy, FOUR, units, 1, passes(policy) * 4).steps:
        sent.append({link: step[link] - total[link] for link in total})
        total = dict(step)
    alone = [predict(phase, FOUR, units, 1, passes(phase)).steps[0] for phase in policy.phases]
    assert sent == [alone[0], alone[0], alone[1], alone[1]]
    held = memory(policy, FOUR, units)
    assert held == {
        **memory(policy.phases[1], FOUR, units),
        "secondary": memory(policy.phases[0], FOUR, units)["secondary"],
    }
    begun = predict(policy, FOUR, units, 1, passes(policy), begun=2)
    assert begun.sent == predict(policy.phases[1], FOUR, units, 1, passes(policy)).sent


def test_seconds_of_a_schedule_are_the_mean_over_its_steps() -> None:
    """A machine's model of a step counts each policy as often as it has steps."""
    policy = scheduled(Span(until=1, gradients=(FP32, FP32)), Span())
    units = plan_units(PARAMETERS, ["a", "b"], FOUR, policy)
    step = Step(policy=policy, topology=FOUR, units=units, parameters=3072, tokens=8, rate=1e5, steps=(0, 4))
    first, then = (step_of(MACHINE, replace(step, policy=phase)) for phase in policy.phases)
    assert first.seconds > then.seconds
    assert step_of(MACHINE, step).seconds == pytest.approx((first.seconds + 3 * then.seconds) / 4)


@given(
    st.lists(st.integers(1, 24), max_size=3, unique=True), st.lists(st.integers(1, 5), min_size=4, max_size=4),
    st.integers(0, 20), st.integers(0, 15),
)  # fmt: skip
def test_steps_are_counted_by_phase(ends: list[int], every: list[int], begin: int, length: int) -> None:
    """The numbers of steps by phase are those of asking each step for its phase."""
    untils = [*sorted(ends), None]
    codecs = [FP32, INT8, FP32, BF16]
    spans = [Span(until=u, every=e, weights=c) for u, e, c in zip(untils, every, codecs, strict=False)]
    policy, steps = scheduled(*spans), range(begin, begin + length)
    assert policy.phase_counts(begin, begin + length) == dict(Counter(map(policy.phase_at, steps)))


def test_a_long_run_is_counted_and_not_walked_through() -> None:
    """A run of 10^15 steps is counted at once: a third of its first half has the changes."""
    policy = scheduled(Span(until="50 %", every=3, weights=INT8), Span()).for_steps(6 * 10**15)
    assert policy.phase_counts(0, 6 * 10**15) == {0: 10**15, 1: 5 * 10**15}
    assert Policy().phase_counts(2, 5) == {0: 3}


@pytest.mark.parametrize("steps", [0, -1, 1.5, "3", None, True])
def test_a_number_of_steps_is_a_whole_number(steps: Any) -> None:
    """Anything but a whole number of 1 or more is refused in one line."""
    with pytest.raises(
        PolicyError, match=r"^a schedule cannot be fitted to .* steps: expected a whole number, 1 or more$"
    ):
        scheduled(Span(until="50 %", weights=INT8), Span()).for_steps(steps)


@pytest.mark.parametrize("value", [{}, [[]], set()])
def test_a_span_holds_values_of_fields(value: Any) -> None:
    """A value that no field of a policy can have is refused with the field's name."""
    with pytest.raises(
        SpanError,
        match=r"^weights = .*: a span cannot hold such a value; use a value that policy\.weights allows$",
    ):
        Span(weights=value)
