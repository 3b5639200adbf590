"""Errors of what was sent, by hop and end to end; and of codecs that were only tried."""

from __future__ import annotations

import pandas as pd

from report.data.frames import Frames
from report.data.text import number

_OF_TRIAL = ["id", "contender", "strategy", "place", "first", "cell", "where", "seed", "repeat", "world"]
_FLOATS = ("hop", "squared_error", "squared_value", "cosine")


def errors(frames: Frames, table: pd.DataFrame) -> pd.DataFrame:
    """Errors of all units together: one row per trial, step, purpose, and hop or end (``hop`` is NaN), with
    ``vnmse`` = sum of squared errors / sum of squared values.
    """
    found = frames.communication_errors
    found = found[found["unit"] == ""].astype(dict.fromkeys(_FLOATS, float))
    found = found.assign(vnmse=found["squared_error"] / found["squared_value"])
    return table[_OF_TRIAL].merge(found, on="id")


def end_to_end(mine: pd.DataFrame, purpose: str = "gradients", *, repeated: bool = False) -> pd.DataFrame:
    """The rows of ``purpose`` from end to end; of gradients that were reduced once, or repeatedly."""
    chosen = mine["repeated"].gt(1) if repeated else mine["repeated"].eq(1)
    return mine[(mine["purpose"] == purpose) & mine["hop"].isna() & chosen]


def hops_told(mine: pd.DataFrame) -> str:
    """``local int4:128 0.012; node int4:128 0.011``; of a ring the range and the number of its steps."""
    told = []
    for (axis, codec), group in mine.groupby(["axis", "codec"], sort=False):
        of_hop = group.groupby("hop")["vnmse"].median()
        low, high = number(2)(float(of_hop.min())), number(2)(float(of_hop.max()))
        ring = f" to {high} in {len(of_hop)} steps" if len(of_hop) > 1 else ""
        told.append(f"{axis} {codec} {low}{ring}")
    return "; ".join(told)


def tried(frames: Frames, table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Errors of the grid of codecs, which are tried and send nothing, of the first contender that tried any,
    in its first cell; and whose they are.
    """
    found = frames.quantisation.merge(table[_OF_TRIAL], on="id")
    if found.empty:
        return found, ""
    first = found.sort_values(["place", "first"], kind="stable").iloc[0]
    mine = found[(found["contender"] == first["contender"]) & (found["cell"] == first["cell"])]
    return mine.reset_index(drop=True), f"{first['contender']} ({first['where']})"


def chosen(frames: Frames, table: pd.DataFrame) -> pd.DataFrame:
    """Codecs that budgets chose, of the first trial of each contender in each cell; in order of steps."""
    first = table.sort_values(["seed", "repeat"], kind="stable").drop_duplicates(["cell", "contender"])
    return table.loc[first.index.sort_values(), _OF_TRIAL].merge(frames.chosen_codecs, on="id")
