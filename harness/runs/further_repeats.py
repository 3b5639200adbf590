"""What a suite's sweeps ask for, batch by batch: further repeats follow from the records of those before.

A sweep that was interrupted asks for the same batches again: each is decided by the records of earlier ones
alone.  Ratios, their pairs and their intervals are those of the report.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.records.confidence_intervals import FEWEST, paired_ratio_interval
from harness.records.record import Record, path_of, read, slowest_seconds
from harness.suites.repeat_order import BASELINE, BEYOND, comparable_groups, contender_of, interleave
from harness.suites.suite import Suite
from harness.suites.trial import Trial

_Took = dict[tuple[int, int], float]  # seconds, by seed and repeat


@dataclass(frozen=True, slots=True)
class Batch:
    """Trials that run one after another, and the sweep that they belong to."""

    sweep: int
    trials: tuple[Trial, ...]


def batches(suite: Suite, sweeps: int, seconds: Callable[[Trial], float | None]) -> Iterator[Batch]:
    """The batches of a suite's sweeps, each once the trials before took ``seconds`` (None: they failed)."""
    for sweep in range(sweeps):
        yield Batch(sweep, suite.sweep(sweep))
        if (within := suite.repeats.within) is None:
            continue
        first, cells = sweep * suite.repeats.most, comparable_groups(suite.cells, "repeat", "seed")
        for repeat in range(first + suite.repeats.least, first + suite.repeats.most):
            done = range(first, repeat)
            cells = [wide for cell in cells if (wide := _too_wide(cell, within, done, seconds))]
            if not cells:
                break
            yield Batch(sweep, tuple(interleave([trial for cell in cells for trial in cell], repeat)))


def seconds_of(record: Record | None) -> float | None:
    """Median step, or geometric mean of the generations, of the slowest rank; None without a result."""
    if record is None or record.failure is not None or not record.ranks:
        return None
    if timed := slowest_seconds(record):
        return statistics.median(timed)
    tokens: dict[int, dict[int, float]] = defaultdict(dict)  # by generation, then by token
    for token in (token for rank in record.ranks for token in rank.tokens if not token.warmup):
        of_step = tokens[token.step]
        of_step[token.index] = max(token.seconds, of_step.get(token.index, 0.0))
    return statistics.geometric_mean([sum(found.values()) for found in tokens.values()]) if tokens else None


def _too_wide(
    cell: Sequence[Trial], within: float, done: range, seconds: Callable[[Trial], float | None]
) -> list[Trial]:
    """The trials of a cell that need one more repeat, together, so that each has the baseline beside it (of
    several the one with fewest changes of its policy); or none.  One that failed is not repeated.
    """
    took: dict[str, _Took] = defaultdict(dict)
    failed: set[str] = set()
    for trial in cell:
        for repeat in done:
            found = seconds(trial.model_copy(update={"repeat": repeat}))
            if found is None:
                failed.add(contender_of(trial))
            else:
                took[contender_of(trial)][trial.seed, repeat] = found
    baselines = [trial for trial in cell if trial.strategy == BASELINE]
    base = contender_of(min(baselines, key=lambda trial: len(trial.changes)))
    others = took.keys() - failed - {base}
    if base in failed or all(
        enough(_half_widths(took[base], took[name], done), within) for name in sorted(others)
    ):
        return []
    return [trial for trial in cell if contender_of(trial) not in failed]


def enough(halves: Sequence[float], within: float) -> bool:
    """Whether an interval, by half its width after each number of repeats, is narrow now and was so
    :data:`BEYOND` repeats ago or before: one may be narrow by chance, and hold the truth in 0.926 of samples.
    """
    before = halves[: max(len(halves) - BEYOND, 0)]
    return halves[-1] <= within and any(half <= within for half in before)


def _half_widths(base: _Took, ours: _Took, done: range) -> list[float]:
    """Half the width of the ratio's interval, as a share of it, after FEWEST repeats and each later one."""
    found = []
    for count in range(FEWEST, len(done) + 1):
        kept = {key: value for key, value in ours.items() if key[1] in done[:count]}
        found.append(paired_ratio_interval(base, kept).half)
    return found


def seconds_in(folder: Path) -> Callable[[Trial], float | None]:
    """What the trials of a folder took, read once each."""
    known: dict[str, float | None] = {}

    def took(trial: Trial) -> float | None:
        if known.get(trial.id) is None and (path := path_of(folder, trial.id)).exists():
            known[trial.id] = seconds_of(read(path))
        return known.get(trial.id)

    return took
