"""What the GPUs of a node did during a trial's timed steps, as a record holds it.  No torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GpuUse:
    """One GPU of a node."""

    index: int  # NVML's number of it
    name: str
    samples: int  # readings of it; means and shares are over them
    joules: float | None  # by its own counter; None where it has none
    sampled_joules: float  # the integral of its power, by the trapezoidal rule
    watts: float  # mean power
    utilisation: float  # mean share of time in which a kernel ran
    clock_mhz: float  # mean clock of its multiprocessors
    # share of samples in which its clock was held down, by reason
    throttled: dict[str, float] = field(default_factory=dict)
    others: int = 0  # most processes of others that computed on it at once


@dataclass(frozen=True, slots=True)
class NodeUse:
    """The GPUs of a node; ``seconds`` are wall-clock, of the timed steps and what came between them."""

    node: int
    seconds: float
    gpus: list[GpuUse] = field(default_factory=list)


def joules(nodes: list[NodeUse]) -> float | None:
    """Energy of all GPUs of a trial, by their counters, else sampled; None without GPUs."""
    gpus = [gpu for node in nodes for gpu in node.gpus]
    if not gpus:
        return None
    return sum(gpu.sampled_joules if gpu.joules is None else gpu.joules for gpu in gpus)
