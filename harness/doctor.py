"""What is there, what is missing, and what it would add.  Changes nothing."""

from __future__ import annotations

import os
import shutil
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from harness.cluster.interrupts import cleaning_up
from harness.cluster.node_supervisors import Node
from harness.errors import LinkError
from harness.measure import machine
from harness.runs.feasibility import PROCESS_BYTES, gib
from harness.strategies import deepspeed

ENOUGH_CORES: Final = 2
ENOUGH_MEMORY: Final = 4 << 30
ENOUGH_SHARED_MEMORY: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked for."""

    what: str
    there: bool  # and enough
    found: str
    adds: str  # what it is for; if it is missing, what to do


def examine() -> list[Finding]:
    """Look at everything that a trial may use."""
    cores, memory, shared = machine.cores(), machine.memory_bytes(), machine.shared_memory_bytes()
    python, facts = sys.version_info[:2] in ((3, 11), (3, 12)), machine.facts()
    packages, driver = facts["packages"], facts["driver"]
    cupy = [f"{name} {packages[name]}" for name in ("cupy-cuda12x", "cupy-cuda13x") if packages[name]]
    nvml = "no NVIDIA driver answers" if packages["nvidia-ml-py"] else "nvidia-ml-py is not installed"
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    return [
        Finding("Python", python, sys.version.split()[0], "3.11 or 3.12 runs the harness"),
        Finding(
            "cores", cores >= ENOUGH_CORES, str(cores), f"{ENOUGH_CORES} or more: suites' times are for 2"
        ),
        Finding(
            "memory", memory >= ENOUGH_MEMORY, gib(memory), f"holds at most {memory // PROCESS_BYTES} ranks"
        ),
        Finding(
            "/dev/shm",  # noqa: S108 - a name to print
            shared >= ENOUGH_SHARED_MEMORY,
            gib(shared) if shared else "none",
            "ranks of a node exchange through it; in a container, --shm-size=1g; else transport = 'gloo'",
        ),
        Finding(
            "torch",
            bool(packages["torch"]),
            packages["torch"] or "none",
            "runs every trial: pip install torch",
        ),
        _link(
            "network namespaces",
            None,
            "nodes behind a link that also holds peers to its rate; else our wire is paced",
        ),
        _link("tbf", 100.0, "the kernel's shaper of the link between namespaces"),
        Finding(
            "C++ compiler",
            compiler is not None,
            Path(compiler).name if compiler else "none",
            "CPU kernels and the CUDA sources' tests on a CPU; without it the PyTorch ones run",
        ),
        Finding(
            "CUDA device",
            *_cuda(),
            "trials with cluster.device = 'cuda'; without one everything runs on the CPU",
        ),
        Finding(
            "CuPy",
            len(cupy) == 1,
            ", ".join(cupy) or "none",
            "our CUDA kernels: pip install 'zeropp-bench[cuda12]' or '[cuda13]', never both",
        ),
        Finding(
            "NVML",
            driver is not None,
            f"driver {driver}" if driver else nvml,
            "GPU facts: an NVIDIA driver, and pip install nvidia-ml-py",
        ),
        Finding(
            "DeepSpeed",
            (missing := deepspeed.why_missing()) is None,
            deepspeed.version() if missing is None else "none",
            "a peer of suites: pip install 'zeropp-bench[deepspeed]'",
        ),
    ]


@dataclass(frozen=True, slots=True)
class Compared:
    """One fact about all nodes of a run."""

    what: str
    values: tuple[str, ...]  # by node

    @property
    def differs(self) -> bool:
        """Whether it is not the same on all of them; an address has to differ."""
        return len(set(self.values)) > 1 and self.what not in _OWN


_OWN: Final = ("address", "host")
_FACTS: Final = (
    "system", "kernel", "architecture", "cpu", "cores", "memory_gib", "shared_memory_gib", "python", "driver",
)  # fmt: skip


def compare(nodes: Sequence[Node]) -> list[Compared]:
    """Facts of all nodes side by side; ``host`` has a letter for each distinct one."""
    hosts = list(dict.fromkeys(node.identity for node in nodes))
    machines: list[dict[str, Any]] = [node.facts["machine"] for node in nodes]
    codes: list[dict[str, Any]] = [node.facts["code"] for node in nodes]
    packages = sorted({name for one in machines for name in one["packages"]})
    rows: dict[str, list[Any]] = {
        "host": [string.ascii_uppercase[hosts.index(node.identity) % 26] for node in nodes],
        "interface": [node.port.interface for node in nodes],
        "address": [node.port.address for node in nodes],
    }
    rows |= {name: [one.get(name) for one in machines] for name in _FACTS}
    rows["gpus"] = [", ".join(f"{g['name']} {g['memory_gib']} GiB" for g in one["gpus"]) for one in machines]
    rows["hcas"] = [", ".join(node.facts["hcas"]) for node in nodes]
    rows |= {name: [one["packages"].get(name) for one in machines] for name in packages}
    rows |= {
        f"code {name}": [one.get(name) for one in codes]
        for name in ("version", "commit", "source", "kernels")
    }
    return [
        Compared(name, tuple("-" if v in (None, "") else str(v) for v in row)) for name, row in rows.items()
    ]


def _cuda() -> tuple[bool, str]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return False, f"torch does not import: {error}"
    if not torch.cuda.is_available():
        return False, f"none (torch is built for {torch.version.cuda or 'the CPU'})"
    return True, ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _link(what: str, rate_mbit: float | None, adds: str) -> Finding:
    """Join two nodes, ask how, and take them apart."""
    from harness.cluster.link import Setting, open_link

    try:
        with cleaning_up(), open_link(Setting("namespaces", 2, rate_mbit), f"{os.getpid():x}"[-6:]) as link:
            return Finding(what, True, f"works, as {link.details.get('mode', 'asked for')}", adds)
    except LinkError as error:
        return Finding(what, False, str(error), adds)
