"""The best step that a schedule and the processors allow."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.records.trial_record import Record, Step
from harness.suites.trial import Cluster, Trial
from report.data.frames import frames_of
from report.data.metrics import derive
from tests.report.records import changed, changed_steps, record_of, with_alone

FEW = settings(max_examples=max(5, settings().max_examples // 4))  # each derives tables of several trials


def _derived(record: Record) -> dict[str, Any]:
    (row,) = derive(frames_of([record])).trials.to_dict("records")
    return {str(name): value for name, value in row.items()}


def _zero3(rate: str = "50 Mbit/s", **cluster: Any) -> Record:
    return record_of(Trial(strategy="zero3", steps=4, warmup=1, cluster=Cluster(rate=rate, **cluster)))


@FEW
@given(st.data(), st.integers(1, 8), st.sampled_from(["50 Mbit/s", "10 Gbit/s"]))
def test_no_step_is_allowed_to_be_shorter_than_the_ideal_one(
    data: st.DataObject, cores: int, rate: str
) -> None:
    """For any times of ranks and steps, and any shares of the processors, the ideal step is no longer than
    the scheduled one.  That is no longer than the allowed step, the larger of it and the processors' bound,
    which is at most the measured step.
    """
    record = _zero3(rate)  # bytes decide, or computation
    stretches, shares = st.floats(0.1, 10.0), st.floats(0, 1 / len(record.ranks))

    def change(step: Step) -> dict[str, Any]:
        stretch = data.draw(stretches)  # of this rank in this step
        parts = ("total", "forward", "backward", "optimizer", "exposed_forward", "exposed_backward")
        seconds = data.draw(shares) * cores * stretch * step.total
        return {"cpu_seconds": seconds, **{part: stretch * getattr(step, part) for part in parts}}

    machine = record.machine | {"cores": cores}
    row = _derived(changed(changed_steps(record, change), machine=machine))
    assert row["share"] >= row["schedule_share"] >= (1 - 1e-9) * row["ideal_share"] > 0
    assert row["best_seconds"] == max(row["schedule_seconds"], row["processor_seconds"])
    assert 0 <= row["processors_busy"] <= 1 + 1e-9


@pytest.mark.parametrize(
    ("changes", "cores", "missing"),
    [
        pytest.param({}, 2, True, id="one rank's seconds missing in one step"),
        pytest.param({}, None, False, id="processors not on record"),
        pytest.param({"launcher": "torchrun"}, 2, False, id="several machines"),
        pytest.param({"device": "cuda"}, 2, False, id="GPU"),
    ],
)
def test_without_known_processors_the_schedule_alone_bounds(
    changes: dict[str, Any], cores: int | None, missing: bool
) -> None:
    """Without all seconds or the processors, on GPUs and over machines, the schedule bounds alone."""
    record = _zero3(**changes)
    values = [1e3] * sum(len(rank.steps) for rank in record.ranks)
    seconds = iter([*values[:-1], None if missing else 1e3])
    record = changed_steps(record, lambda _: {"cpu_seconds": next(seconds)})
    row = _derived(changed(record, machine=record.machine | {"cores": cores}))
    assert math.isnan(row["processor_seconds"])
    assert math.isnan(row["processors_busy"])
    assert row["best_seconds"] == row["schedule_seconds"] > 0


def test_peers_keep_processors_busy_and_have_no_best_step() -> None:
    """A peer has a share of busy processors, and no bound on its step."""
    row = _derived(record_of(Trial(strategy="fsdp2", steps=4, warmup=1, cluster=Cluster(rate="50 Mbit/s"))))
    assert 0 < row["processors_busy"] < 1
    assert math.isnan(row["best_seconds"])
    assert math.isnan(row["share"])


@FEW
@given(stall=st.floats(0.0, 5.0), accumulation=st.integers(1, 3))
def test_what_an_engine_stalls_is_not_allowed(stall: float, accumulation: int) -> None:
    """The bounds of an engine stay if it sleeps in every step or computes more than the model by itself: its
    share falls by as much as its step grows.  Without computation by itself the stall counts as computation.
    """
    cluster = Cluster(rate="10 Gbit/s")  # or a stall could hide behind the link
    plain = record_of(Trial(strategy="zero3", steps=4, warmup=1, accumulation=accumulation, cluster=cluster))

    def stalled(step: Step) -> dict[str, Any]:
        longer = {name: getattr(step, name) + stall for name in ("total", "backward")}
        return {**longer, "cpu_seconds": (step.cpu_seconds or 0.0) + stall}

    slow = changed_steps(plain, stalled)
    before, after = (_derived(with_alone(record, 0.02, 0.04, 0.01)) for record in (plain, slow))
    assert before["alone"] is True
    bounds = ("compute", "schedule", "processor", "best", "ideal")
    assert all(after[f"{bound}_seconds"] == before[f"{bound}_seconds"] for bound in bounds)
    assert before["compute_seconds"] == pytest.approx(0.06 * accumulation + 0.01)
    assert before["processor_seconds"] == pytest.approx(len(plain.ranks) * (0.06 * accumulation + 0.01) / 2)
    assert after["step_seconds"] == pytest.approx(before["step_seconds"] + stall)
    assert after["share"] == pytest.approx(before["best_seconds"] / (before["step_seconds"] + stall))
    absorbed = _derived(slow)
    assert absorbed["alone"] is False
    assert absorbed["best_seconds"] >= _derived(plain)["best_seconds"] + 0.5 * stall


def test_records_of_a_users_codec_are_read_without_it() -> None:
    """The bound needs no import of the codec, and is that of the same messages under any other codec."""
    record, own = _zero3(), {"gradients": "no_such_module:Codec", "align": 2048}
    renamed = changed(record, trial=record.trial | {"policy": record.trial["policy"] | own})
    assert _derived(renamed)["schedule_seconds"] == _derived(record)["schedule_seconds"] > 0


def test_the_bound_over_nccl_has_the_pairs_of_the_engine() -> None:
    """Over NCCL the bound is that of the schedule with pairs, for which the bytes of weights must be known."""
    record = _zero3("1 Gbit/s", device="cuda", transport="nccl")
    row = _derived(record)
    assert row["schedule_seconds"] >= row["ideal_seconds"] > 0
    own = {"weights": "no_such_module:Codec", "align": 2048}
    renamed = changed(record, trial=record.trial | {"policy": record.trial["policy"] | own})
    assert math.isnan(_derived(renamed)["schedule_seconds"])
