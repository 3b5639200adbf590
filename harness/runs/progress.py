"""Progress output of a sweep: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from rich import progress as bars
from rich.console import Console

from harness.cluster.rank import Progress
from harness.errors import one_line
from harness.records.record import Record, slowest_seconds
from harness.suites.labels import NONE, at, varying_paths
from harness.suites.trial import Trial

_ALWAYS: Final = ("strategy", "cluster.nodes", "cluster.ranks_per_node", "cluster.rate")


class Display:
    """Progress of a sweep into ``results``, of at least ``total`` trials; a live line in a terminal."""

    def __init__(self, console: Console, results: Path, total: int = 0) -> None:
        self._console, self._results = console, results
        self._asked, self._done, self._trials = 0, 0, total
        self._axes: list[str] = []  # in which the trials differ
        self._durations: list[float] = []  # of trials
        self._began = time.monotonic()
        self._name = ""  # of the trial under way
        self._said: set[str] = set()
        self._live = bars.Progress(
            bars.TimeElapsedColumn(),
            bars.TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._line = self._live.add_task("")

    def say(self, line: str) -> None:
        """Print a line as it is, however long."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def asked(self, trials: Sequence[Trial], missing: int, why: str, failures: Sequence[Record]) -> None:
        """Trials follow, so many of which have to run, further ones for a reason; some failed before."""
        first, done = not self._asked, len(trials) - missing
        self._asked += len(trials)
        self._trials = max(self._trials, self._asked)
        self._done += done
        if first:
            varying = varying_paths([trial.canonical() for trial in trials])
            self._axes = [path for path in varying if path not in _ALWAYS]
        if first and done:
            self.say(f"{done} of {len(trials)} trials are done, and skipped")
        elif missing and not first:
            self.say(why)
        if failures:
            count = f"{len(failures)} of {self._trials} trials failed before"
            self.say(f"{count}; --retry-failed runs them again:")
        for record in failures:
            self.say(f"  {record.id} {outcome(record)}")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def began(self, trial: Trial) -> None:
        """A trial begins."""
        self._name, self._began = self._name_of(trial), time.monotonic()
        self._live.reset(self._line)
        self.progress(Progress("set-up"))

    def progress(self, progress: Progress) -> None:
        """The trial under way got this far; what it says is printed once, whatever trial says it again."""
        step = f" {progress.step}/{progress.steps}" if progress.steps else ""
        left = f" (about {eta} left)" if (eta := self._eta()) else ""
        shown = f"[{self._done + 1}/{self._trials}] {progress.stage}{step}{left} {self._name}"
        self._live.update(self._line, description=shown)
        if progress.text and progress.text not in self._said:
            self._said.add(progress.text)
            self.say(progress.text)

    def finished(self, record: Record) -> None:
        """Print the outcome of the current trial from its record."""
        self._done += 1
        seconds = time.monotonic() - self._began
        self._durations.append(seconds)
        if record.failure is not None:
            end = outcome(record, self._results)
        else:
            timed = slowest_seconds(record)
            end = f"{statistics.median(timed):.3f} s a step" if timed else "done"
            if record.foreseen is not None:
                end += f" (predicted {record.foreseen.seconds:.3f})"
            tokens = [token.seconds for rank in record.ranks[:1] for token in rank.tokens if not token.warmup]
            end = f"{statistics.median(tokens):.3f} s a token" if tokens else end
            if record.link is not None and record.link.probed_mbit:
                end += f", link {statistics.median(record.link.probed_mbit):.0f} Mbit/s"
        left = f", {eta} left" if (eta := self._eta()) else ""
        self.say(f"[{self._done}/{self._trials}] {self._name}: {end} ({seconds:.1f} s{left})")
        self._live.update(self._line, description="")

    def again(self, record: Record, number: int, most: int) -> None:
        """Print that the current trial failed, and runs again."""
        self.say(f"{self._name}: {outcome(record)}; tried again ({number} of {most})")

    def stopped(self, why: str) -> None:
        """Print that the run ends before its last trial."""
        self.say(f"{why}; {self._done} of {self._trials} trials are done, the same command goes on")

    def _name_of(self, trial: Trial) -> str:
        fields = trial.canonical()
        words = [trial.strategy, f"{trial.topology()}", at(fields, "cluster.rate")]
        said = {path: at(fields, path) for path in self._axes}
        words += [f"{path.rpartition('.')[2]} {value}" for path, value in said.items() if value != NONE]
        return f"{trial.id} {', '.join(words)}, repeat {trial.repeat}"

    def _eta(self) -> str:
        """Time left, by the trials but the first, which starts up for all; empty until the second ends."""
        if len(self._durations) < 2 or self._done == self._trials:
            return ""
        seconds = statistics.fmean(self._durations[1:]) * (self._trials - self._done)
        return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def outcome(record: Record, folder: Path | None = None) -> str:
    """How a trial ended, in one line; with its log, where the results folder is given."""
    if (failure := record.failure) is None:
        return "ok"
    log = f"; log: {folder / failure.log}" if folder and failure.log else ""
    return one_line(f"{failure.kind}: {failure.message}{log}")
