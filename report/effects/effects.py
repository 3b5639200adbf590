"""Compares each configuration with the suite's baseline in each quantity, and gives verdicts.

Definitions: docs/reference/metrics.md, Verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import pandas as pd

from harness.records.confidence_intervals import (
    FEWEST,
    Interval,
    Prediction,
    geometric_interval,
    quantile,
)
from harness.records.memory_parts import on_device
from harness.suites.answering_quantity import LEAST_STEPS
from harness.suites.peers import PEERS
from report.data import bytes_and_memory, decoding, speedups
from report.data.configuration import is_baseline, spelled
from report.data.frames import groups
from report.data.metrics import Derived
from report.effects import loss_verdicts, net_speed

Verdict = Literal[
    "better", "worse", "higher within the margin", "not significant", "inconclusive", "one value", "not measured",
    "not reached",
]  # fmt: skip
Key = tuple[str, str]  # (setting, configuration): the setting's hash, and the configuration's name
MOST_NEEDED: Final = 200  # pages do not print how many pairs would be needed if there are more than these
# Memory sizes that differ by at most this share count as equal, since padding differs.
SAME_MEMORY: Final = 0.005
_BY_KEY: Final = ["setting", "configuration"]
_OF_LOSSES: Final[dict[str, Verdict]] = {"beyond the margin": "worse", "within the margin": "not significant"}


@dataclass(frozen=True, slots=True)
class Effect:
    """The comparison of one configuration with its baseline, in one quantity (such as step time) and one setting.

    A setting is what a trial runs in: cluster, model, batch and so on.
    """

    # The change from the baseline.  It is a ratio, the configuration's value over the baseline's value, or for losses
    # a difference, the configuration's loss minus the baseline's loss.  If the quantity is counted, both ends of the
    # interval equal the estimate.
    change: Interval
    verdict: Verdict
    value: Interval  # the configuration's value; equals ``change`` if only the change is known
    base: float = math.nan  # the baseline's value
    equal: float = 1.0  # the value of ``change`` that means "no difference": 1 for ratios, 0 for differences
    # Why the verdict is inconclusive although there are enough values; empty if there is no such reason.
    why: str = ""
    steps: int = 0  # for losses: number of training steps before the loss was measured
    expected: Prediction | None = None  # prediction of the change in a new run; None if nothing is predicted
    text: str = ""  # text of the cell if there is no number

    @property
    def significant(self) -> bool:
        """Whether the interval of the change excludes "no difference".

        False if there is no interval, or if there is a reason against a verdict (``why``).
        """
        return not self.why and self.change.known and not self.change.contains(self.equal)

    @property
    def counted(self) -> bool:
        """Whether the quantity is counted exactly, such as bytes; its change then has no sample (``n`` is 0)."""
        return self.change.n == 0 and self.change.known

    @property
    def size(self) -> float:
        """Absolute size of the change, by which effects are ranked.

        For losses it is in nats; for other quantities it is the logarithm of the ratio, infinite for a ratio of 0.  It
        is -1 if nothing was measured.
        """
        estimate = self.change.estimate
        if math.isnan(estimate):
            return -1.0
        return abs(estimate) if self.equal == 0 else abs(math.log(estimate)) if estimate > 0 else math.inf


def verdict_on(change: Interval, *, more_is_better: bool) -> Verdict:
    """Return the verdict on a ratio: a configuration's value over its baseline's value.

    ``more_is_better`` says whether a ratio above 1 is an improvement.  If the interval of ``change`` excludes 1, the
    verdict is ``better`` or ``worse``; if it contains 1, ``not significant``.  Without an interval the verdict is
    ``inconclusive``, and without a ratio (NaN) it is ``not measured``.
    """
    if math.isnan(change.estimate):
        return "not measured"
    if not change.known:
        return "inconclusive"
    if change.contains(1.0):
        return "not significant"
    return "better" if (change.estimate > 1) is more_is_better else "worse"


def counted(value: float) -> Interval:
    """Return the interval of a number that was counted exactly: its estimate and its ends are ``value``, and n is 0."""
    return Interval(value, value, value, 0)


def speeds(derived: Derived) -> dict[Key, Effect]:
    """Return how many times as fast as its baseline each configuration is, by (setting, configuration).

    For training, this is the speed-up of a step; for decoding, the ratio of tokens per second.  Baselines, and
    configurations without a baseline's trial under the same conditions, are left out.
    """
    effects: dict[Key, Effect] = {}
    for table, ratio_of in ((derived.generations, decoding.speedup), (derived.pairs, speedups.speedup)):
        for key, rows in groups(table[table["id"] != table["baseline"].fillna(table["id"])], _BY_KEY):
            change = ratio_of(rows)
            expected = speedups.expected(rows) if table is derived.pairs else None
            verdict = verdict_on(change, more_is_better=True)
            effects[key] = Effect(change, verdict, change, expected=expected)
    return effects


def sent(derived: Derived) -> dict[Key, Effect]:
    """Return the ratio of each configuration's bytes between nodes to its baseline's bytes.

    Keys are (setting, configuration).  For training, the bytes are those of a step, as the ranks counted them when
    sending (in their ledgers).  If the configuration or the baseline has no ledgers, the counts of the nodes' network
    interfaces are used for both.  For decoding, the bytes are those of one token after the first, by the ledgers.
    """
    effects: dict[Key, Effect] = {}
    bases = baselines(derived)
    later: dict[Any, float] = derived.generations.groupby(_BY_KEY)["later_bytes"].median().to_dict()
    for (setting, name), size in later.items():
        base = next(
            (later[setting, base] for base in bases.get(setting, ()) if (setting, base) in later), 0.0
        )
        if base > 0 and not math.isnan(size):
            effects[setting, name] = _ratio(counted(size / base))
    for key, rows in groups(derived.pairs, _BY_KEY):
        ledger = rows["bytes_ratio"].median()
        if math.isfinite(ledger):
            effects[key] = _ratio(counted(float(ledger)))
        elif len(rows := rows[rows["interface_bytes"].gt(0) & rows["baseline_interface_bytes"].gt(0)]):
            effects[key] = _ratio(speedups.steady_ratio(rows, "interface_bytes", "baseline_interface_bytes"))
    return effects


def errors(derived: Derived) -> dict[Key, Effect]:
    """Return the error of each configuration's reduced gradients, and its ratio to the baseline's error.

    The error is the vNMSE from end to end (sum of squared errors over sum of squares).  A trial's error is the median
    over its measured steps, and the ratio is over pairs of trials.  Suites measure errors only in the first repeat of
    each seed, since other repeats would give the same errors.  If a configuration's error was measured in a single
    trial, the verdict is ``one value``: the steps of a trial are not independent samples.
    """
    rows, trials = derived.sent_errors, derived.trials
    rows = rows[rows["purpose"].eq("gradients") & rows["hop"].isna() & rows["repeated"].eq(1)]
    of_trial = rows.groupby("id")["vnmse"].median()
    of_trial = of_trial[of_trial > 0]
    pairs = (
        derived.pairs[[*_BY_KEY, "seed", "repeat", "id", "baseline"]]
        .assign(error=derived.pairs["id"].map(of_trial), base=derived.pairs["baseline"].map(of_trial))
        .dropna(subset=["error", "base"])
    )
    changes = {key: speedups.steady_ratio(paired, "error", "base") for key, paired in groups(pairs, _BY_KEY)}
    effects: dict[Key, Effect] = {}
    measured = trials.assign(error=trials["id"].map(of_trial)).dropna(subset=["error"])
    for key, group in groups(measured, _BY_KEY):
        value, change = geometric_interval(list(group["error"])), changes.get(key)
        effect = Effect(NONE, "inconclusive", value) if change is None else _ratio(change, value)
        effects[key] = replace(effect, verdict="one value") if value.n == 1 else effect
    return effects


def losses(derived: Derived) -> dict[Key, Effect]:
    """Return the difference of each configuration's final validation loss from its baseline's, in nats.

    Keys are (setting, configuration).  :mod:`report.effects.loss_verdicts` gives the verdicts.  If a seed of a
    configuration failed or ended with a loss that is not finite, the configuration's verdict is inconclusive, because
    its other seeds are not a fair sample.
    """
    failures, trials = derived.frames.failures, derived.trials
    without = trials[trials["validation_loss"].isna() & trials["validation_step"].notna()]
    columns = [*_BY_KEY, "seed"]
    lost = (
        pd.concat([failures[columns], without[columns]]).drop_duplicates().groupby(_BY_KEY).size().to_dict()
    )
    effects: dict[Key, Effect] = {}
    for row in loss_verdicts.losses(derived):
        if not row["verdict"]:
            continue
        key, change = (row["setting"], row["configuration"]), row["difference"]
        verdict, why = _OF_LOSSES.get(row["verdict"], "inconclusive"), ""
        if verdict == "not significant" and not change.contains(0.0):
            verdict = "better" if change.high < 0 else "higher within the margin"
        if row["steps"] < LEAST_STEPS:
            why = f"{row['steps']} steps; a verdict needs {LEAST_STEPS}"
        if key in lost:
            seeds, verdict = lost[key] + row["seeds"], "inconclusive"
            why = f"{lost[key]} of {seeds} seeds of {spelled(row['configuration'])} ended without a loss"
        effects[key] = Effect(change, verdict, change, 0.0, 0.0, why, row["steps"])
    return effects


def net_speeds(derived: Derived) -> dict[Key, Effect]:
    """Return the net speed-ups: how many times as fast each configuration reaches its baseline's final loss.

    The first of these cases that applies to a configuration decides on the verdict:

    * There is a reason against a verdict on the configuration's loss (``why`` in :func:`losses`).  The verdict is
      ``inconclusive``.
    * The configuration does not reach the baseline's final loss.  The verdict is ``not reached``, and there is no
      number.
    * There is a reason why steps cannot be compared (``why`` in :class:`report.effects.equal_loss.EqualLoss`).  The
      verdict is ``inconclusive``.
    * All other cases.  There is a net speed-up, with the usual verdicts on a ratio.

    The dict lacks these configurations:

    * Configurations that :func:`report.effects.net_speed.net_speeds` leaves out: baselines, and for example
      configurations without losses, or with too few training steps.
    * Configurations that reach the baseline's final loss, but that :func:`report.effects.net_speed.foremost` leaves
      out, for example because no source has the seconds of their steps.
    * All configurations, if ``foremost`` leaves all of them out.
    """
    of_losses, known = losses(derived), net_speed.foremost(derived)
    effects: dict[Key, Effect] = {}
    for each in net_speed.net_speeds(derived) if known else ():
        key: Key = (each.row["setting"], each.row["configuration"])
        net, equal, why = each.net, each.equal, of_losses[key].why
        if not equal.reached and not why:
            effects[key] = Effect(NONE, "not reached", NONE, text=net_speed.cell(each))
        elif known.get(key) is each:
            why = why or equal.why
            verdict: Verdict = "inconclusive" if why else verdict_on(net, more_is_better=True)
            effects[key] = Effect(net, verdict, net, why=why)
    return effects


def memory(derived: Derived) -> dict[Key, Effect]:
    """Return the memory in MiB that each configuration takes on the device, by our engine's count.

    Keys are (setting, configuration).  A trial's memory is that of the rank that holds the most, and the value is the
    median over trials.  DDP, FSDP2 and DeepSpeed are left out, because the count of a library's memory lacks gathered
    weights and local gradients.
    """
    parts = derived.frames.memory
    parts = parts[parts["source"].eq("engine")]
    parts = parts[parts["part"].isin(on_device(dict.fromkeys(parts["part"], 0)))]
    of_trial = parts.groupby(["id", "rank"])["bytes"].sum().groupby("id").max() / 2**20
    ours = derived.finished[~derived.finished["strategy"].isin(list(PEERS))]
    trials = ours.assign(mib=ours["id"].map(of_trial)).dropna(subset=["mib"])
    held: dict[Any, float] = trials[trials["mib"] > 0].groupby(_BY_KEY)["mib"].median().to_dict()
    return _over_baselines(held, beside(derived), same=SAME_MEMORY)


def largest_models(derived: Derived) -> dict[Key, Effect]:
    """Return the size of the largest model that each configuration trained within a memory limit.

    The size is in millions of parameters; it is 0 if no model trained.  Keys are (limit, configuration), with limits
    such as ``64 MiB a rank``.
    """
    rows = bytes_and_memory.under_limits(derived)
    sizes: dict[Any, float] = {
        (f"{limit / 2**20:g} MiB a rank", name): bytes_and_memory.largest(group)[0]
        for (limit, name), group in groups(rows, ["limit_bytes", "configuration"])
    }
    bases = dict.fromkeys(sizes, tuple(all_baselines(derived)))
    return _over_baselines(sizes, bases, more_is_better=True)


def scaling(derived: Derived) -> list[tuple[str, str, int, int, Effect]]:
    """Return by how much each configuration's throughput grows from the fewest to the most nodes.

    The throughput is the tokens/s of all ranks together.  For example, the effect is 1.8 if a configuration has 1.8
    times as many tokens/s on 4 nodes as on 1 node.
    Trials are compared within each group of :func:`report.data.bytes_and_memory.by_nodes`.  The numbers of nodes are
    the smallest and the largest number on which all configurations of the group ran.
    Each entry is (kind, configuration, fewest nodes, most nodes, effect).  The kind is ``weak`` if every rank's batch
    stays the same, and ``strong`` if the batch of all ranks together stays the same.
    """
    rows, found = bytes_and_memory.by_nodes(derived), []
    for (kind, _), group in groups(rows, ["kind", "title"]):
        common = set.intersection(*(set(own["nodes"]) for _, own in groups(group, ["configuration"])))
        if len(common) < 2:
            continue
        first, last = min(common), max(common)
        for (name,), own in groups(group, ["configuration"]):
            above, below = (own[own["nodes"] == nodes] for nodes in (last, first))
            pairs = above.merge(below, on=["seed", "repeat"], suffixes=("", "_first"))
            if len(pairs):
                either = pairs["disturbed"].astype(bool) | pairs["disturbed_first"].astype(bool)
                speeds = ("tokens_per_second", "tokens_per_second_first")
                change = speedups.speedup(pairs.assign(disturbed=either), *speeds)
                effect = Effect(change, verdict_on(change, more_is_better=True), change)
                found.append((kind, str(name), first, last, effect))
    return found


def baselines(derived: Derived) -> dict[str, tuple[str, ...]]:
    """Return the names of each setting's baselines, by the setting's hash; usually there is one baseline.

    A setting is the cluster, model, batch and so on of trials that may be compared.
    """
    rows = derived.finished[is_baseline(derived.finished)]
    return {
        str(setting): tuple(map(str, group["configuration"].unique()))
        for (setting,), group in groups(rows, ["setting"])
    }


def beside(derived: Derived) -> dict[Key, tuple[str, ...]]:
    """Return the names of the baselines with which each configuration is compared, by (setting, configuration).

    In a setting (cluster, model, batch and so on) with several baselines, a configuration is compared with the baseline
    that column ``beside`` of ``Frames.finished`` names.  In a setting without a baseline, the tuple of names is empty.
    """
    bases, found = baselines(derived), {}
    for (setting, name, nearest), _ in groups(derived.finished, [*_BY_KEY, "beside"]):
        found[str(setting), str(name)] = (str(nearest),) if nearest else bases.get(str(setting), ())
    return found


def all_baselines(derived: Derived) -> list[str]:
    """Return the names of the configurations that are a baseline in at least one setting."""
    return list(dict.fromkeys(name for names in baselines(derived).values() for name in names))


def needed(change: Interval, equal: float) -> int:
    """Return how many pairs would be needed for a significant change, if the change and its spread stay the same.

    A change is significant if its interval excludes ``equal``, the value that means "no difference".  If the change was
    measured at several occasions (starts of the machine, or runs more than an hour apart), occasions are counted
    instead of pairs.  The result is at least 6 and at most :data:`MOST_NEEDED`.
    """
    count = change.occasions if change.occasions > 1 else change.n
    ends = (change.estimate, change.high)
    estimate, high = map(math.log, ends) if equal == 1 else ends
    spread = (high - estimate) / quantile(count - 1) * math.sqrt(count)
    enough = (
        n for n in range(FEWEST, MOST_NEEDED) if quantile(n - 1) * spread / math.sqrt(n) < abs(estimate)
    )
    return next(enough, MOST_NEEDED)


NONE: Final = Interval(math.nan, math.nan, math.nan, 0)


def _ratio(change: Interval, value: Interval | None = None) -> Effect:
    """Return the effect (a comparison with the baseline) on a quantity of which less is better, such as bytes.

    ``change`` is the configuration's value over the baseline's value.  ``value`` is the configuration's value, or None
    if only the ratio is known.
    """
    return Effect(change, verdict_on(change, more_is_better=False), change if value is None else value)


def _over_baselines(
    values: Mapping[Key, float], bases: Mapping[Key, tuple[str, ...]], *, same: float = 0.0,
    more_is_better: bool = False,
) -> dict[Key, Effect]:  # fmt: skip
    """Return an effect for each exactly counted value: its ratio to the value of the baseline, with a verdict.

    Args:
        values: Values by (setting, configuration).
        bases: The names of each configuration's baselines.  The ratio is to the value of the first baseline that has
            one.  It is NaN if no baseline has a value, or if this value is 0.
        same: A ratio that differs from 1 by at most this number is returned as 1.
        more_is_better: Whether a ratio above 1 is an improvement.
    """
    effects: dict[Key, Effect] = {}
    for (setting, name), value in values.items():
        names = bases.get((setting, name), ())
        base = next((values[setting, b] for b in names if (setting, b) in values), math.nan)
        ratio = value / base if base > 0 else math.nan
        change = counted(1.0 if abs(ratio - 1) <= same else ratio)
        verdict = verdict_on(change, more_is_better=more_is_better)
        effects[setting, name] = Effect(change, verdict, counted(value), base)
    return effects
