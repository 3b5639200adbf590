"""The expected time adds up the parts of a suite's time, or gives the reason why there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import expected_time
from harness.expected_time import OVERHEAD, Estimate, estimate
from harness.records.trial_record import Failure
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
    total, sentence = estimated(**fields)
    assert total is not None, sentence
    return total


@pytest.mark.usefixtures("cores")
def test_steps_wait_for_cores_and_for_the_link() -> None:
    """Four ranks on two cores take twice as long as two; micro-batches, bytes and validations add their time."""
    two, four = (seconds(cluster=Cluster(nodes=2, ranks_per_node=ranks, link="none")) for ranks in (1, 2))
    assert four - OVERHEAD == pytest.approx(2 * (two - OVERHEAD))
    assert two == pytest.approx(OVERHEAD + 0.1 * (10 + 6))
    none = Cluster(nodes=2, ranks_per_node=1, link="none")
    assert seconds(cluster=none, accumulation=3) == pytest.approx(two + 2.0)
    assert seconds(cluster=none, validate_every=5, validation_batches=6) == pytest.approx(
        two + 3 * 6 * 0.1 / 3
    )
    slow = Cluster(nodes=2, ranks_per_node=1, rate="1 Mbit/s")  # type: ignore[arg-type]
    (planned,) = forecast([Trial(strategy="zero3", cluster=slow, **TINY)], any_host())
    assert seconds(cluster=slow) == pytest.approx(two + 10 * planned.wire_seconds)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cluster": Cluster(device="cuda", transport="nccl")}, "only for trials on the CPU of this machine"),
        ({"corpus": "no/such"}, "no trial can run here"),
        ({"memory_limit": "1 MiB"}, "no trial can run here"),
    ],
)
def test_what_is_not_estimated_says_why(fields: dict[str, Any], reason: str) -> None:
    """There is no estimate for GPUs, nor for suites of which no trial can run; the sentence gives the reason."""
    assert reason in estimated(**fields).sentence


def test_a_core_is_measured_once() -> None:
    """One measurement serves all trials, also of other models, and the sentence calls the result an estimate."""
    trials = [Trial(strategy=name, seed=seed, **TINY) for name in ("zero3", "hpz") for seed in (0, 1)]
    total, sentence = estimate(forecast(trials, any_host()))
    assert total is not None
    assert 4 * OVERHEAD < total < 4 * OVERHEAD + 60
    assert "This estimate assumes" in sentence
    assert seconds(model=Model(name="gpt-1.5b")) > total
    refused = Failure(kind="refused", message="not here", log=None)
    assert estimate([Forecast(trial, 1, failure=refused) for trial in trials]).seconds is None


def test_a_core_is_measured_once_on_a_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Later processes read what the first one measured; a damaged file, or one of another torch, is replaced."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = iter([2e9, 3e9, 4e9])
    monkeypatch.setattr(expected_time, "measured_flops", lambda: next(measured))
    again = expected_time.core_flops.__wrapped__  # as in a process of its own
    assert [again(), again()] == [2e9, 2e9]
    (path,) = tmp_path.rglob("core_flops.json")
    path.write_text("{")
    assert [again(), again()] == [3e9, 3e9]
    monkeypatch.setattr(expected_time, "version", lambda _: "another")
    assert again() == 4e9
