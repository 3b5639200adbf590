"""Puts a fault into our engine on purpose, so that the engine trains worse (a positive control).

A comparison of losses is worth something only if it notices such a fault.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from impl.comm.reduce_scatter import Reduction
from impl.unit.master_shard import Version
from impl.unit.secondary_shard import SecondaryShard
from impl.unit.weight_gather import WeightGather
from impl.zero import Zero


def spoil(zero: Zero, control: str | None) -> None:
    """Put a fault into an engine in place, so that the engine trains worse.

    With ``late_schedule`` the number of bytes that the engine sends may change.  With all other faults it stays the
    same.

    Args:
        zero: The engine.
        control: Name of the fault.  A secondary shard is a rank's part of hpZ's second copy of the weights:

            - ``stale_secondary``: secondary shards always hold the weights of their first all-gather;
            - ``late_secondary``: secondary shards hold the weights of the step before;
            - ``unordered``: gradients are not reordered before the two hops of qgZ.  With N nodes of L ranks, rank l of
              node n then ends with slice ``l * N + n`` instead of ``n * L + l`` (paper section 3.3).  With 2 nodes of 2
              ranks, ranks 1 and 2 end with each other's slice;
            - ``late_schedule``: every change of settings that the policy's schedule makes comes one step late.

            Any other value changes nothing.
    """
    if control == "late_schedule":
        follow = zero.follow_schedule

        def follow_late(step: int) -> None:
            follow(max(0, step - 1))

        zero.follow_schedule = follow_late  # type: ignore[method-assign]
    for unit in zero.units:
        if control in ("stale_secondary", "late_secondary"):
            if isinstance(gather := unit.weight_gather, WeightGather):  # hpZ allows no gather of a user's own
                _keep_old(gather.secondary, forever=control == "stale_secondary")
        elif control == "unordered":
            right = unit.reduction.collective
            if not isinstance(right, Reduction):  # a suite refuses this control of a user's own reduction
                continue
            hops = [
                replace(hop, stride=hop.frames) if hop.kind == "all_to_all" else hop for hop in right.hops
            ]
            unit.reduction.collective = replace(right, hops=hops)


def _keep_old(secondary: SecondaryShard, *, forever: bool) -> None:
    """Make a secondary shard (a rank's part of hpZ's copy of the weights) hold old weights instead of the present ones.

    The old weights are those of the first all-gather if ``forever`` is True, and those of the step before if it is
    False.
    """
    keep = secondary.keep
    # The weights gathered from the last two versions of the master, by torch's version counter of the master.
    gathered = dict[int, Tensor]()

    def keep_old(received: Tensor, version: Version, *, step: int = 0) -> None:
        if version[1] not in gathered and not (forever and gathered):
            gathered[version[1]] = received.clone()
        for old in sorted(gathered)[:-2]:
            del gathered[old]
        keep(gathered[min(gathered)], version, step=step)

    secondary.keep = keep_old  # type: ignore[method-assign]
