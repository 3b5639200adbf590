"""Compares the numbers of steps that a configuration and its baseline need to reach the same loss.

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
    """The numbers of training steps after which a configuration and its baseline reach the same loss.

    All losses are means over the seeds with which both were trained.
    """

    # The baseline's number of steps over the configuration's number of steps; NaN if ``why`` gives a reason.
    ratio: Interval = NONE
    loss: float = math.nan  # the configuration's final loss
    base: float = math.nan  # the baseline's final loss
    steps: float = math.nan  # steps of the configuration to the higher of the two final losses
    base_steps: float = math.nan  # steps of the baseline to the same loss
    # Whether the configuration reaches the baseline's final loss.  False if the configuration's final loss is
    # significantly higher, or if it is higher and there are too few seeds for an interval.
    reached: bool = True
    why: str = ""  # why there is no ratio; empty if there is one

    @property
    def target(self) -> float:
        """The loss that both configurations reach: the higher of their two final losses."""
        return max(self.loss, self.base)


def equal_loss(own: pd.DataFrame, base: pd.DataFrame) -> EqualLoss:
    """Compare the numbers of steps that a configuration and its baseline need to reach the same loss.

    Configuration and baseline each have a curve: the validation loss over steps, as the mean over the seeds that both
    have.  The loss to be reached is the higher of the two final losses.  Both curves reach this loss, so that nothing
    is extrapolated.

    The result's ``ratio`` is the baseline's number of steps over the configuration's number of steps.  The interval of
    the ratio follows from the interval of the difference of the final losses, which are compared seed by seed.  For
    example, let the interval of the difference be 0.01 to 0.03 nats.  Then the lower end of the ratio's interval is the
    ratio that follows from a difference of 0.03 nats, and the upper end is the ratio that follows from 0.01 nats.  If
    either end cannot be computed, the ratio has no interval.

    Args:
        own: Validations of the configuration, with columns ``seed``, ``step`` and ``loss``.  If there are several for
            one seed and step, their mean counts.
        base: Validations of the baseline, with the same columns.

    Returns:
        The comparison.  If there is no ratio, ``ratio`` is NaN, and ``why`` gives the reason, which is one of these:

        * Configuration and baseline share no seed.
        * A seed has no loss after the last step, or a loss is infinite.
        * A curve has a single validation, or begins below the loss to be reached.
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
        """Return the number of steps after which a curve reaches its final loss plus ``above`` nats.

        ``curve`` is 0 for the configuration and 1 for the baseline.  If ``above`` is at most 0, return the number of
        all steps.
        """
        # A curve that rises at its end passes its final loss long before its last step; all of its steps count.
        if above <= 0:
            return float(steps[curve][-1])
        return first_at(losses[curve], steps[curve], losses[curve][-1] + above)

    def to_equal(difference: float) -> tuple[float, float]:
        """Return the numbers of steps after which the configuration and the baseline reach the same loss.

        ``difference`` is an assumed value, in nats, of the configuration's final loss minus the baseline's final loss.

        * If it is positive, the configuration needs all of its steps.  The baseline needs the steps after which its
          loss is its final loss plus ``difference``.
        * If it is negative, the baseline needs all of its steps.  The configuration needs the steps after which its
          loss is its final loss minus ``difference``.
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
