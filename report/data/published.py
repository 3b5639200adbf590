"""Published numbers of the papers, with their sources (``report/published/*.csv``)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd

from report.data.configuration import BASELINE, NAMES, PROPOSED
from report.data.text import NOTHING

PUBLISHED: Final = "published"  # the value of column ``where`` in rows of published numbers
FOLDER: Final = Path(__file__).parents[1] / "published"


def throughput() -> pd.DataFrame:
    """Return TFLOPs per GPU by model, bandwidth and tokens per GPU, with ZeRO++'s speed-up: one row per setting."""
    table = pd.read_csv(FOLDER / "zeropp_throughput.csv")
    keys = ["source", "gpus", "gpu", "model", "inter_node_gbps", "tokens_per_gpu"]
    wide = table.pivot_table(index=keys, columns="system", values="tflops_per_gpu", sort=False).reset_index()
    wide.columns.name = None
    return wide.assign(speedup=wide["zeropp"] / wide["zero3"])


def parity() -> pd.DataFrame:
    """Return ZeRO++'s TFLOPs per GPU at a quarter of a bandwidth over ZeRO-3's at the full bandwidth, by model."""
    rows = throughput()
    rows = rows[rows["source"].str.contains("bandwidth parity")]
    low = rows.assign(high_gbps=4 * rows["inter_node_gbps"])
    high = rows[["model", "inter_node_gbps", "zero3"]].rename(columns={"inter_node_gbps": "high_gbps"})
    pairs = low.drop(columns=["zero3", "speedup"]).merge(high, on=["model", "high_gbps"])
    pairs = pairs.rename(columns={"inter_node_gbps": "low_gbps"})
    return pairs.assign(parity=pairs["zeropp"] / pairs["zero3"])


def volume() -> pd.DataFrame:
    """Return bytes between nodes per step in units of M, one row per preset.

    Where column ``published`` is "no", the numbers follow from the rule that the ZeRO++ blog gives.
    """
    return pd.read_csv(FOLDER / "zeropp_volume.csv")


def total(strategy: str, configuration: str) -> float:
    """Return an unchanged preset's bytes between nodes per step, in M, by the ZeRO++ blog's rule; NaN for others."""
    totals = volume().set_index("method")["total_m"]
    return float(totals.get(strategy, math.nan)) if "(" not in configuration else math.nan


def rlhf(*phases: str) -> pd.DataFrame:
    """Return the throughputs per GPU in the ZeRO++ blog's RLHF figure, one row per model and phase, with the speed-up.

    A phase is ``generation``, or ``training``, which is that of RLHF's step 1.
    """
    table = pd.read_csv(FOLDER / "zeropp_rlhf.csv")
    table = table[table["phase"].isin(phases)].sort_values("phase", kind="stable", ignore_index=True)
    return table.assign(speedup=table["zeropp"] / table["zero3"])


def rows_below(
    measured: Sequence[Mapping[str, Any]], *phases: str
) -> Iterator[tuple[dict[str, Any], dict[Any, Any], str]]:
    """Yield the published rows that a table prints below its ``measured`` rows; none if nothing was measured.

    Each is yielded as the cells of the table's row, the row of :func:`rlhf`, and the strategy.
    """
    for row in rlhf(*phases).to_dict("records") if measured else []:
        for strategy in (BASELINE, PROPOSED):
            configuration = f"{PUBLISHED}: {NAMES[strategy]}, {row['model']} on {row['gpus']} GPUs"
            speedup = row["speedup"] if strategy == PROPOSED else 1.0
            cells = {"where": PUBLISHED, "configuration": configuration, "trials": NOTHING, "_taken": ""}
            yield cells | {"speedup": speedup}, row, strategy
