"""Samples a node's GPUs through NVML, in a thread, while a trial's steps run.

NVML refreshes its readings about every 0.1 s, so oftener gains nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psutil

from harness.records.machine_use import GpuUse, NodeUse

SECONDS: Final = 0.1  # between two samples
# Bits of NVML's clocks event reasons for what holds a clock down: not idleness, not a setting.
_REASONS: Final = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


@dataclass(slots=True)
class _Reading:
    """One sample of a GPU; None where the GPU does not report it."""

    at: float  # time.monotonic()
    watts: float | None
    utilisation: float | None
    clock: float | None
    reasons: int
    others: int


class _Gpu:
    """One GPU, through ``nvml``, the library's module."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self.index = nvml.nvmlDeviceGetIndex(self._handle)
        name = self._ask("nvmlDeviceGetName") or ""
        self.name = name.decode() if isinstance(name, bytes) else name
        self.readings: list[_Reading] = []
        self._energy = self._ask("nvmlDeviceGetTotalEnergyConsumption")

    def _ask(self, function: str, *arguments: Any) -> Any:
        """What NVML says; None where this GPU or driver does not."""
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def read(self) -> None:
        """Take a sample."""
        power, rates = self._ask("nvmlDeviceGetPowerUsage"), self._ask("nvmlDeviceGetUtilizationRates")
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses") or []
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        self.readings.append(
            _Reading(
                at=time.monotonic(),
                watts=None if power is None else power / 1e3,
                utilisation=None if rates is None else rates.gpu / 100,
                clock=self._ask("nvmlDeviceGetClockInfo", getattr(self._nvml, "NVML_CLOCK_SM", 1)),
                reasons=reasons,
                others=_of_others([process.pid for process in processes]),
            )
        )

    def use(self) -> GpuUse:
        """All samples together."""
        energy, readings = self._ask("nvmlDeviceGetTotalEnergyConsumption"), self.readings
        powers = [(one.at, one.watts) for one in readings if one.watts is not None]
        throttled = {
            reason: _mean([float(bool(one.reasons & bit)) for one in readings])
            for bit, reason in _REASONS.items()
        }
        return GpuUse(
            index=self.index,
            name=self.name,
            samples=len(readings),
            joules=None if None in (energy, self._energy) else (energy - self._energy) / 1e3,
            sampled_joules=integral(powers),
            watts=_mean([watts for _, watts in powers]),
            utilisation=_mean([one.utilisation for one in readings if one.utilisation is not None]),
            clock_mhz=_mean([one.clock for one in readings if one.clock is not None]),
            throttled={reason: share for reason, share in throttled.items() if share},
            others=max((one.others for one in readings), default=0),
        )


def integral(readings: Sequence[tuple[float, float]]) -> float:
    """The integral of (time, value) by the trapezoidal rule; 0 of fewer than two."""
    pairs = itertools.pairwise(readings)
    return math.fsum((t1 - t0) * (v0 + v1) / 2 for (t0, v0), (t1, v1) in pairs)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _of_others(pids: Sequence[int]) -> int:
    """How many are neither this process nor started by the one that started it, as all ranks are."""
    family = os.getppid()
    return sum(pid != os.getpid() and _parent(pid) != family for pid in pids)


def _parent(pid: int) -> int | None:
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:  # of another container: the pid means nothing here
        return None


@dataclass(slots=True)
class Sampled:
    """What :func:`sampling` fills in: ``use`` once its body has ended; None without GPUs."""

    use: NodeUse | None = None


@contextlib.contextmanager
def sampling(node: int, gpus: Sequence[str]) -> Iterator[Sampled]:
    """Sample a node's GPUs in a thread while the body runs.

    Args:
        node: its number, for the record.
        gpus: NVML's UUIDs of the GPUs of its ranks; those that NVML does not know are left out.
    """
    found, stop, began = Sampled(), threading.Event(), time.monotonic()
    devices = _opened(gpus)
    if not devices:
        yield found
        return

    def sample() -> None:
        done = False
        while not done:
            for device in devices:
                device.read()
            done = stop.wait(SECONDS)
        for device in devices:
            device.read()

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
        found.use = NodeUse(node, time.monotonic() - began, [device.use() for device in devices])


def _opened(uuids: Sequence[str]) -> list[_Gpu]:
    """The GPUs that NVML knows; it is not asked for none."""
    if not uuids:
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
        return [_Gpu(pynvml, uuid) for uuid in uuids]
    except pynvml.NVMLError:  # no driver, or a part of a GPU
        return []
