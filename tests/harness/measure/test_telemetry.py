"""What is sampled of a machine while steps run."""

from __future__ import annotations

import math
import os
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.measure.telemetry import integral, sampling
from harness.records.machine_use import NodeUse, joules
from tests.support.fake_nvml import FakeNvml

# Power that rises and falls once a second around 300 W, and its exact integral.
WAVES = (
    lambda t: 300 + 200 * math.sin(2 * math.pi * t),
    lambda t: 300 * t + 200 * (1 - math.cos(2 * math.pi * t)) / (2 * math.pi),
)


def sampled(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, seconds: float, *gpus: str) -> NodeUse:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with sampling(1, gpus, "lo") as found:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(1000))
    assert found.use is not None
    return found.use


def test_energy_is_the_integral_of_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two GPUs whose power changes all the time, the counter's energy is the samples' within 5 %."""
    use = sampled(monkeypatch, FakeNvml(*WAVES), 3.0, "GPU-3", "GPU-5")
    assert [gpu.index for gpu in use.gpus] == [3, 5]
    for gpu in use.gpus:
        assert gpu.joules is not None
        assert gpu.sampled_joules == pytest.approx(gpu.joules, rel=0.05)
        assert gpu.samples >= 10
        assert gpu.name == "Fake H100"
        assert (gpu.utilisation, gpu.memory_bytes, gpu.clock_mhz) == (pytest.approx(0.8), 3 << 30, 1980)
        assert (gpu.pcie_sent, gpu.pcie_received) == (1000 * 1024, 2000 * 1024)
        assert (gpu.nvlink_sent, gpu.nvlink_received) == (5 * 1024, 7 * 1024)
        assert 0 < gpu.throttled["power cap"] < 1
        assert set(gpu.throttled) == {"power cap"}
    assert joules([use]) == sum(gpu.joules or 0 for gpu in use.gpus)
    assert use.node == 1
    assert 0 < use.processors <= 1
    assert use.memory_bytes > 0
    assert use.sent == use.received  # of the loopback interface


@pytest.mark.parametrize(
    "lacks",
    [
        "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetFieldValues", "nvmlDeviceGetPcieThroughput",
        "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage",
    ],
)  # fmt: skip
def test_what_a_gpu_does_not_report_is_left_out(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    """Each of NVML's functions may be missing; the others are recorded."""
    (gpu,) = sampled(monkeypatch, FakeNvml(*WAVES, lacks=frozenset({lacks})), 0.25, "GPU-0").gpus
    assert (gpu.joules is None) == (lacks == "nvmlDeviceGetTotalEnergyConsumption")
    assert (gpu.nvlink_sent is None) == (lacks == "nvmlDeviceGetFieldValues")
    assert (gpu.pcie_sent is None) == (lacks == "nvmlDeviceGetPcieThroughput")
    assert (gpu.watts == 0) == (lacks == "nvmlDeviceGetPowerUsage")
    assert (gpu.utilisation == 0) == (lacks == "nvmlDeviceGetUtilizationRates")
    assert gpu.throttled  # by the older name of the function too


def test_processes_of_others_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is not, nor what the same process started; any other is."""
    nvml = FakeNvml(*WAVES, pids=(os.getpid(), 1))
    (gpu,) = sampled(monkeypatch, nvml, 0.25, "GPU-0").gpus
    assert gpu.others == 1


def test_without_nvml_the_host_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a GPU has no handle, and a CPU is not asked for one."""
    for gpus in ((), ("MIG-0",)):
        use = sampled(monkeypatch, FakeNvml(*WAVES), 0.25, *gpus)
        assert not use.gpus
        assert use.samples > 1
    assert joules([use]) is None


@given(st.lists(st.floats(0, 1000), min_size=2, max_size=20), st.floats(0.01, 10))
def test_the_integral_of_a_line_is_exact(values: list[float], step: float) -> None:
    """Between samples power is taken to change evenly."""
    readings = [(step * index, value) for index, value in enumerate(values)]
    middle = sum(values) - (values[0] + values[-1]) / 2
    assert integral(readings) == pytest.approx(step * middle, abs=1e-6)
