"""Samples a node's machine in a thread while a trial's steps run: GPUs through NVML, processors, memory,
interface.

NVML refreshes its readings about every 0.1 s, so oftener gains nothing.  PCIe counters block for 20 ms each:
they are read every tenth time.
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
_SELDOM: Final = 10  # samples between two readings of PCIe,
_HOST: Final = 5  # of processors and memory, whose means come from counters
_ALL_LINKS: Final = 0xFFFFFFFF  # as the scope of an NVLink's counter (nvml.h); without one it is link 0's
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
    memory: int | None
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
        self.pcie: list[tuple[int, int]] = []
        self._energy = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        self._links = self._nvlink()

    def _ask(self, function: str, *arguments: Any) -> Any:
        """What NVML says; None where this GPU or driver does not."""
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def _nvlink(self) -> tuple[int, int] | None:
        """Bytes over all NVLinks since the driver began, sent and received."""
        names = ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX")
        fields = [getattr(self._nvml, name, None) for name in names]
        scoped = [(field, _ALL_LINKS) for field in fields]
        found = None if None in fields else self._ask("nvmlDeviceGetFieldValues", scoped)
        if found is None or any(value.nvmlReturn for value in found):
            return None
        sent, received = (value.value.ullVal * 1024 for value in found)  # NVML counts KiB
        return sent, received

    def read(self, *, seldom: bool) -> None:
        """Take a sample."""
        power, rates = self._ask("nvmlDeviceGetPowerUsage"), self._ask("nvmlDeviceGetUtilizationRates")
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses") or []
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        clock = self._ask("nvmlDeviceGetClockInfo", getattr(self._nvml, "NVML_CLOCK_SM", 1))
        self.readings.append(
            _Reading(
                at=time.monotonic(),
                watts=None if power is None else power / 1e3,
                utilisation=None if rates is None else rates.gpu / 100,
                memory=None if memory is None else memory.used,
                clock=clock,
                reasons=reasons,
                others=_of_others([process.pid for process in processes]),
            )
        )
        if seldom:
            both = [self._ask("nvmlDeviceGetPcieThroughput", counter) for counter in (0, 1)]  # sent, received
            if None not in both:
                self.pcie.append((both[0] * 1024, both[1] * 1024))

    def use(self) -> GpuUse:
        """All samples together."""
        energy, links, readings = (
            self._ask("nvmlDeviceGetTotalEnergyConsumption"),
            self._nvlink(),
            self.readings,
        )
        powers = [(one.at, one.watts) for one in readings if one.watts is not None]
        known = None if links is None or self._links is None else (links, self._links)
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
            memory_bytes=max((one.memory for one in readings if one.memory is not None), default=0),
            clock_mhz=_mean([one.clock for one in readings if one.clock is not None]),
            throttled={reason: share for reason, share in throttled.items() if share},
            pcie_sent=_mean([sent for sent, _ in self.pcie]) if self.pcie else None,
            pcie_received=_mean([received for _, received in self.pcie]) if self.pcie else None,
            nvlink_sent=None if known is None else known[0][0] - known[1][0],
            nvlink_received=None if known is None else known[0][1] - known[1][1],
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


class _Host:
    """Processors and memory of the machine."""

    def __init__(self) -> None:
        self.busy: list[float] = []
        self.memory = 0

    def read(self) -> None:
        """Take a sample."""
        self.busy.append(psutil.cpu_percent() / 100)
        memory = psutil.virtual_memory()
        self.memory = max(self.memory, memory.total - memory.available)


@dataclass(slots=True)
class Telemetry:
    """What :func:`sampling` fills in: ``use`` once its body has ended."""

    use: NodeUse | None = None


@contextlib.contextmanager
def sampling(node: int, gpus: Sequence[str], interface: str | None) -> Iterator[Telemetry]:
    """Sample a node's machine in a thread while the body runs.

    Args:
        node: its number, for the record.
        gpus: NVML's UUIDs of the GPUs of its ranks; those that NVML does not know are left out.
        interface: between nodes, in this process's network namespace.
    """
    found, stop, began = Telemetry(), threading.Event(), time.monotonic()
    devices, host, spent = _opened(gpus), _Host(), [0.0]
    before = _moved(interface)
    psutil.cpu_percent()  # which counts from here on

    def sample() -> None:
        first = time.thread_time()
        for number in itertools.count():
            for device in devices:
                device.read(seldom=number % _SELDOM == 0)
            if stop.wait(SECONDS):
                break
            if number % _HOST == 0:
                host.read()
        for device in devices:
            device.read(seldom=False)
        host.read()
        spent[0] = time.thread_time() - first

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
        after = _moved(interface)
        found.use = NodeUse(
            node=node,
            seconds=time.monotonic() - began,
            samples=len(host.busy),
            sampling_seconds=spent[0],
            processors=_mean(host.busy),
            memory_bytes=host.memory,
            sent=None if before is None or after is None else after[0] - before[0],
            received=None if before is None or after is None else after[1] - before[1],
            gpus=[device.use() for device in devices],
        )


def _moved(interface: str | None) -> tuple[int, int] | None:
    """Bytes sent and received by an interface; None if there is none of that name."""
    counted = psutil.net_io_counters(pernic=True, nowrap=False).get(interface or "")
    return None if counted is None else (counted.bytes_sent, counted.bytes_recv)


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
