"""Predictions equal what the steps of written traces would take by hand, and say what they cannot know."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import Refusal
from harness.whatif import joint, kineto
from harness.whatif.joint import Traced
from harness.whatif.policies import Target, of_our_engine, units_of
from harness.whatif.predict import VALIDATED, _crossing, about, check_replay, predict
from impl.plan.step_time import CodecCost, Machine
from impl.plan.traffic import passes
from impl.plan.traffic import predict as traffic
from impl.policy.presets import PRESETS
from impl.policy.shard_layout import UnitGeometry
from impl.policy.topology import Topology
from tests.harness.whatif.test_joint import joined
from tests.harness.whatif.written import (
    FORWARD,
    RATE,
    REAL,
    UNITS,
    Writer,
    ddp,
    ddp_seconds,
    fsdp,
    fsdp_seconds,
    on_gpu,
)

TWO = Topology(2, 1)


def two(folder: Path, kind: str = "ddp") -> Traced:
    """Return two ranks' traces of DDP or FSDP2."""
    write = {"ddp": ddp, "fsdp": fsdp, "gpu": on_gpu}[kind]
    return joined(folder, write(Writer(0)), write(Writer(1)), rate=1e3 * RATE)


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0, 3.0, 100.0])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_other_rates(tmp_path: Path, kind: str, factor: float) -> None:
    """At another rate a step takes what its computation and its bytes take, with the overlap of the trace."""
    by_hand = {"ddp": ddp_seconds, "fsdp": fsdp_seconds}[kind](factor * RATE)
    found = predict(two(tmp_path, kind), Target("same", factor * 1e3 * RATE, TWO))
    assert 1e3 * found.seconds == pytest.approx(by_hand, rel=1e-6)
    assert (found.low, found.high, found.speed_up) == pytest.approx((found.seconds, found.seconds, 1))
    assert any("extrapolated" in note for note in found.notes) == (not VALIDATED[0] <= factor <= VALIDATED[1])


def test_narrower_messages(tmp_path: Path) -> None:
    """In bf16 half the bytes are sent; casting takes the seconds of the machine's codec."""
    found = predict(two(tmp_path), Target("bf16", 1e3 * RATE, TWO))
    assert 1e3 * found.seconds == pytest.approx(ddp_seconds(item=2))
    assert "codecs are counted as taking no time" in found.notes[0]
    machine = Machine(
        name="m", source="", fixed=1, per_token=0, efficiency=1, fewest=0, most=9, host="here",
        codecs={"bf16": CodecCost(encode=1e-9, decode=2e-9)},
    )  # fmt: skip
    cast = predict(two(tmp_path), Target("bf16", 1e3 * RATE, TWO, machine))
    assert cast.seconds > found.seconds
    assert cast.notes == ["codec seconds of m"]


def test_kept_weights_are_gathered_once(tmp_path: Path) -> None:
    """With weights kept, backward gathers nothing."""
    found = predict(two(tmp_path, "fsdp"), Target("kept", 1e3 * RATE, TWO))
    assert 1e3 * found.seconds == pytest.approx(fsdp_seconds(kept=True))
    assert found.speed_up == pytest.approx(fsdp_seconds() / fsdp_seconds(kept=True))


@pytest.mark.parametrize("topology", [Topology(4, 1), Topology(2, 2), Topology(4, 2)])
def test_other_topologies(tmp_path: Path, topology: Topology) -> None:
    """A ring over more ranks sends (ranks - 1) / ranks of all bytes over each link, and ranks compute as traced."""
    found = predict(two(tmp_path), Target("same", 1e3 * RATE, topology))
    assert 1e3 * found.seconds == pytest.approx(ddp_seconds(world=topology.world))
    assert any("--slower" in note for note in found.notes)


def test_overheads_give_an_interval(tmp_path: Path) -> None:
    """If collectives take longer than their bytes over the rate, the interval has both hypotheses' predictions."""
    # At twice the traced link's rate, half of each collective's time is overhead.
    traced = joined(tmp_path, fsdp(Writer(0)), fsdp(Writer(1)), rate=2e3 * RATE)
    found = predict(traced, Target("same", 1e3 * RATE, TWO))
    sent = fsdp_seconds() - 33
    assert 1e3 * found.low == pytest.approx(33 + sent / 2 + sent)  # constant
    assert 1e3 * found.high == pytest.approx(33 + 2 * sent)  # scaled
    assert found.seconds == found.high


