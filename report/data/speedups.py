"""Pairs trials that ran under the same conditions, and computes speed-ups and parity from the pairs.

Definitions: docs/reference/metrics.md.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np
import pandas as pd

from harness.records.confidence_intervals import (
    Interval,
    Prediction,
    geometric_interval,
    paired_ratio_interval,
    ratio_of_another_run,
)
from report.data.configuration import PROPOSED, is_baseline, is_preset, with_baseline

RATES_AGREE_WITHIN: Final = 0.10  # relative spread up to which the rates of a setting's links count as equal
UNTIMED: Final = Interval(math.nan, math.nan, math.nan, 0)  # for seconds that no trial measured
PAIR: Final = ("setting", "sweep", "seed", "repeat")  # trials that ran under the same conditions


def pairs(table: pd.DataFrame, is_base: pd.Series[bool]) -> pd.DataFrame:
    """Return each trial together with the baseline's trial of the same setting, sweep, seed and repeat.

    A setting is the cluster, model, batch and so on; a sweep is one run of all trials of a suite.  ``is_base`` says
    which rows of ``table`` belong to the baseline.  Trials for which the baseline has no such trial are left out.  A
    row has the columns of ``table`` (:func:`report.data.metrics.trials`) and these:

    * ``baseline``: the id of the baseline's trial;
    * ``baseline_configuration``, ``baseline_seconds`` and so on: the configuration, the step time and other values of
      the baseline's trial;
    * ``speedup``: the baseline's step time over the trial's step time;
    * ``allowed``: the largest speed-up that the trial could have.  This is the baseline's step time over the trial's
      best possible step, a lower bound on the trial's step time;
    * ``bytes_ratio``: the trial's bytes between nodes over the baseline's bytes, as the ranks counted them when
      sending;
    * ``interface_ratio``: the same ratio, as the nodes' interfaces counted the bytes;
    * ``disturbed``: whether other programs took much processor time during the trial or the baseline's trial;
    * ``own_disturbed``: whether other programs took much processor time during the trial.
    """
    columns = {
        "baseline": "id",
        "baseline_configuration": "configuration",
        "baseline_seconds": "step_seconds",
    }
    columns |= {
        f"baseline_{name}": name for name in ("sent_bytes", "interface_bytes", "compute_seconds", "disturbed")
    }
    joined = (
        with_baseline(table, is_base, PAIR, **columns).dropna(subset=["baseline"], ignore_index=True).copy()
    )
    return joined.assign(
        own_disturbed=joined["disturbed"].astype(bool),
        disturbed=joined["disturbed"].astype(bool) | joined["baseline_disturbed"].astype(bool),
        speedup=joined["baseline_seconds"] / joined["step_seconds"],
        allowed=joined["baseline_seconds"] / joined["best_seconds"],
        bytes_ratio=joined["sent_bytes"] / joined["baseline_sent_bytes"],
        interface_ratio=joined["interface_bytes"] / joined["baseline_interface_bytes"],
    )


def undisturbed(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that are not disturbed; if all are disturbed, return all.

    ``rows`` are trials, or pairs of trials, of one configuration in one setting.  A trial is disturbed if other
    programs and the hypervisor together took more than 5 % of the processors' time, and a pair if one of its trials is.
    """
    disturbed = rows["disturbed"].astype(bool)
    return rows if disturbed.all() else rows[~disturbed]


def speedup(group: pd.DataFrame, above: str = "baseline_seconds", below: str = "step_seconds") -> Interval:
    """Return the geometric mean of the ratio of two columns, ``above`` over ``below``, with its interval.

    ``group`` are rows of :func:`pairs` of one configuration in one setting (cluster, model, batch and so on).  By
    default, the result is the speed-up: the baseline's step time over the configuration's step time.  The mean is over
    the pairs that :func:`undisturbed` keeps.  The interval includes the spread between occasions: starts of the
    machine, or runs more than an hour apart.
    Pairs of trials whose ranks are threads are left out, since their steps are not timed.  The mean is NaN if no pair
    is left.
    """
    kept = undisturbed(group).dropna(subset=[above, below])
    if kept.empty:
        return UNTIMED
    keys = list(zip(kept["seed"], kept["repeat"], strict=True))  # the last run of a trial counts
    over, under, occasion = (dict(zip(keys, kept[name], strict=True)) for name in (above, below, "occasion"))
    return _with_disturbance(paired_ratio_interval(over, under, occasion, len(group) - len(kept)), kept)


