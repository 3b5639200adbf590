"""Makes the tables of parity at a quarter of the link's rate, of break-even rates, and of decoding."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.records.confidence_intervals import Interval
from report.data import caveats, decoding, published, speedups
from report.data.break_even import in_words
from report.data.configuration import BASELINE, NAMES, PROPOSED
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import NOTHING, number
from report.quantities import formula
from report.tables.table import CONFIGURATION, RATIO, TRIALS, Column, Table, rows_of, table_of, trial_count


def parity(derived: Derived) -> Table:
    """Return the table of parity: throughput at a quarter of a link's rate over the baseline's at the full rate.

    The configurations are those that the suite compares with its baseline.  If the suite names no baseline, ZeRO++ is
    compared with ZeRO-3.  If the table has rows of ZeRO++ over ZeRO-3, rows of the numbers that the ZeRO++ blog
    published follow.
    """
    keys = ["configuration", "configuration_baseline", "elsewhere", "rate_mbit", "full_rate"]
    rows: list[dict[str, Any]] = [
        {
            "configuration": key[0],
            "baseline": key[1],
            "setting": key[2],
            "low": f"{key[3]:g} Mbit/s",
            "high": f"{key[4]:g} Mbit/s",
            "ours": speedups.step_interval(group, "tokens_per_second").estimate,
            "base": speedups.step_interval(group, "tokens_per_second_baseline").estimate,
            "unit": "tokens/s",
            "parity": (interval := speedups.parity_interval(group)),
            "pairs": len(group),
            "verdict": verdict(interval),
            **_behind(derived, [*group["id"], *group["baseline"]]),
        }
        for key, group in groups(speedups.parity(derived.trials), keys)
    ]
    paper = NAMES[PROPOSED], NAMES[BASELINE]
    if any((row["configuration"], row["baseline"]) == paper for row in rows):
        rows += [
            {
                "configuration": paper[0],
                "baseline": paper[1],
                "setting": f"published, {row.model} on {row.gpus} {row.gpu}",
                "low": f"{row.low_gbps:g} Gbit/s",
                "high": f"{row.high_gbps:g} Gbit/s",
                "ours": row.zeropp,
                "base": row.zero3,
                "unit": "TFLOPs/GPU",
                "parity": row.parity,
                "pairs": 1,
                "verdict": NOTHING,
                "trials": NOTHING,
                "_taken": "",
                "_rates": "",
            }
            for row in published.parity().itertuples()
        ]
    return table_of(
        "parity",
        "Parity",
        rows,
        CONFIGURATION,
        Column("baseline", "Baseline"),
        Column("setting", "Setting"),
        TRIALS,
        Column("low", "Rate"),
        Column("high", "Rate of the baseline"),
        Column("ours", "Throughput", number(3)),
        Column("base", "Throughput of the baseline", number(3)),
        Column("unit", "Unit"),
        Column("parity", "Parity", number(3), formula("parity"), "_rates"),
        Column("verdict", "Verdict"),
        caption="Does a configuration at a quarter of the link's rate reach the throughput of its baseline at the full "
        "rate?",
        notes="n counts the trials of both configurations.",
    )


def verdict(parity: Interval) -> str:
    """Return the verdict on a parity, from its interval.

    A parity is a configuration's throughput at a quarter of a link's rate over the baseline's throughput at the full
    rate.  The verdict is ``reached`` if the interval lies at 1 or above, ``missed`` if it lies below 1, and
    ``inconclusive`` if it begins below 1 and ends at 1 or above.  Returns a dash if there is no interval.
    """
    if not parity.known:
        return NOTHING
    return "reached" if parity.low >= 1 else "missed" if parity.high < 1 else "inconclusive"


def _behind(derived: Derived, ids: list[str]) -> dict[str, Any]:
    """Return the cells of a table's row that describe the trials from which the row was computed.

    ``ids`` are the ids of these trials.  The cells are:

    * ``trials`` and ``_taken``: the number of trials, and text with the number of disturbed trials, such as `` (2 ‡)``;
    * ``_rates``: the mark `` †`` if the link was faster for some configurations than for others, else empty;
    * ``taken_share``: the share of the processors' time that other programs and the hypervisor took during a trial, the
      largest over trials.  If it is large, the trial is disturbed.
    """
    rows = derived.trials[derived.trials["id"].isin(ids)]
    return {**trial_count(rows), "_rates": caveats.rates(rows), "taken_share": rows["taken_share"].max()}


def break_even(derived: Derived) -> Table:
    """Return the table of break-even rates: rates of the link at which a configuration is as fast as the baseline."""
    rows = derived.break_evens
    behind = pd.DataFrame([_behind(derived, ids.split()) for ids in rows["records"]])
    rows = rows.assign(where=rows["elsewhere"], _found=rows["found"].map(in_words)).drop(columns="found")
    return table_of(
        "break_even",
        "Break-even",
        rows.join(behind),
        CONFIGURATION,
        TRIALS,
        Column("_found", "Break-even, Mbit/s", str, formula("break-even"), "_rates"),
        Column("low_mbit", "Lowest rate, Mbit/s", number(3)),
        Column("high_mbit", "Highest", number(3)),
        Column("low_speedup", "Speed-up at the lowest", number(3)),
        Column("high_speedup", "at the highest", number(3)),
        caption="Rates of the link at which a configuration's speed-up over "
        f"{derived.compared.baseline} crosses 1, each with its 95 % interval.",
        notes=f"n counts the trials at all rates, those of {derived.compared.baseline} included.",
    )


def generation(derived: Derived) -> Table:
    """Return the table of decoding (workload ``generate``): tokens per second, and bytes between nodes.

    Rows with the tokens per second that the ZeRO++ blog published follow the measured rows.
    """
    rows: list[dict[str, Any]] = [
        {
            **row,
            "tokens_per_second": decoding.speed(runs),
            "later_tokens_per_second": speedups.undisturbed(runs)["later_tokens_per_second"].median(),
            "speedup": decoding.speedup(runs),
            "exposed": speedups.undisturbed(runs)["exposed"].median(),
            "first_mb": runs["first_bytes"].median() / 1e6,
            "later_mb": runs["later_bytes"].median() / 1e6,
        }
        for row, runs in rows_of(derived.generations)
    ]
    rows += [
        cells | {"tokens_per_second": row[name]}
        for cells, row, name in published.rows_below(rows, "generation")
    ]
    speed, ratio = formula("tokens per second of a rank"), formula("over ZeRO-3's")
    sent = formula("bytes between nodes")
    return table_of(
        "generation",
        "Generation",
        rows,
        CONFIGURATION,
        TRIALS,
        Column("tokens_per_second", "Tokens/s per rank", number(3), speed, of_trials=True),
        Column("later_tokens_per_second", "without the first token", number(3)),
        Column("speedup", f"over {derived.compared.baseline}'s", RATIO, ratio),
        Column("exposed", "Exposed share", number(2), formula("exposed share")),
        Column("first_mb", "Between nodes, first token, MB", number(4), sent),
        Column("later_mb", "each later one, MB", number(4)),
        caption="Decoding with sharded weights: tokens per second, and bytes between nodes for a token. "
        "Columns for which this page gives no definition are medians.",
        notes="n counts generations. Published rows are from the RLHF figure of the ZeRO++ blog, in tokens/s per GPU, "
        "with other batches and models.",
    )
