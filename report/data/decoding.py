"""Computes the metrics of workload ``generate``, whose steps decode tokens.  Formulas: docs/reference/metrics.md."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd

from harness.records.confidence_intervals import Interval, geometric_interval, paired_ratio_interval
from report.data import best_step
from report.data.configuration import is_baseline, with_baseline
from report.data.frames import Frames
from report.data.speedups import geometric, undisturbed

PAIR = ("setting", "sweep", "seed", "repeat", "step")  # generations that ran under the same conditions


def generations(frames: Frames) -> pd.DataFrame:
    """Return one row for each timed generation.  A generation is one step of workload ``generate``: it decodes tokens.

    The table has the columns of ``frames.finished``, and among others these:

    * ``seconds``: the slowest rank's seconds of each token, added up over the tokens;
    * ``later_seconds``: the same sum without the first token;
    * ``exposed``: the share of ``seconds`` in which the slowest rank waited for messages;
    * ``first_bytes`` and ``later_bytes``: the bytes that all ranks sent between nodes for the first token, and for each
      later token; NaN if the ranks did not count them (have no ledger);
    * ``tokens_per_second`` and ``later_tokens_per_second``: the tokens per second of a rank, with the first token and
      without it;
    * ``baseline``: the id of the baseline's trial of the same setting, sweep, seed and repeat; NaN if there is none;
    * ``speedup``: tokens per second over the tokens per second of the same generation in the baseline's trial.
    """
    timed = best_step.timed(frames.tokens).astype({"inter_bytes": float, "exposed": float})
    by_token = timed.groupby(["id", "step", "index"])
    tokens = timed.loc[by_token["seconds"].idxmax()].set_index(["id", "step", "index"])  # of the slowest rank
    tokens["bytes"] = by_token["inter_bytes"].sum(min_count=1)
    index = tokens.index.get_level_values("index")
    parts = (tokens, tokens[index == 0], tokens[index > 0])
    whole, first, later = (part.groupby(["id", "step"]) for part in parts)
    sums = pd.DataFrame(
        {
            "tokens": whole["seconds"].size(),
            "seconds": whole["seconds"].sum(),
            "later_seconds": later["seconds"].sum(),
            "exposed": whole["exposed"].sum(min_count=1) / whole["seconds"].sum(),
            "first_bytes": first["bytes"].sum(min_count=1),
            "later_bytes": later["bytes"].sum(min_count=1) / later["seconds"].size(),
        }
    ).reset_index()
    table = frames.finished.merge(sums, on="id")
    table["sequences"] = table["tokens_per_rank"] // table["sequence"]
    table["tokens_per_second"] = table["sequences"] * table["tokens"] / table["seconds"]
    table["later_tokens_per_second"] = table["sequences"] * (table["tokens"] - 1) / table["later_seconds"]
    columns = {"baseline": "id", "baseline_tokens_per_second": "tokens_per_second"}
    columns |= {"baseline_disturbed": "disturbed"}
    table = with_baseline(table, is_baseline(table), PAIR, **columns)
    return table.assign(speedup=table["tokens_per_second"] / table["baseline_tokens_per_second"])


def speedup(group: pd.DataFrame) -> Interval:
    """Return the ratio of a configuration's tokens per second to its baseline's, with the interval.

    ``group`` are rows of :func:`generations` of one configuration in one setting (cluster, model, batch and so on).  A
    pair is a trial of the configuration and the baseline's trial under the same conditions.  A trial's tokens per
    second are the geometric mean over its generations, and the result is the geometric mean of the ratio over pairs.  A
    pair is disturbed if other programs or the hypervisor took much processor time during one of its trials.  Disturbed
    pairs are left out; if all pairs are disturbed, all are kept.
    The ratio is NaN if no row has a baseline.
    """
    paired = group.dropna(subset=["baseline"])
    if paired.empty:
        return Interval(math.nan, math.nan, math.nan, 0)
    pairs = paired.assign(
        disturbed=paired["disturbed"].astype(bool) | paired["baseline_disturbed"].astype(bool)
    )
    kept = undisturbed(pairs)
    by_trial = kept.groupby(["seed", "repeat"])
    rates = ("tokens_per_second", "baseline_tokens_per_second")
    rate, base_rate = (by_trial[name].agg(geometric).to_dict() for name in rates)
    left_out = pairs.groupby(["seed", "repeat"]).ngroups - by_trial.ngroups
    ratio = paired_ratio_interval(rate, base_rate, by_trial["occasion"].first().to_dict(), left_out)
    return replace(ratio, disturbed=bool(kept["disturbed"].any()))


def speed(group: pd.DataFrame) -> Interval:
    """Return the tokens per second of a rank, with the interval.

    ``group`` are rows of :func:`generations` of one configuration in one setting (cluster, model, batch and so on).  A
    trial's tokens per second are the geometric mean over its generations, and the result is the geometric mean over
    trials.  Disturbed trials, during which other programs or the hypervisor took much processor time, are left out; if
    all trials are disturbed, all are kept.
    """
    kept = undisturbed(group)
    by_trial = kept.groupby("id", sort=False)
    speeds, left_out = by_trial["tokens_per_second"].agg(geometric), group["id"].nunique() - by_trial.ngroups
    mean = geometric_interval(list(speeds), list(by_trial["occasion"].first()), left_out)
    return replace(mean, disturbed=bool(kept["disturbed"].any()))
