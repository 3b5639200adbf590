"""Pairs of trials under equal conditions: speed-ups, break-evens and parity (docs/reference/metrics.md)."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np
import pandas as pd

from harness.records.confidence_intervals import Interval, crossing, geometric_interval, paired_ratio_interval
from report.data.contender import PROPOSED, is_baseline, is_preset, with_baseline
from report.data.frames import groups

RATES_AGREE_WITHIN: Final = 0.10  # policies of a cell are compared at one rate if within this
PAIR: Final = ("cell", "sweep", "seed", "repeat")  # trials that ran under the same conditions


def pairs(table: pd.DataFrame, is_base: pd.Series[bool]) -> pd.DataFrame:
    """Pairs of each trial with the baseline's (``is_base``) of its cell, seed and repeat, where there is one.

    Columns of ``table`` (:func:`report.data.metrics.trials`), ``baseline`` (its id), ``speedup`` (its step
    over the trial's), ``allowed`` (over the trial's best), ``bytes_ratio`` (ledger) and ``interface_ratio``.
    """
    columns = {"baseline": "id", "baseline_contender": "contender", "baseline_seconds": "step_seconds"}
    columns |= {f"baseline_{name}": name for name in ("sent_bytes", "interface_bytes")}
    joined = with_baseline(table, is_base, PAIR, **columns).dropna(subset=["baseline"], ignore_index=True)
    return joined.assign(
        speedup=joined["baseline_seconds"] / joined["step_seconds"],
        allowed=joined["baseline_seconds"] / joined["best_seconds"],
        bytes_ratio=joined["sent_bytes"] / joined["baseline_sent_bytes"],
        interface_ratio=joined["interface_bytes"] / joined["baseline_interface_bytes"],
    )


def speedup(group: pd.DataFrame, above: str = "baseline_seconds", below: str = "step_seconds") -> Interval:
    """Geometric mean of the ratios of two columns by seed and repeat, with the spread between sweeps in its
    interval; of :func:`pairs` of one contender in one cell the speed-up.
    """
    by_pair = group.set_index(["seed", "repeat"])  # a trial run again under another time limit: no new pair
    columns = (by_pair[name].to_dict() for name in (above, below, "sweep"))
    return paired_ratio_interval(*columns)


def over_itself(paired: pd.DataFrame) -> Interval | float:
    """The speed-up of some pairs; without ends of a baseline beside itself, and NaN without pairs."""
    if paired.empty:
        return math.nan
    found = speedup(paired)
    itself = paired["contender"].iloc[0] == paired["baseline_contender"].iloc[0]
    return replace(found, low=math.nan, high=math.nan) if itself else found


def geometric(values: pd.Series[float]) -> float:
    """Geometric mean."""
    return float(np.exp(np.log(values).mean()))


def step_interval(group: pd.DataFrame, column: str = "step_seconds") -> Interval:
    """Geometric mean of a column of trials with its interval: what pages print of their steps."""
    return geometric_interval(list(group[column]), list(group["sweep"]))


def rates_differ(table: pd.DataFrame) -> dict[str, float]:
    """Relative spread of the rates of contenders' links, where too large; without unshaped ones."""
    kept = table[table["rate_mbit"].notna() | (table["link_kind"] == "real")].dropna(subset=["achieved_mbit"])
    medians = kept.groupby(["cell", "contender"])["achieved_mbit"].median().groupby("cell")
    spread = medians.max() / medians.min() - 1
    return {str(cell): float(value) for cell, value in spread.items() if value > RATES_AGREE_WITHIN}


