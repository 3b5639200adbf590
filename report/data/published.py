"""Published numbers of the papers, with their sources (``report/published/*.csv``), to compare with ours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd

from report.data.contender import BASELINE, NAMES, PROPOSED
from report.data.text import NOTHING

PUBLISHED: Final = "published"  # where such rows were measured
FOLDER: Final = Path(__file__).parents[1] / "published"


def throughput() -> pd.DataFrame:
    """TFLOPs per GPU by model, bandwidth and tokens per GPU, with ZeRO++'s speed-up: one row per setting."""
    table = pd.read_csv(FOLDER / "zeropp_throughput.csv")
    keys = ["source", "gpus", "gpu", "model", "inter_node_gbps", "tokens_per_gpu"]
    wide = table.pivot_table(index=keys, columns="system", values="tflops_per_gpu", sort=False).reset_index()
    wide.columns.name = None
    return wide.assign(speedup=wide["zeropp"] / wide["zero3"])


def parity() -> pd.DataFrame:
    """ZeRO++ at a quarter of the bandwidth over ZeRO-3 at the full one, TFLOPs per GPU: one row per model."""
    shown = throughput()
    shown = shown[shown["source"].str.contains("bandwidth parity")]
    low = shown.assign(high_gbps=4 * shown["inter_node_gbps"])
    high = shown[["model", "inter_node_gbps", "zero3"]].rename(columns={"inter_node_gbps": "high_gbps"})
    pairs = low.drop(columns=["zero3", "speedup"]).merge(high, on=["model", "high_gbps"])
    pairs = pairs.rename(columns={"inter_node_gbps": "low_gbps"})
    return pairs.assign(parity=pairs["zeropp"] / pairs["zero3"])


def volume() -> pd.DataFrame:
    """Bytes between nodes per step in units of M; what is not ``published`` follows from the blog's rule."""
    return pd.read_csv(FOLDER / "zeropp_volume.csv")


def total(strategy: str, contender: str) -> float:
    """Bytes between nodes per step in units of M by the blog's rule, of presets alone; else NaN."""
    found = volume().set_index("method")["total_m"]
    return float(found.get(strategy, math.nan)) if "(" not in contender else math.nan


def rlhf(*phases: str) -> pd.DataFrame:
    """Rates of a GPU in the blog's RLHF figure by model and phase (``generation``, ``training``, step 1)."""
    table = pd.read_csv(FOLDER / "zeropp_rlhf.csv")
    table = table[table["phase"].isin(phases)].sort_values("phase", kind="stable", ignore_index=True)
    return table.assign(speedup=table["zeropp"] / table["zero3"])


def rows_below(
    ours: Sequence[Mapping[str, Any]], *phases: str
) -> Iterator[tuple[dict[str, Any], dict[Any, Any], str]]:
    """Rows that stand below ``ours``: cells of each number of :func:`rlhf`, its row, and whose it is."""
    for row in rlhf(*phases).to_dict("records") if ours else []:
        for name in (BASELINE, PROPOSED):
            who = f"{PUBLISHED}: {NAMES[name]}, {row['model']} on {row['gpus']} GPUs"
            faster = row["speedup"] if name == PROPOSED else 1.0
            cells = {"where": PUBLISHED, "contender": who, "trials": NOTHING, "_taken": ""}
            yield cells | {"speedup": faster}, row, name
