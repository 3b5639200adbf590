"""Finds the engine of a parameter that modules of a sharded model show."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from impl.engine.engine import Zero
from impl.engine.optimizer_hooks import owner_of
from impl.unit.unit import Unit


class Owner(NamedTuple):
    """Whose a parameter is: its engine, its unit and its number there."""

    engine: Zero
    unit: Unit
    number: int


def find(parameter: Tensor) -> Owner | None:
    """Whose ``parameter`` is, if it is one that modules of a sharded model show.

    Raises:
        ZeroError: if the engine is gone.
    """
    owner = owner_of(parameter)
    if owner is None:
        return None
    engine, unit, number = owner
    assert isinstance(engine, Zero)  # noqa: S101  # no other registers
    return Owner(engine, unit, number)
