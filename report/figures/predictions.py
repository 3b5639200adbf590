"""Compares the measured seconds of a step with the seconds that were predicted before the trial ran."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from report.data.metrics import KEPT, Derived

APART: Final = (
    0.05  # if two measured steps differ by less than this share, the predicted order of the two is not judged
)
WAYS: Final = {
    "over_predicted": "foreseen_seconds",
    "over_naive": "naive_seconds",
    "over_constant": "constant_seconds",
}


def measured_over(derived: Derived) -> pd.DataFrame:
    """Return the trials whose step was predicted, with columns of measured seconds over predicted seconds.

    There is one such column for each way of predicting (the keys of ``WAYS``):

    * ``over_predicted``: the prediction is that of the model of a step (:mod:`impl.plan.step_time`).
    * ``over_naive``: the prediction is the sum of the seconds of computation and of messages between nodes.
    * ``over_constant``: the prediction is one number for all trials, the median of their measured steps.
    """
    rows = derived.trials[derived.trials["foreseen_seconds"].notna()]
    rows = rows.assign(
        naive_seconds=rows["foreseen_compute"] + rows["foreseen_wire"],
        constant_seconds=rows["step_seconds"].median(),
    )
    rows = rows.assign(**{over: rows["step_seconds"] / rows[way] for over, way in WAYS.items()})
    return rows[[*KEPT, "step_seconds", "foreseen_calibrated", *WAYS.values(), *WAYS]]


def score(rows: pd.DataFrame) -> dict[str, float]:
    """Return scores that say how close predicted steps are to measured steps.

    ``rows`` are rows of :func:`measured_over`.

    - ``settings``: the number of combinations of setting and configuration.
    - ``median``, ``ninth``: the median and the 90th percentile of the predictions' relative errors, over these
      combinations.
    - ``trial_median``, ``trial_ninth``: the same two numbers over single trials.
    - ``naive_median``, ``naive_ninth``: the same two numbers over combinations, for the naive prediction, which adds
      the seconds of computation and the seconds of messages between nodes.
    - ``pairs``: the number of pairs of configurations in one setting whose measured steps differ by more than the share
      :data:`APART`.
    - ``ordered``: the share of these pairs for which the faster configuration was predicted to be faster.
    - ``regret``: what is lost by choosing the configuration that was predicted to be fastest: by which share its
      measured step is longer than the shortest measured step.  With 1.1 s and 1.0 s, the regret is 0.1.  The value is
      the mean over the settings with several configurations.
    """
    by_setting = rows.groupby(["setting", "configuration"], as_index=False)[
        ["step_seconds", *WAYS.values()]
    ].median()
    seconds, foreseen = by_setting["step_seconds"], by_setting["foreseen_seconds"]
    ratios = {"": foreseen / seconds, "trial_": 1 / rows["over_predicted"]}
    ratios["naive_"] = by_setting["naive_seconds"] / seconds
    both = by_setting.merge(by_setting, on="setting", suffixes=("", "_other"))
    both = both[both["configuration"] < both["configuration_other"]]
    columns = ("step_seconds", "foreseen_seconds")
    measured, predicted = (both[column] / both[f"{column}_other"] for column in columns)
    right = (measured < 1).eq(predicted < 1)[np.abs(np.log(measured)) > np.log1p(APART)]
    several = by_setting[by_setting["setting"].duplicated(keep=False)].groupby("setting")
    chosen = seconds.reindex(several["foreseen_seconds"].idxmin()).to_numpy()
    return {
        "settings": float(len(by_setting)),
        **{f"{prefix}median": float((ratio - 1).abs().median()) for prefix, ratio in ratios.items()},
        **{f"{prefix}ninth": float((ratio - 1).abs().quantile(0.9)) for prefix, ratio in ratios.items()},
        "pairs": float(len(right)),
        "ordered": float(right.mean()),
        "regret": float((chosen / several["step_seconds"].min() - 1).mean()),
    }


def score_in_words(rows: pd.DataFrame) -> str:
    """Return the main scores of :func:`score` as sentences of a caption."""
    scores = score(rows)
    text = (
        "Over {settings:.0f} combinations of setting and configuration, the error of the prediction has a median of "
        "{median:.1%} and a 90th percentile of {ninth:.1%}; if computation plus wire is the prediction, they are "
        "{naive_median:.1%} and {naive_ninth:.1%}."
    )
    if scores["pairs"]:
        text += (
            " Of {pairs:.0f} pairs of configurations whose steps differ by more than {apart:.0%}, {ordered:.0%} are "
            "predicted in the right order; the configuration predicted to be fastest takes {regret:.1%} longer than "
            "the fastest, as the mean over settings."
        )
    return text.format(apart=APART, **scores)
