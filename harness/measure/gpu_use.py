"""Samples a node's GPUs through NVML, in a thread, while a trial's steps run."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import psutil

from harness.records.record import GpuUse, NodeUse

SECONDS: Final = 0.1  # between two samples
_SM_CLOCK: Final = 1  # NVML_CLOCK_SM
# Bits of NVML's clocks event reasons for what holds a clock down: not idleness, not a setting.
_REASONS: Final = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


class _Gpu:
    """One GPU, through ``nvml``, the library's module."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._read: dict[str, list[Any]] = defaultdict(list)  # by what was read, where the GPU reports it
        self._energy = self._ask("nvmlDeviceGetTotalEnergyConsumption")

    def _ask(self, function: str, *arguments: Any) -> Any:
        """What NVML says; None where this GPU or driver does not."""
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def read(self) -> None:
        """Take a sample."""
        if (power := self._ask("nvmlDeviceGetPowerUsage")) is not None:
            self._read["seconds"].append(time.monotonic())
            self._read["watts"].append(power / 1e3)
        if (rates := self._ask("nvmlDeviceGetUtilizationRates")) is not None:
            self._read["utilisation"].append(rates.gpu / 100)
        if (clock := self._ask("nvmlDeviceGetClockInfo", _SM_CLOCK)) is not None:
            self._read["clock"].append(clock)
        self._read["reasons"].append(self._ask("nvmlDeviceGetCurrentClocksEventReasons") or 0)
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses") or []
        pids = {process.pid for process in processes} - {os.getpid()}
        self._read["others"].append(sum(_parent(pid) != os.getppid() for pid in pids))  # our ranks' siblings

    def use(self) -> GpuUse:
        """All samples together."""
        energy, read = self._ask("nvmlDeviceGetTotalEnergyConsumption"), self._read
        throttled = {
            reason: _mean([bool(one & bit) for one in read["reasons"]]) for bit, reason in _REASONS.items()
        }
        return GpuUse(
            index=self._nvml.nvmlDeviceGetIndex(self._handle),
            name=self._ask("nvmlDeviceGetName") or "",
            samples=len(read["others"]),
            joules=None if None in (energy, self._energy) else (energy - self._energy) / 1e3,
            sampled_joules=float(np.trapezoid(read["watts"], read["seconds"])),
            watts=_mean(read["watts"]),
            utilisation=_mean(read["utilisation"]),
            clock_mhz=_mean(read["clock"]),
            throttled={reason: share for reason, share in throttled.items() if share},
            others=max(read["others"], default=0),
        )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _parent(pid: int) -> int | None:
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:  # of another container: the pid means nothing here
        return None


@contextlib.contextmanager
def sampling(node: int, gpus: Sequence[str]) -> Iterator[list[NodeUse]]:
    """Sample a node's GPUs, by UUID, in a thread while the body runs; the list is filled at its end."""
    found, stop, began = list[NodeUse](), threading.Event(), time.monotonic()
    devices = _opened(gpus) if gpus else []
    if not devices:
        yield found
        return

    def sample() -> None:
        done = False
        while not done:
            done = stop.wait(SECONDS)
            for device in devices:
                device.read()

    for device in devices:
        device.read()
    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
        seconds = time.monotonic() - began
        found.append(NodeUse(node=node, seconds=seconds, gpus=[device.use() for device in devices]))


def _opened(uuids: Sequence[str]) -> list[_Gpu]:
    """The GPUs that NVML knows."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return [_Gpu(pynvml, uuid) for uuid in uuids]
    except pynvml.NVMLError:  # no driver, or a part of a GPU
        return []
