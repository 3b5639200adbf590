"""Decides after which optimizer steps which units are exchanged between groups that take local steps.

With ``policy.local_steps = H`` each group of ranks trains by itself, and every H steps the groups average how far their
masters have moved (DiLoCo, 2311.08105).  With ``policy.local_fragments = F`` the units are dealt into F fragments:
unit number u belongs to fragment u mod F, and fragment f is exchanged after the steps H k + f H / F (Streaming DiLoCo,
2501.18512).  Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from impl.policy.policy import Policy, PolicyError
from impl.policy.shard_layout import UnitGeometry


def fragments_of(policy: Policy, units: Sequence[UnitGeometry]) -> list[int | None]:
    """Returns the number of each unit's fragment, in model order.

    The fragment is None for frozen units, and for all units if the policy has no local steps.

    Raises PolicyError: if there are fewer trained units than fragments.
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
    """Returns whether groups exchange the fragment with this number after optimizer step ``step``, counted from 1.

    Returns False for the fragment None, and for every fragment without local steps.
    """
    if policy.local_steps is None or fragment is None or step < 1:
        return False
    return (step - fragment * policy.local_steps // policy.local_fragments) % policy.local_steps == 0


def meeting_steps(policy: Policy) -> list[int]:
    """Returns the steps, counted from 1 to ``local_steps``, after which some fragment is exchanged, in order."""
    if (steps := policy.local_steps) is None:
        return []
    fragments = policy.local_fragments
    return [*(fragment * steps // fragments for fragment in range(1, fragments)), steps]
