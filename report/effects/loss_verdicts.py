"""Judges whether a configuration's validation loss is higher than the baseline's by more than a margin.

Losses are compared in pairs of one seed.  A seed determines the first weights and the order of the data, so all repeats
and sweeps of a seed count as one loss.  A verdict needs a test of enough power (:func:`power`).
Formulas: docs/reference/metrics.md.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from harness.records.confidence_intervals import (
    FEWEST,
    Interval,
    mean_interval,
    paired_ratio_interval,
    quantile,
)
from harness.suites.answering_quantity import LEAST_STEPS
from report.data.configuration import is_baseline
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.speedups import geometric, undisturbed

FEWEST_OF_FRONT = 8  # fewest configurations in a setting for which :func:`front` is computed
OPEN = "inconclusive"
ENOUGH_POWER = 0.8  # a test with less power gets no verdict
# The margin of suites that name none: a configuration's loss may be higher by this share of the baseline's loss.
MARGIN = 0.01
LAST = 0.25  # the last share of training, over which a margin in steps is converted into nats
Row = dict[str, Any]
Floats = NDArray[np.float64]
_NONE = Interval(math.nan, math.nan, math.nan, 0)


@lru_cache(maxsize=32)  # the answer, tables and figures ask for it
def losses(derived: Derived) -> tuple[Row, ...]:
    """Return the comparison of final validation losses with the baseline, one row per configuration and setting.

    A setting is the cluster, model, batch and so on.  Only trials with a final validation loss are used.  Besides the
    names of setting and configuration, a row has these keys:

    * ``loss``: mean final loss over ``seeds`` seeds, after ``steps`` training steps;
    * ``id`` and ``baseline``: ids of the records of the configuration and its baseline, joined by spaces;
    * ``difference``: the loss minus the baseline's loss, compared seed by seed, with its interval;
    * ``margin``: by how many nats the loss may be higher than the baseline's;
    * ``verdict``: whether the difference is within the margin (:func:`non_inferiority`).  With too few training steps
      for a verdict it is ``too short: ...``, and with too few seeds ``too few: ...``;
    * ``power``: the probability that the test behind the verdict would find an equal configuration within the margin
      (:func:`power`);
    * ``target``: the baseline's mean loss plus the margin;
    * ``reached``: the number of seeds that reach the target;
    * ``seconds``: the training seconds to the target, median over the trials that reach it and are not disturbed
      (:func:`~report.data.speedups.undisturbed`);
    * ``gain``: the baseline's seconds to the target over the configuration's seconds; NaN if a trial of the
      configuration or of the baseline does not reach the target.

    Baselines have no verdict, and neither have configurations that share no seed with their baseline.  In their rows
    ``verdict`` is empty, and ``difference``, ``power`` and ``gain`` are NaN.  If a setting has no baseline, ``margin``
    and ``target`` are NaN, too.
    """
    trials = derived.trials.dropna(subset=["validation_loss"])
    trials = trials.assign(is_base=is_baseline(derived.trials)[trials.index])
    return tuple(
        _row(derived, group, _beside(of_setting[of_setting["is_base"]], group))
        for _, of_setting in groups(trials, ["setting"])
        for _, group in groups(of_setting, ["configuration"])
    )


def _beside(base: pd.DataFrame, group: pd.DataFrame) -> pd.DataFrame:
    """Return those trials of ``base`` with which the configuration of ``group`` is compared.

    ``base`` are the trials of all baselines of one setting, and ``group`` the trials of one configuration in this
    setting.  If there are several baselines, column ``beside`` of ``group`` names one of them.
    """
    beside = group["beside"].iloc[0]
    return base[base["configuration"].eq(beside)] if beside else base


def _row(derived: Derived, group: pd.DataFrame, base: pd.DataFrame) -> Row:
    losses_by_seed, base_by_seed, first = by_seed(group), by_seed(base), group.iloc[0]
    steps = int(first["validation_step"])
    row: Row = {
        **first[["where", "setting", "strategy", "configuration", "place", "first"]],
        "id": " ".join(sorted(group["id"])),
        "base": "" if base.empty else base["configuration"].iloc[0],
        "baseline": " ".join(sorted(base["id"])),
        "steps": steps,
        "seeds": len(losses_by_seed),
        "loss": float(losses_by_seed.mean()),
        "difference": _NONE,
        "verdict": "",
        **dict.fromkeys(("margin", "power", "target", "seconds"), math.nan),
        "reached": 0,
        "gain": _NONE,
    }
    if base_by_seed.empty:
        return row
    margin = _margin(derived, base)
    target = float(base_by_seed.mean()) + margin
    seconds, base_seconds = (_seconds_to(derived, trials, target) for trials in (group, base))
    reached = seconds[seconds["reached"]]
    row |= {"margin": margin, "target": target, "reached": int(reached["seed"].nunique())}
    row["seconds"] = float(undisturbed(reached)["seconds"].median())
    differences = list((losses_by_seed - base_by_seed).dropna())
    if differences and not group["is_base"].any():
        difference = mean_interval(differences)
        row |= {"difference": difference, "power": power(difference, margin)}
        row |= {"verdict": _verdict(difference, margin, steps), "gain": _gain(seconds, base_seconds)}
    return row


def allowed(derived: Derived) -> str:
    """Return the margin by which a loss may be higher than the baseline's loss, as text: ``1%`` or ``14 steps``.

    If the suite names a margin in training steps, the text gives these steps.  Otherwise the text is a percentage of
    the baseline's loss.
    """
    steps = derived.frames.margin
    return f"{MARGIN:.0%}" if not steps else f"{steps} steps"


def _margin(derived: Derived, base: pd.DataFrame) -> float:
    """Return the margin in nats by which a loss may be higher than the baseline's loss.

    ``base`` are the baseline's trials.  By default, the margin is :data:`MARGIN` times the baseline's loss.  If the
    suite names a margin in training steps, this is converted to nats by the slope of the baseline's mean loss in the
    last quarter of training.
    Returns NaN if the loss does not fall in this quarter, or if the quarter has fewer than two validations.
    """
    if not (steps := derived.frames.margin):
        return MARGIN * float(by_seed(base).mean())
    curves = derived.frames.validations
    mean = curves[curves["id"].isin(base["id"])].groupby("step")["loss"].mean()
    late = mean[mean.index >= (1 - LAST) * mean.index[-1]]
    fall, late_steps = late.iloc[0] - late.iloc[-1], late.index[-1] - late.index[0]
    return float(steps * fall / late_steps) if late_steps and fall > 0 else math.nan


@lru_cache(maxsize=32)  # the answer and a figure ask for it
def front(derived: Derived) -> pd.DataFrame:
    """Return a table that says which configurations lie on the Pareto front of bytes between nodes and loss.

    There is one row per setting (cluster, model, batch and so on) and configuration; in each setting, rows are in
    ascending order of the bytes, ``sent``.  Configurations with losses of fewer than 6 seeds are left out.  Settings in
    which fewer than :data:`FEWEST_OF_FRONT` configurations remain are left out, too.
    The rivals of a configuration are the other configurations of the setting that send at most as many bytes.  The
    configuration's losses are compared with each rival's losses, seed by seed.  Column ``front`` holds the result:

    * ``no``: at least one rival has a significantly lower loss.  Column ``beaten`` names the rival that beats the
      configuration; if several rivals do, it names the rival with the lowest loss.
    * ``yes``: all rivals have significantly higher losses, or there are no rivals.
    * ``inconclusive``: all other cases.
    """
    trials = derived.trials.dropna(subset=["validation_loss", "sent_bytes"])
    rows: list[Row] = []
    for (setting,), of_setting in groups(trials, ["setting"]):
        losses_of = {name: by_seed(group) for (name,), group in groups(of_setting, ["configuration"])}
        sent = of_setting.groupby("configuration")["sent_bytes"].median().sort_values()
        names = [str(name) for name in sent.index if len(losses_of[name]) >= FEWEST]
        for name in names if len(names) >= FEWEST_OF_FRONT else ():
            differences = {
                other: mean_interval(list((losses_of[other] - losses_of[name]).dropna()))
                for other in names
                if other != name and sent[other] <= sent[name]
            }
            better = [other for other, difference in differences.items() if difference.high < 0]
            sure = all(difference.low > 0 for difference in differences.values())
            rows.append({
                "setting": setting, "configuration": name, "sent": float(sent[name]),
                "loss": float(losses_of[name].mean()), "front": "no" if better else "yes" if sure else OPEN,
                "beaten": min(better, key=lambda other: losses_of[other].mean(), default=""),
            })  # fmt: skip
    return pd.DataFrame(rows, columns=["setting", "configuration", "sent", "loss", "front", "beaten"])


def _verdict(difference: Interval, margin: float, steps: int) -> str:
    """Return whether a difference of losses is within ``margin`` (nats), as a verdict (:func:`non_inferiority`).

    ``difference`` is a configuration's loss minus its baseline's loss, after ``steps`` training steps.  If there are
    too few training steps or seeds for a verdict, return text that says this, such as ``too few: 3 seeds of 6``.
    """
    if steps < LEAST_STEPS:
        return f"too short: {steps} steps of {LEAST_STEPS}"
    if difference.n < FEWEST:
        return f"too few: {difference.n} seeds of {FEWEST}"
    return non_inferiority(difference, margin)


def power(difference: Interval, margin: float) -> float:
    """Return the power of the test: the probability of the verdict "within the margin" if the true difference is 0.

    The verdict "within the margin" needs an interval of the difference that ends below ``margin`` (nats).  The number
    of seeds and the spread between them are taken from ``difference``; its estimate is not used.  The probability
    follows from the noncentral t distribution.
    The power is NaN if ``difference`` has no interval.
    """
    if not difference.known:
        return math.nan
    freedom = difference.n - 1
    half = difference.high - difference.estimate
    if half == 0:
        return 1.0
    from scipy import stats

    bound = quantile(freedom)
    return float(stats.nct.sf(bound, freedom, margin * bound / half))


def non_inferiority(difference: Interval, margin: float) -> str:
    """Return the verdict on a difference: a configuration's loss minus its baseline's loss.

    ``margin`` is the non-inferiority margin: by how many nats the configuration's loss may be higher than the
    baseline's.  The first verdict that applies is returned:

    * ``beyond the margin``: the interval of the difference lies above the margin.
    * ``no power``: there is no interval, or the power (:func:`power`) is below :data:`ENOUGH_POWER`.  With so little
      power, even a configuration that is equal to the baseline would too rarely get the verdict ``within the margin``.
    * ``within the margin``: the interval lies below the margin.
    * ``inconclusive``: the margin lies inside the interval.

    ``beyond the margin`` and ``within the margin`` are each wrong in at most 2.5 % of samples.
    """
    if difference.known and difference.low > margin:
        return "beyond the margin"
    if not power(difference, margin) >= ENOUGH_POWER:
        return "no power"
    return "within the margin" if difference.high < margin else "inconclusive"


def by_seed(trials: pd.DataFrame, column: str = "validation_loss") -> pd.Series[float]:
    """Return the loss of each seed, which is the mean of ``column`` over the trials of the seed."""
    return trials.groupby("seed")[column].mean()


def over_seeds(group: pd.DataFrame, column: str = "validation_loss") -> Interval:
    """Return the mean of a column of losses over seeds, as an interval from the lowest to the highest seed's loss."""
    means = by_seed(group, column)
    return Interval(float(means.mean()), float(means.min()), float(means.max()), len(means))


