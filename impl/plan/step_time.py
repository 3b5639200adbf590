"""Predicts the seconds of a training step from its bytes, its computation and a machine.

Pure: no torch.  A :class:`Machine` says what a cluster achieves; :func:`step_time` adds up or overlaps what
one step asks of it.  How a system overlaps belongs to the machine's description, by name, and is never
carried from one system to another:

``none``
    Computation and the messages between nodes follow one another: ``step = compute + wire``.
``full``
    The longer of the two hides the other: ``step = max(compute, wire)``, which no schedule surpasses.

Computation is ``parameters * (fixed + tokens * per_token)`` seconds a rank: ``fixed`` is what a step costs
whatever the batch, such as messages inside a node, launches and the optimizer.  The wire is the bytes that
leave one node over what its adapters carry together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final, Literal

Overlap = Literal["none", "full"]
FLOPS_PER_TOKEN: Final = 8  # of each parameter: forward 2, again for activation checkpointing 2, backward 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What one cluster achieves in training, as measured or as published.

    Attributes:
        fixed: seconds of a step for each parameter of the model, whatever the batch.
        per_token: further seconds for each parameter and each token of a rank.
        efficiency: share of an adapter's nominal rate that messages achieve, above 0 and at most 1.
        fewest, most: tokens of a rank between which ``fixed`` and ``per_token`` were measured.
        overlap: how the system hides messages.

    Raises:
        ValueError: naming the field that is negative, not finite, or out of its range.
    """

    name: str
    source: str
    fixed: float
    per_token: float
    efficiency: float
    fewest: float
    most: float
    overlap: Overlap = "none"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float | int) and not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"machine {self.name}: {field.name} is {value}, not a finite number from 0 on"
                )
        if not 0 < self.efficiency <= 1:
            raise ValueError(
                f"machine {self.name}: efficiency is {self.efficiency}, not above 0 and at most 1"
            )
        if self.fixed + self.per_token == 0:
            raise ValueError(f"machine {self.name}: fixed and per_token are both 0, so nothing takes time")
        if self.overlap not in ("none", "full"):
            raise ValueError(f'machine {self.name}: overlap is "{self.overlap}", not "none" or "full"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one step asks of a machine.

    Attributes:
        parameters: of the model, without padding.
        tokens: of one rank in a step.
        egress_bytes: that one node sends to all others in a step.
        rate: bytes a second that all adapters of one node carry nominally; infinite where nodes are one.
    """

    parameters: float
    tokens: float
    egress_bytes: float
    rate: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least_is_zero = field.name == "egress_bytes"
            if math.isnan(value) or value < 0 or (value == 0 and not least_is_zero):
                raise ValueError(f"{field.name} of a step is {value}, not a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A predicted step, in seconds."""

    compute: float
    wire: float  # of the messages between nodes, hidden or not
    seconds: float  # of the step
    calibrated: bool  # whether the batch lies where the machine was measured


def step_time(machine: Machine, work: Work) -> StepTime:
    """Returns the predicted step of one system on one cluster."""
    compute = work.parameters * (machine.fixed + work.tokens * machine.per_token)
    wire = work.egress_bytes / (work.rate * machine.efficiency)
    return StepTime(
        compute=compute,
        wire=wire,
        seconds=compute + wire if machine.overlap == "none" else max(compute, wire),
        calibrated=machine.fewest <= work.tokens <= machine.most,
    )


def least_seconds(work: Work, peak_flops: float) -> float:
    """Returns what no step undercuts: the wire at its nominal rate, and the computation at the peak rate.

    Args:
        work: of the step.
        peak_flops: floating-point operations a second that one rank can do; infinite if unknown.
    """
    return max(work.egress_bytes / work.rate, flops(work) / peak_flops)


def flops(work: Work) -> float:
    """Returns the floating-point operations of a rank in a step, with activation checkpointing."""
    return FLOPS_PER_TOKEN * work.parameters * work.tokens
