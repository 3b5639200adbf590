"""Reads the numbers that the ZeRO++ blog published, with their sources, from ``report/published/zeropp_*.csv``."""

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
    """Return the published TFLOP/s per GPU of ZeRO-3 and ZeRO++, one row per model, bandwidth and tokens per GPU.

    Columns ``zero3`` and ``zeropp`` hold the TFLOP/s, and ``speedup`` their ratio.
    """
    table = pd.read_csv(FOLDER / "zeropp_throughput.csv")
    keys = ["source", "gpus", "gpu", "model", "inter_node_gbps", "tokens_per_gpu"]
    wide = table.pivot_table(index=keys, columns="system", values="tflops_per_gpu", sort=False).reset_index()
    wide.columns.name = None
    return wide.assign(speedup=wide["zeropp"] / wide["zero3"])


def parity() -> pd.DataFrame:
    """Return the numbers that the ZeRO++ blog published on bandwidth parity, one row per model.

    They show whether ZeRO++ at a quarter of the bandwidth is as fast as ZeRO-3 at the full bandwidth.  ``zeropp`` is
    the TFLOP/s per GPU of ZeRO++ at ``low_gbps``, a quarter of the bandwidth.  ``zero3`` is the TFLOP/s per GPU of
    ZeRO-3 at ``high_gbps``, the full bandwidth.  ``parity`` is ``zeropp`` over ``zero3``.
    """
    rows = throughput()
    rows = rows[rows["source"].str.contains("bandwidth parity")]
    low = rows.assign(high_gbps=4 * rows["inter_node_gbps"])
    high = rows[["model", "inter_node_gbps", "zero3"]].rename(columns={"inter_node_gbps": "high_gbps"})
    pairs = low.drop(columns=["zero3", "speedup"]).merge(high, on=["model", "high_gbps"])
    pairs = pairs.rename(columns={"inter_node_gbps": "low_gbps"})
    return pairs.assign(parity=pairs["zeropp"] / pairs["zero3"])


def volume() -> pd.DataFrame:
    """Return the bytes between nodes in a step by the rule of the ZeRO++ blog, one row per named policy.

    The rule adds up the bytes of three collectives: the all-gathers of the forward and of the backward pass, and the
    reduce-scatter of gradients.  The bytes are in units of M, the bytes of all weights in 16 bits.  Column
    ``published`` is "yes" if the blog prints the numbers of the policy, and "no" if they only follow from the rule.
    """
    return pd.read_csv(FOLDER / "zeropp_volume.csv")


def total(strategy: str, configuration: str) -> float:
    """Return the bytes between nodes in a step of a strategy, by the rule of the ZeRO++ blog (:func:`volume`).

    The result is in units of M, where M are the bytes of all weights in 16 bits.  It is NaN if the rule does not
    mention the strategy.  It is also NaN if ``configuration``, the printed name, shows changes to the strategy, as
    ``ZeRO++ (g int8:256)`` does.
    """
    totals = volume().set_index("method")["total_m"]
    return float(totals.get(strategy, math.nan)) if "(" not in configuration else math.nan


def rlhf(*phases: str) -> pd.DataFrame:
    """Return the throughputs per GPU in the RLHF figure of the ZeRO++ blog, one row per model and phase.

    Columns ``zero3`` and ``zeropp`` hold the throughputs, and ``speedup`` their ratio.  ``phases`` names the phases to
    return: ``generation``, or ``training`` (the training in step 1 of RLHF), or both.
    """
    table = pd.read_csv(FOLDER / "zeropp_rlhf.csv")
    table = table[table["phase"].isin(phases)].sort_values("phase", kind="stable", ignore_index=True)
    return table.assign(speedup=table["zeropp"] / table["zero3"])


def rows_below(
    measured: Sequence[Mapping[str, Any]], *phases: str
) -> Iterator[tuple[dict[str, Any], dict[Any, Any], str]]:
    """Yield the published throughputs that a table prints below its ``measured`` rows; nothing without measured rows.

    Each row of :func:`rlhf` with these ``phases`` gives two rows of the table, one for ZeRO-3 and one for ZeRO++.  A
    tuple (cells, row, strategy) is yielded for each of the two rows:

    * ``cells``: the first cells of the row, such as its name and its speed-up, which are the same in every table;
    * ``row``: the row of :func:`rlhf`;
    * ``strategy``: the column of ``row`` that has the throughput, ``zero3`` or ``zeropp``.
    """
    for row in rlhf(*phases).to_dict("records") if measured else []:
        for strategy in (BASELINE, PROPOSED):
            configuration = f"{PUBLISHED}: {NAMES[strategy]}, {row['model']} on {row['gpus']} GPUs"
            speedup = row["speedup"] if strategy == PROPOSED else 1.0
            cells = {"where": PUBLISHED, "configuration": configuration, "trials": NOTHING, "_taken": ""}
            yield cells | {"speedup": speedup}, row, strategy
