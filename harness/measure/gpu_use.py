"""Samples power, clocks and utilisation of a node's GPUs through NVML, in a thread, while steps run."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from harness.records.trial_record import GpuUse, NodeUse

SECONDS: Final = 0.1  # between two samples
_HOSTS_NAMESPACE: Final = 0xEFFFFFFC  # PROC_PID_INIT_INO of Linux: the inode of the host's PID namespace
_SM_CLOCK: Final = 1  # NVML_CLOCK_SM
_NVLINK_SENT: Final = 138, 0xFFFFFFFF  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, of all links: KiB (nvml.h)
# NVML's bits for the reasons why a clock is held down, without those for idleness and users' settings.
_REASONS: Final = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


def sees_the_hosts_processes() -> bool:
    """Return whether this process sees the host's process ids, which are the ids that the GPU driver reports.

    Only then can the ids of ranks be found among the ids of the processes that use a GPU.  In a container, processes
    have ids of their own, unless the container shares the host's PID namespace.  Returns True on systems without PID
    namespaces.
    """
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _HOSTS_NAMESPACE
    except OSError:
        return True


class _Gpu:
    """Takes samples of one GPU: its power, utilisation, clock and running processes.

    ``nvml`` is the module pynvml, and ``ranks`` the number of ranks that compute on the GPU.
    """

    def __init__(self, nvml: Any, uuid: str, ranks: int) -> None:
        self._count, self._by_number = ranks, sees_the_hosts_processes()
        self._nvml, self._handle = nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)
        # Values by name; some GPUs do not report all of them.
        self._samples: dict[str, list[Any]] = defaultdict(list)
        processes = psutil.process_iter(["ppid"])
        self._ranks = {process.pid for process in processes if process.info["ppid"] == os.getppid()}
        self._energy, self._nvlink = self._query("TotalEnergyConsumption"), self._nvlink_bytes()

    def _nvlink_bytes(self) -> int | None:
        """Return the bytes that this GPU has sent through NVLinks so far; None if it does not count them."""
        values = self._query("FieldValues", [_NVLINK_SENT])
        if not values or values[0].nvmlReturn != 0:
            return None
        return int(values[0].value.ullVal) * 1024

    def _query(self, name: str, *arguments: Any) -> Any:
        """Return what ``nvmlDeviceGet<name>`` returns; None if this GPU or driver does not support it."""
        try:
            return getattr(self._nvml, f"nvmlDeviceGet{name}")(self._handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def read(self) -> None:
        """Take a sample: read the GPU's power, utilisation, clock and running processes once."""
        if (power := self._query("PowerUsage")) is not None:
            self._samples["seconds"].append(time.monotonic())
            self._samples["watts"].append(power / 1e3)
        if (rates := self._query("UtilizationRates")) is not None:
            self._samples["utilisation"].append(rates.gpu / 100)
        if (clock := self._query("ClockInfo", _SM_CLOCK)) is not None:
            self._samples["clock"].append(clock)
        self._samples["reasons"].append(self._query("CurrentClocksEventReasons") or 0)
        processes = self._query("ComputeRunningProcesses") or []
        present = {process.pid for process in processes}
        others = len(present - self._ranks) if self._by_number else max(0, len(present) - self._count)
        self._samples["others"].append(others)

    def use(self) -> GpuUse:
        """Return the means over all samples, and the energy and NVLink bytes since this object was constructed."""
        energy, samples = self._query("TotalEnergyConsumption"), self._samples
        nvlink = self._nvlink_bytes()
        throttled = {
            reason: _mean([bool(bits & bit) for bits in samples["reasons"]])
            for bit, reason in _REASONS.items()
        }
        return GpuUse(
            index=self._nvml.nvmlDeviceGetIndex(self._handle),
            name=self._query("Name") or "",
            samples=len(samples["others"]),
            joules=None if None in (energy, self._energy) else (energy - self._energy) / 1e3,
            sampled_joules=float(np.trapezoid(samples["watts"], samples["seconds"])),
            watts=_mean(samples["watts"]),
            utilisation=_mean(samples["utilisation"]),
            clock_mhz=_mean(samples["clock"]),
            throttled={reason: share for reason, share in throttled.items() if share},
            others=max(samples["others"], default=0),
            nvlink_bytes="unseen" if nvlink is None or self._nvlink is None else nvlink - self._nvlink,
        )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


@contextlib.contextmanager
def sampling(node: int, gpus: Sequence[str]) -> Iterator[list[NodeUse]]:
    """Take samples of a node's GPUs in a thread while the body of ``with`` runs.

    Args:
        node: Number of the node, for the record.
        gpus: For each rank of the node, the UUID of its GPU; a GPU that ranks share occurs several times.

    Yields:
        A list that is empty until the body ends, and then has one entry with the use of all GPUs.  It stays empty if
        there are no GPUs, if NVML does not work, or if any of the GPUs is unknown to NVML.
    """
    uses, stop, began = list[NodeUse](), threading.Event(), time.monotonic()
    devices = _open(gpus) if gpus else []
    if not devices:
        yield uses
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
        yield uses
    finally:
        stop.set()
        thread.join()
        seconds = time.monotonic() - began
        uses.append(NodeUse(node=node, seconds=seconds, gpus=[device.use() for device in devices]))


def _open(uuids: Sequence[str]) -> list[_Gpu]:
    """Return a sampler for each GPU in ``uuids``; an empty list if NVML does not work, or any UUID is unknown to it."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return [_Gpu(pynvml, uuid, ranks) for uuid, ranks in Counter(uuids).items()]
    except pynvml.NVMLError:  # there is no driver, or a UUID is that of a MIG instance
        return []
