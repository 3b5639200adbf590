"""DeepSpeed's configuration, key by key: what each takes, its default there, and what happens to it here.

:mod:`impl.deepspeed.recipe` reads configurations by the table ``keys.csv`` beside this, and
``docs/guide/deepspeed.md`` is generated from it.
Keys and defaults are those of DeepSpeed's ``runtime/zero/config.py`` and ``runtime/config.py``, which differ
from its web pages in places.  No torch.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

Takes = Literal["switch", "count", "number", "text", "list", "anything"]
Fate = Literal["honoured", "without effect", "renamed", "only the default"]


@dataclass(frozen=True, slots=True)
class Key:
    """One key, a row of the table.

    Attributes:
        path: dotted, from the top of the configuration.
        fate: what happens to it; ``only the default`` refuses every other value.
        takes: a switch is true or false, a count a whole number, also as ``5e8``.
        default: DeepSpeed's, also used here, in JSON; None where there is none.
        text: what its fate means.
        means: of a renamed key, the path of the one that it is read as.
    """

    path: str
    fate: Fate
    takes: Takes
    default: Any
    text: str
    means: str


ZERO: Final = "zero_optimization"
OFFLOAD_PARAM: Final = f"{ZERO}.offload_param"
OFFLOAD_OPTIMIZER: Final = f"{ZERO}.offload_optimizer"
LOCO: Final = f"{ZERO}.zeropp_loco_param"
NO_LIMIT: Final = 2**63 - 1  # Python's sys.maxsize on 64 bits, DeepSpeed's default of a limit that is none

SWITCHED: Final = (
    "elasticity", "compression_training", "data_efficiency", "curriculum_learning", "progressive_layer_drop",
    "eigenvalue", "quantize_training",
)  # fmt: skip
"""Tables that are no sections here, and that ``"enabled": false`` switches off there."""


def _rows() -> Iterator[Key]:
    with Path(__file__).with_name("keys.csv").open(encoding="utf-8", newline="") as file:
        for path, fate, takes, default, text, means in list(csv.reader(file))[1:]:
            value = json.loads(default)
            held = tuple(value) if isinstance(value, list) else value
            yield Key(path, cast("Fate", fate), cast("Takes", takes), held, text, means)


KEYS: Final[dict[str, Key]] = {key.path: key for key in _rows()}
"""Every key by its path."""

SECTIONS: Final = frozenset(
    path.rsplit(".", depth)[0] for path in KEYS for depth in range(1, path.count(".") + 1)
)
"""Paths of the tables that hold keys."""
