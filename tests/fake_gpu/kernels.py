"""Runs this project's CUDA kernels on the memory of fake GPUs, compiled for the CPU by ``tests/cuda_on_cpu``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch

from impl.cuda import launch as cuda_launch
from impl.cuda.launch import Launch
from tests.fake_gpu import trace


def folder() -> Path:
    """Returns the folder of the kernels that are compiled for the CPU."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "zeropp-bench" / "fake-kernels"
    path.mkdir(parents=True, exist_ok=True)
    return path


@functools.cache
def _host() -> Callable[[Launch, torch.device], None]:
    from tests.cuda_on_cpu.host import Host  # it imports the kernels, which are being imported at the start

    return Host(folder())


def on_device(launch: Launch, device: torch.device, *, idle_bytes: int = 0) -> None:
    """Note a launch on torch's current stream, and carry it out on the CPU, unless values are none."""
    trace.note(trace.Kind.CODEC, torch.cuda.current_stream(device).cuda_stream, launch.kernel)
    if os.environ["FAKE_GPU_VALUES"] != "none":
        _host()(launch, device)


def start() -> None:
    """Put the CPU in the place of CuPy."""
    cuda_launch.on_device = on_device
