"""What a step could take at best: by the schedule of its units, and by the processors that its ranks share.

The schedule's model is that of :mod:`impl.simulate`, with the seconds of a trial: computation as measured and
shared among the units by their elements, messages as in its ledger at the rate that its link achieved.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, Final

import pandas as pd

from impl.geometry import FROZEN, UnitGeometry
from impl.schedule import Schedule
from impl.simulate import Load, pass_seconds
from impl.traffic import kept_units
from report.frame import Frames

BITS_PER_MBIT: Final = 1e6


def schedule_seconds(frames: Frames, steps: pd.Series[int]) -> pd.Series[float]:
    """Seconds of the best step of each trial, by id; NaN for engines whose waiting is not known.

    No step is shorter than that of any of its ranks alone: the longest of theirs counts.

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
    of_ranks = timed.groupby(["id", "rank"])[columns].median()
    found = {
        row["id"]: max(
            _seconds(frames, row, computed, int(steps.loc[row["id"]]))
            for _, computed in of_ranks.loc[row["id"]].iterrows()
        )
        for row in frames.trials.to_dict("records")
        if row["id"] in of_ranks.index
    }
    return pd.Series(found, dtype=float)


def processor_seconds(frames: Frames) -> pd.Series[float]:
    """Seconds in which the processors could do the work of a step of each trial, by id, all of them busy.

    The processor seconds of all ranks over the processors that they share; over the timed steps the median.
    With a processor for every rank that is no more than the slowest of them computes.

    NaN on GPUs, for ranks that may stand on several machines, and for records without processor seconds.

    Args:
        frames: with the trials' raw values.
    """
    timed = frames.steps[~frames.steps["warmup"].astype(bool)]
    computed = pd.to_numeric(timed["cpu_seconds"]).astype(float)
    of_steps = computed.groupby([timed["id"], timed["index"]]).agg(lambda ranks: ranks.sum(skipna=False))
    of_trials = of_steps.groupby("id").agg(lambda steps: steps.median(skipna=False))
    processors = pd.to_numeric(frames.trials.set_index("id")["processors"]).astype(float)
    return of_trials / processors.reindex(of_trials.index)


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
    world = trial.topology().world
    geometries = [
        UnitGeometry(name, (), padded, world, not name.endswith(FROZEN)) for name, _, padded in units
    ]
    outer = tuple(index for index, unit in enumerate(geometries) if unit.outer)
    schedule = Schedule(
        [unit.padded for unit in geometries],
        tuple(index for index in range(len(units)) if index not in outer),
        outer,
        policy.memory.prefetch,
        policy.memory.max_live,
        kept_units(policy, geometries),
        in_model_order=policy.stage < 3,
    )
    return passes * pass_seconds(schedule, loads) + float(computed["rest"])
