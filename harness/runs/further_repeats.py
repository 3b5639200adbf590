"""Decides which trials a sweep runs next, batch by batch.

The first batch of a sweep has all trials that the suite lists.  With ``repeats = "until 2 %"``, further batches follow.
Each further batch repeats some trials once more, until the confidence intervals of their speed-ups over the baseline
are narrow, or the largest number of repeats is reached.

A further batch is decided setting by setting; the trials of one setting differ only in configuration, seed and repeat.
A setting is repeated as long as the interval of any of its configurations is too wide.  Intervals are computed as in
the report, from the same pairs of trials, but as if all trials had run at one occasion (without a restart of the
machine or a long pause in between).

A batch depends only on the records of earlier batches, so that an interrupted sweep continues with the same batches.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from harness.records.confidence_intervals import FEWEST, Interval, paired_ratio_interval
from harness.records.trial_record import Record, path_of, read, slowest_seconds
from harness.suites.repeat_order import BEYOND, comparable_groups, configuration_of, interleave, is_baseline
from harness.suites.suite import Suite
from harness.suites.trial import Trial


class Timing(NamedTuple):
    """How long a training step, or the generation of a text, typically takes in one trial."""

    seconds: float
    disturbed: bool  # whether other programs disturbed the trial (:attr:`Record.disturbed`)


_Timings = Mapping[tuple[int, int], Timing]  # timings of a configuration by (seed, repeat)


@dataclass(frozen=True, slots=True)
class Batch:
    """Trials that run one after another, and the number of their sweep (one run of all repeats of a suite)."""

    sweep: int  # number of the sweep, from 0
    trials: tuple[Trial, ...]  # in the order in which they run
    first: int = 0  # if this is the run's first batch: place of its first trial in the order of all trials
    beside: tuple[Trial, ...] = ()  # other trials of the sweep, which no batch of this run has


def batches(suite: Suite, sweeps: int, timing: Callable[[Trial], Timing | None]) -> Iterator[Batch]:
    """Yield the batches of trials that a suite's sweeps run, in order; a sweep runs all repeats of the suite.

    The caller must run all trials of a batch before it takes the next batch, which depends on the trials' timings.

    Args:
        suite: The suite.
        sweeps: Number of sweeps.
        timing: Returns the timing of a trial that has run (:func:`timing_of`); None if the trial failed.
    """
    for sweep in range(sweeps):
        yield Batch(sweep, suite.sweep(sweep))
        if (within := suite.repeats.within) is None:
            continue
        first, fields = sweep * suite.repeats.most, ("repeat", "seed", *suite.compared_also)
        settings = comparable_groups(suite.combinations, *fields)
        for repeat in range(first + suite.repeats.least, first + suite.repeats.most):
            done = range(first, repeat)
            settings = [
                wide for setting in settings if (wide := _wide_trials(suite, setting, within, done, timing))
            ]
            if not settings:
                break
            yield Batch(
                sweep, tuple(interleave([trial for setting in settings for trial in setting], repeat))
            )


def single(suite: Suite, trial: Trial) -> Batch:
    """Return a batch with a single trial of a suite, to run only this trial.

    The batch also states the number of the trial's sweep, and the trial's place in the order of all trials.  Some
    trials run only if intervals are too wide (``repeats = "until ..."``).  Such a trial is placed after all trials that
    are sure to run.
    """
    number, most = trial.repeat // suite.repeats.most, suite.repeats.most
    order = [each.id for sweep in range(number + 1) for each in suite.sweep(sweep)]
    first = order.index(trial.id) if trial.id in order else len(order)
    others = (each for each in suite.all_repeats(number + 1).values() if each.id != trial.id)
    return Batch(number, (trial,), first, tuple(each for each in others if each.repeat // most == number))


def timing_of(record: Record | None) -> Timing | None:
    """Return how long a trial's step, or its generation of a text, typically takes, from the trial's record.

    - For a trial that trains: the median over the timed steps, where a step counts with the seconds of its slowest
      rank.  If the policy has a schedule, a median is taken for each phase (the steps with the same policy), and the
      result is the mean of these medians, weighted by the phases' numbers of timed steps.
    - For a trial that generates: the geometric mean over the timed generations.  The seconds of a generation are the
      sum over its tokens, where a token counts with the seconds of its slowest rank.

    Returns None if the record is missing or has no result.
    """
    if record is None or record.failure is not None or not record.ranks:
        return None
    if timed := slowest_seconds(record):
        return Timing(_typical_step(record, timed), record.disturbed)
    tokens: dict[int, dict[int, float]] = defaultdict(dict)  # by generation, then by token
    for token in (token for rank in record.ranks for token in rank.tokens if not token.warmup):
        slowest = tokens[token.step]
        slowest[token.index] = max(token.seconds, slowest.get(token.index, 0.0))
    generations = [sum(slowest.values()) for slowest in tokens.values()]
    return Timing(statistics.geometric_mean(generations), record.disturbed) if generations else None


def _typical_step(record: Record, timed: Sequence[float]) -> float:
    """Return the typical seconds of a training step; ``timed`` has the seconds of the trial's timed steps, in order.

    The result is the median.  If the policy has a schedule, it is the mean of the medians of the phases (the steps with
    the same policy), weighted by the phases' numbers of steps.
    """
    policy = Trial.from_canonical(record.trial).resolved_policy()
    if policy is None or not policy.schedule:
        return statistics.median(timed)
    by_phase: dict[int, list[float]] = defaultdict(list)
    numbers = [step.index for step in record.ranks[0].steps if not step.warmup]
    for number, seconds in zip(numbers, timed, strict=True):
        by_phase[policy.phase_at(number)].append(seconds)
    return sum(statistics.median(phase) * len(phase) for phase in by_phase.values()) / len(timed)


def _wide_trials(
    suite: Suite,
    setting: Sequence[Trial],
    within: float,
    done: range,
    timing: Callable[[Trial], Timing | None],
) -> list[Trial]:
    """Return the trials of one setting that must run once more, because a speed-up's confidence interval is too wide.

    Trials of one setting differ only in configuration (strategy and policy), seed and repeat.  Each configuration but
    the baseline has a speed-up: the baseline's seconds divided by the configuration's seconds.

    - If the baseline failed, or the intervals of all speed-ups are narrow, the returned list is empty.
    - If any interval is too wide, the list has all trials of the setting, baseline included, but no trials of
      configurations that failed.

    If the setting has several baselines, the baseline that changes the fewest policy fields of its strategy is used.

    Args:
        suite: The suite, which determines the baseline.
        setting: The trials of one setting.
        within: How far the upper end of a narrow interval may lie above the speed-up, as a share of the speed-up.
        done: Numbers of the repeats that have run in this sweep.
        timing: Returns the timing of a trial that has run; None if the trial failed.
    """
    of_configuration = partial(configuration_of, also=suite.compared_also)
    times: dict[str, dict[tuple[int, int], Timing]] = defaultdict(dict)  # by configuration
    failed: set[str] = set()
    for trial in setting:
        for repeat in done:
            if (time := timing(trial.model_copy(update={"repeat": repeat}))) is None:
                failed.add(of_configuration(trial))
            else:
                times[of_configuration(trial)][trial.seed, repeat] = time
    baselines = [trial for trial in setting if is_baseline(trial, suite.roles)]
    base = of_configuration(min(baselines, key=lambda trial: len(trial.changes)))
    others = sorted(times.keys() - failed - {base})
    if base in failed or all(narrow(_half_widths(times[base], times[name], done), within) for name in others):
        return []
    return [trial for trial in setting if of_configuration(trial) not in failed]


def narrow(halves: Sequence[float], within: float) -> bool:
    """Return whether a confidence interval is narrow after the last repeat, and was narrow some repeats before.

    The earlier time must be at least :data:`BEYOND` repeats before the last repeat.  This second condition is needed
    because an interval may be narrow by chance.  Without it, a sweep would stop at the first narrow interval, and only
    92.6 % of the intervals would contain the true ratio instead of 95 %.

    Args:
        halves: The interval's half width after each number of repeats, in order.
        within: The largest half width of a narrow interval, in the unit of ``halves``.
    """
    before = halves[: max(len(halves) - BEYOND, 0)]
    return halves[-1] <= within and any(half <= within for half in before)


def _half_widths(base: _Timings, configuration: _Timings, done: range) -> list[float]:
    """Return the half width of a speed-up's confidence interval after each number of repeats.

    The speed-up is the seconds of the baseline over the seconds of the configuration.  A half width says how far the
    interval's upper end lies above the speed-up, as a share of the speed-up.  The first half width in the list is
    computed from the first :data:`FEWEST` repeats, the next from one repeat more, and the last from all repeats in
    ``done``.

    Args:
        base: Timings of the baseline by (seed, repeat).
        configuration: Timings of the configuration by (seed, repeat).
        done: Numbers of the repeats that have run.
    """
    halves = []
    for count in range(FEWEST, len(done) + 1):
        first = {key: value for key, value in configuration.items() if key[1] in done[:count]}
        halves.append(speed_up(base, first).half)
    return halves


def speed_up(base: _Timings, configuration: _Timings) -> Interval:
    """Return a configuration's speed-up over the baseline with its confidence interval.

    A trial of the configuration and a trial of the baseline with the same seed and repeat are a pair.  Pairs with a
    trial that other programs disturbed are left out; if all pairs are disturbed, all are kept.

    The report (:func:`report.data.speedups.speedup`) computes the same result if all trials ran at one occasion, that
    is, without a restart of the machine or a long pause in between.

    Args:
        base: Timings of the baseline by (seed, repeat).
        configuration: Timings of the configuration by (seed, repeat), with at least one key of ``base``.
    """
    pairs = base.keys() & configuration.keys()
    undisturbed = {key for key in pairs if not (base[key].disturbed or configuration[key].disturbed)}
    kept = sorted(undisturbed or pairs)
    over, under = ({key: times[key].seconds for key in kept} for times in (base, configuration))
    return paired_ratio_interval(over, under, left_out=len(pairs) - len(kept))


def timings_in(folder: Path) -> Callable[[Trial], Timing | None]:
    """Return a function that looks up a trial's record in ``folder`` and returns its timing (:func:`timing_of`).

    The function returns None if the trial has no record yet, or failed.
    """
    by_id: dict[str, Timing | None] = {}

    def timing(trial: Trial) -> Timing | None:
        if by_id.get(trial.id) is None and (path := path_of(folder, trial.id)).exists():
            by_id[trial.id] = timing_of(read(path))
        return by_id.get(trial.id)

    return timing
