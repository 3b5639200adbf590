"""The order of a suite's trials: repeats are interleaved, and compared trials stand side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from harness.suites.trial import Trial


def interleaved(trials: list[Trial], repeats: int) -> Iterator[Trial]:
    """Every trial once a repeat; compared ones adjacent, in an order that no drift can favour."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        data = trial.canonical()
        del data["strategy"], data["policy"]
        groups.setdefault(json.dumps(data, sort_keys=True), []).append(trial)
    blocks = list(groups.values())
    for repeat in range(repeats):
        for index, block in enumerate(_rotated(blocks, repeat)):
            turned = _rotated(block, repeat + index)
            for trial in turned if repeat % 2 == 0 else reversed(turned):
                yield trial.model_copy(update={"repeat": repeat})


def _rotated(items: list[Any], by: int) -> list[Any]:
    return items[by % len(items) :] + items[: by % len(items)]
