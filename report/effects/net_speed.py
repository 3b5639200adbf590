"""Computes net speed-ups: how many times as fast as its baseline a configuration reaches a loss, in training seconds.

A net speed-up is the product of two ratios:

* the speed-up of a step (:mod:`report.effects.step_seconds`);
* the number of steps that the baseline needs to reach the loss, over the number that the configuration needs
  (:mod:`report.effects.equal_loss`).

For example, a configuration whose steps are 1.5 times as fast, and which needs 1000 steps where the baseline needs 900,
has the net speed-up 1.5 * 0.9 = 1.35.
Formulas: docs/reference/metrics.md, Net speed-up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import pandas as pd

from harness.records.confidence_intervals import Interval, product_interval
from harness.suites.answering_quantity import LEAST_STEPS
from report.data import caveats
from report.data.metrics import Derived
from report.data.text import plus_or_minus
from report.effects import loss_verdicts
from report.effects.equal_loss import NONE, EqualLoss, equal_loss
from report.effects.loss_verdicts import Row
from report.effects.step_seconds import StepSpeed, step_speeds

_FEWEST_DECIMALS: Final = 2


@dataclass(frozen=True, slots=True)
class NetSpeed:
    """The net speed-up of a configuration over its baseline, computed from the step times of one source and setting.

    A net speed-up says how many times as fast the configuration reaches the baseline's final loss, in training seconds.
    A source is a suite's records or a model of a machine; a setting is the cluster, model, batch and so on.
    """

    row: Row  # the configuration's row of :func:`report.effects.loss_verdicts.losses`
    equal: EqualLoss
    step: StepSpeed | None  # speed-up of a step; None if no source has seconds

    @property
    def at_both(self) -> Interval:
        """How many times as fast as its baseline the configuration reaches the higher of the two final losses.

        Both configurations reach this loss.  The value is NaN if the numbers of steps to this loss, or the seconds of a
        step, are unknown.
        """
        if self.step is None or self.equal.why:
            return NONE
        return product_interval(self.step.speedup, self.equal.ratio)

    @property
    def net(self) -> Interval:
        """How many times as fast as its baseline the configuration reaches the baseline's final loss.

        NaN if the configuration does not reach this loss, or if the seconds of a step or the numbers of steps are
        unknown.
        """
        return self.at_both if self.equal.reached else NONE


@lru_cache(maxsize=32)  # the verdicts, a table and a figure ask for it
def net_speeds(derived: Derived) -> tuple[NetSpeed, ...]:
    """Return the net speed-ups of all configurations whose loss is compared with a baseline's.

    A net speed-up says how many times as fast a configuration reaches the baseline's final loss, in training seconds.
    The seconds of a configuration's step may be known from several sources (records of suites, or a model of a machine)
    and in several settings (such as link rates) of a source.  The result has one entry for each configuration, source
    and setting.  If no source has the seconds of a configuration's step, the configuration has one entry, whose
    ``step`` is None.
    Configurations that trained for fewer than :data:`LEAST_STEPS` steps are left out, since their losses hardly depend
    on the policy.
    """
    found = list[NetSpeed]()
    for row in loss_verdicts.losses(derived):
        if not row["verdict"] or row["steps"] < LEAST_STEPS:
            continue
        found += against(derived, row, row["baseline"].split())
    return tuple(found)


def against(derived: Derived, row: Row, base: Sequence[str]) -> list[NetSpeed]:
    """Return the net speed-ups of one configuration over the trials ``base``, given by their ids.

    A net speed-up says how many times as fast the configuration reaches the final loss of the other trials, in training
    seconds.  There is one entry for each source of the seconds of a step (records of a suite, or a model of a machine)
    and each setting of the source.  If no source has the seconds, there is a single entry, whose ``step`` is None.
    ``row`` is the configuration's row of :func:`report.effects.loss_verdicts.losses`.
    """
    own = row["id"].split()
    equal = equal_loss(_curves(derived, own), _curves(derived, base))
    steps: Sequence[StepSpeed | None] = step_speeds(derived, own[0], base[0])
    return [NetSpeed(row, equal, step) for step in steps or (None,)]


def foremost(derived: Derived) -> dict[tuple[str, str], NetSpeed]:
    """Return the net speed-up that the table of verdicts prints for each configuration, by (setting, configuration).

    A net speed-up says how many times as fast a configuration reaches its baseline's final loss, in training seconds.
    It is computed from the first source (records of a suite, or a model of a machine) that has the seconds of the
    configuration's step.  If this source has the seconds in several settings, the configuration is left out, because
    the settings may give different net speed-ups.  A configuration is also left out if no source has its seconds.
    """
    by_key = dict[tuple[str, str], list[NetSpeed]]()
    for each in net_speeds(derived):
        if each.step is not None:
            by_key.setdefault((each.row["setting"], each.row["configuration"]), []).append(each)
    return {key: rows[0] for key, rows in by_key.items() if _single(rows)}


def in_words(equal: EqualLoss) -> str:
    """Return text for a configuration that does not reach its baseline's loss: ``not reached: 1.705 against 1.683``.

    The first number is the configuration's final loss, the second the baseline's.  Both have as many digits as are
    needed to see a difference.
    """
    loss, base = _final_losses(equal)
    return f"not reached: {loss} against {base}"


def cell(each: NetSpeed) -> str:
    """Return the text of a cell for a configuration that does not reach its baseline's final loss.

    It is the text of :func:`in_words`.  If the net speed-up to the higher of the two final losses is known, this number
    follows: ``not reached: 1.705 against 1.683; 1.05 ± 0.04 at 1.705``.
    """
    text = in_words(each.equal)
    if math.isnan(each.at_both.estimate):
        return text
    disturbed = f" {caveats.TAKEN}" * each.at_both.disturbed
    return (
        f"{text}; {plus_or_minus(each.at_both, '{:.2f}'.format)}{disturbed} at {_final_losses(each.equal)[0]}"
    )


def _final_losses(equal: EqualLoss) -> tuple[str, str]:
    apart = abs(equal.loss - equal.base)
    decimals = max(_FEWEST_DECIMALS, 1 - math.floor(math.log10(apart))) if apart > 0 else _FEWEST_DECIMALS
    return f"{equal.loss:.{decimals}f}", f"{equal.base:.{decimals}f}"


def sources(derived: Derived) -> str:
    """Return text that names the sources of the step times from which the table of verdicts computes net speed-ups.

    For example, ``this suite's own records``.
    """
    texts = (each.step.named for each in foremost(derived).values() if each.step is not None)
    return "; ".join(dict.fromkeys(texts))


def seconds_behind(derived: Derived) -> tuple[Interval, ...]:
    """Return the speed-up of a step that is behind each net speed-up in the table of verdicts.

    A net speed-up is this speed-up times a ratio of numbers of steps.
    """
    return tuple(each.step.speedup for each in foremost(derived).values() if each.step is not None)


def _single(rows: Sequence[NetSpeed]) -> bool:
    """Return whether the first source of step times has a configuration's step in one setting only.

    ``rows`` are all net speed-ups of the configuration: one for each source (such as a suite's records) and each of the
    source's settings (such as link rates), in the order of the sources.
    """
    names = [each.step.source for each in rows if each.step is not None]
    return names.count(names[0]) == 1


def _curves(derived: Derived, ids: Sequence[str]) -> pd.DataFrame:
    """Return the validations of the trials ``ids``, one row each, with a column ``seed``."""
    curves = derived.frames.validations
    seeds = derived.trials.set_index("id")["seed"]
    curves = curves[curves["id"].isin(ids)]
    return curves.assign(seed=curves["id"].map(seeds), loss=curves["loss"].astype(float))
