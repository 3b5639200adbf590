"""Reads the peak memory of this process and of its GPU, in bytes."""

from __future__ import annotations

import contextlib
import re
import resource
from pathlib import Path

import torch


def forget_peak(device: torch.device) -> None:
    """Reset the peak memory of this process and of its GPU, so that later peaks count from now on.

    If the system does not allow this, a later peak is the peak since the process started, and so an upper bound.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss() -> int:
    """Return the peak resident memory of this process, in bytes."""
    with contextlib.suppress(OSError):
        if match := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii")):
            return int(match[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_device(device: torch.device) -> int | None:
    """Return the peak memory that torch has allocated on the GPU, in bytes; None for the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def device_in_use(device: torch.device) -> int | None:
    """Return how many bytes of the GPU's memory all processes and libraries use now; None for the CPU.

    Unlike :func:`peak_device`, this includes the CUDA contexts, NCCL's buffers and free memory that torch keeps.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free
