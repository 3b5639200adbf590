"""Metrics of workload ``generate``.  Formulas: docs/reference/metrics.md."""

from __future__ import annotations

import pandas as pd

from harness.records.statistics import Interval, paired_ratio_interval
from report.data.contender import BASELINE, NAMES
from report.data.frames import Frames

PAIR = ("cell", "seed", "repeat", "step")  # generations that ran under the same conditions


def generations(frames: Frames) -> pd.DataFrame:
    """One row per timed generation: the columns of ``frames.generators``, and

    sequences: that each rank decodes.
    seconds, later_seconds: of all its tokens, and without the first; each of the slowest rank.
    tokens_per_second: of a rank, prompt included in the time.
    later_tokens_per_second: the same without the first token.
    exposed: share of ``seconds`` that the slowest rank stood waiting for communication.
    first_bytes, later_bytes: that all ranks sent between nodes for the first token, and for each
        later one; NaN where there is no ledger.
    baseline, speedup: the trial of ZeRO-3 of the same cell, seed and repeat, and tokens per second
        over those of its generation of the same number.
    """
    timed = frames.tokens[~frames.tokens["warmup"].astype(bool)]
    sent = timed.assign(inter_bytes=pd.to_numeric(timed["inter_bytes"]))
    by_token = sent.groupby(["id", "step", "index"])
    tokens = by_token.agg(seconds=("seconds", "max")).assign(
        bytes=by_token["inter_bytes"].sum(min_count=1), exposed=_exposed(timed)
    )
    first = tokens[tokens.index.get_level_values("index") == 0].groupby(["id", "step"])
    later = tokens[tokens.index.get_level_values("index") > 0].groupby(["id", "step"])
    whole = tokens.groupby(["id", "step"])
    found = pd.DataFrame(
        {
            "tokens": whole["seconds"].size(),
            "seconds": whole["seconds"].sum(),
            "later_seconds": later["seconds"].sum(),
            "exposed": whole["exposed"].sum(min_count=1) / whole["seconds"].sum(),
            "first_bytes": first["bytes"].sum(min_count=1),
            "later_bytes": later["bytes"].sum(min_count=1) / later["seconds"].size(),
        }
    ).reset_index()
    table = frames.generators.merge(found, on="id")
    table["sequences"] = table["tokens_per_rank"] // table["sequence"]
    table["tokens_per_second"] = table["sequences"] * table["tokens"] / table["seconds"]
    later_tokens = table["sequences"] * (table["tokens"] - 1)
    table["later_tokens_per_second"] = later_tokens / table["later_seconds"]
    table["first"] = table.groupby("contender")["order"].transform("min")
    table = _beside_baseline(table)
    return table.sort_values(["nodes", "ranks_per_node", "cell", "place", "first", "seed", "repeat", "step"])


def _exposed(timed: pd.DataFrame) -> pd.Series[float]:
    """Seconds of each token that its slowest rank waited for communication."""
    slowest = timed.loc[timed.groupby(["id", "step", "index"])["seconds"].idxmax()]
    return pd.to_numeric(slowest.set_index(["id", "step", "index"])["exposed"]).astype(float)


def _beside_baseline(table: pd.DataFrame) -> pd.DataFrame:
    base = table[(table["strategy"] == BASELINE) & (table["contender"] == NAMES[BASELINE])]
    base = base[[*PAIR, "id", "tokens_per_second"]].rename(
        columns={"id": "baseline", "tokens_per_second": "baseline_tokens_per_second"}
    )
    joined = table.merge(base, on=list(PAIR), how="left")
    return joined.assign(speedup=joined["tokens_per_second"] / joined["baseline_tokens_per_second"])


def speedup(group: pd.DataFrame) -> Interval:
    """Geometric mean of the paired ratios of tokens per second, with its interval.

    Args:
        group: rows of :func:`generations` of one contender in one cell, with a baseline.
    """
    keys = list(zip(group["seed"], group["repeat"], group["step"], strict=True))
    return paired_ratio_interval(
        dict(zip(keys, group["tokens_per_second"], strict=True)),
        dict(zip(keys, group["baseline_tokens_per_second"], strict=True)),
    )
