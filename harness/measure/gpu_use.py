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
        self._nvml, self._handle = nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._read: dict[str, list[Any]] = defaultdict(list)  # by what was read, where the GPU reports it
        ranks = (one for one in psutil.process_iter(["ppid"]) if one.info["ppid"] == os.getppid())
        self._ours = {one.pid for one in ranks}
        self._energy = self._ask("TotalEnergyConsumption")

    def _ask(self, what: str, *arguments: Any) -> Any:
        """What NVML says; None where this GPU or driver does not."""
        try:
            return getattr(self._nvml, f"nvmlDeviceGet{what}")(self._handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def read(self) -> None:
        """Take a sample."""
        if (power := self._ask("PowerUsage")) is not None:
            self._read["seconds"].append(time.monotonic())
            self._read["watts"].append(power / 1e3)
        if (rates := self._ask("UtilizationRates")) is not None:
            self._read["utilisation"].append(rates.gpu / 100)
        if (clock := self._ask("ClockInfo", _SM_CLOCK)) is not None:
            self._read["clock"].append(clock)
        self._read["reasons"].append(self._ask("CurrentClocksEventReasons") or 0)
        processes = self._ask("ComputeRunningProcesses") or []
        self._read["others"].append(len({process.pid for process in processes} - self._ours))

    def use(self) -> GpuUse:
        """All samples together."""
        energy, read = self._ask("TotalEnergyConsumption"), self._read
        throttled = {
            reason: _mean([bool(one & bit) for one in read["reasons"]]) for bit, reason in _REASONS.items()
        }
        return GpuUse(
            index=self._nvml.nvmlDeviceGetIndex(self._handle),
            name=self._ask("Name") or "",
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


@contextlib.contextmanager
def sampling(node: int, gpus: Sequence[str]) -> Iterator[list[NodeUse]]:
    """Sample a node's GPUs, by UUID, in a thread while the body runs; the list is filled at its end."""
    found, stop, began = list[NodeUse](), threading.Event(), time.monotonic()
    devices = _opened(gpus) if gpus else []
    if not devices:
        yield found
        return

    def sample() -> None:
        while True:
            for device in devices:
                device.read()
            if stop.is_set():
                return
            stop.wait(SECONDS)

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
