"""What is sampled of GPUs while steps run."""

from __future__ import annotations

import math
import os
import sys
import time

import pytest

from harness.measure.gpu_use import sampling
from harness.records.record import NodeUse, joules
from tests.support.fake_nvml import FakeNvml

# Power that rises and falls once a second around 300 W, and its exact integral.
WAVES = (
    lambda t: 300 + 200 * math.sin(2 * math.pi * t),
    lambda t: 300 * t + 200 * (1 - math.cos(2 * math.pi * t)) / (2 * math.pi),
)


def sampled(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, seconds: float, *gpus: str) -> NodeUse | None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with sampling(1, gpus) as found:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(1000))
    return next(iter(found), None)


def test_energy_is_the_integral_of_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two GPUs whose power changes all the time, the counter's energy is the samples' within 5 %."""
    use = sampled(monkeypatch, FakeNvml(*WAVES), 3.0, "GPU-3", "GPU-5")
    assert use is not None
    assert [gpu.index for gpu in use.gpus] == [3, 5]
    for gpu in use.gpus:
        assert gpu.joules is not None
        assert gpu.sampled_joules == pytest.approx(gpu.joules, rel=0.05)
        assert gpu.samples >= 10
        assert gpu.name == "Fake H100"
        assert (gpu.utilisation, gpu.clock_mhz) == (pytest.approx(0.8), 1980)
        assert 0 < gpu.throttled["power cap"] < 1
        assert set(gpu.throttled) == {"power cap"}
    assert joules([use]) == sum(gpu.joules or 0 for gpu in use.gpus)
    assert use.node == 1


@pytest.mark.parametrize(
    "lacks",
    [
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage",
    ],
)  # fmt: skip
def test_what_a_gpu_does_not_report_is_left_out(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    """Each of NVML's functions may be missing; the others are recorded."""
    use = sampled(monkeypatch, FakeNvml(*WAVES, lacks=frozenset({lacks})), 0.25, "GPU-0")
    assert use is not None
    (gpu,) = use.gpus
    assert (gpu.joules is None) == (lacks == "nvmlDeviceGetTotalEnergyConsumption")
    assert (gpu.watts == 0) == (lacks == "nvmlDeviceGetPowerUsage")
    assert (gpu.utilisation == 0) == (lacks == "nvmlDeviceGetUtilizationRates")
    assert gpu.throttled  # by the older name of the function too


def test_processes_of_others_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is not, nor what the same process started; any other is."""
    nvml = FakeNvml(*WAVES, pids=(os.getpid(), 1))
    use = sampled(monkeypatch, nvml, 0.25, "GPU-0")
    assert use is not None
    (gpu,) = use.gpus
    assert gpu.others == 1


def test_without_gpus_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a GPU has no handle, and a CPU is not asked for one."""
    for gpus in ((), ("MIG-0",)):
        assert sampled(monkeypatch, FakeNvml(*WAVES), 0.05, *gpus) is None
