"""Lists what this machine has, what it lacks, and what that would add.  Changes nothing."""

from __future__ import annotations

import shutil
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from harness.cluster.node_supervisors import Node
from harness.measure import machine
from harness.runs.feasibility import PROCESS_BYTES, gib, namespaces
from harness.strategies import deepspeed

ENOUGH_CORES: Final = 2
ENOUGH_MEMORY: Final = 4 << 30
ENOUGH_SHARED_MEMORY: Final = 256 << 20
_ADDS: Final = {  # its use and, if it is missing, what to do
    "cores": f"{ENOUGH_CORES} or more: suites' times are for 2",
    "/dev/shm": "ranks of a node exchange through it; in a container, --shm-size=1g; else transport = 'gloo'",  # noqa: S108
    "torch": "runs every trial: pip install torch",
    "network namespaces": "nodes behind a link that also holds peers to its rate; else our wire is paced",
    "tbf": "the kernel's shaper of the link between namespaces",
    "C++ compiler": "CPU kernels and the CUDA sources' tests on a CPU; without it the PyTorch ones run",
    "CUDA device": "trials with cluster.device = 'cuda'; without one all runs on the CPU",
    "CuPy": "our CUDA kernels: pip install 'zeropp-bench[cuda12]' or '[cuda13]', never both",
    "NVML": "GPU facts: an NVIDIA driver, and pip install nvidia-ml-py",
    "DeepSpeed": "a peer of suites: pip install 'zeropp-bench[deepspeed]'",
}


def examine() -> list[dict[str, Any]]:
    """A row for everything that a trial may use; ``there`` if the machine has enough of it."""
    cores, memory, shared = machine.cores(), machine.memory_bytes(), machine.shared_memory_bytes()
    facts = machine.facts()
    packages, driver = facts["packages"], facts["driver"]
    cupy = [f"{name} {packages[name]}" for name in ("cupy-cuda12x", "cupy-cuda13x") if packages[name]]
    nvml = "no NVIDIA driver answers" if packages["nvidia-ml-py"] else "nvidia-ml-py is not installed"
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    missing, unshaped, tbf = deepspeed.why_missing(), namespaces(None), namespaces()
    features: dict[str, tuple[object, object]] = {  # whether it is enough, and what the machine has
        "cores": (cores >= ENOUGH_CORES, cores),
        "memory": (memory >= ENOUGH_MEMORY, gib(memory)),
        "/dev/shm": (shared >= ENOUGH_SHARED_MEMORY, shared and gib(shared)),  # noqa: S108  # a name to print
        "torch": (packages["torch"], packages["torch"]),
        "network namespaces": (unshaped is None, unshaped or "works"),
        "tbf": (tbf is None, tbf or "works"),
        "C++ compiler": (compiler, compiler and Path(compiler).name),
        "CUDA device": _cuda(),
        "CuPy": (len(cupy) == 1, ", ".join(cupy)),
        "NVML": (driver, driver or nvml),
        "DeepSpeed": (missing is None, missing is None and deepspeed.version()),
    }
    adds = _ADDS | {"memory": f"holds at most {memory // PROCESS_BYTES} ranks"}
    return [
        {"what": name, "there": bool(enough), "found": str(value or "none"), "adds": adds[name]}
        for name, (enough, value) in features.items()
    ]


_DIFFERENT: Final = ("address", "host")  # differ although nothing is wrong
_FACTS: Final = (
    "system", "kernel", "architecture", "cpu", "cores", "memory_gib", "shared_memory_gib", "python", "driver",
)  # fmt: skip


def compare(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """A row for each fact, with the values of all nodes; ``host`` is a letter for each distinct host."""
    hosts = list(dict.fromkeys(node.identity for node in nodes))
    columns = [
        {"host": string.ascii_uppercase[hosts.index(node.identity) % 26]} | _facts_of(node) for node in nodes
    ]
    rows = []
    for name in dict.fromkeys(name for facts in columns for name in facts):
        values = [str(facts.get(name) or "-") for facts in columns]
        differs = len({*values}) > 1 and name not in _DIFFERENT
        rows.append({"what": name, "values": values, "differs": differs})
    return rows


def _facts_of(node: Node) -> dict[str, Any]:
    facts, code = node.facts["machine"], node.facts["code"]
    return {
        "interface": node.port.interface,
        "address": node.port.address,
        **{name: facts.get(name) for name in _FACTS},
        "gpus": ", ".join(f"{gpu['name']} {gpu['memory_gib']} GiB" for gpu in facts["gpus"]),
        "hcas": ", ".join(node.facts["hcas"]),
        **facts["packages"],
        **{f"code {name}": code.get(name) for name in ("version", "commit", "source", "kernels")},
    }


def _cuda() -> tuple[bool, str]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return False, f"torch does not import: {error}"
    if not torch.cuda.is_available():
        return False, f"none (torch is built for {torch.version.cuda or 'the CPU'})"
    return True, ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