def test_what_is_exposed_and_what_bounds_the_step(tmp_path: Path) -> None:
    """Where communication is slow the rank waits and the link bounds the step; where it is fast, the processor."""
    slow, fast = (predict(two(tmp_path), Target("same", 1e3 * RATE * factor, TWO)) for factor in (0.25, 1e4))
    assert (slow.bound, fast.bound) == ("link", "processor")
    assert 1e3 * slow.exposed == pytest.approx(ddp_seconds(RATE / 4) - 33)
    assert fast.exposed < 1e-4


def test_a_gpu_at_another_rate(tmp_path: Path) -> None:
    """On a GPU the optimizer waits for the collective, which overlaps half of the computation."""
    traced = joined(tmp_path, on_gpu(Writer(0)), on_gpu(Writer(1)), rate=None)
    for factor in (0.5, 2.0, 4.0):
        found = predict(traced, Target("same", traced.rate * factor, TWO))
        assert 1e3 * found.seconds == pytest.approx(max(20, 10 + 30 / factor) + 3, rel=1e-3)


def test_our_engine_sends_what_the_ledger_says(tmp_path: Path) -> None:
    """For a preset, the link is busy for the bytes that impl.plan.traffic predicts for the traced units."""
    traced = two(tmp_path, "fsdp")
    units = units_of(traced.steps[0])
    assert {unit.name: unit.elements for unit in units} == UNITS
    assert [(unit.forward, unit.backward) for unit in units] == [pytest.approx((0.005, 0.010), rel=1e-2)] * 2
    for name in ("zero3", "zeropp"):
        policy = PRESETS[name]
        grain = 2 * policy.grain
        geometries = [UnitGeometry(n, (), -(-size // grain) * grain, 2) for n, size in UNITS.items()]
        sent = sum(
            s.bytes for key, s in traffic(policy, TWO, geometries, 0, passes(policy)).sent.items() if key.unit
        )
        found = predict(traced, Target(name, 1e3 * RATE, TWO))
        assert found.link == pytest.approx(sent / (1e3 * RATE))
        assert found.seconds >= 0.033
        assert "on our engine's schedule, not on the traced program's" in found.notes


def test_gathers_without_names_are_units(tmp_path: Path) -> None:
    """DeepSpeed's gathers name no module; each is a unit, whose computation is in proportion to its elements."""
    writers = [fsdp(Writer(rank)) for rank in (0, 1)]
    for writer in writers:
        for event in writer.events:
            if event["name"].startswith("FSDP::pre_backward"):
                event |= {"name": "autograd::engine::evaluate_function: Hook", "cat": "cpu_op"}
        writer.events = [event for event in writer.events if not event["name"].startswith("FSDP::")]
    units = units_of(joined(tmp_path, *writers).steps[0])
    assert [unit.elements for unit in units] == [*UNITS.values()]
    assert [1e3 * unit.forward for unit in units] == pytest.approx([10 / 3, 20 / 3])
    assert [1e3 * unit.backward for unit in units] == pytest.approx([20 / 3, 40 / 3])


def test_buckets_of_ddp_are_units(tmp_path: Path) -> None:
    """DDP's last bucket comes first in forward; the computation before a bucket's reduction belongs to it."""
    units = units_of(two(tmp_path).steps[0])
    assert [unit.elements for unit in units] == [500_000, 1_000_000]
    assert sum(unit.forward for unit in units) == pytest.approx(FORWARD / 1e3)
    assert [1e3 * unit.backward for unit in units] == pytest.approx([12, 8])


def test_break_even(tmp_path: Path) -> None:
    """Below the rate of break-even the policy is faster, and above it the program as traced."""
    machine = Machine(
        name="m", source="", fixed=1, per_token=0, efficiency=1, fewest=0, most=9, overlap="schedule",
        codecs={"bf16": CodecCost(encode=1e-8, decode=1e-8)},
    )  # fmt: skip
    traced = two(tmp_path)
    found = predict(traced, Target("bf16", 1e3 * RATE, TWO, machine)).break_even
    assert found is not None
    below, above = (predict(traced, Target("bf16", found * by, TWO, machine)).speed_up for by in (0.9, 1.1))
    assert above < 1 < below


def test_an_interval_reaches_over_all_fits_of_the_machine(tmp_path: Path) -> None:
    """For our engine, step and speed-up lie in intervals that further fits widen; rewritten messages need no fit."""
    one = Machine(
        name="m", source="", fixed=1, per_token=0, efficiency=1, fewest=0, most=9, overlap="schedule", unit=1e-3,
    )  # fmt: skip
    several, traced = replace(one, alternatives=({"unit": 5e-3}, {"unit": 0.0})), two(tmp_path)
    for policy in ("zeropp", "bf16"):
        alone, found = (predict(traced, Target(policy, 1e3 * RATE, TWO, fit)) for fit in (one, several))
        assert (found.seconds, found.speed_up) == (alone.seconds, alone.speed_up)
        assert found.low <= found.seconds <= found.high
        assert found.low_speed_up <= found.speed_up <= found.high_speed_up
        wider = found.low_speed_up < alone.low_speed_up and found.high_speed_up > alone.high_speed_up
        assert wider == (policy == "zeropp")


@given(at=st.floats(1e3, 1e9))
def test_crossings_are_found(at: float) -> None:
    """The rate at which a gain changes its sign is found; without such a rate there is none."""
    rates = [10.0**k for k in range(2, 11)]
    assert _crossing(lambda rate: at - rate, rates) == pytest.approx(at, rel=1e-3)
    assert _crossing(lambda _: 1.0, rates) is None
    assert _crossing(lambda _: -1.0, rates) is None


@pytest.mark.parametrize(
    ("policy", "topology", "says"),
    [
        ("zero++", TWO, "did you mean 'zeropp'"),
        ("kept", TWO, "gathers no weights again"),
        ("same", Topology(1, 2), "one node has no link"),
    ],
)
def test_targets_that_do_not_fit_are_refused(
    tmp_path: Path, policy: str, topology: Topology, says: str
) -> None:
    """Unknown policies, and those for which the traces lack something, are refused in one line."""
    with pytest.raises(Refusal, match=says):
        predict(two(tmp_path), Target(policy, 1e8, topology))


def test_accumulation_is_refused_for_other_schedules(tmp_path: Path) -> None:
    """A step of several forward passes can be sent in bf16, but not laid out for our engine."""
    writers = [ddp(Writer(rank)) for rank in (0, 1)]
    for writer in writers:
        writer.add("DistributedDataParallel.forward", 101, 102, "user_annotation")
    traced = joined(tmp_path, *writers)
    assert predict(traced, Target("bf16", 1e8, TWO)).seconds > 0
    with pytest.raises(Refusal, match="2 forward passes"):
        predict(traced, Target("zeropp", 1e8, TWO))


def test_units_of_nothing_are_refused(tmp_path: Path) -> None:
    """A trace without FSDP2's modules and DDP's buckets cannot be laid out."""
    with pytest.raises(
        Refusal, match="neither modules that FSDP gathers, nor gathers of DeepSpeed, nor buckets of DDP"
    ):
        predict(two(tmp_path, "gpu"), Target("zeropp", 1e8, TWO))


def test_a_replay_that_misses_its_own_step_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traces whose own step is not replayed within 2 % are refused with the error."""
    traced = two(tmp_path)
    assert check_replay(traced) == pytest.approx([0, 0], abs=1e-6)
    replay = joint.replay
    monkeypatch.setattr(joint, "replay", lambda *arguments: replay(*arguments, slower=2.0))
    with pytest.raises(Refusal, match=r"replayed with an error of \d+\.\d%, and at most 2% is"):
        check_replay(traced)


def test_the_real_trace_gets_slower_with_its_link() -> None:
    """On a slower link the real step of GPUs takes longer, and never less than its bytes over the rate."""
    traced = joint.join([kineto.read(REAL)], 1, None)
    seconds = [predict(traced, Target("same", traced.rate / factor, TWO)) for factor in (1, 4, 16, 64)]
    assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(seconds))
    assert seconds[-1].seconds > 2 * seconds[0].seconds
    assert all(one.seconds >= one.link for one in seconds)
    text = " ".join(about(traced, check_replay(traced)))
    assert re.search(r"Traced: 2 steps of 2x1 ranks", text)
    assert "One rank's trace stands for all" in text
    assert "the link may be faster than the rate found. No interval contains this error." in text
    for one in seconds:
        assert any("one rank's trace stands for all ranks" in note for note in one.notes)
    assert math.isfinite(seconds[0].seconds)


def _hybrid(rank: int) -> Writer:
    """A GPU's steps with a reduce-scatter inside its node of two, 10 ms, then an all-reduce between nodes, 20 ms."""
    writer, node = Writer(rank, world=4, host=f"node {rank // 2}"), rank // 2
    for number in range(3, 6):
        begin = 100.0 * number
        writer.step(number, begin, begin + 40)
        writer.kernel("gemm", begin, begin, begin + 5, 7)
        inside, between = [2 * node, 2 * node + 1], [rank % 2, rank % 2 + 2]
        for name, ranks, start, end, issue in (
            ("reduce_scatter", inside, 5, 15, 1),
            ("allreduce", between, 15, 35, 2),
        ):
            facts = {"Group size": 2, "Process Group Ranks": str(ranks)}
            writer.nccl(name, 1_000_000, begin + issue, begin + start, begin + end, **facts)
        writer.add("Optimizer.step#SGD.step", begin + 3, begin + 4, "user_annotation")
        writer.kernel("adam", begin + 3.5, begin + 35, begin + 40, 7)
    return writer


def test_collectives_inside_nodes_keep_their_time(tmp_path: Path) -> None:
    """With HSDP, only the collectives that cross nodes depend on the link's rate, and all rails share the link."""
    traced = joined(tmp_path, *map(_hybrid, range(4)), rate=None, ranks_per_node=2)
    assert [joined.between for joined in traced.steps[0].collectives].count(True) == 2
    base = predict(traced, Target("same", traced.rate, traced.topology))
    assert 1e3 * base.seconds == pytest.approx(40, rel=1e-2)
    slow = predict(traced, Target("same", traced.rate / 3, traced.topology))
    assert 1e3 * slow.seconds == pytest.approx(40 + 2 * 20, rel=1e-2)
    with pytest.raises(Refusal, match="only a program whose collectives have all ranks"):
        predict(traced, Target("same", 1e8, Topology(4, 2)))


def test_a_step_without_collectives_does_not_matter(tmp_path: Path) -> None:
    """Steps that only accumulate gradients send nothing; the first one may be such a step."""
    writers = [ddp(Writer(rank)) for rank in (0, 1)]
    for writer in writers:
        second = next(i for i, event in enumerate(writer.events) if event["name"] == "ProfilerStep#4")
        kept = [
            event
            for event in writer.events[:second]
            if "allreduce" not in event["args"] and ":" not in event["name"]
        ]
        writer.events[:second] = kept
    traced = joined(tmp_path, *writers)
    assert not traced.steps[0].collectives
    assert about(traced, [0.0])


def test_steps_that_take_no_time_are_refused(tmp_path: Path) -> None:
    """A step that ends at the moment at which the last rank begins it has no duration."""
    traced = joined(tmp_path, ddp(Writer(0)), ddp(Writer(1)), rate=RATE * 1e3)
    none = replace(traced, steps=[replace(step, seconds=0.0) for step in traced.steps])
    with pytest.raises(Refusal, match="lasts 0 s or less"):
        check_replay(none)


def test_steps_of_ranks_that_share_no_time_are_refused(tmp_path: Path) -> None:
    """Rank 1 begins its step when rank 0 has ended it, as in traces of two runs; the refusal names both ranks."""
    traced = joined(tmp_path, ddp(Writer(0)), ddp(Writer(1)), rate=RATE * 1e3)
    step = traced.steps[0]
    late = replace(step, skew={0: 0.0, 1: step.ranks[0].end - step.ranks[0].begin})
    with pytest.raises(Refusal, match="rank 0 ended a traced step 0 s before rank 1 began it"):
        check_replay(replace(traced, steps=[late]))


def test_a_collective_of_any_number_of_elements_is_refused(tmp_path: Path) -> None:
    """JSON's integers have any size, and bytes are floats."""
    writer = ddp(Writer(0))
    for event in writer.events:
        if "Input Dims" in event["args"]:
            event["args"]["Input Dims"] = [[10**400]]
    with pytest.raises(Refusal, match="an impossible number of elements"):
        joined(tmp_path, writer)


@pytest.mark.parametrize("gpu", [False, True])
def test_small_modules_of_a_gpu_are_gathered_in_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    """If a GPU was traced, our engine gathers b and c by one call, so that b waits for c's messages too."""
    monkeypatch.setattr("tests.harness.whatif.written.UNITS", dict.fromkeys("abcd", 400_000))
    step, *_ = (traced := two(tmp_path, "fsdp")).steps
    for task in (task for rank in step.ranks.values() for task in rank.tasks):
        task.stream = 7 if gpu else None
    target = Target("zero3", 1e3 * RATE, TWO)
    (run,) = of_our_engine(step, traced, target, "scale").passes
    arrival = [message.arrival for message in run.messages]
    begin = {stretch.units: stretch.begin for stretch in run.stretches if stretch.work == "forward"}
    assert [message.unit for message in run.messages[:4]] == [0, 1, 2, 3]
    assert arrival[0] <= begin[0,] < arrival[1] <= begin[1,]
    assert (begin[1,] < arrival[2]) == (not gpu)
