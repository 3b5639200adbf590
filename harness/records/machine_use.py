"""What the machine of a node did during a trial's timed steps, as a record holds it.  No torch."""

from __future__ import annotations

from dataclasses import dataclass, field


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
        memory_bytes: the most in use, by anybody.
        clock_mhz: mean clock of its multiprocessors.
        throttled: share of samples in which its clock was held down, by reason.
        pcie_sent, pcie_received: bytes a second over PCIe, mean; None where not reported.
        nvlink_sent, nvlink_received: bytes over NVLink; None where not reported.
        others: most processes of others that computed on it at once.
    """

    index: int
    name: str
    samples: int
    joules: float | None
    sampled_joules: float
    watts: float
    utilisation: float
    memory_bytes: int
    clock_mhz: float
    throttled: dict[str, float] = field(default_factory=dict)
    pcie_sent: float | None = None
    pcie_received: float | None = None
    nvlink_sent: int | None = None
    nvlink_received: int | None = None
    others: int = 0


@dataclass(frozen=True, slots=True)
class NodeUse:
    """A node's machine; nodes of one machine each say the same of its processors and memory.

    Attributes:
        seconds: wall-clock, of the timed steps and the validations between them.
        samples: readings.
        sampling_seconds: processor time that they took.
        processors: mean share of the machine's processors in use.
        memory_bytes: the most memory in use, by anybody.
        sent, received: bytes of the interface between nodes; None where none is known.
    """

    node: int
    seconds: float
    samples: int
    sampling_seconds: float
    processors: float
    memory_bytes: int
    sent: int | None = None
    received: int | None = None
    gpus: list[GpuUse] = field(default_factory=list)


def joules(nodes: list[NodeUse]) -> float | None:
    """Energy of all GPUs of a trial, by their counters, else sampled; None without GPUs."""
    gpus = [gpu for node in nodes for gpu in node.gpus]
    if not gpus:
        return None
    return sum(gpu.sampled_joules if gpu.joules is None else gpu.joules for gpu in gpus)
