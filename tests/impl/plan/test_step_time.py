"""Predicted steps obey what holds for any cluster: more bandwidth or fewer bytes never lengthen a step."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.codecs.codec import parse
from impl.plan.step_time import CodecCost, Machine, Work, flops, least_seconds, step_time

amounts = st.floats(1e-3, 1e15)
machines = st.builds(
    partial(Machine, name="any", source="drawn", fewest=1.0, most=1e6),
    fixed=st.floats(0, 1e-3),
    per_token=st.floats(1e-18, 1e-3),
    efficiency=st.floats(0.01, 1),
    overlap=st.sampled_from(["none", "full"]),
)
works = st.builds(Work, parameters=amounts, tokens=amounts, egress_bytes=amounts, rate=amounts)


@given(machines, works, st.floats(1, 100))
def test_more_to_do_never_takes_less_time_and_a_faster_link_never_more(
    machine: Machine, work: Work, factor: float
) -> None:
    """More work never shortens a step, a faster link never lengthens it, and an infinitely fast link takes no time."""
    seconds = step_time(machine, work).seconds
    for name in ("parameters", "tokens", "egress_bytes"):
        assert step_time(machine, replace(work, **{name: getattr(work, name) * factor})).seconds >= seconds
    assert step_time(machine, replace(work, rate=work.rate * factor)).seconds <= seconds
    endless = step_time(machine, replace(work, rate=math.inf))
    assert endless.seconds == endless.compute


@given(machines, works)
def test_no_step_undercuts_a_resource_and_overlap_never_lengthens_one(machine: Machine, work: Work) -> None:
    """A step takes at least its computation and its wire, and with full overlap at most its time without overlap."""
    none, full = (step_time(replace(machine, overlap=overlap), work) for overlap in ("none", "full"))
    for step in (none, full):
        assert max(step.compute, step.wire, least_seconds(work, math.inf)) <= step.seconds
        assert step.seconds <= step.compute + step.wire
    assert full.seconds <= none.seconds
    assert (none.compute, none.wire) == (full.compute, full.wire)


def test_what_was_not_measured_is_called_transferred() -> None:
    """A batch outside the range that the machine was measured with is not called calibrated."""
    machine = Machine(name="m", source="s", fixed=1e-10, per_token=1e-13, efficiency=1, fewest=512, most=2048)
    work = Work(parameters=1e9, tokens=1024, egress_bytes=1e9, rate=1e9)
    assert step_time(machine, work).calibrated
    assert not step_time(machine, replace(work, tokens=4096)).calibrated
    assert flops(work) == 8 * 1e9 * 1024


@pytest.mark.parametrize(
    ("text", "encode"), [("int4:128:clip", 1.0), ("int4:256:clip", 2.0), ("int4:64", 1.0), ("int8:32", 3.0)]
)
def test_a_measured_codec_has_its_own_cost(text: str, encode: float) -> None:
    """A codec that was measured costs what it was measured with; only other ones cost what a similar codec does."""
    codecs = {
        name: CodecCost(encode=seconds, decode=0.0)
        for name, seconds in {"int4:128:clip": 1.0, "int4:256:clip": 2.0, "int8:2048": 3.0}.items()
    }
    machine = Machine(
        name="m", source="s", fixed=1e-10, per_token=1e-13, efficiency=1, fewest=1, most=2, codecs=codecs
    )
    assert machine.cost(parse(text)).encode == encode


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"fixed": math.nan}, "fixed"),
        ({"per_token": -1.0}, "per_token"),
        ({"efficiency": 1.1}, "efficiency"),
        ({"efficiency": 0.0}, "efficiency"),
        ({"most": math.inf}, "most"),
        ({"fixed": 0.0, "per_token": 0.0}, "no step would take time"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(changed: dict[str, float], named: str) -> None:
    """Numbers that are negative, not finite or out of range are refused, and the error names the field."""
    values = {"fixed": 1e-10, "per_token": 1e-13, "efficiency": 0.9, "fewest": 1.0, "most": 2.0}
    with pytest.raises(ValueError, match=named):
        Machine(name="m", source="s", **values | changed)  # type: ignore[arg-type]
