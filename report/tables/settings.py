"""Settings of a folder's trials (model, data, options) as readable text.

A setting with several values lists each, with the contenders that had it if that depends on the contender
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import pandas as pd

from harness.suites.trial import Trial
from report.data.frames import Frames, rate_text
from report.data.text import counted, listed, number
from report.draw.contenders import contenders

_SHOWN: Final = 12  # values of one setting

Row = Mapping[Any, Any]  # of the table of trials


def setting(frames: Frames, table: pd.DataFrame) -> list[tuple[str, str]]:
    """(setting, value) in reading order; a setting that no record holds is left out.

    Args:
        frames: the records.
        table: from :func:`report.data.metrics.trials`.
    """
    if table.empty:
        return []
    found = [(name, _told(_values(frames, table, of)) or "") for name, of in _SETTINGS.items()]
    found += [
        ("Seeds", _some([str(seed) for seed in sorted(table["seed"].unique())])),
        ("Repeats", str(table["repeat"].nunique())),
        ("Sweeps", str(sweeps) if (sweeps := table["sweep"].nunique()) > 1 else ""),
    ]
    return [(name, told) for name, told in found if told]


def essentials(frames: Frames, table: pd.DataFrame) -> list[tuple[str, str]]:
    """(name, value) of the main settings, for the headline."""
    if table.empty:
        return []
    known = dict(setting(frames, table))
    found = [("model", known["Model"])]
    if (sizes := sorted({int(size) for size in table["parameters"] if size})) != []:
        found.append(("parameters", listed([_size(size) for size in sizes[:_SHOWN]])))
    repeated = ["seed", "repeat", *(["sweep"] if len(set(table["sweep"])) > 1 else [])]
    return [
        *found,
        ("tokens per rank", f"{known['Tokens per rank']}, in sequences of {known['Sequence']}"),
        ("steps", known["Steps"]),
        ("repetition", ", ".join(counted(table[what].nunique(), what) for what in repeated)),
        ("optimizer", known["Optimizer"]),
        ("corpus", known["Corpus"]),
    ]


def _size(count: int) -> str:
    """Format a number of parameters: ``3.31 M``, ``18.0 B``."""
    large = count >= 1e9
    return f"{number(3)(count / (1e9 if large else 1e6))} {'B' if large else 'M'}"


def _arguments(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _model(trial: Trial, _: Row) -> str:
    told = _arguments(trial.model.arguments)
    return f"{trial.model.name} ({told})" if told else trial.model.name


def _steps(trial: Trial, _: Row) -> str:
    return f"{trial.steps} timed, after {counted(trial.warmup, 'warm-up')}"


def _optimizer(trial: Trial, _: Row) -> str:
    clip = "" if trial.clip is None else f", gradients clipped to norm {trial.clip:g}"
    return f"{trial.optimizer.name}({_arguments(trial.optimizer.arguments)}){clip}"


def _link(trial: Trial, row: Row) -> str:
    if trial.topology().nodes == 1:
        return ""
    return f"{row['link_kind'] or trial.cluster.link}, {rate_text(trial.cluster.rate)}"


def _counted_or_nothing(value: int) -> str:
    return f"{value:,}" if value else ""


_SETTINGS: Final[dict[str, Callable[[Trial, Row], str]]] = {
    "Model": _model,
    "Parameters": lambda _, row: _counted_or_nothing(int(row["parameters"])),
    "Units": lambda _, row: _counted_or_nothing(int(row["units"])),
    "Ranks": lambda trial, _: f"{trial.topology()}",
    "Link between nodes": _link,
    "Sequence": lambda trial, _: str(trial.sequence),
    "Tokens per rank": lambda trial, _: str(trial.tokens_per_rank),
    "Accumulation": lambda trial, _: counted(trial.accumulation, "micro-batch", "micro-batches"),
    "Steps": _steps,
    "Optimizer": _optimizer,
    "Corpus": lambda trial, _: trial.corpus,
    "Corpus, SHA-256": lambda _, row: str(row["corpus_sha256"]),
    "Device": lambda trial, _: trial.cluster.device,
    "Kernels": lambda _, row: str(row["kernels"]),
}


def _values(frames: Frames, table: pd.DataFrame, of: Callable[[Trial, Row], str]) -> dict[str, list[str]]:
    """Contenders by value of a setting, both in table order."""
    found: dict[str, list[str]] = {}
    order = [contender for _, contender in contenders(table)]
    for row in table.to_dict("records"):
        value = of(frames.ran[str(row["id"])], row)
        if value and row["contender"] not in found.setdefault(value, []):
            found[value].append(row["contender"])
    return {value: sorted(names, key=order.index) for value, names in found.items()}


def _told(found: dict[str, list[str]]) -> str:
    everyone = [name for names in found.values() for name in names]
    by_contender = len(found) > 1 and len(everyone) == len(set(everyone))
    return _some(
        [f"{value} ({', '.join(names)})" if by_contender else value for value, names in found.items()]
    )


def _some(values: list[str]) -> str:
    """Values joined by semicolons; a long list is truncated, with the number left out."""
    rest = len(values) - _SHOWN
    return "; ".join(values[:_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")
