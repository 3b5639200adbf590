"""A calibration finds the machine behind what its trials took."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.bench.calibration import Measured, _error, fit, fit_all, trials
from harness.errors import Refusal
from harness.measure import machine_file
from harness.runs.feasibility import any_host, forecast
from impl.plan.step_time import ALTERNATIVE, EQUAL_FITS, CodecCost, Machine, step_of

TRUTH = Machine(
    name="truth", source="made up", fixed=3e-9, per_token=5e-11, launch=1e-3, efficiency=0.96, fewest=1,
    most=1e6, overlap="schedule", latency=1e-4, unit=1.5e-3, element=2e-10, message=1e-4, sent=6e-9,
    optimizer=2e-9, processors=2, emulated=True, date="2026-01-01", host="here",
    codecs={"int8:2048": CodecCost(encode=1e-9, decode=5e-10), "bf16": CodecCost(encode=2e-10, decode=1e-10)},
)  # fmt: skip


def _measured(truth: Machine) -> list[Measured]:
    """Return what the calibration's trials would take on machine ``truth``."""
    measured = []
    for planned in forecast(trials(), any_host()):
        assert planned.step is not None
        step, shaped = planned.step, planned.trial.cluster.rate is not None
        alone = replace(truth, processors=0, latency=0.0)
        computing = alone.compute(step.parameters, step.tokens, len(step.units))
        stepping = alone.optimizer * sum(unit.shard for unit in step.units)
        measured.append(Measured(
            step=step, computing=computing, stepping=stepping,
            in_steps=step_of(alone, replace(step, rate=math.inf)).seconds,
            wall=step_of(truth, step).seconds, achieved=truth.efficiency if shaped else None,
        ))  # fmt: skip
    return measured


@given(factor=st.floats(0.2, 5), sent=st.floats(0, 1e-8))
def test_the_machine_behind_the_trials_is_fitted(factor: float, sent: float) -> None:
    """The fitted machine predicts every trial's step, although only processor seconds were fitted."""
    truth = replace(TRUTH, per_token=TRUTH.per_token * factor, unit=TRUTH.unit * factor, sent=sent)
    blank = replace(
        truth, fixed=1.0, per_token=0.0, launch=0, unit=0, element=0, message=0, sent=0, optimizer=0,
        latency=truth.latency + truth.message,  # as a tiny gather takes
    )  # fmt: skip
    fitted = fit(replace(blank, efficiency=1.0), measured := _measured(truth))
    assert fitted.spread < 0.01
    for trial in measured:
        assert step_of(fitted, trial.step).seconds == pytest.approx(trial.wall, rel=0.02)
    assert fitted.efficiency == truth.efficiency
    assert fitted.latency == pytest.approx(truth.latency, abs=truth.message / 2)
    assert fitted.per_token == pytest.approx(truth.per_token, rel=0.05)


def test_a_machine_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Writing a machine to TOML and reading it back gives an equal machine, codecs included."""
    for machine in (TRUTH, replace(TRUTH, alternatives=({"sent": 5e-9}, {"sent": 7e-9, "unit": 0.0}))):
        machine_file.write(tmp_path / "m.toml", machine)
        read = machine_file.read(tmp_path / "m.toml")
        assert replace(read, alternatives=tuple(read.alternatives)) == machine


BLANK = replace(TRUTH, per_token=0.0, launch=0.0, unit=0.0, element=0.0, message=0.0, sent=0.0)


@settings(max_examples=2, deadline=None)
@given(st.lists(st.floats(0.8, 1.25), min_size=11, max_size=11))
def test_alternatives_fit_as_well_as_the_best(noise: list[float]) -> None:
    """The best fit is that of all trials, and each alternative differs from it and has an error at most 0.01 larger."""
    measured = [
        replace(trial, wall=factor * trial.wall, in_steps=factor * trial.in_steps)
        for trial, factor in zip(_measured(TRUTH), noise, strict=True)
    ]
    best, *others = fit_all(BLANK, measured).fits
    assert best == fit(BLANK, measured)
    for other in others:
        assert _error(other, measured) <= _error(best, measured) + EQUAL_FITS
        assert any(getattr(other, name) != getattr(best, name) for name in ALTERNATIVE)


def test_a_cost_that_measurements_do_not_need_is_left_out_in_an_alternative() -> None:
    """A launch cost of a microsecond is 0 in an alternative; the cost of sending is needed in every fit."""
    fits = fit_all(BLANK, _measured(replace(TRUTH, launch=1e-6))).fits
    assert fits[0].launch > 0
    assert any(other.launch == 0 for other in fits)
    assert all(other.sent > 0 for other in fits)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("efficiency = -1", "efficiency"),
        ("efficiency", "efficiency"),
        ("latency = '5 parsecs'", "latency"),
        ("overlap = 'perfect'", "overlap"),
        ("overlop = 'none'", "did you mean 'overlap'"),
        ("[codecs.bf16]\nencode = -1\ndecode = 0", "codecs.bf16.encode"),
        ("[codecs.bf16]\nencode = 1", "codecs.bf16.decode"),
        (
            "[[alternatives]]\nspread = 0.1",
            "alternative 1 changes 'spread', but may change only fixed, per_token",
        ),
        (
            "[[alternatives]]\nsent = 1.0\n[[alternatives]]\nefficiency = 2.0",
            "alternative 2: efficiency is 2",
        ),
        ("[[alternatives]]\nsent = 'much'", "alternatives.0.sent"),
        ("alternatives = 3", "alternatives"),
        ("[[", "not TOML"),
    ],
)
def test_what_a_machine_cannot_have_is_refused_by_its_key(tmp_path: Path, line: str, named: str) -> None:
    """A missing, unknown or wrong key is refused in one line that names the file and the key."""
    machine_file.write(path := tmp_path / "m.toml", replace(TRUTH, codecs={}))
    key = line.split(" ", maxsplit=1)[0]
    kept = [kept for kept in path.read_text().splitlines() if not kept.startswith(f"{key} ")]
    path.write_text("\n".join(kept if line == "efficiency" else [*kept, line]))  # that one is missing
    with pytest.raises(Refusal, match=named) as caught:
        machine_file.read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host": ""}, "zeropp run needs costs that were measured on this host"),
        ({"host": "elsewhere"}, "calibrated on elsewhere"),
        ({"date": "2020-01-01"}, "days ago"),
        ({"date": "today"}, "date = 'today': expected the day of the calibration"),
    ],
)
def test_a_stale_or_foreign_calibration_is_refused(changes: dict[str, str], message: str) -> None:
    """A run refuses a machine that was calibrated on another host, or too long ago."""
    with pytest.raises(Refusal, match=message):
        machine_file.check_host(Path("m.toml"), replace(TRUTH, **changes), "here")  # type: ignore[arg-type]
