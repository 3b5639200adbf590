"""Settings of a folder's trials as readable text: all by the keys of a suite, and the main ones in words.

A setting with several values lists each, with the contenders that had it if that depends on the contender
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pandas as pd

from harness.suites import labels
from harness.suites.repeat_order import CONTENDER
from harness.suites.suite_file import flatten
from report.data.frames import Frames
from report.data.text import called, counted, listed, number

_SHOWN: Final = 12  # values of one setting
_FOUND: Final = {  # columns of the trials
    "parameters": "parameters", "units": "units", "link": "link_kind", "kernels": "kernels",
    "corpus, SHA-256": "corpus_sha256",
}  # fmt: skip


def setting(frames: Frames, table: pd.DataFrame) -> list[tuple[str, str]]:
    """(key of a suite, value as a suite has it) of all that trials were given beside who ran, then what was
    found with it; without what no record holds.
    """
    given = [dict(flatten(frames.ran[str(identity)].canonical())) for identity in table["id"]]
    keys = dict.fromkeys(key for one in given for key in one)
    kept = [key for key in keys if key.split(".")[0] not in (*CONTENDER, "repeat")]
    values = {key: [labels.at({key: one.get(key)}, key) for one in given] for key in kept}
    values |= {name: [str(value or "") for value in table[column]] for name, column in _FOUND.items()}
    found = [(name, _told(table["contender"], told)) for name, told in values.items()]
    found += [(f"{name}s", str(table[name].nunique())) for name in ("repeat", "sweep") if len(table)]
    return [(name, told) for name, told in found if told not in ("", labels.NONE)]


def _told(contenders: pd.Series[str], values: Sequence[str]) -> str:
    """Values in table order, each with its contenders where it depends on these alone."""
    who = {value: names.unique() for value, names in contenders.groupby(list(values), sort=False)}
    apart = len(who) > 1 and sum(map(len, who.values())) == contenders.nunique()
    return _some([f"{value} ({', '.join(names)})" if apart else str(value) for value, names in who.items()])


def _some(values: Sequence[str]) -> str:
    """Values joined by semicolons; a long list is truncated, with the number left out."""
    rest = len(values) - _SHOWN
    return "; ".join(values[:_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


def essentials(frames: Frames, table: pd.DataFrame) -> list[tuple[str, str]]:
    """(name, value) of the main settings, for the headline; none without trials."""
    if not len(table):
        return []
    ran = [frames.ran[str(identity)] for identity in table["id"]]
    values = {
        "model": [called(one.model.name, one.model.arguments) for one in ran],
        "tokens per rank": [f"{one.tokens_per_rank}, in sequences of {one.sequence}" for one in ran],
        "steps": [f"{one.steps} timed, after {counted(one.warmup, 'warm-up')}" for one in ran],
        "optimizer": [called(one.optimizer.name, one.optimizer.arguments) for one in ran],
        "corpus": [one.corpus for one in ran],
    }
    found = [(name, _some(list(dict.fromkeys(of_trials)))) for name, of_trials in values.items()]
    if sizes := sorted({int(size) for size in table["parameters"] if size}):
        found.append(("parameters", listed([_size(size) for size in sizes[:_SHOWN]])))
    repeated = ["seed", "repeat", *(["sweep"] if len(set(table["sweep"])) > 1 else [])]
    return [*found, ("repetition", ", ".join(counted(table[what].nunique(), what) for what in repeated))]


def _size(count: int) -> str:
    """Format a number of parameters: ``3.31 M``, ``18.0 B``."""
    size, unit = (1e9, "B") if count >= 1e9 else (1e6, "M")
    return f"{number(3)(count / size)} {unit}"