def several_rates(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of sizes and topologies that ran at two or more rates."""
    keys = ["nodes", "ranks_per_node", "tokens_per_rank"]
    rates = table.assign(told=table["rate_mbit"].fillna(-1.0)).groupby(keys)["told"].transform("nunique")
    return table[(rates >= 2) & table["achieved_mbit"].notna()]


def break_even(pairs: pd.DataFrame) -> pd.DataFrame:
    """The rate at which a contender and the baseline are equally fast, in settings that differ in rate alone.

    One row per setting and contender that ran at two or more rates: ``break_even_mbit`` (:class:`Interval`),
    the highest crossing of 1, on the line between neighbouring points in logarithms, NaN without one; its
    ends, infinite beyond the neighbours, NaN for few pairs; the range measured with the speed-ups at its
    ends; ``records``, the ids behind it.
    """
    keys = ["elsewhere", "nodes", "ranks_per_node", "tokens_per_rank", "place", "contender"]
    rows = []
    measured = pairs[pairs["achieved_mbit"].notna() & (pairs["id"] != pairs["baseline"])]
    for key, group in groups(measured, keys):
        cells = ((float(mine["achieved_mbit"].median()), mine) for _, mine in groups(group, ["cell"]))
        points = sorted(cells, key=lambda point: point[0])
        if len(points) > 1:
            (lowest, slow), (highest, fast) = points[0], points[-1]
            found, records = _highest_crossing(points), sorted({*group["id"], *group["baseline"]})
            ends = (lowest, highest, speedup(slow).estimate, speedup(fast).estimate)
            rows.append((*key, found, found.n, *ends, " ".join(records)))
    names = ["break_even_mbit", "fewest_pairs", "low_mbit", "high_mbit", "low_speedup", "high_speedup"]
    return pd.DataFrame(rows, columns=[*keys, *names, "records"])


def _highest_crossing(points: list[tuple[float, pd.DataFrame]]) -> Interval:
    """The rate between the last neighbours whose speed-ups lie on both sides of 1."""
    for (r0, slow), (r1, fast) in reversed(list(pairwise(points))):
        by_pair = (
            one.drop_duplicates(["seed", "repeat"]).set_index(["seed", "repeat"]) for one in (slow, fast)
        )
        left, right = (np.log(one["baseline_seconds"]) - np.log(one["step_seconds"]) for one in by_pair)
        both = left.index.intersection(right.index)
        if len(both) and left[both].mean() * right[both].mean() < 0:
            sweeps = slow.set_index(["seed", "repeat"])["sweep"].to_dict()
            places = crossing(left.to_dict(), right.to_dict(), sweeps)
            at, low, high = (r0 * (r1 / r0) ** one if math.isfinite(one) else one for one in places)
            return Interval(at, low, high, len(both))
    return Interval(math.nan, math.nan, math.nan, 0)


def parity(table: pd.DataFrame) -> pd.DataFrame:
    """The contrast at a quarter of the rate over the baseline at the full rate, paired by seed and repeat.

    Columns of ``table``, ``baseline`` (its id), ``full_rate``, and ``parity``, of tokens per second.
    """
    shaped = table.dropna(subset=["rate_mbit"])
    asked = shaped["role"].eq("baseline").any()
    contrast = shaped["role"].eq("contrast") if asked else is_preset(shaped, PROPOSED)
    ours = shaped[contrast].assign(full_rate=lambda t: 4 * t["rate_mbit"])
    base = shaped[is_baseline(shaped)]
    base = base.rename(columns={"rate_mbit": "full_rate", "id": "baseline"})
    keys = ["elsewhere", "sweep", "seed", "repeat", "full_rate"]
    columns = [*keys, "baseline", "tokens_per_second", "achieved_mbit"]
    joined = ours.merge(base[columns], on=keys, suffixes=("", "_baseline"))
    joined["parity"] = joined["tokens_per_second"] / joined["tokens_per_second_baseline"]
    return joined.sort_values(["nodes", "ranks_per_node", "tokens_per_rank", "full_rate"], ignore_index=True)


def parity_interval(group: pd.DataFrame) -> Interval:
    """Geometric mean of the parity of rows of :func:`parity` with one place and rate, with its interval."""
    return speedup(group, "tokens_per_second", "tokens_per_second_baseline")
