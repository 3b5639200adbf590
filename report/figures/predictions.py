"""Steps beside their predictions: what each trial took over what was said of it before it ran."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from report.data.metrics import KEPT, Derived

APART: Final = 0.05  # steps of a pair that differ by less have no order
WAYS: Final = {
    "over_predicted": "foreseen_seconds",
    "over_naive": "naive_seconds",
    "over_constant": "constant_seconds",
}


def measured_over(derived: Derived) -> pd.DataFrame:
    """Trials whose step was predicted, with ``step_seconds`` over each of :data:`WAYS` to predict it."""
    rows = derived.trials[derived.trials["foreseen_seconds"].notna()]
    rows = rows.assign(
        naive_seconds=rows["foreseen_compute"] + rows["foreseen_wire"],
        constant_seconds=rows["step_seconds"].median(),
    )
    rows = rows.assign(**{over: rows["step_seconds"] / rows[way] for over, way in WAYS.items()})
    return rows[[*KEPT, "step_seconds", "foreseen_calibrated", *WAYS.values(), *WAYS]]


def score(rows: pd.DataFrame) -> dict[str, float]:
    """How far predictions of :func:`measured_over`'s rows were off.

    Median and 90th percentile of the relative errors of cells, of single trials, and of computation plus
    wire; ``ordered``: share of pairs more than :data:`APART` apart in the right order; ``regret``: what the
    contender predicted to be fastest takes longer than the fastest.
    """
    by_cell = rows.groupby(["cell", "contender"], as_index=False)[["step_seconds", *WAYS.values()]].median()
    took, said = by_cell["step_seconds"], by_cell["foreseen_seconds"]
    over = {"": said / took, "trial_": 1 / rows["over_predicted"], "naive_": by_cell["naive_seconds"] / took}
    both = by_cell.merge(by_cell, on="cell", suffixes=("", "_other"))
    both = both[both["contender"] < both["contender_other"]]
    ours, predicted = (both[name] / both[f"{name}_other"] for name in ("step_seconds", "foreseen_seconds"))
    right = (ours < 1).eq(predicted < 1)[np.abs(np.log(ours)) > np.log1p(APART)]
    several = by_cell[by_cell["cell"].duplicated(keep=False)].groupby("cell")
    chosen = took.reindex(several["foreseen_seconds"].idxmin()).to_numpy()
    return {
        "cells": float(len(by_cell)),
        **{f"{of}median": float((one - 1).abs().median()) for of, one in over.items()},
        **{f"{of}ninth": float((one - 1).abs().quantile(0.9)) for of, one in over.items()},
        "pairs": float(len(right)),
        "ordered": float(right.mean()),
        "regret": float((chosen / several["step_seconds"].min() - 1).mean()),
    }


def score_in_words(rows: pd.DataFrame) -> str:
    """A sentence or two of a caption."""
    found = score(rows)
    told = (
        "Predictions err by {median:.1%} in the median of {cells:.0f} cells and by {ninth:.1%} at the 90th "
        "percentile (single trials {trial_median:.1%} and {trial_ninth:.1%}); computation plus wire by "
        "{naive_median:.1%} and {naive_ninth:.1%}."
    )
    if found["pairs"]:
        told += (
            " Of {pairs:.0f} pairs of contenders more than {apart:.0%} apart, {ordered:.0%} are put in the "
            "right order; to choose by it costs {regret:.1%}."
        )
    return told.format(apart=APART, **found)
