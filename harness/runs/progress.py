"""Shows the progress of a sweep: a line for each trial that ended and, in a terminal, a live line below them."""

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
from harness.records.trial_record import Record, slowest_seconds
from harness.suites.labels import NONE, at, varying_paths
from harness.suites.trial import Trial

_ALWAYS: Final = ("strategy", "cluster.nodes", "cluster.ranks_per_node", "cluster.rate")


class Display:
    """Prints the progress of a sweep.

    Use a display as a context manager.  The live line is shown until the body of ``with`` ends.

    Args:
        console: Where to print.
        results: The results folder, for the paths of logs.
        total: The number of trials that are known to come; further batches may add more trials.
    """

    def __init__(self, console: Console, results: Path, total: int = 0) -> None:
        self._console, self._results = console, results
        self._known, self._done, self._trials = 0, 0, total
        self._axes: list[str] = []  # paths in which the trials differ
        self._durations: list[float] = []  # seconds of the trials that ended
        self._began = time.monotonic()
        self._name = ""  # of the current trial
        self._printed: set[str] = set()  # texts that some trial has reported
        self._live = bars.Progress(
            bars.TimeElapsedColumn(),
            bars.TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._line = self._live.add_task("")

    def print(self, line: str) -> None:
        """Print a line without wrapping or markup."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def batch(self, trials: Sequence[Trial], missing: int, why: str, failures: Sequence[Record]) -> None:
        """Print, before a batch runs, how many trials are done already, why the others run, and which failed earlier.

        Args:
            trials: All trials of the batch.
            missing: Number of these trials that have to run.
            why: Why they have to run; printed for all batches but the first.
            failures: Records of trials that failed in an earlier run, and are not run again.
        """
        first, done = not self._known, len(trials) - missing
        self._known += len(trials)
        self._trials = max(self._trials, self._known)
        self._done += done
        if first:
            varying = varying_paths([trial.canonical() for trial in trials])
            self._axes = [path for path in varying if path not in _ALWAYS]
        if first and done:
            self.print(f"{done} of {len(trials)} trials are done, and skipped")
        elif missing and not first:
            self.print(why)
        if failures:
            count = f"{len(failures)} of {self._trials} trials failed before"
            self.print(f"{count}; --retry-failed runs them again:")
        for record in failures:
            self.print(f"  {record.id} {outcome(record)}")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def began(self, trial: Trial) -> None:
        """Show that ``trial`` begins, and note the time, from which its duration is counted."""
        self._name, self._began = self._name_of(trial), time.monotonic()
        self._live.reset(self._line)
        self.progress(Progress("set-up"))

    def progress(self, progress: Progress) -> None:
        """Show the progress of the current trial in the live line, and print its ``text`` once.

        The text is not printed if it is empty, or if this or an earlier trial has reported the same text before.
        """
        step = f" {progress.step}/{progress.steps}" if progress.steps else ""
        left = f" (about {eta} left)" if (eta := self._eta()) else ""
        shown = f"[{self._done + 1}/{self._trials}] {progress.stage}{step}{left} {self._name}"
        self._live.update(self._line, description=shown)
        if progress.text and progress.text not in self._printed:
            self._printed.add(progress.text)
            self.print(progress.text)

    def finished(self, record: Record) -> None:
        """Print how the current trial ended, from its record."""
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
        self.print(f"[{self._done}/{self._trials}] {self._name}: {end} ({seconds:.1f} s{left})")
        self._live.update(self._line, description="")

    def retried(self, record: Record, number: int, most: int) -> None:
        """Print that the current trial failed and now runs again.

        Args:
            record: The record of the attempt that failed.
            number: Number of the retry that begins now, from 1.
            most: Largest number of retries.
        """
        self.print(f"{self._name}: {outcome(record)}; tried again ({number} of {most})")

    def stopped(self, why: str) -> None:
        """Print that the run ends before all trials have run, and why."""
        self.print(
            f"{why}; {self._done} of {self._trials} trials are done; run the same command again to continue"
        )

    def _name_of(self, trial: Trial) -> str:
        fields = trial.canonical()
        parts = [trial.strategy, f"{trial.topology()}", at(fields, "cluster.rate")]
        values = {path: at(fields, path) for path in self._axes}
        parts += [f"{path.rpartition('.')[2]} {value}" for path, value in values.items() if value != NONE]
        return f"{trial.id} {', '.join(parts)}, repeat {trial.repeat}"

    def _eta(self) -> str:
        """Return the time left as text; empty until two trials have ended, and after the last trial.

        The first trial is left out of the mean duration of trials, because it includes starting up.
        """
        if len(self._durations) < 2 or self._done == self._trials:
            return ""
        seconds = statistics.fmean(self._durations[1:]) * (self._trials - self._done)
        return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def outcome(record: Record, folder: Path | None = None) -> str:
    """Return in one line how a trial ended, with the path of its log if the results folder is given."""
    if (failure := record.failure) is None:
        return "ok"
    log = f"; log: {folder / failure.log}" if folder and failure.log else ""
    return one_line(f"{failure.kind}: {failure.message}{log}")
