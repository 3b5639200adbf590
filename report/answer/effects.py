"""What each contender changes beside what it is compared with: the numbers of the answer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import pandas as pd

from harness.records.confidence_intervals import FEWEST, Interval, quantile
from harness.records.memory_parts import on_device
from report.data import speedups
from report.data.contender import NAMES
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import counted

YES: Final = "yes"
NO: Final = "no"
OPEN: Final = "cannot be told"
MOST_PAIRS: Final = 200  # beyond which no number of further pairs is named


@dataclass(frozen=True)
class Effect:
    """One contender beside its baseline in one cell."""

    contender: str
    base: str
    where: str  # the cell's description
    pairs: pd.DataFrame  # its rows of :func:`report.data.speedups.pairs`
    ratio: Interval  # the baseline's seconds of a step over the contender's: above 1 the contender is faster

    @property
    def verdict(self) -> str:
        """Whether the contender is faster."""
        return is_faster(self.ratio)

    @property
    def cell(self) -> str:
        """The cell's hash."""
        return str(self.pairs["cell"].iloc[0])

    @property
    def count(self) -> str:
        """``6 pairs``, and in how many sweeps."""
        of = f" in {self.ratio.sweeps} sweeps" if self.ratio.sweeps > 1 else ""
        return f"{counted(self.ratio.n, 'pair')}{of}"

    @property
    def intervals(self) -> str:
        """Which intervals stand beside ratios like this one's."""
        return f"95 % intervals of {self.count}" if self.ratio.known else f"{self.count}, no interval"

    @property
    def bytes_ratio(self) -> float:
        """Bytes between nodes over the baseline's, by the ledger, else by the interfaces; NaN of neither."""
        ledger = float(self.pairs["bytes_ratio"].median())
        return float(self.pairs["interface_ratio"].median()) if math.isnan(ledger) else ledger


def is_faster(found: Interval) -> str:
    """``yes`` if a ratio lies above 1, ``no`` if below, else and without an interval ``cannot be told``."""
    if not found.known or found.contains(1.0):
        return OPEN
    return YES if found.estimate > 1 else NO


def effects(derived: Derived) -> list[Effect]:
    """Every contrast of every cell, in page order."""
    rows = derived.pairs[derived.pairs["contender"] != derived.pairs["baseline_contender"]]
    return _effects(rows, derived.compared.contrast)


def variants(derived: Derived) -> list[list[str]]:
    """Contenders of one strategy, a list for each that has several; the preset is first."""
    found = derived.trials.drop_duplicates("contender")
    found = found[~found["id"].isin([one for one, trial in derived.frames.ran.items() if trial.control])]
    lists = [
        sorted(mine.sort_values("first")["contender"], key=lambda name: name != NAMES.get(strategy))
        for (strategy,), mine in groups(found.sort_values("place", kind="stable"), ["strategy"])
    ]
    return [names for names in lists if len(names) > 1]


def between(derived: Derived, base: str, others: Iterable[str]) -> list[Effect]:
    """The same for contenders beside one that is not the table's baseline."""
    return _effects(speedups.pairs(derived.trials, derived.trials["contender"].eq(base)), others)


def _effects(rows: pd.DataFrame, contenders: Iterable[str]) -> list[Effect]:
    rows = rows[rows["contender"].isin(list(contenders))]
    named = ["cell", "contender", "baseline_contender", "where"]
    return [
        Effect(contender, base, where, mine, speedups.speedup(mine))
        for (_, contender, base, where), mine in groups(rows, named)
    ]


def pairs_needed(effect: Effect) -> int:
    """How many pairs would tell the two apart, if their ratio and its spread stay; beyond MOST_PAIRS that."""
    found = effect.ratio
    if not found.known:
        return FEWEST
    count, far = found.n if found.sweeps == 1 else found.sweeps, abs(math.log(found.estimate))
    spread = math.log(found.high / found.estimate) / quantile(count - 1) * math.sqrt(count)
    enough = (n for n in range(FEWEST, MOST_PAIRS) if quantile(n - 1) * spread / math.sqrt(n) < far)
    return next(enough, MOST_PAIRS)


def errors(derived: Derived) -> pd.Series[float]:
    """Error end to end (vNMSE) by cell and contender: the median over measured steps and trials."""
    found = derived.sent_errors
    found = found[(found["purpose"] == "gradients") & found["hop"].isna() & found["repeated"].eq(1)]
    return found.groupby(["cell", "contender"], sort=False)["vnmse"].median()


def device_mib(derived: Derived, contender: str, source: str = "engine") -> float:
    """MiB of the rank that has most, the median over trials: what the engine holds on the device, or what is
    ``copied`` between host and device in a step.
    """
    memory, ran = derived.frames.memory, derived.finished
    ids = ran[ran["contender"] == contender]["id"]
    held = memory[memory["id"].isin(ids) & (memory["source"] == source)]
    if source == "engine":
        held = held[held["part"].isin(on_device(dict.fromkeys(held["part"], 0)))]
    return float(held.groupby(["id", "rank"])["bytes"].sum().groupby("id").max().median() / 2**20)
