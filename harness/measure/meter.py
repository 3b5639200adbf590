"""Measures the parts of a step, peak memory, and GPU power; keeps raw values."""

from __future__ import annotations

import contextlib
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import torch

from harness.records.record import Step

Part = Literal["forward", "backward", "optimizer"]
_POWER_SECONDS: Final = 0.1  # NVML refreshes its reading about as often


class StepClock:
    """Times each step by part, with the CPU seconds of the process, all its threads included.

    Args:
        exposed: returns seconds waited for communication so far, or None if not known.
        device: synchronised at the edges of every part, if it is a GPU.
    """

    def __init__(self, exposed: Callable[[], float | None], device: torch.device) -> None:
        self._exposed, self._device = exposed, device
        self._seconds: dict[str, float] = {}
        self._waited: dict[str, float] = {}
        self._begun = self._computed = 0.0
        self.steps: list[Step] = []

    def begin(self) -> None:
        """Begin a step."""
        self._seconds = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
        self._waited = {}
        self._begun = self._now()
        self._computed = time.process_time()  # read inside the wall clock's readings, not around them

    @contextlib.contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Time the body as a part of the step; a part may occur several times and adds up."""
        waited, start = self._exposed(), self._now()
        yield
        self._seconds[name] += self._now() - start
        after = self._exposed()
        if waited is not None and after is not None:
            self._waited[name] = self._waited.get(name, 0.0) + after - waited

    def end(self, *, index: int, warmup: bool, loss: float, norm: float | None) -> None:
        """End the step and return its times; ``index`` counts from the first warm-up step."""
        computed = time.process_time() - self._computed
        self.steps.append(
            Step(
                index=index,
                warmup=warmup,
                total=self._now() - self._begun,
                exposed_forward=self._waited.get("forward"),
                exposed_backward=self._waited.get("backward"),
                loss=loss,
                gradient_norm=norm,
                cpu_seconds=computed,
                **self._seconds,
            )
        )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def forget_peak(device: torch.device) -> None:
    """Reset the peaks of memory, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):  # then the peak is the whole process's, an upper bound
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss() -> int:
    """Peak resident memory of this process, in bytes."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
        if found:
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_device(device: torch.device) -> int | None:
    """Peak memory that torch has allocated on the GPU, in bytes; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


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
