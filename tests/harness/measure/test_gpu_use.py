"""Samples of GPUs while steps run."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from harness.measure.gpu_use import sampling
from harness.records.trial_record import NodeUse, joules

_LIMITED = (0x4, 0x4, 0x1)  # reasons in turn: of power, and idle, which holds nothing down


def fake_nvml(lacks: str = "", pids: tuple[int, ...] = ()) -> Any:
    """NVML's Python module: GPUs whose power rises and falls once a second around 300 W, and its integral."""
    begun, reasons = time.monotonic(), itertools.cycle(_LIMITED)
    kibibytes = itertools.count(100, 50)
    sent = (SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=count)) for count in kibibytes)

    class NVMLError(Exception):
        """The library's."""

    def refuse(*_: object) -> Any:
        raise NVMLError("Not Supported")

    def milliwatts(_: str) -> int:
        return round(1e3 * (300 + 200 * math.sin(2 * math.pi * (time.monotonic() - begun))))

    def millijoules(_: str) -> int:
        seconds = time.monotonic() - begun
        return round(1e3 * (300 * seconds + 200 * (1 - math.cos(2 * math.pi * seconds)) / (2 * math.pi)))

    device = {
        "GetHandleByUUID": lambda uuid: uuid if uuid.startswith("GPU-") else refuse(),
        "GetIndex": lambda handle: int(handle.removeprefix("GPU-")),
        "GetName": lambda _: "Fake H100",
        "GetPowerUsage": milliwatts,
        "GetTotalEnergyConsumption": millijoules,
        "GetUtilizationRates": lambda _: SimpleNamespace(gpu=80, memory=20),
        "GetClockInfo": lambda *_: 1980,
        "GetCurrentClocksEventReasons": lambda _: next(reasons),
        "GetCurrentClocksThrottleReasons": lambda _: 0x4,
        "GetFieldValues": lambda _, fields: [next(sent) for _ in fields],
        "GetComputeRunningProcesses": lambda _: [SimpleNamespace(pid=pid, usedGpuMemory=1) for pid in pids],
    }
    functions = {f"nvmlDevice{name}": refuse if name == lacks else get for name, get in device.items()}
    return SimpleNamespace(NVMLError=NVMLError, nvmlInit=lambda: None, **functions)


def sampled(monkeypatch: pytest.MonkeyPatch, nvml: Any, seconds: float, *gpus: str) -> NodeUse | None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with sampling(1, gpus) as uses:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(1000))
    return next(iter(uses), None)


def test_energy_is_the_integral_of_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two GPUs whose power changes all the time, the counter's energy is the samples' within 5 %; of
    processes, this one and what the same process started are not counted as others, any other is.
    """
    use = sampled(monkeypatch, fake_nvml(pids=(os.getpid(), 1)), 3.0, "GPU-3", "GPU-5")
    assert use is not None
    assert [gpu.index for gpu in use.gpus] == [3, 5]
    for gpu in use.gpus:
        assert gpu.joules is not None
        assert gpu.sampled_joules == pytest.approx(gpu.joules, rel=0.05)
        assert gpu.samples >= 10
        assert (gpu.name, gpu.others) == ("Fake H100", 1)
        assert (gpu.utilisation, gpu.clock_mhz) == (pytest.approx(0.8), 1980)
        assert 0 < gpu.throttled["power cap"] < 1
        assert set(gpu.throttled) == {"power cap"}
    assert joules([use]) == sum(gpu.joules or 0 for gpu in use.gpus)
    assert use.node == 1


def test_bytes_sent_through_nvlinks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the difference of the GPU's counter, which is in KiB; a GPU without links has none to see."""
    use = sampled(monkeypatch, fake_nvml(), 0.15, "GPU-0")
    assert use is not None
    assert use.gpus[0].nvlink_bytes == 50 * 1024
    nvml = fake_nvml()
    nvml.nvmlDeviceGetFieldValues = lambda *_: [SimpleNamespace(nvmlReturn=3, value=None)]  # not supported
    for without in (fake_nvml("GetFieldValues"), nvml):
        use = sampled(monkeypatch, without, 0.15, "GPU-0")
        assert use is not None
        assert use.gpus[0].nvlink_bytes == "unseen"


@pytest.mark.parametrize(
    "lacks",
    ["GetTotalEnergyConsumption", "GetCurrentClocksEventReasons", "GetUtilizationRates", "GetPowerUsage"],
)
def test_what_a_gpu_does_not_report_is_left_out(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    """Each of NVML's functions may be missing; the others are recorded."""
    use = sampled(monkeypatch, fake_nvml(lacks), 0.25, "GPU-0")
    assert use is not None
    (gpu,) = use.gpus
    assert (gpu.joules is None) == (lacks == "GetTotalEnergyConsumption")
    assert (gpu.watts == 0) == (lacks == "GetPowerUsage")
    assert (gpu.utilisation == 0) == (lacks == "GetUtilizationRates")
    assert bool(gpu.throttled) == (lacks != "GetCurrentClocksEventReasons")


def test_without_gpus_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a GPU has no handle, and a CPU is not asked for one."""
    for gpus in ((), ("MIG-0",)):
        assert sampled(monkeypatch, fake_nvml(), 0.05, *gpus) is None


@pytest.mark.parametrize(("pids", "others"), [((4001, 4002), 0), ((4001, 4002, 4003), 1), ((), 0)])
def test_ranks_in_a_container_are_not_others(
    monkeypatch: pytest.MonkeyPatch, pids: tuple[int, ...], others: int
) -> None:
    """There NVML shows the host's numbers of processes; as many as ranks compute on the GPU are this trial's."""
    monkeypatch.setattr("harness.measure.gpu_use.sees_the_hosts_processes", lambda: False)
    use = sampled(monkeypatch, fake_nvml(pids=pids), 0.2, "GPU-3", "GPU-3")
    assert use is not None
    (gpu,) = use.gpus  # two ranks share it
    assert gpu.others == others
