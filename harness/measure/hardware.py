"""How the processors and GPUs of this machine are joined, from ``/sys`` and NVML.

What the system does not say is None, empty or "?".
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from harness.records.run_record import Gpus, Processors

DEVICES: Final = Path("/sys/devices/system")
INFINIBAND: Final = Path("/sys/class/infiniband")
_ANCESTORS: Final = (  # of two GPUs, by NVML's names and those of nvidia-smi
    ("INTERNAL", "PIX"), ("SINGLE", "PIX"), ("MULTIPLE", "PXB"), ("HOSTBRIDGE", "PHB"),
    ("NODE", "NODE"), ("SYSTEM", "SYS"),
)  # fmt: skip
_UNKNOWN: Final = "?"


def processors(devices: Path = DEVICES) -> Processors:
    """The processors of this machine that are online."""
    places = []
    for folder in devices.glob("cpu/cpu[0-9]*/topology"):
        found = [_number(folder / name) for name in ("physical_package_id", "core_id")]
        if None not in found:
            places.append(tuple(found))
    numa = {
        path.name.removeprefix("node"): _text(path / "cpulist") for path in devices.glob("node/node[0-9]*")
    }
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    return Processors(
        sockets=len({socket for socket, _ in places}) or None,
        cores=len(set(places)) or None,
        threads=len(places) or None,
        allowed=None if allowed is None else ranges(allowed),
        numa={number: cpus for number, cpus in sorted(numa.items(), key=lambda one: int(one[0])) if cpus},
    )


def hcas(devices: Path = INFINIBAND) -> list[str]:
    """InfiniBand adapters, RoCE's too, of which a port is active, in the order of their numbers."""
    states = devices.glob("*/ports/*/state")
    names = {path.parts[-4] for path in states if (_text(path) or "").endswith(" ACTIVE")}
    return sorted(
        names, key=lambda name: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
    )


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as Linux writes lists of processors: ``0-3,8``."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][-1] + 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ",".join("-".join(map(str, one)) for one in found)


def gpus() -> Gpus:
    """How the GPUs are joined; empty without NVML."""
    try:
        import pynvml
    except ImportError:
        return Gpus()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Gpus()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        nvlinks = [_nvlinks(pynvml, handle) for handle in handles]
        places = [_place(pynvml.nvmlDeviceGetPciInfo(handle)) for handle in handles]
        links = [
            [
                "X" if one == other else _joined(pynvml, (handles[one], handles[other]), count)
                for other in range(len(handles))
                for count in (_between(nvlinks, places, one, other),)
            ]
            for one in range(len(handles))
        ]
        return Gpus(links=links, pcie=[_pcie(pynvml, handle) for handle in handles])
    except pynvml.NVMLError:
        return Gpus()
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _place(info: Any) -> tuple[int, int, int]:
    return int(info.domain), int(info.bus), int(info.device)


def _nvlinks(nvml: Any, handle: Any) -> list[tuple[int, int, int]]:
    """What is at the other end of each NVLink of a GPU that is up: another GPU, or a switch."""
    found = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        with contextlib.suppress(nvml.NVMLError):  # it has no such link
            if nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED:
                found.append(_place(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)))
    return found


def _between(nvlinks: list[list[Any]], places: list[Any], one: int, other: int) -> int:
    """NVLinks between two GPUs, directly or by switches, to which all other links lead."""
    direct = nvlinks[one].count(places[other])
    switched = [sum(place not in places for place in nvlinks[gpu]) for gpu in (one, other)]
    return direct or min(switched)


def _joined(nvml: Any, pair: tuple[Any, Any], nvlinks: int) -> str:
    if nvlinks:
        return f"NV{nvlinks}"
    with contextlib.suppress(nvml.NVMLError):
        level = nvml.nvmlDeviceGetTopologyCommonAncestor(*pair)
        for name, short in _ANCESTORS:
            if level == getattr(nvml, f"NVML_TOPOLOGY_{name}"):
                return short
    return _UNKNOWN


def _pcie(nvml: Any, handle: Any) -> str:
    with contextlib.suppress(nvml.NVMLError):
        generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        return f"gen {generation} x{nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)}"
    return _UNKNOWN


def _text(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="ascii").strip()
    return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.lstrip("-").isdecimal() else None