def steady_ratio(group: pd.DataFrame, above: str, below: str) -> Interval:
    """Return the geometric mean of the ratio of two columns, ``above`` over ``below``, with its interval.

    ``group`` are pairs of trials, all of which count.  Use this function for columns such as bytes, which do not depend
    on other programs or on the time of the run.  For times, use :func:`speedup`.
    """
    keys = list(zip(group["seed"], group["repeat"], strict=True))
    over, under = (dict(zip(keys, group[name], strict=True)) for name in (above, below))
    return paired_ratio_interval(over, under)


def expected(group: pd.DataFrame) -> Prediction:
    """Return the interval in which the speed-up of one further run, after another start of the machine, is expected.

    ``group`` are rows of :func:`pairs` of one configuration in one setting (cluster, model, batch and so on).
    Speed-ups may differ between occasions (starts of the machine, or runs more than an hour apart) because the machine
    computes faster or slower.  If the seconds of computation in the baseline's step explain the differences, the
    prediction uses these seconds (:func:`harness.records.confidence_intervals.ratio_of_another_run`).
    """
    kept = undisturbed(group)
    points = [
        (float(rows["baseline_compute_seconds"].mean()), geometric(rows["speedup"]))
        for _, rows in kept.groupby("occasion")
    ]
    known = [] if any(math.isnan(x) for x, _ in points) else points
    return ratio_of_another_run(speedup(group), known)


def outside(group: pd.DataFrame) -> int:
    """Return the number of occasions whose mean speed-up lies outside of the speed-up's interval.

    An occasion is a start of the machine, or a run more than an hour apart from others; the interval is computed over
    all occasions.  ``group`` are rows of :func:`pairs` of one configuration in one setting (cluster, model, batch and
    so on).  Returns 0 if there is no interval.
    """
    ratio, by_occasion = speedup(group), undisturbed(group).groupby("occasion")["speedup"]
    return sum(ratio.known and not ratio.contains(mean) for mean in by_occasion.agg(geometric))


def _with_disturbance(interval: Interval, kept: pd.DataFrame) -> Interval:
    return replace(interval, disturbed=bool(kept["disturbed"].astype(bool).any()))


def over_itself(paired: pd.DataFrame) -> Interval | float:
    """Return the speed-up of the pairs ``paired`` of one configuration; NaN if there are no pairs.

    In the rows of the baseline, each trial is paired with itself; then the speed-up is 1 and has no interval.
    """
    if paired.empty:
        return math.nan
    estimate = speedup(paired)
    itself = paired["configuration"].iloc[0] == paired["baseline_configuration"].iloc[0]
    return replace(estimate, low=math.nan, high=math.nan) if itself else estimate


def geometric(values: pd.Series[float]) -> float:
    """Return the geometric mean of positive values."""
    return float(np.exp(np.log(values).mean()))


def step_interval(group: pd.DataFrame, column: str = "step_seconds") -> Interval:
    """Return the geometric mean of ``column`` over trials, with its interval.

    The mean is over the trials that :func:`undisturbed` keeps.  It is NaN if no trial has a value.
    """
    kept = undisturbed(group).dropna(subset=[column])
    if kept.empty:
        return UNTIMED
    of_group = geometric_interval(list(kept[column]), list(kept["occasion"]), len(group) - len(kept))
    return _with_disturbance(of_group, kept)


