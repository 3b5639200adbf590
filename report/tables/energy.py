"""The table of energy: joules per token and utilisation of GPUs, by policy."""

from __future__ import annotations

import math
from typing import Any, Final

import pandas as pd

from harness.records.confidence_intervals import median_interval
from report.data import footnotes
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import number
from report.draw.figure_definition import by_contender
from report.tables.table import Column, Table, placed

HELD: Final = "¶"  # beside trials whose GPUs were held down, or shared
_HELD_FROM: Final = 0.05  # share of samples


def energy(derived: Derived) -> Table:
    """Table of GPUs' energy per token, power, utilisation and clocks; without rows where no GPU was."""
    on_gpus = derived.trials[derived.trials["gpus"].gt(0)]
    columns = (
        Column("contender", "Contender"),
        Column("trials_told", "n", str),
        Column("joules_told", "J/token", str),
        Column("watts", "W per GPU", number(3)),
        Column("utilisation", "Utilisation", number(2)),
        Column("clock_mhz", "Clock, MHz", number(4)),
        Column("throttled", "Held down", number(2)),
    )
    caption = (
        "GPUs of all ranks over the timed steps, and the validations between them, as NVML reports them. "
        "J/token: by the GPUs' own counters where they have one, else the integral of their power; median "
        "over trials with its 95 % interval. Utilisation: share of time in which a kernel ran, which a "
        "kernel that waits for a message does too. Held down: share of samples in which power or "
        f"temperature held a clock down. {HELD}: trials in which that was more than {_HELD_FROM:.0%}, or in "
        "which a process of others computed on a GPU."
    )
    rows: list[dict[str, Any]] = []
    for _, of_cell in groups(on_gpus, ["cell"]):
        rows += [_row(contender, mine) for _, contender, mine in by_contender(of_cell)]
    if not rows:
        return Table("energy", "Energy", caption, pd.DataFrame(), columns)
    return placed("energy", "Energy", caption, rows, *columns)


def _row(contender: str, mine: pd.DataFrame) -> dict[str, Any]:
    held = int((mine["throttled"].gt(_HELD_FROM) | mine["gpu_others"].gt(0)).sum())
    row: dict[str, Any] = {
        "where": mine["where"].iloc[0],
        "contender": contender,
        "trials": len(mine),
        "trials_told": footnotes.trials(mine) + (f" ({held} {HELD})" if held else ""),
        "held_or_shared": held,
    }
    row |= {name: mine[name].median() for name in ("watts", "utilisation", "clock_mhz", "throttled")}
    known = mine.dropna(subset=["joules_per_token"])
    if known.empty:
        return row | {"joules_per_token": math.nan, "joules_told": ""}
    found = median_interval(list(known["joules_per_token"]), list(known["sweep"]))
    told = f"{found.estimate:.3g}" + (f" ({found.low:.3g} to {found.high:.3g})" if found.known else "")
    return row | {
        "joules_per_token": found.estimate,
        "joules_per_token_low": found.low,
        "joules_per_token_high": found.high,
        "joules_told": told,
    }
