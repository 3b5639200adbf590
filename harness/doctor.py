"""What is there, what is missing, and what it would add.  Changes nothing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from harness.cluster.interrupts import cleaning_up
from harness.measure import machine
from harness.runs.forecast import PROCESS_BYTES, gib

ENOUGH_CORES: Final = 2
ENOUGH_MEMORY: Final = 4 << 30
ENOUGH_SHARED_MEMORY: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked for.

    Attributes:
        what: it is.
        there: whether it is there, and enough.
        found: what was found.
        adds: what it is for; if it is missing, what to do.
    """

    what: str
    there: bool
    found: str
    adds: str


def examine() -> list[Finding]:
    """Look at everything that a trial may use."""
    return [look() for look in _LOOKS]


def _python() -> Finding:
    there = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return Finding("Python", there, sys.version.split()[0], "3.11 or 3.12 runs the harness")


def _torch() -> Finding:
    found = _version("torch")
    return Finding("torch", found is not None, found or "none", "runs every trial: pip install torch")


def _cuda() -> Finding:
    adds = "trials with cluster.device = 'cuda'; without one everything runs on the CPU"
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("CUDA device", False, f"torch does not import: {error}", adds)
    if not torch.cuda.is_available():
        build = torch.version.cuda
        return Finding("CUDA device", False, f"none (torch is built for {build or 'the CPU'})", adds)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding("CUDA device", True, ", ".join(names), adds)


def _cupy() -> Finding:
    found = [name for name in ("cupy-cuda12x", "cupy-cuda13x") if _version(name)]
    adds = "our CUDA kernels: pip install 'zeropp-bench[cuda12]' or '[cuda13]', never both"
    text = ", ".join(f"{name} {_version(name)}" for name in found) or "none"
    return Finding("CuPy", len(found) == 1, text, adds)


def _nvml() -> Finding:
    adds = "GPU facts: pip install 'zeropp-bench[cuda12]' or '[cuda13]', on an NVIDIA driver"
    try:
        import pynvml
    except ImportError:
        return Finding("NVML", False, "nvidia-ml-py is not installed", adds)
    try:
        pynvml.nvmlInit()
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return Finding("NVML", False, str(error), adds)
    return Finding("NVML", True, f"driver {driver}", adds)


def _namespaces() -> Finding:
    adds = "nodes behind a link that also holds peers (ddp, fsdp2) to its rate; else our wire is paced"
    return _tried_link("network namespaces", None, adds)


def _tbf() -> Finding:
    return _tried_link("tbf", 100.0, "the kernel's shaper of the link between namespaces")


def _tried_link(what: str, rate_mbit: float | None, adds: str) -> Finding:
    """Join two nodes, ask how, and take them apart."""
    from harness.cluster.link import LinkError, Setting, open_link

    try:
        with cleaning_up(), open_link(Setting("namespaces", 2, rate_mbit), f"{os.getpid():x}"[-6:]) as link:
            how = f"works, as {link.details.get('mode', 'asked for')}"
    except LinkError as error:
        return Finding(what, False, str(error), adds)
    return Finding(what, True, how, adds)


def _shared_memory() -> Finding:
    size = machine.shared_memory_bytes()
    return Finding(
        "/dev/shm",  # noqa: S108 - a name to print
        size >= ENOUGH_SHARED_MEMORY,
        gib(size) if size else "none",
        "ranks of a node exchange through it; in a container, --shm-size=1g; else transport = 'gloo'",
    )


def _compiler() -> Finding:
    found = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    return Finding(
        "C++ compiler",
        found is not None,
        Path(found).name if found else "none",
        "CPU kernels and the CUDA sources' tests on a CPU; without it the PyTorch ones run",
    )


def _cores() -> Finding:
    cores = machine.cores()
    return Finding(
        "cores", cores >= ENOUGH_CORES, str(cores), f"{ENOUGH_CORES} or more; the suites' times are for 2"
    )


def _memory() -> Finding:
    size = machine.memory_bytes()
    most = size // PROCESS_BYTES
    return Finding("memory", size >= ENOUGH_MEMORY, gib(size), f"holds at most {most} ranks")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


_LOOKS: Final[tuple[Callable[[], Finding], ...]] = (
    _python,
    _cores,
    _memory,
    _shared_memory,
    _torch,
    _namespaces,
    _tbf,
    _compiler,
    _cuda,
    _cupy,
    _nvml,
)
