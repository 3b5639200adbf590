"""What a step could take at best: the schedule of its units, driven with what the step computed and sent.

The model of :mod:`impl.simulate`, with the seconds of a trial: computation as measured and shared among the
units by their elements, messages as in its ledger at the rate that its link achieved.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, Final

import pandas as pd

from impl.geometry import FROZEN, PERSISTENT, ROOT
from impl.schedule import Schedule
from impl.simulate import Load, pass_seconds
from report.frame import Frames

BITS_PER_MBIT: Final = 1e6
_AROUND: Final = {name + suffix for name in (ROOT, PERSISTENT) for suffix in ("", FROZEN)}


def schedule_seconds(frames: Frames, steps: pd.Series[int]) -> pd.Series[float]:
    """Seconds of the best step of each trial, by id; NaN for engines whose waiting is not known.

    With A micro-batches a step, A passes that each compute and send a part of A; what is neither forward
    nor backward (the optimizer) comes on top as it was measured.

    Args:
        frames: with the trials' raw values.
        steps: timed steps of each trial.
    """
    timed = frames.steps[~frames.steps["warmup"].astype(bool)].copy()
    for phase in ("forward", "backward"):
        timed[f"compute_{phase}"] = timed[phase] - pd.to_numeric(timed[f"exposed_{phase}"])
    timed["rest"] = timed["total"] - timed["forward"] - timed["backward"]
    columns = ["compute_forward", "compute_backward", "rest"]
    slowest = timed.groupby(["id", "index"])[columns].max().groupby("id").median()
    found = {
        row["id"]: _seconds(frames, row, slowest.loc[row["id"]], int(steps.loc[row["id"]]))
        for row in frames.trials.to_dict("records")
        if row["id"] in slowest.index
    }
    return pd.Series(found, dtype=float)


def _seconds(frames: Frames, row: Mapping[Hashable, Any], computed: pd.Series[float], steps: int) -> float:
    """Of one trial."""
    trial, units = frames.ran[row["id"]], frames.units[row["id"]]
    sent = frames.unit_bytes[row["id"]]
    policy = trial.resolved_policy()
    rate = math.nan if row["achieved_mbit"] is None else row["achieved_mbit"] * BITS_PER_MBIT
    if policy is None or computed.isna().any() or not units or (sent and math.isnan(rate)):
        return math.nan
    passes = trial.accumulation

    def link(unit: str, phase: str, *purposes: str) -> float:
        nbytes = sum(sent.get((unit, phase, purpose), 0) for purpose in purposes)
        return 8 * nbytes / steps / passes / rate if nbytes else 0.0

    elements = sum(size for _, size, _ in units)
    loads = [
        Load(
            forward=computed["compute_forward"] * size / elements / passes,
            backward=computed["compute_backward"] * size / elements / passes,
            gather=link(unit, "forward", "weights", "persistent"),
            regather=link(unit, "backward", "weights", "persistent"),
            reduce=link(unit, "backward", "gradients"),
        )
        for unit, size, _ in units
    ]
    outer = tuple(index for index, (unit, _, _) in enumerate(units) if unit in _AROUND)
    inner = tuple(index for index in range(len(units)) if index not in outer)
    limits = policy.memory
    schedule = Schedule([padded for *_, padded in units], inner, outer, limits.prefetch, limits.max_live)
    return passes * pass_seconds(schedule, loads) + float(computed["rest"])