def rates_differ(table: pd.DataFrame) -> dict[str, float]:
    """Return the spread of the link's rate in each setting whose link was faster for some configurations than others.

    ``table`` has one row per trial.  Keys are hashes of settings (cluster, model, batch and so on).  A spread of 0.2
    means that the highest of the configurations' median rates is 20 % above the lowest.  Settings with a spread of at
    most :data:`RATES_AGREE_WITHIN` are left out.  Emulated links without a rate are ignored.
    """
    limited = table["rate_mbit"].notna() | table["link_kind"].eq("real")
    by_configuration = table[limited].dropna(subset=["achieved_mbit"]).groupby(["setting", "configuration"])
    medians = by_configuration["achieved_mbit"].median().groupby("setting")
    spread = medians.max() / medians.min() - 1
    return {str(setting): float(value) for setting, value in spread.items() if value > RATES_AGREE_WITHIN}


def several_rates(table: pd.DataFrame) -> pd.DataFrame:
    """Return the trials that can be compared over link rates: similar trials ran at two or more requested rates.

    Trials are similar if they have the same number of nodes, ranks per node and tokens per rank.  For example, trials
    of 2x2 ranks with 512 tokens per rank are returned if some ran at 50 and others at 100 Mbit/s.
    Trials whose link's rate was not measured are left out.
    """
    keys = ["nodes", "ranks_per_node", "tokens_per_rank"]
    rates = table.fillna({"rate_mbit": -1.0}).groupby(keys)["rate_mbit"].transform("nunique")
    return table[(rates >= 2) & table["achieved_mbit"].notna()]


def parity(table: pd.DataFrame) -> pd.DataFrame:
    """Return pairs of a trial at a quarter of a link's rate and the baseline's trial at the full rate, one per row.

    The first trial of a pair is of a configuration that the suite compares with its baseline.  If the suite names no
    baseline, the first trial is of ZeRO++ without changes.  Both trials of a pair have the same sweep, seed and repeat,
    and their settings (cluster, model, batch and so on) differ in the rate alone.

    A row has the columns of ``table`` for the first trial, and these:

    * ``baseline``: the id of the baseline's trial;
    * ``configuration_baseline``: the configuration of the baseline's trial;
    * ``full_rate``: the requested rate of the baseline's trial in Mbit/s, 4 times the rate of the first trial;
    * ``parity``: the first trial's tokens per second over the baseline's tokens per second;
    * ``disturbed``: whether other programs took much processor time during either trial.
    """
    shaped = table.dropna(subset=["rate_mbit"])
    named_in_suite = shaped["role"].eq("baseline").any()
    contrast = shaped["role"].eq("contrast") if named_in_suite else is_preset(shaped, PROPOSED)
    slow = shaped[contrast].assign(full_rate=lambda t: 4 * t["rate_mbit"])
    base = shaped[is_baseline(shaped)].rename(columns={"rate_mbit": "full_rate", "id": "baseline"})
    keys = ["elsewhere", "sweep", "seed", "repeat", "full_rate"]
    columns = [*keys, "baseline", "configuration", "tokens_per_second", "achieved_mbit", "disturbed"]
    joined = slow.merge(base[columns], on=keys, suffixes=("", "_baseline"))
    # If a setting has several baselines, the suite pairs each compared trial with one of them.
    beside = joined["beside"]
    joined = joined[beside.eq("") | beside.eq(joined["configuration_baseline"])]
    joined["disturbed"] = joined["disturbed"].astype(bool) | joined["disturbed_baseline"].astype(bool)
    joined["parity"] = joined["tokens_per_second"] / joined["tokens_per_second_baseline"]
    return joined.sort_values(["nodes", "ranks_per_node", "tokens_per_rank", "full_rate"], ignore_index=True)


def parity_interval(group: pd.DataFrame) -> Interval:
    """Return the geometric mean of ``parity`` over the pairs ``group``, with its interval.

    Parity is a configuration's throughput at a quarter of a link's rate over the baseline's throughput at the full
    rate.  ``group`` are rows of :func:`parity` with the same two configurations, setting and rate.
    """
    return speedup(group, "tokens_per_second", "tokens_per_second_baseline")
