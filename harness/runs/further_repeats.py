"""Batches of trials of a suite's sweeps: further repeats follow from the records of earlier batches.

A sweep that was interrupted has the same batches again, since each follows from the records of earlier ones
alone.  Ratios, their pairs and their intervals are those of the report.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness.records.confidence_intervals import FEWEST, paired_ratio_interval
from harness.records.trial_record import Record, path_of, read, slowest_seconds
from harness.suites.repeat_order import BEYOND, comparable_groups, configuration_of, interleave, is_baseline
from harness.suites.suite import Suite
from harness.suites.trial import Trial

_Seconds = dict[tuple[int, int], float]  # by seed and repeat


@dataclass(frozen=True, slots=True)
class Batch:
    """Trials that run one after another, and the sweep that they belong to."""

    sweep: int
    trials: tuple[Trial, ...]


def batches(suite: Suite, sweeps: int, seconds: Callable[[Trial], float | None]) -> Iterator[Batch]:
    """The batches of a suite's sweeps, each by the ``seconds`` of trials before it (None: they failed)."""
    for sweep in range(sweeps):
        yield Batch(sweep, suite.sweep(sweep))
        if (within := suite.repeats.within) is None:
            continue
        first, fields = sweep * suite.repeats.most, ("repeat", "seed", *suite.compared_also)
        settings = comparable_groups(suite.combinations, *fields)
        for repeat in range(first + suite.repeats.least, first + suite.repeats.most):
            done = range(first, repeat)
            settings = [
                wide for setting in settings if (wide := _wide_trials(suite, setting, within, done, seconds))
            ]
            if not settings:
                break
            yield Batch(
                sweep, tuple(interleave([trial for setting in settings for trial in setting], repeat))
            )


def seconds_of(record: Record | None) -> float | None:
    """Median step, or geometric mean of generations, of the slowest rank; None without a result."""
    if record is None or record.failure is not None or not record.ranks:
        return None
    if timed := slowest_seconds(record):
        return statistics.median(timed)
    tokens: dict[int, dict[int, float]] = defaultdict(dict)  # by generation, then by token
    for token in (token for rank in record.ranks for token in rank.tokens if not token.warmup):
        slowest = tokens[token.step]
        slowest[token.index] = max(token.seconds, slowest.get(token.index, 0.0))
    generations = [sum(slowest.values()) for slowest in tokens.values()]
    return statistics.geometric_mean(generations) if generations else None


def _wide_trials(
    suite: Suite,
    setting: Sequence[Trial],
    within: float,
    done: range,
    seconds: Callable[[Trial], float | None],
) -> list[Trial]:
    """The trials of a setting if any interval is too wide, so that each repeat has the baseline beside it (of
    several the one with fewest changes of its policy); else none.  A configuration that failed is left out.
    """
    of_configuration = partial(configuration_of, also=suite.compared_also)
    times: dict[str, _Seconds] = defaultdict(dict)  # by configuration
    failed: set[str] = set()
    for trial in setting:
        for repeat in done:
            if (time := seconds(trial.model_copy(update={"repeat": repeat}))) is None:
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
    """Whether an interval, by half its width after each number of repeats, is narrow now and was so at least
    :data:`BEYOND` repeats ago: one that is narrow by chance holds the truth in 0.926 of samples.
    """
    before = halves[: max(len(halves) - BEYOND, 0)]
    return halves[-1] <= within and any(half <= within for half in before)


def _half_widths(base: _Seconds, configuration: _Seconds, done: range) -> list[float]:
    """Half the width of the ratio's interval, as a share of it, after FEWEST repeats and each later one."""
    halves = []
    for count in range(FEWEST, len(done) + 1):
        first = {key: value for key, value in configuration.items() if key[1] in done[:count]}
        halves.append(paired_ratio_interval(base, first).half)
    return halves


def seconds_in(folder: Path) -> Callable[[Trial], float | None]:
    """The seconds of the trials of a folder, whose records are read once each."""
    by_id: dict[str, float | None] = {}

    def seconds(trial: Trial) -> float | None:
        if by_id.get(trial.id) is None and (path := path_of(folder, trial.id)).exists():
            by_id[trial.id] = seconds_of(read(path))
        return by_id.get(trial.id)

    return seconds
