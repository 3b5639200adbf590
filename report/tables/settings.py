"""Settings of a folder's trials as readable text: all by the keys of a suite, and the main ones in words.

A setting with several values lists each, with the contenders that had it if that depends on the contender
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import pandas as pd

from harness.suites import labels
from harness.suites.repeat_order import CONTENDER
from harness.suites.suite_file import flatten
from harness.suites.trial import Trial
from report.data.frames import Frames
from report.data.text import counted, listed, number

_SHOWN: Final = 12  # values of one setting
_FOUND: Final = {  # columns of the trials
    "parameters": "parameters", "units": "units", "link": "link_kind", "kernels": "kernels",
    "corpus, SHA-256": "corpus_sha256",
}  # fmt: skip


def setting(frames: Frames, table: pd.DataFrame) -> list[tuple[str, str]]:
    """(key of a suite, value as a suite has it) of all that trials were given beside who ran, then what was
    found with it; without what no record holds.

    Args:
        frames: the records.
        table: from :func:`report.data.metrics.trials`.
    """
    given = [dict(flatten(frames.ran[str(identity)].canonical())) for identity in table["id"]]
    keys = dict.fromkeys(key for one in given for key in one)
    kept = [key for key in keys if key.split(".")[0] not in (*CONTENDER, "repeat")]
    values = {key: [labels.at({key: one.get(key)}, key) for one in given] for key in kept}
    values |= {name: [str(value or "") for value in table[column]] for name, column in _FOUND.items()}
    found = [(name, _told(table["contender"], told)) for name, told in values.items()]
    found += [(f"{name}s", str(table[name].nunique())) for name in ("repeat", "sweep") if len(table)]
    return [(name, told) for name, told in found if told not in ("", labels.NONE)]


def _told(contenders: Iterable[str], values: Sequence[str]) -> str:
    """Values in table order, each with its contenders where it depends on these alone."""
    who: dict[str, dict[str, None]] = {}
    for contender, value in zip(contenders, values, strict=True):
        who.setdefault(value, {})[contender] = None
    everyone = [name for names in who.values() for name in names]
    apart = len(who) > 1 and len(everyone) == len(set(everyone))
    return _some([f"{value} ({', '.join(names)})" if apart else value for value, names in who.items()])


def _some(values: Sequence[str]) -> str:
    """Values joined by semicolons; a long list is truncated, with the number left out."""
    rest = len(values) - _SHOWN
    return "; ".join(values[:_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


def _called(name: str, arguments: Mapping[str, object]) -> str:
    return (
        f"{name} ({', '.join(f'{key}={value}' for key, value in arguments.items())})" if arguments else name
    )


_ESSENTIAL: Final[dict[str, Callable[[Trial], str]]] = {
    "model": lambda trial: _called(trial.model.name, trial.model.arguments),
    "tokens per rank": lambda trial: f"{trial.tokens_per_rank}, in sequences of {trial.sequence}",
    "steps": lambda trial: f"{trial.steps} timed, after {counted(trial.warmup, 'warm-up')}",
    "optimizer": lambda trial: _called(trial.optimizer.name, trial.optimizer.arguments),
    "corpus": lambda trial: trial.corpus,
}


def essentials(frames: Frames, table: pd.DataFrame) -> list[tuple[str, str]]:
    """(name, value) of the main settings, for the headline; none without trials."""
    ran = [frames.ran[str(identity)] for identity in table["id"]]
    found = [(name, _some(list(dict.fromkeys(map(of, ran))))) for name, of in _ESSENTIAL.items() if ran]
    if sizes := sorted({int(size) for size in table["parameters"] if size}):
        found.append(("parameters", listed([_size(size) for size in sizes[:_SHOWN]])))
    repeated = ["seed", "repeat", *(["sweep"] if len(set(table["sweep"])) > 1 else [])]
    if ran:
        found.append(("repetition", ", ".join(counted(table[what].nunique(), what) for what in repeated)))
    return found


def _size(count: int) -> str:
    """Format a number of parameters: ``3.31 M``, ``18.0 B``."""
    large = count >= 1e9
    return f"{number(3)(count / (1e9 if large else 1e6))} {'B' if large else 'M'}"
