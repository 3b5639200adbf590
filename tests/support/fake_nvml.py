"""A stand-in for NVML's Python module: its names, its units and its errors, GPUs of given power over time."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

POWER_CAP = 0x4


class FakeNvml(ModuleType):
    """As ``pynvml``, of GPUs with these watts by seconds since this was made, whose integral is ``joules``,
    which lack some functions, and on which these processes compute: milliwatts, millijoules, per cent.
    """

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        """The library's."""

    def __init__(
        self,
        watts: Callable[[float], float],
        joules: Callable[[float], float],
        *,
        lacks: frozenset[str] = frozenset(),
        pids: tuple[int, ...] = (),
    ) -> None:
        super().__init__("pynvml")
        self._begun, self._watts, self._joules = time.monotonic(), watts, joules
        self._lacks, self._pids, self.calls = lacks, pids, 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("nvml") and name in self._lacks:

            def missing(*_: object) -> None:
                raise self.NVMLError("Not Supported")

            return missing
        return found

    def nvmlInit(self) -> None:  # noqa: N802  # names are the library's
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if not uuid.startswith("GPU-"):
            raise self.NVMLError("Invalid Argument")
        return uuid

    def nvmlDeviceGetIndex(self, handle: str) -> int:  # noqa: N802
        return int(handle.removeprefix("GPU-"))

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return "Fake H100"

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return round(1e3 * self._watts(time.monotonic() - self._begun))

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        return round(1e3 * self._joules(time.monotonic() - self._begun))

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=80, memory=20)

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:  # noqa: N802
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:  # noqa: N802
        self.calls += 1
        return POWER_CAP if self.calls % 3 else 0x1  # 0x1: idle, which holds nothing down

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:  # noqa: N802
        return POWER_CAP

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=1) for pid in self._pids]
