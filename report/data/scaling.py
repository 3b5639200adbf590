"""Trials of several sizes: by number of nodes, and by size of the model under a limit of memory."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from report.data.frames import groups
from report.data.metrics import Derived

_FEWEST: Final = 3  # numbers of nodes that make a line
_HELD: Final = ["ranks_per_node", "model", "rate_mbit", "sequence", "accumulation"]
_KEPT: Final = [
    "id", "strategy", "contender", "place", "first", "cell", "where", "sweep", "seed", "repeat", "nodes",
    "ranks_per_node", "tokens_per_rank", "achieved_mbit", "step_seconds", "tokens_per_second", "sent_bytes",
]  # fmt: skip


def by_nodes(derived: Derived) -> pd.DataFrame:
    """Trials that differ only in the number of nodes, with equal batches per rank or in all.

    Columns ``kind``, weak or strong, and ``title``, beside those of the trials.
    """
    table = derived.trials.assign(everyone=lambda t: t["tokens_per_rank"] * t["world"])
    parts = []
    for kind, held, tokens in (("weak", "tokens_per_rank", "a rank"), ("strong", "everyone", "in all")):
        for key, group in groups(table, [*_HELD, held]):
            if group["nodes"].nunique() >= _FEWEST:
                title = f"{kind}: {int(key[-1])} tokens {tokens}"
                parts.append(group[_KEPT].assign(kind=kind, title=title))
    return pd.concat(parts, ignore_index=True) if parts else table[_KEPT].iloc[:0]


def under_limits(derived: Derived) -> pd.DataFrame:
    """Trials with a memory limit: those that ``trained`` within it, and those that exceeded it."""
    ran, failures = derived.frames.ran, derived.frames.failures
    kept = ["id", "strategy", "contender", "place", "where", "cell", "parameters", "nodes", "ranks_per_node"]
    refused = failures[failures["kind"] == "memory"][kept].assign(trained=False)
    found = pd.concat([derived.trials[kept].assign(trained=True), refused], ignore_index=True)
    limits = np.array([ran[identity].memory_limit or np.nan for identity in found["id"]])
    found = found.assign(limit_bytes=limits, first=found["place"]).dropna(subset=["limit_bytes"])
    return found if (~found["trained"].astype(bool)).any() and found["trained"].any() else found.iloc[:0]


def largest(group: pd.DataFrame) -> tuple[float, float]:
    """Million parameters of the largest model that trained (0 if none), and of the next that did not fit."""
    trained, millions = group["trained"].astype(bool), group["parameters"] / 1e6
    return millions[trained].max() if trained.any() else 0.0, millions[~trained].min()
