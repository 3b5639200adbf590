"""What the units of one engine share: wire, policy, counters, memory pools, and the pass under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from impl.codecs.rounding_noise import Clock
from impl.comm.wire import Wire
from impl.plan.policy import Policy
from impl.plan.prefetch_schedule import Schedule
from impl.unit.host_memory import HostMemory
from impl.unit.memory_pool import Meter, Pool, Reserve
from impl.unit.reduction_queue import ReductionQueue


@dataclass(slots=True, eq=False)
class Passes:
    """How far the passes of one model are on this rank.

    Attributes:
        schedule: what is gathered ahead, what stays gathered, and in which order gradients are reduced.
        reductions: of the backward pass under way.
        running: forward calls of hooked modules under way.
        in_forward: whether the model's forward pass is under way, and nothing was refused.
        in_backward: whether a backward pass is under way, or failed and was not finished.
        accumulating: whether backward passes add to local gradients, and reduce nothing.
        gathering: indices of the units whose all-gather is under way.
        escaped: indices of the units in use outside of their modules, in this forward pass.
        weights_at: by address of memory, the index of the unit whose gathered weights came there last.
    """

    schedule: Schedule
    reductions: ReductionQueue = field(default_factory=ReductionQueue)
    running: int = 0
    in_forward: bool = False
    in_backward: bool = False
    accumulating: bool = False
    gathering: set[int] = field(default_factory=set)
    escaped: set[int] = field(default_factory=set)
    weights_at: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UnitContext:
    """What the units of one engine share.

    Attributes:
        policy: the model's; to the parts of a unit, the unit's own.
        clock: what stochastic codecs and feedback go by.
        gradients, weights: where buffers of local gradients and of gathered weights come from.
        passes: how far the model's passes are.
    """

    wire: Wire
    policy: Policy
    meter: Meter
    clock: Clock
    gradients: Pool
    weights: Reserve
    host: HostMemory
    passes: Passes
