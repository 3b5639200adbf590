"""DeepSpeed's configuration, key by key: its type, DeepSpeed's default, and what we do with it.

Configurations, files, JSON text or tables, are read as (path, value) pairs by the table ``keys.csv`` beside
this, from which ``docs/guide/deepspeed.md`` is generated.
Keys and defaults are those of DeepSpeed's ``runtime/zero/config.py`` and ``runtime/config.py``, which differ
from its web pages in places.  No torch.
"""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from impl import regular_file

Takes = Literal["switch", "count", "number", "text", "list", "anything"]
Fate = Literal["honoured", "without effect", "renamed", "only the default"]


@dataclass(frozen=True, slots=True)
class Key:
    """One key, a row of the table."""

    path: str  # dotted, from the top of the configuration
    fate: Fate  # our treatment; ``only the default`` refuses every other value
    takes: Takes  # a switch is true or false, a count a whole number, also as ``5e8``
    default: Any  # DeepSpeed's and ours; None where there is none
    text: str  # an explanation of the fate
    means: str  # of a renamed key, the path of the key that it is read as
    allowed: tuple[str, ...]  # values, of whatever case; any if there is none
    stage: int  # of ZeRO, the lowest at which another value than the default is allowed


ZERO: Final = "zero_optimization"
OFFLOAD_PARAM: Final = f"{ZERO}.offload_param"
OFFLOAD_OPTIMIZER: Final = f"{ZERO}.offload_optimizer"
AUTO: Final = "auto"  # HuggingFace's word, which counts as not given
LOCO: Final = f"{ZERO}.zeropp_loco_param"
NO_LIMIT: Final = 2**63 - 1  # sys.maxsize on 64 bits, DeepSpeed's default for no limit

SWITCHED: Final = (
    "elasticity", "compression_training", "data_efficiency", "curriculum_learning", "progressive_layer_drop",
    "eigenvalue", "quantize_training",
)  # fmt: skip
"""Unsupported tables, which ``"enabled": false`` switches off in DeepSpeed."""


def _rows() -> Iterator[Key]:
    with Path(__file__).with_name("keys.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            value = json.loads(row["default"])
            yield Key(
                row["path"], cast("Fate", row["fate"]), cast("Takes", row["takes"]),
                tuple(value) if isinstance(value, list) else value,
                row["text"], row["means"], tuple(row["allowed"].split()), int(row["stage"] or 0),
            )  # fmt: skip


KEYS: Final[dict[str, Key]] = {key.path: key for key in _rows()}
"""Every key by its path."""

SECTIONS: Final = frozenset(
    path.rsplit(".", depth)[0] for path in KEYS for depth in range(1, path.count(".") + 1)
)
"""Paths of the tables that hold keys."""


class DeepSpeedError(ValueError):
    """A configuration that cannot be carried out as it asks; one line that names the key and its value."""


def load(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """The configuration as a table with unchecked keys; a DeepSpeedError if it is no table.

    As DeepSpeed reads it, in JSON or HJSON: comments, trailing commas, keys and texts without quotes.
    """
    if isinstance(config, Mapping):
        return config
    text, source = str(config), "configuration"
    try:
        if not text.lstrip().startswith("{"):
            source = text
            text = regular_file.read_text(Path(config), "utf-8-sig", 1 << 20)
        table = _parsed(text)
    except OSError as error:
        raise DeepSpeedError(f"{source}: cannot read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DeepSpeedError(f"{source}: not JSON: {error}") from None
    if not isinstance(table, dict):
        raise DeepSpeedError(f"{source}: expected a table of keys, got {shown(table)}")
    return table


def _parsed(text: str) -> Any:
    """Text in JSON, else in HJSON."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError:
        import hjson  # only here: most files are JSON

        return hjson.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table; a ValueError for a key that stands twice, as in DeepSpeed, where Python takes the last."""
    if len(table := dict(pairs)) < len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"key {max(names, key=names.count)!r} stands twice")
    return table


def shown(value: Any) -> str:
    """A value as JSON, short enough for a line."""
    text = as_json(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def as_json(value: Any) -> str:
    """A value as JSON on one line; other types by their ``repr``."""
    return json.dumps(value, default=repr)


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every key and every empty section; a DeepSpeedError for an unknown key."""
    for name, value in table.items():
        path = f"{prefix}{name}"
        if path in SECTIONS and isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}.")
        elif path in KEYS or (path in SECTIONS and (value is None or isinstance(value, Mapping))):
            yield path, value
        elif path in SECTIONS:
            raise DeepSpeedError(f"{path} = {shown(value)}: expected a table")
        else:
            raise DeepSpeedError(f"unknown key {path!r}{_nearest(path)}")


def _nearest(path: str) -> str:
    """``"; did you mean ...?"`` for a path close to a known one in its section, or anywhere."""
    known_paths = [*KEYS, *SECTIONS]
    short = {name.rpartition(".")[2]: name for name in known_paths}
    near = difflib.get_close_matches(path, known_paths, n=1, cutoff=0.7)
    near += [short[key] for key in difflib.get_close_matches(path.rpartition(".")[2], short, n=1)]
    return f"; did you mean {near[0]!r}?" if near else "; docs/guide/deepspeed.md lists what there is"
