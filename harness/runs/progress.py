"""Progress output of a sweep: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from harness.cluster.rank import Progress
from harness.errors import one_line
from harness.records.record import Record, slowest_seconds
from harness.suites.labels import NONE, at, varying_paths
from harness.suites.trial import Trial

_ALWAYS: Final = ("strategy", "cluster.nodes", "cluster.ranks_per_node", "cluster.rate")


class Display:
    """Progress of a sweep over ``trials`` into ``results``, of which those ``missing`` have to run.

    At least ``total`` trials are known to come, those of further sweeps among them (:meth:`further`).
    """

    def __init__(
        self,
        console: Console,
        trials: Sequence[Trial],
        missing: Sequence[Trial],
        results: Path,
        *,
        total: int = 0,
    ) -> None:
        self._console, self._done = console, len(trials) - len(missing)
        self._asked = len(trials)
        self._trials = max(len(trials), total)
        self._axes = [
            path for path in varying_paths([trial.canonical() for trial in trials]) if path not in _ALWAYS
        ]
        self._results = results
        self._durations: list[float] = []  # of trials
        self._began = time.monotonic()
        self._trial: Trial | None = None
        self._progress = Progress("set-up")
        self._live: Live | None = None
        self._said: set[str] = set()
        if self._done:
            self._say(f"{self._done} of {len(trials)} trials are done, and skipped")

    def _say(self, line: str) -> None:
        """Print a line as it is, however long."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def further(self, trials: Sequence[Trial], missing: Sequence[Trial], why: str) -> None:
        """More trials follow, of which those ``missing`` have to run; says why they do, if any has."""
        self._asked += len(trials)
        self._trials = max(self._trials, self._asked)
        self._done += len(trials) - len(missing)
        if missing:
            self._say(why)

    def failed_before(self, failures: Sequence[Record]) -> None:
        """Say how many trials failed in earlier runs, and why."""
        if not failures:
            return
        self._say(f"{len(failures)} of {self._trials} trials failed before; --retry-failed runs them again:")
        for record in failures:
            assert record.failure is not None  # noqa: S101  # it does not answer
            words = one_line(f"  {record.id} {record.failure.kind}: {record.failure.message}")
            self._say(words)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._line, refresh_per_second=4, transient=True
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def began(self, trial: Trial) -> None:
        """A trial begins."""
        self._trial, self._progress = trial, Progress("set-up")
        self._began = time.monotonic()

    def progress(self, progress: Progress) -> None:
        """The trial under way got this far; what it says is printed once, whatever trial says it again."""
        self._progress = progress
        if progress.text and progress.text not in self._said:
            self._said.add(progress.text)
            self._say(progress.text)

    def finished(self, record: Record) -> None:
        """Print the outcome of the current trial from its record."""
        self._done += 1
        seconds = time.monotonic() - self._began
        self._durations.append(seconds)
        place = f"[{self._done}/{self._trials}]"
        if record.failure is not None:
            log = f"; log: {self._results / record.failure.log}" if record.failure.log else ""
            end = one_line(f"{record.failure.kind}: {record.failure.message}{log}")
        else:
            timed = slowest_seconds(record)
            end = f"{statistics.median(timed):.3f} s a step" if timed else "done"
            if record.foreseen is not None:
                end += f" (predicted {record.foreseen.seconds:.3f})"
            tokens = [token.seconds for rank in record.ranks[:1] for token in rank.tokens if not token.warmup]
            end = f"{statistics.median(tokens):.3f} s a token" if tokens else end
            if record.link is not None and record.link.probed_mbit:
                end += f", link {statistics.median(record.link.probed_mbit):.0f} Mbit/s"
        name = self._name()
        eta = self._eta()
        left = "" if self._done == self._trials or not eta else f", {eta} left"
        self._say(f"{place} {name}: {end} ({seconds:.1f} s{left})")
        self._trial = None

    def again(self, record: Record, number: int, most: int) -> None:
        """Print that the current trial failed, and runs again."""
        assert record.failure is not None  # noqa: S101  # it does not answer
        words = one_line(f"{record.failure.kind}: {record.failure.message}")
        said = f"{self._name()}: {words}; tried again ({number} of {most})"
        self._say(said)

    def stopped(self, why: str) -> None:
        """Print that the run ends before its last trial."""
        self._say(f"{why}; {self._done} of {self._trials} trials are done, the same command goes on")

    def _name(self) -> str:
        if self._trial is None:
            return ""
        trial = self._trial.canonical()
        words = [self._trial.strategy, f"{self._trial.topology()}", at(trial, "cluster.rate")]
        said = {path: at(trial, path) for path in self._axes}
        words += [f"{path.rpartition('.')[2]} {value}" for path, value in said.items() if value != NONE]
        return f"{self._trial.id} {', '.join(words)}, repeat {self._trial.repeat}"

    def _eta(self) -> str:
        """Time left, by the trials but the first, which starts up for all; empty until the second ends."""
        if len(self._durations) < 2:
            return ""
        seconds = statistics.fmean(self._durations[1:]) * (self._trials - self._done)
        return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"

    def _line(self) -> Text:
        if self._trial is None:
            return Text("")
        stage = self._progress.stage
        if self._progress.steps:
            stage += f" {self._progress.step}/{self._progress.steps}"
        seconds = time.monotonic() - self._began
        eta = self._eta()
        left = f", about {eta} left" if eta else ""
        place = f"[{self._done + 1}/{self._trials}]"
        line = f"{place} {stage} ({seconds:.0f} s{left}) {self._name()}"  # what moves comes first
        return Text(line, overflow="ellipsis", no_wrap=True)
