"""What losses say: paired by seed, against a margin, with power.  Formulas: docs/reference/metrics.md.

A seed draws the first weights and the order of the data; repeats and sweeps of one are one loss.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from harness.records import confidence_intervals
from harness.records.confidence_intervals import FEWEST, Interval, mean_interval, paired_ratio_interval
from harness.suites.answering_quantity import LEAST_STEPS
from report.data.contender import is_baseline
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.speedups import geometric

FEWEST_OF_FRONT = 8  # contenders
OPEN = "cannot be told"
MARGIN = 0.01  # of the baseline's loss: how much more a contender's may be and not count as inferior
LAST = 0.25  # of training, over which the loss of a step is taken where a suite's margin is in steps
Row = dict[str, Any]
_NONE = Interval(math.nan, math.nan, math.nan, 0)


@lru_cache(maxsize=32)  # the answer, tables and figures ask for it
def losses(derived: Derived) -> tuple[Row, ...]:
    """One row per contender and cell whose trials ended in a validation.

    Beside a baseline of the same seeds ``difference`` (more is worse), ``margin``, ``power``, ``verdict``;
    ``target``, its mean loss and the margin; ``reached``, the seeds that reach it; ``seconds``, the median
    time they took; ``gain``, its seconds over them, known if all seeds of both reach it.  ``id`` and
    ``baseline`` are the records behind the row, joined by spaces.
    """
    found = derived.trials.dropna(subset=["validation_loss"])
    found = found.assign(is_base=is_baseline(derived.trials)[found.index])
    return tuple(
        _row(derived, mine, of_cell[of_cell["is_base"]])
        for _, of_cell in groups(found, ["cell"])
        for _, mine in groups(of_cell, ["contender"])
    )


def _row(derived: Derived, mine: pd.DataFrame, base: pd.DataFrame) -> Row:
    ours, theirs, first = by_seed(mine), by_seed(base), mine.iloc[0]
    steps = int(first["validation_step"])
    row: Row = {
        **first[["where", "cell", "strategy", "contender", "place", "first"]],
        "id": " ".join(sorted(mine["id"])),
        "base": "" if base.empty else base["contender"].iloc[0],
        "baseline": " ".join(sorted(base["id"])),
        "steps": steps,
        "seeds": len(ours),
        "loss": float(ours.mean()),
        "difference": _NONE,
        "verdict": "",
        **dict.fromkeys(("margin", "power", "target", "seconds"), math.nan),
        "reached": 0,
        "gain": _NONE,
    }
    if theirs.empty:
        return row
    margin = _margin(derived, base)
    target = float(theirs.mean()) + margin
    seconds, needed = (_seconds_to(derived, one, target) for one in (mine, base))
    got = seconds[np.isfinite(seconds["seconds"])]
    row |= {"margin": margin, "target": target, "reached": int(got["seed"].nunique())}
    row["seconds"] = float(got["seconds"].median())
    apart = list((ours - theirs).dropna())
    if apart and not mine["is_base"].any():
        difference = mean_interval(apart)
        row |= {"difference": difference, "power": confidence_intervals.power(difference, margin)}
        row |= {"verdict": _verdict(difference, margin, steps), "gain": _gain(seconds, needed)}
    return row


def allowed(derived: Derived) -> str:
    """How much worse a loss may be and not count as inferior, in words."""
    steps = derived.frames.margin
    return f"{MARGIN:.0%}" if not steps else f"{steps} steps"


def _margin(derived: Derived, base: pd.DataFrame) -> float:
    """Nats that losses may differ by: a share of the baseline's, or what its mean curve falls by over the
    suite's steps in the last quarter of training; NaN where that is not known.
    """
    if not (steps := derived.frames.margin):
        return MARGIN * float(by_seed(base).mean())
    curves = derived.frames.validations
    mean = curves[curves["id"].isin(base["id"])].groupby("step")["loss"].mean()
    late = mean[mean.index >= (1 - LAST) * mean.index[-1]]
    gained, passed = late.iloc[0] - late.iloc[-1], late.index[-1] - late.index[0]
    return float(steps * gained / passed) if passed and gained > 0 else math.nan


@lru_cache(maxsize=32)  # the answer and a figure ask for it
def front(derived: Derived) -> pd.DataFrame:
    """Who sends fewest bytes between nodes for a loss, in cells of enough contenders whose losses are known.

    By cell, in ascending order of ``sent``: ``front`` is ``no`` if one that sends no more has a lower loss
    (``beaten``: by whom), ``yes`` if all that send no more have a higher one, by intervals paired by seed.
    """
    found = derived.trials.dropna(subset=["validation_loss", "sent_bytes"])
    rows: list[Row] = []
    for (cell,), of_cell in groups(found, ["cell"]):
        losses_of = {name: by_seed(mine) for (name,), mine in groups(of_cell, ["contender"])}
        sent = of_cell.groupby("contender")["sent_bytes"].median().sort_values()
        names = [str(name) for name in sent.index if len(losses_of[name]) >= FEWEST]
        for name in names if len(names) >= FEWEST_OF_FRONT else ():
            apart = {
                other: mean_interval(list((losses_of[other] - losses_of[name]).dropna()))
                for other in names
                if other != name and sent[other] <= sent[name]
            }
            beaten = [other for other, one in apart.items() if one.high < 0]
            sure = all(one.low > 0 for one in apart.values())
            rows.append({
                "cell": cell, "contender": name, "sent": float(sent[name]),
                "loss": float(losses_of[name].mean()), "front": "no" if beaten else "yes" if sure else OPEN,
                "beaten": min(beaten, key=lambda other: losses_of[other].mean(), default=""),
            })  # fmt: skip
    return pd.DataFrame(rows, columns=["cell", "contender", "sent", "loss", "front", "beaten"])


def _verdict(difference: Interval, margin: float, steps: int) -> str:
    """The verdict on a difference of losses, or what there is too little of for one."""
    if steps < LEAST_STEPS:
        return f"too short: {steps} steps of {LEAST_STEPS}"
    if difference.n < FEWEST:
        return f"too few: {difference.n} seeds of {FEWEST}"
    return confidence_intervals.verdict(difference, margin)


def by_seed(trials: pd.DataFrame, column: str = "validation_loss") -> pd.Series[float]:
    """The loss of each seed; the mean where it was trained several times."""
    return trials.groupby("seed")[column].mean()


def over_seeds(group: pd.DataFrame, column: str = "validation_loss") -> Interval:
    """The mean of a column of losses over seeds, and from the lowest to the highest of them."""
    seeds = by_seed(group, column)
    return Interval(float(seeds.mean()), float(seeds.min()), float(seeds.max()), len(seeds))


def _seconds_to(derived: Derived, trials: pd.DataFrame, target: float) -> pd.DataFrame:
    """Training seconds of each trial until its validation loss is at most ``target``, on the line between
    validations; infinite if none is so low, NaN if the first is already.
    """
    curves, seconds = derived.frames.validations, {}
    curves = curves[curves["id"].isin(trials["id"])].sort_values("step")
    for identity, curve in curves.groupby("id"):
        loss, took = curve["loss"].to_numpy(), curve["train_seconds"].to_numpy()
        if (at := int((loss > target).cumprod().sum())) in (0, len(loss)):  # so many are above it
            seconds[identity] = math.inf if at else math.nan
        else:
            fell = loss[at - 1] - loss[at]
            seconds[identity] = took[at - 1] + (took[at] - took[at - 1]) * (loss[at - 1] - target) / fell
    return trials[["id", "seed", "sweep"]].assign(seconds=trials["id"].map(seconds).astype(float))


def _gain(ours: pd.DataFrame, base: pd.DataFrame) -> Interval:
    """Seconds of the baseline over ours, paired by seed: the wider interval, of seeds or of sweeps; none if a
    seed, then among the slowest, never gets there.
    """
    if not np.isfinite([*ours["seconds"], *base["seconds"]]).all():
        return _NONE
    found = []
    for clusters in (["seed"], ["seed", "sweep"]):
        above, below = (side.groupby(clusters)["seconds"].agg(geometric) for side in (base, ours))
        sweeps = {key: key[1] for key in above.index} if "sweep" in clusters else None
        found.append(paired_ratio_interval(above.to_dict(), below.to_dict(), sweeps))
    return max(found, key=lambda one: (not one.known, one.half))