def first_at(loss: Floats, place: Floats, target: float) -> float:
    """Return the place at which a curve of losses first falls to ``target``; between validations it is a straight line.

    Args:
        loss: Validation losses in order, shape (n,).
        place: Steps or training seconds after which the losses were measured, shape (n,).
        target: The loss to which the curve falls.

    Returns:
        The place, in the unit of ``place``.  Infinity if no loss is at most ``target``.  NaN if the first loss is
        already at most ``target``, or if a loss is NaN before the curve falls to ``target``.
    """
    # Number of validations before the first one that is low enough.
    end = int((loss > target).cumprod().sum())
    if end in (0, len(loss)):
        return math.inf if end else math.nan
    share = (loss[end - 1] - target) / (loss[end - 1] - loss[end])
    return float(place[end - 1] + share * (place[end] - place[end - 1]))


def _seconds_to(derived: Derived, trials: pd.DataFrame, target: float) -> pd.DataFrame:
    """Return whether and when the validation loss of each trial falls to ``target``, one row per trial.

    Column ``reached`` says whether any validation loss of the trial is at most ``target``.  Column ``seconds`` holds
    the training seconds after which the loss falls to ``target`` (:func:`first_at`); NaN in trials that were not timed.
    """
    curves, reached, seconds = derived.frames.validations, {}, {}
    curves = curves[curves["id"].isin(trials["id"])].sort_values("step")
    for identity, curve in curves.groupby("id"):
        loss = curve["loss"].to_numpy()
        reached[identity] = bool((loss <= target).any())
        seconds[identity] = first_at(loss, curve["train_seconds"].to_numpy(), target)
    return trials[["id", "seed", "occasion", "disturbed"]].assign(
        reached=trials["id"].map(reached).eq(True), seconds=trials["id"].map(seconds).astype(float)
    )


