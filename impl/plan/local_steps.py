"""Decides which units state groups exchange after each optimizer step, if they train with local steps.

A state group is a group of ranks that share one copy of all sharded states.  With ``policy.local_steps = H`` each state
group trains by itself for H steps.  Every H steps the groups average the changes of their masters (fp32 weights) since
the last exchange (DiLoCo, 2311.08105).

With ``policy.local_fragments = F`` the trained units are divided into F fragments, and different fragments are
exchanged after different steps (Streaming DiLoCo, 2501.18512).  The trained unit number u belongs to fragment u mod F.
Fragment f is exchanged after the steps ``H k + f H / F``, rounded down, for all k.  With H = 10 and F = 2, fragment 0
is exchanged after the steps 10, 20 and so on, and fragment 1 after the steps 5, 15 and so on.  Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from impl.policy.policy import Policy, PolicyError
from impl.policy.shard_layout import UnitGeometry


def fragments_of(policy: Policy, units: Sequence[UnitGeometry]) -> list[int | None]:
    """Returns for each unit, in model order, the number of its fragment, counted from 0.

    With local steps, groups of ranks train apart from one another, and exchange weights after some of the steps.  A
    fragment is a set of units whose weights are exchanged after the same steps.  The number is None for a frozen unit,
    and for all units if the policy has no local steps.

    Raises PolicyError: if ``policy.local_fragments`` is larger than the number of trained units.
    """
    trained = [index for index, unit in enumerate(units) if unit.trainable]
    fragments: list[int | None] = [None] * len(units)
    if policy.local_steps is None:
        return fragments
    if 0 < len(trained) < policy.local_fragments:
        raise PolicyError(
            f"local_fragments={policy.local_fragments} is more than the number of the model's units with trained "
            f"parameters: set at most {len(trained)}"
        )
    for number, index in enumerate(trained):
        fragments[index] = number % policy.local_fragments
    return fragments


def meets(policy: Policy, step: int, fragment: int | None) -> bool:
    """Returns whether groups of ranks exchange the units of a fragment after optimizer step number ``step``.

    With local steps, groups of ranks train apart from one another, each with a copy of all weights, and exchange
    weights after some of the steps.  A fragment is a set of units whose weights are exchanged after the same steps.

    ``step`` is counted from 1, and ``fragment``, the number of a fragment, from 0.  Returns False if ``fragment`` is
    None (a frozen unit), or if the policy has no local steps.
    """
    if policy.local_steps is None or fragment is None or step < 1:
        return False
    return (step - fragment * policy.local_steps // policy.local_fragments) % policy.local_steps == 0


def meeting_steps(policy: Policy) -> list[int]:
    """Returns the optimizer steps, from 1 to ``policy.local_steps``, after which groups of ranks exchange a fragment.

    With local steps, groups of ranks train apart from one another, and exchange weights after some of the steps.  A
    fragment is a set of units whose weights are exchanged after the same steps.  The result is in ascending order: with
    ``local_steps=10`` and ``local_fragments=2``, [5, 10].  It is an empty list if the policy has no local steps.
    """
    if (steps := policy.local_steps) is None:
        return []
    fragments = policy.local_fragments
    return [*(fragment * steps // fragments for fragment in range(1, fragments)), steps]
