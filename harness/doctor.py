"""``zeropp doctor``: lists what this machine has and lacks, and compares the nodes of a cluster.

Each row names a component, what was found, what the component is used for and, if it is missing, how to get
it.  Nothing is installed or changed.
"""

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
_OLDEST_OF_CUDA_13: Final = (7, 5)  # compute capability (CUDA 13 release notes)
_ADDS: Final = {  # what the component is used for and, if it is missing, what to do
    "cores": f"{ENOUGH_CORES} or more, for which the times stated in suites hold",
    "/dev/shm": "ranks of a node exchange data through it; in a container, start with --shm-size=1g, or set "  # noqa: S108
    "transport = 'gloo'",
    "torch": "runs every trial: pip install torch",
    "network namespaces": "emulated nodes with a shaped link, which also limits the rate of peers; without "
    "namespaces, only our own messages are paced",
    "tbf": "the kernel's traffic shaper, which limits the link between namespaces",
    "C++ compiler": "builds the CPU kernels, and tests the CUDA sources on a CPU; without it, codecs run as "
    "PyTorch operations",
    "CUDA device": "runs trials with cluster.device = 'cuda'; without it, trials run on the CPU",
    "CuPy": "runs our CUDA kernels: pip install 'zeropp-bench[cuda12]' or '[cuda13]', never both; a V100 needs cuda12",
    "NVML": "gives facts about GPUs for records: install an NVIDIA driver, and pip install nvidia-ml-py",
    "DeepSpeed": "a peer that suites can name as strategy: pip install 'zeropp-bench[deepspeed]'",
}


def examine() -> list[dict[str, Any]]:
    """Return a row for each component that a trial may use.

    Keys are ``what`` (the component's name), ``there`` (whether the machine has it, or enough of it), ``found`` (what
    the machine has) and ``adds`` (what the component is used for and, if it is missing, what to do).
    """
    cores, memory, shared = machine.cores(), machine.memory_bytes(), machine.shared_memory_bytes()
    facts = machine.facts()
    packages, driver = facts["packages"], facts["driver"]
    cupy = [f"{name} {packages[name]}" for name in ("cupy-cuda12x", "cupy-cuda13x") if packages[name]]
    old = _too_old() if packages["cupy-cuda13x"] else []
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
        "CuPy": (len(cupy) == 1 and not old, ", ".join([*cupy, *old])),
        "NVML": (driver, driver or nvml),
        "DeepSpeed": (missing is None, missing is None and deepspeed.version()),
    }
    adds = _ADDS | {"memory": f"enough for the processes of {memory // PROCESS_BYTES} ranks, without models"}
    return [
        {"what": name, "there": bool(enough), "found": str(value or "none"), "adds": adds[name]}
        for name, (enough, value) in features.items()
    ]


_DIFFERENT: Final = ("address", "host")  # facts that differ between the nodes of a healthy cluster
_FACTS: Final = (
    "system", "kernel", "architecture", "cpu", "cores", "memory_gib", "shared_memory_gib", "python", "driver",
)  # fmt: skip


def compare(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Compare facts about the nodes of a cluster, such as their CPU or their version of torch; return a row for each.

    Keys are ``what`` (the name of the fact), ``values`` (a text for each node, in the order of ``nodes``) and
    ``differs`` (whether the values differ).  ``differs`` is always false for the host and the address, which normally
    differ.  In the row ``host``, a host has a letter instead of its name; nodes on one host have the same letter.
    """
    hosts = list(dict.fromkeys(node.identity for node in nodes))
    columns = [{"host": _letters(hosts.index(node.identity))} | _facts_of(node) for node in nodes]
    rows = []
    for name in dict.fromkeys(name for facts in columns for name in facts):
        values = [str(facts.get(name) or "-") for facts in columns]
        differs = len({*values}) > 1 and name not in _DIFFERENT
        rows.append({"what": name, "values": values, "differs": differs})
    return rows


def _letters(number: int) -> str:
    """Return a name for a host by its number, from 0: ``A`` to ``Z``, then ``AA``, ``AB`` and so on."""
    more, last = divmod(number, len(string.ascii_uppercase))
    return (_letters(more - 1) if more else "") + string.ascii_uppercase[last]


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


def _too_old() -> list[str]:
    """Return a text such as ``Tesla V100 (sm_70) needs cuda12`` for each kind of GPU that CUDA 13 does not support."""
    try:
        import torch
    except (ImportError, OSError):
        return []
    if not torch.cuda.is_available():
        return []
    devices = range(torch.cuda.device_count())
    named = {torch.cuda.get_device_name(i): torch.cuda.get_device_capability(i) for i in devices}
    return [
        f"{name} (sm_{major}{minor}) needs cuda12"
        for name, (major, minor) in named.items()
        if (major, minor) < _OLDEST_OF_CUDA_13
    ]


def _cuda() -> tuple[bool, str]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return False, f"torch does not import: {error}"
    if not torch.cuda.is_available():
        return False, f"none (torch is built for {torch.version.cuda or 'the CPU'})"
    return True, ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
