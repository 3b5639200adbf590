"""Judges whether a configuration's validation loss is higher than the baseline's by more than a margin.

Losses are paired by seed.  A verdict needs enough power.  Formulas: docs/reference/metrics.md.

A seed draws the first weights and the order of the data; its repeats and sweeps count as one loss.
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

FEWEST_OF_FRONT = 8  # configurations in a setting, for :func:`front`
OPEN = "inconclusive"
ENOUGH_POWER = 0.8  # a test with less power gets no verdict
MARGIN = (
    0.01  # share of the baseline's loss by which a configuration's may be higher and not count as inferior
)
LAST = 0.25  # the last share of training, over which a margin in steps is converted into nats
Row = dict[str, Any]
Floats = NDArray[np.float64]
_NONE = Interval(math.nan, math.nan, math.nan, 0)


@lru_cache(maxsize=32)  # the answer, tables and figures ask for it
def losses(derived: Derived) -> tuple[Row, ...]:
    """Return one row for each configuration and setting whose trials ended in a validation.

    If there is a baseline with the same seeds, a row has:

    * ``difference`` of the losses (more is worse), ``margin``, ``power`` and ``verdict``;
    * ``target``: the baseline's mean loss plus the margin;
    * ``reached``: the number of seeds that reach the target; ``seconds``: the median of their times to it;
    * ``gain``: the baseline's seconds to the target over the configuration's, if all seeds of both reach it.

    ``id`` and ``baseline`` are ids of records, joined by spaces.
    """
    trials = derived.trials.dropna(subset=["validation_loss"])
    trials = trials.assign(is_base=is_baseline(derived.trials)[trials.index])
    return tuple(
        _row(derived, group, _beside(of_setting[of_setting["is_base"]], group))
        for _, of_setting in groups(trials, ["setting"])
        for _, group in groups(of_setting, ["configuration"])
    )


def _beside(base: pd.DataFrame, group: pd.DataFrame) -> pd.DataFrame:
    """Return the trials ``base`` of the baseline; if there are several baselines, those of the one in ``beside``."""
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
    """Return the margin as text: ``1%``, or ``14 steps``."""
    steps = derived.frames.margin
    return f"{MARGIN:.0%}" if not steps else f"{steps} steps"


def _margin(derived: Derived, base: pd.DataFrame) -> float:
    """Return the margin in nats.

    By default it is a share of the baseline's loss.  If the suite names a number of steps, the margin is what the
    baseline's mean loss falls by in so many steps, at its rate in the last quarter of training; NaN if it does not
    fall there, or has fewer than two validations there.
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
    """Return which configurations lie on the front of bytes between nodes and loss.

    Rows are by setting, in ascending order of ``sent``, the bytes; settings with too few configurations of known loss
    are left out.  Each configuration is compared with those that send no more, by intervals paired by seed.  Its
    ``front`` is ``no`` if one of them has a lower loss (``beaten`` names the lowest), ``yes`` if all of them have a
    higher loss, and ``inconclusive`` otherwise.
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
    """Return the verdict on a difference of losses, or a text that steps or seeds are too few for a verdict."""
    if steps < LEAST_STEPS:
        return f"too short: {steps} steps of {LEAST_STEPS}"
    if difference.n < FEWEST:
        return f"too few: {difference.n} seeds of {FEWEST}"
    return non_inferiority(difference, margin)


def power(difference: Interval, margin: float) -> float:
    """Return the power of a test: how probably it would find a configuration with equal losses not inferior.

    This is the probability, from the noncentral t distribution, that the interval of the difference ends below
    ``margin`` if the true difference is 0 and the losses vary between seeds as much as those behind ``difference``.
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
    """Return the verdict on paired differences of which more is worse.

    ``inferior``: the interval lies above the margin.  ``not inferior``: it lies below the margin.  Each of these
    verdicts is wrong in at most 2.5 % of samples.  ``inconclusive``: the margin lies inside the interval.
    ``no power``: a configuration that is equal to the baseline would be found not inferior too rarely.
    """
    if difference.known and difference.low > margin:
        return "inferior"
    if not power(difference, margin) >= ENOUGH_POWER:
        return "no power"
    return "not inferior" if difference.high < margin else "inconclusive"


def by_seed(trials: pd.DataFrame, column: str = "validation_loss") -> pd.Series[float]:
    """Return the loss of each seed: the mean over the trials of this seed."""
    return trials.groupby("seed")[column].mean()


def over_seeds(group: pd.DataFrame, column: str = "validation_loss") -> Interval:
    """Return the mean of a column of losses over seeds; the ends are the lowest and the highest loss of a seed."""
    means = by_seed(group, column)
    return Interval(float(means.mean()), float(means.min()), float(means.max()), len(means))


def first_at(loss: Floats, place: Floats, target: float) -> float:
    """Return the place at which a curve of losses is first at most ``target``, on the line between two validations.

    Args:
        loss: Validation losses in order, shape (n,).
        place: Where they were measured, such as steps or training seconds, shape (n,).
        target: The loss that is looked for.

    Returns:
        The place; infinity if no loss is at most ``target``; NaN if already the first loss is at most ``target``, or if
        a NaN comes before the first such loss.
    """
    # Number of validations before the first one that is low enough.
    end = int((loss > target).cumprod().sum())
    if end in (0, len(loss)):
        return math.inf if end else math.nan
    share = (loss[end - 1] - target) / (loss[end - 1] - loss[end])
    return float(place[end - 1] + share * (place[end] - place[end - 1]))


def _seconds_to(derived: Derived, trials: pd.DataFrame, target: float) -> pd.DataFrame:
    """Return whether each trial's validation loss is ever at most ``target``, and after how many training seconds.

    The columns are ``reached`` and ``seconds`` (:func:`first_at`), which are NaN in trials that were not timed.
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
    """Return the ratio of the baseline's seconds to a configuration's, over undisturbed pairs of one seed.

    Its interval is the wider of two: over occasions, and over seeds.  There is no ratio if a seed never reaches the
    target, since leaving out that seed, which is among the slowest, would flatter the others.
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
