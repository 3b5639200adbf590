"""An expected time adds up what is known of a suite, and says so where nothing is."""

from __future__ import annotations

from typing import Any

import pytest

from harness import expected_time
from harness.expected_time import OVERHEAD, Estimate, estimate
from harness.records.record import Failure
from harness.runs.feasibility import Forecast, any_host, forecast
from harness.suites.trial import Cluster, Model, Trial

TINY: dict[str, Any] = {"model": Model(name="gpt-tiny"), "sequence": 32, "tokens_per_rank": 64}


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, on which a pass of one rank takes 0.1 s."""
    (tiny,) = forecast([Trial(strategy="zero3", **TINY)], any_host())
    flops = 6 * (tiny.parameters or 0) * 64 / 0.1
    monkeypatch.setattr("harness.measure.machine.cores", lambda: 2)
    monkeypatch.setattr(expected_time, "core_flops", lambda: flops)


def estimated(**fields: Any) -> Estimate:
    return estimate(forecast([Trial(strategy="zero3", steps=10, warmup=0, **TINY | fields)], any_host()))


def seconds(**fields: Any) -> float:
    found = estimated(**fields)
    assert found.seconds is not None, found.sentence
    return found.seconds


@pytest.mark.usefixtures("cores")
def test_steps_wait_for_cores_and_for_the_link() -> None:
    """Four ranks on two cores take twice as long as two; micro-batches add up; bytes take their time; and
    validations are forward passes.
    """
    two, four = (seconds(cluster=Cluster(nodes=2, ranks_per_node=each, link="none")) for each in (1, 2))
    assert four - OVERHEAD == pytest.approx(2 * (two - OVERHEAD))
    assert two == pytest.approx(OVERHEAD + 0.1 * (10 + 6))
    none = Cluster(nodes=2, ranks_per_node=1, link="none")
    assert seconds(cluster=none, accumulation=3) == pytest.approx(two + 2.0)
    assert seconds(cluster=none, validate_every=5, validation_batches=6) == pytest.approx(
        two + 3 * 6 * 0.1 / 3
    )
    slow = Cluster(nodes=2, ranks_per_node=1, rate="1 Mbit/s")  # type: ignore[arg-type]
    (one,) = forecast([Trial(strategy="zero3", cluster=slow, **TINY)], any_host())
    assert seconds(cluster=slow) == pytest.approx(two + 10 * one.wire_seconds)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cluster": Cluster(device="cuda", transport="nccl")}, "processors of one machine alone"),
        ({"corpus": "no/such"}, "no trial runs"),
        ({"memory_limit": "1 MiB"}, "no trial runs"),
    ],
)
def test_what_is_not_estimated_says_why(fields: dict[str, Any], words: str) -> None:
    """A GPU is not measured, and what cannot run takes no time."""
    assert words in estimated(**fields).sentence


def test_a_core_is_measured_once() -> None:
    """All trials share it, one of the paper's scale too, and the estimate is printed as one."""
    trials = [Trial(strategy=name, seed=seed, **TINY) for name in ("zero3", "hpz") for seed in (0, 1)]
    found = estimate(forecast(trials, any_host()))
    assert found.seconds is not None
    assert 4 * OVERHEAD < found.seconds < 4 * OVERHEAD + 60
    assert "an estimate" in found.sentence
    assert seconds(model=Model(name="gpt-1.5b")) > found.seconds
    refused = Failure(kind="refused", message="not here", log=None)
    assert estimate([Forecast(trial, 1, failure=refused) for trial in trials]).seconds is None
