"""How many steps a configuration needs for a loss, and how many its baseline needs.

Formulas: docs/reference/metrics.md, Net speed-up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from harness.records.confidence_intervals import Interval, mean_interval
from report.effects.loss_verdicts import first_at

NONE: Final = Interval(math.nan, math.nan, math.nan, 0)


@dataclass(frozen=True, slots=True)
class EqualLoss:
    """The steps to a loss that a configuration and its baseline both reach, over the seeds that both have."""

    # The baseline's steps over the configuration's; NaN if a curve begins below that loss.
    ratio: Interval = NONE
    loss: float = math.nan  # the configuration's mean loss at the end
    base: float = math.nan  # the baseline's mean loss at the end
    steps: float = math.nan  # the configuration's, to the higher of the two losses
    base_steps: float = math.nan  # the baseline's, to the same loss
    # False if the configuration ends higher than the baseline, significantly or with too few seeds to tell.
    reached: bool = True
    why: str = ""  # why there is no ratio

    @property
    def target(self) -> float:
        """The loss up to which steps are counted: the higher of the two final losses."""
        return max(self.loss, self.base)


def equal_loss(own: pd.DataFrame, base: pd.DataFrame) -> EqualLoss:
    """Compare the steps that a configuration and its baseline need for equal losses.

    A curve is the mean over the seeds that both have.  Steps are counted to the higher of the two final losses, which
    both curves reach, so that nothing is extrapolated.  The ends of the interval are the ratios at the ends of the
    interval of the difference of final losses, which are paired by seed.

    Args:
        own: Validations of the configuration, with columns ``seed``, ``step`` and ``loss``; of several for one seed and
            step the mean counts.
        base: Validations of the baseline, with the same columns.

    Returns:
        The comparison.  There is no ratio if the two share no seed, if a seed has no loss after the last step, if a
        loss is infinite, or if a curve has one validation or begins below the loss.
    """
    tables = [each.pivot_table(index="seed", columns="step", values="loss") for each in (own, base)]
    seeds = tables[0].index.intersection(tables[1].index)
    if seeds.empty:
        return EqualLoss(why="no seed has losses of both")
    curves = [table.loc[seeds].dropna(axis="columns") for table in tables]
    last = max(int(table.columns.max()) for table in tables)
    if any(last not in curve for curve in curves):
        return EqualLoss(why=f"not every seed of both has a loss after {last} steps")
    if any(len(curve.columns) < 2 for curve in curves):
        return EqualLoss(why="one validation; a curve needs two")
    steps = [curve.columns.to_numpy(dtype=float) for curve in curves]
    if not all(np.isfinite(curve.to_numpy()).all() for curve in curves):
        return EqualLoss(why="an infinite loss")
    losses = [curve.mean().to_numpy() for curve in curves]

    def steps_to(curve: int, above: float) -> float:
        """Return the steps to the curve's final loss plus ``above`` nats; all its steps if ``above`` is at most 0."""
        # Not the first step with the final loss, which a curve that rises at its end has long before.
        if above <= 0:
            return float(steps[curve][-1])
        return first_at(losses[curve], steps[curve], losses[curve][-1] + above)

    def to_equal(difference: float) -> tuple[float, float]:
        """Return the configuration's and the baseline's steps to equal losses.

        ``difference`` is how many nats above the baseline the configuration ends.
        """
        return steps_to(0, -difference), steps_to(1, difference)

    def ratio_at(difference: float) -> float:
        own_steps, base_steps = to_equal(difference)
        return base_steps / own_steps

    difference = mean_interval(list(curves[0][last] - curves[1][last]))
    own_steps, base_steps = to_equal(difference.estimate)
    low, high = ratio_at(difference.high), ratio_at(difference.low)
    if math.isnan(low + high):  # the interval reaches above a curve's first validation
        low = high = math.nan
    ratio = Interval(base_steps / own_steps, low, high, len(seeds))
    return EqualLoss(
        ratio=ratio,
        loss=float(losses[0][-1]),
        base=float(losses[1][-1]),
        steps=own_steps,
        base_steps=base_steps,
        reached=difference.estimate <= 0 or (difference.known and difference.contains(0.0)),
        why="a curve begins below that loss" if math.isnan(ratio.estimate) else "",
    )