def _gain(seconds: pd.DataFrame, base_seconds: pd.DataFrame) -> Interval:
    """Return how many times as fast a configuration reaches a target loss as its baseline, with the interval.

    ``seconds`` and ``base_seconds`` are rows of :func:`_seconds_to`.  A pair is a trial of the configuration and a
    trial of the baseline with the same seed and occasion (a start of the machine, or a run more than an hour apart).
    The ratio of a pair is the baseline's training seconds to the target over the configuration's seconds.  The result
    is a geometric mean of the ratios.  Disturbed pairs are left out; if all pairs are disturbed, all are kept
    (:func:`~report.data.speedups.undisturbed`).  One interval is computed over occasions and another one over seeds;
    the wider interval is returned.

    The result is NaN in each of these cases:

    * A trial never reaches the target.  If such a slow trial were left out, its configuration would look too fast.
    * The seconds of a trial are not known.
    * There are no pairs.
    """
    if not np.isfinite([*seconds["seconds"], *base_seconds["seconds"]]).all():
        return _NONE
    pairs = seconds.merge(base_seconds, on=["seed", "occasion"], suffixes=("", "_base"))
    if pairs.empty:
        return _NONE
    either = pairs["disturbed"].astype(bool) | pairs["disturbed_base"].astype(bool)
    pairs = pairs.assign(disturbed=either)
    kept, gains = undisturbed(pairs), []
    for clusters in (["seed", "occasion"], ["seed"]):
        above, below = (kept.groupby(clusters)[name].agg(geometric) for name in ("seconds_base", "seconds"))
        occasions = {key: key[1] for key in above.index} if "occasion" in clusters else None
        left_out = pairs.groupby(clusters).ngroups - len(above)
        gains.append(paired_ratio_interval(above.to_dict(), below.to_dict(), occasions, left_out))
    widest = max(gains, key=lambda gain: (not gain.known, gain.half))
    return replace(widest, occasions=gains[0].occasions, disturbed=bool(kept["disturbed"].any()))
