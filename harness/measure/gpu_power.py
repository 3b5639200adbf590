"""Samples a GPU's power through NVML while a trial runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import torch

_POWER_SECONDS: Final = 0.1  # NVML refreshes its reading about as often


@contextlib.contextmanager
def sampling_power(device: torch.device) -> Iterator[list[dict[str, float]] | None]:
    """Read a GPU's power in a thread while the body runs; yields the list that it fills.

    A sample is ``{"seconds": since start, "watts": drawn}``.  None on a CPU or without NVML.
    """
    found = _nvml_handle(device)
    if found is None:
        yield None
        return
    nvml, handle = found
    samples: list[dict[str, float]] = []
    start, stop = time.monotonic(), threading.Event()

    def sample() -> None:
        while not stop.wait(_POWER_SECONDS):
            watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
            samples.append({"seconds": time.monotonic() - start, "watts": watts})

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def _nvml_handle(device: torch.device) -> tuple[Any, Any] | None:
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None
