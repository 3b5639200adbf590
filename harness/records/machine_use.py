"""What the GPUs of a node did during a trial's timed steps, as a record holds it.  No torch.

Older records hold more, which is not read: of processors, memory and interface, and of PCIe and NVLink.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

_OLDER: Final = {"extra": "ignore"}  # which pydantic reads


@dataclass(frozen=True, slots=True)
class GpuUse:
    """One GPU of a node.

    Attributes:
        index: NVML's number of it.
        samples: readings of it; means and shares are over them.
        joules: by its own counter; None where it has none.
        sampled_joules: the integral of its power, by the trapezoidal rule.
        watts: mean power.
        utilisation: mean share of time in which a kernel ran.
        clock_mhz: mean clock of its multiprocessors.
        throttled: share of samples in which its clock was held down, by reason.
        others: most processes of others that computed on it at once.
    """

    __pydantic_config__: ClassVar[Any] = _OLDER

    index: int
    name: str
    samples: int
    joules: float | None
    sampled_joules: float
    watts: float
    utilisation: float
    clock_mhz: float
    throttled: dict[str, float] = field(default_factory=dict)
    others: int = 0


@dataclass(frozen=True, slots=True)
class NodeUse:
    """The GPUs of a node; ``seconds`` are wall-clock, of the timed steps and what came between them."""

    __pydantic_config__: ClassVar[Any] = _OLDER

    node: int
    seconds: float
    gpus: list[GpuUse] = field(default_factory=list)


def joules(nodes: list[NodeUse]) -> float | None:
    """Energy of all GPUs of a trial, by their counters, else sampled; None without GPUs."""
    gpus = [gpu for node in nodes for gpu in node.gpus]
    if not gpus:
        return None
    return sum(gpu.sampled_joules if gpu.joules is None else gpu.joules for gpu in gpus)
