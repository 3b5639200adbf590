"""What the units of one engine share: the wire, the policy, counters and memory pools."""

from __future__ import annotations

from dataclasses import dataclass, field

from impl.codecs.rounding_noise import Clock
from impl.comm.wire import Wire
from impl.plan.policy import Policy
from impl.unit.host_memory import HostMemory
from impl.unit.memory_pool import Meter, Pool, Reserve


@dataclass(frozen=True, slots=True)
class UnitContext:
    """What the units of one engine share.

    Attributes:
        wire: what sends.
        policy: the model's; to the parts of a unit, the unit's own.
        meter: where memory is counted.
        clock: what stochastic codecs and feedback go by.
        gradients: where buffers of local gradients come from.
        weights: where buffers of gathered weights come from.
        host: the host's memory, of units that are offloaded.
        under_way: units that are being gathered.
    """

    wire: Wire
    policy: Policy
    meter: Meter
    clock: Clock
    gradients: Pool
    weights: Reserve
    host: HostMemory
    under_way: set[object] = field(default_factory=set)
