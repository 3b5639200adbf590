"""Collects facts about the machine and the code for records, and computes the pool key: a hash of these facts.

Records with the same pool key come from equal machines and equal code, so that their times can be compared.  Facts
contain no host names and no paths, since records are published.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from impl.cpu import build

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
INFINIBAND: Final = Path("/sys/class/infiniband")
ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = (
    "torch", "numpy", "scipy", "pydantic", "pyroute2", "psutil",
    "cupy-cuda12x", "cupy-cuda13x", "nvidia-ml-py",
)  # fmt: skip
# Facts in the pool key.
MUST_AGREE: Final = ("cpu", "cores", "memory_gib", "kernel", "python", "gpus", "driver")
SOURCES: Final = ("impl", "harness")  # packages that can affect a measurement; `report` cannot
SOURCE_SUFFIXES: Final = frozenset({".py", ".cu", ".cuh", ".cpp", ".hpp", ".h", ".csv", ".template"})


def facts() -> dict[str, Any]:
    """Return facts about the machine, ready for JSON: CPU, memory, kernel, boot, Python, packages, GPUs."""
    gpus, driver, _ = nvml()
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "shared_memory_gib": round(shared_memory_bytes() / 2**30, 2),
        "system": platform.system(),
        "kernel": platform.release(),
        "boot": boot(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "gpus": gpus,
        "driver": driver,
    }


def boot(path: Path = BOOT_ID) -> str | None:
    """Return 12 hex digits that change whenever this machine is booted; None if the kernel shows no boot id.

    The digits are the beginning of a SHA-256 of the kernel's boot id, because the boot id itself must not be published.
    """
    try:
        return hashlib.sha256(path.read_bytes().strip()).hexdigest()[:12]
    except OSError:
        return None


def identity() -> str:
    """Return a text that identifies this host in a machine file: its processor, number of cores and kernel."""
    return f"{_cpu_model()}, {cores()} cores, {platform.system()} {platform.release()}"


def code() -> dict[str, Any]:
    """Return facts that identify the code that runs, ready for JSON.

    The keys are ``version`` (of the package), ``commit``, ``dirty`` (whether tracked files differ from the commit),
    ``source`` (:func:`source_digest`) and ``kernels`` (the identity of the compiled C++ kernels).  ``commit`` and
    ``dirty`` are None outside a git checkout.
    """
    commit = git(ROOT, "rev-parse", "HEAD")
    status = git(ROOT, "status", "--porcelain", "--untracked-files=no")
    return {
        "version": _version("zeropp-bench"),
        "commit": None if commit is None else commit.decode().strip(),
        "dirty": None if status is None else bool(status.strip()),
        "source": source_digest(),
        "kernels": build.identity(),
    }


def source_digest(root: Path = ROOT) -> str:
    """Return the first 16 hex digits of the SHA-256 of all source files that can affect a measurement."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SOURCE_SUFFIXES and path.is_file():
                digest.update(path.relative_to(root).as_posix().encode() + b"\0")
                digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def pool_key(machine: dict[str, Any], code: dict[str, Any]) -> str:
    """Return a hash, 12 hex digits, of everything that must be equal in two records before they are evaluated together.

    ``machine`` comes from :func:`facts` and ``code`` from :func:`code`.  Of these two, the hash covers the hardware,
    the kernel, the GPU driver, Python, torch, our sources and the compiled C++ kernels.
    """
    facts = {name: machine.get(name) for name in MUST_AGREE}
    facts["torch"] = machine.get("packages", {}).get("torch")
    facts |= {name: code.get(name) for name in ("source", "kernels")}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Return how many bytes of memory this process may use: the machine's, or its cgroup's limit if lower."""
    total = int(psutil.virtual_memory().total)
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # without a limit the file says "max"
            total = min(total, int(Path(name).read_text(encoding="ascii")))
    return total


def hcas(devices: Path = INFINIBAND) -> list[str]:
    """Return the names of InfiniBand and RoCE adapters that have an active port.

    The names are sorted by their numbers: ``mlx5_2`` comes before ``mlx5_10``.
    """
    names = set()
    for state in devices.glob("*/ports/*/state"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if state.read_text(encoding="ascii").strip().endswith(" ACTIVE"):
                names.add(state.parts[-4])
    parts = {name: re.split(r"(\d+)", name) for name in names}
    return sorted(names, key=lambda name: [int(p) if p.isdecimal() else p for p in parts[name]])


def hca_sent_bytes(only: Sequence[str] = (), devices: Path = INFINIBAND) -> dict[str, int]:
    """Return the bytes that each active InfiniBand or RoCE port has sent so far, by name, such as ``mlx5_0/1``.

    The bytes come from the ports' counters ``port_xmit_data``, which are in units of 4 bytes (Linux,
    sysfs-class-infiniband).  Ports without a readable counter are left out.  ``only`` names the adapters to read; if it
    is empty, all adapters are read.
    """
    sent = {}
    for name in hcas(devices):
        for port in sorted((devices / name / "ports").glob("*")) if not only or name in only else ():
            with contextlib.suppress(OSError, ValueError):
                if (port / "state").read_text(encoding="ascii").strip().endswith(" ACTIVE"):
                    count = (port / "counters" / "port_xmit_data").read_text(encoding="ascii")
                    sent[f"{name}/{port.name}"] = 4 * int(count)
    return sent


def shared_memory_bytes() -> int:
    """Return the size in bytes of /dev/shm, where transport ``shm`` exchanges messages; 0 if there is none."""
    try:
        return shutil.disk_usage("/dev/shm").total  # noqa: S108  # no file is made, only a size is read
    except OSError:
        return 0


def _cpu_model() -> str | None:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if match := re.search(r"^model name\s*:\s*(.*?)\s*$", text, re.MULTILINE):
            return match[1]
    return platform.processor() or platform.machine() or None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def git(root: Path, *arguments: str, differs: int = 0) -> bytes | None:
    """Run git in a checkout, and return its standard output.

    Returns None if ``root`` is no checkout, or if git fails.  An exit status equal to ``differs`` does not count as a
    failure: ``git diff --no-index`` exits with 1 if it finds a difference.
    """
    if not (root / ".git").exists():
        return None
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        process = subprocess.run(
            ["git", *arguments], cwd=root, env=environment, capture_output=True, timeout=20, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout if process.returncode in (0, differs) else None


def nvml() -> tuple[list[dict[str, Any]], str | None, str | None]:
    """Return what NVML reports: the GPUs, the driver's version, and the newest CUDA version that the driver supports.

    Each GPU is a dict with the keys ``name`` and ``memory_gib``.  Without NVML or without a driver, returns an empty
    list and None for both versions.
    """
    try:
        import pynvml
    except ImportError:
        return [], None, None
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        sizes = [round(pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30, 1) for handle in handles]
        names = [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
        gpus = [{"name": name, "memory_gib": size} for name, size in zip(names, sizes, strict=True)]
        driver, cuda = str(pynvml.nvmlSystemGetDriverVersion()), int(pynvml.nvmlSystemGetCudaDriverVersion())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:  # no driver, or one that does not answer
        return [], None, None
    return gpus, driver, f"{cuda // 1000}.{cuda % 1000 // 10}"
