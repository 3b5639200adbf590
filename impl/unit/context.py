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
        policy: the model's; to the parts of a unit, the unit's own.
        clock: what stochastic codecs and feedback go by.
        gradients, weights: where buffers of local gradients and of gathered weights come from.
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
