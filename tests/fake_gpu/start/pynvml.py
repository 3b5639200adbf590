"""A fake NVML: the functions of nvidia-ml-py that this project calls, for ``FAKE_GPUS`` idle devices."""

# ruff: noqa: N802, N816  # the names are NVML's
from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, Final

_BYTES: Final = int(os.environ.get("FAKE_GPU_GIB", "80")) << 30


class NVMLError(Exception):
    """An error of NVML, which never occurs here."""


def _returns(value: object) -> Any:
    return lambda *_: value


nvmlInit = nvmlShutdown = _returns(None)
nvmlDeviceGetCount = _returns(int(os.environ["FAKE_GPUS"]))
nvmlSystemGetDriverVersion = _returns("580.0")
nvmlSystemGetCudaDriverVersion = _returns(13000)
nvmlDeviceGetName = _returns("Fake GPU")
nvmlDeviceGetMemoryInfo = _returns(SimpleNamespace(total=_BYTES, free=_BYTES, used=0))
nvmlDeviceGetPowerUsage = _returns(300_000)  # mW
nvmlDeviceGetTotalEnergyConsumption = _returns(1000)  # mJ
nvmlDeviceGetUtilizationRates = _returns(SimpleNamespace(gpu=90, memory=10))  # %
nvmlDeviceGetClockInfo = _returns(1980)  # MHz
nvmlDeviceGetCurrentClocksEventReasons = _returns(0)
nvmlDeviceGetComputeRunningProcesses = _returns([])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetIndex(handle: int) -> int:
    return handle


def nvmlDeviceGetHandleByUUID(uuid: str | bytes) -> int:
    """The fake runtime fills the UUID of device i with bytes i + 1."""
    text = uuid if isinstance(uuid, str) else uuid.decode()
    return int(text.removeprefix("GPU-")[:2], 16) - 1


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-{handle + 1:02x}"
