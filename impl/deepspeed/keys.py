"""Lists every key of DeepSpeed's configuration: its type, DeepSpeed's default, and how it is treated here.

The list is the table ``keys.csv``, from which ``docs/guide/deepspeed.md`` is generated.  :func:`load` reads a
configuration (a file, JSON text or a mapping), and :func:`leaves` turns it into (path, value) pairs of known keys.
Keys and defaults are taken from DeepSpeed's ``runtime/zero/config.py`` and ``runtime/config.py``, which differ in
places from DeepSpeed's web pages.  This module does not import torch.
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
    """One key of DeepSpeed's configuration; each row of ``keys.csv`` becomes such an object."""

    path: str  # dotted path from the top of the configuration
    fate: Fate  # how the key is treated; ``only the default`` refuses every other value
    takes: Takes  # type of the value: a switch is true or false, a count a whole number (``5e8`` too)
    default: Any  # DeepSpeed's default, which holds here too; None: no default
    text: str  # what the key does here, why it has no effect, or why other values are refused
    means: str  # for a renamed key, the path of the key that takes its value
    allowed: tuple[str, ...]  # allowed values, in any case of letters; empty: all values
    stage: int  # lowest ZeRO stage at which a value other than the default is allowed


ZERO: Final = "zero_optimization"
OFFLOAD_PARAM: Final = f"{ZERO}.offload_param"
OFFLOAD_OPTIMIZER: Final = f"{ZERO}.offload_optimizer"
AUTO: Final = "auto"  # HuggingFace's placeholder; such a key counts as missing
LOCO: Final = f"{ZERO}.zeropp_loco_param"
NO_LIMIT: Final = 2**63 - 1  # DeepSpeed's default for no limit, sys.maxsize on 64 bits

SWITCHED: Final = (
    "elasticity", "compression_training", "data_efficiency", "curriculum_learning", "progressive_layer_drop",
    "eigenvalue", "quantize_training",
)  # fmt: skip
"""Tables that are refused as not supported, unless they contain ``"enabled": false``, which switches them off."""


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
    """Raised when a configuration cannot be read or carried out; the message is one line that names the key and the
    reason.
    """


def load(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """Returns the configuration as a mapping; its keys are not checked yet.

    ``config`` is a mapping, JSON text (which begins with ``{``), or the path of a file.  Like DeepSpeed, the function
    reads JSON and HJSON.  HJSON allows comments, trailing commas, and keys and texts without quotes.

    Raises DeepSpeedError: if the file cannot be read, or if the text is neither JSON nor HJSON, or not a mapping.
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
        raise DeepSpeedError(f"{source}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DeepSpeedError(f"{source}: cannot be read as JSON: {error}") from None
    if not isinstance(table, dict):
        raise DeepSpeedError(f"{source}: expected a table of keys, got {shown(table)}")
    return table


def _parsed(text: str) -> Any:
    """Returns the value that ``text`` has as JSON or, if the text is not JSON, as HJSON."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError:
        import hjson  # imported only when needed, since most files are JSON

        return hjson.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the (key, value) pairs of a table in a configuration as a dict.

    Raises ValueError: if a key occurs twice, which DeepSpeed refuses too.
    """
    if len(table := dict(pairs)) < len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"key {max(names, key=names.count)!r} occurs twice")
    return table


def shown(value: Any) -> str:
    """Returns a value as JSON for an error message, cut to at most 60 characters."""
    text = as_json(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def as_json(value: Any) -> str:
    """Returns a value as JSON on one line; parts that JSON cannot express are replaced by their ``repr``."""
    return json.dumps(value, default=repr)


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for every key of ``table``, and for every empty section.

    A section is a table inside the configuration, such as ``fp16``.  ``prefix`` is put before each path.  It is empty
    for the whole configuration, and, for example, ``fp16.`` for the section ``fp16``.

    Raises DeepSpeedError: if a key is unknown, or if a section is not a table.
    """
    for name, value in table.items():
        path = f"{prefix}{name}"
        if path in SECTIONS and isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}.")
        elif path in KEYS or (path in SECTIONS and (value is None or isinstance(value, Mapping))):
            yield path, value
        elif path in SECTIONS:
            raise DeepSpeedError(f"{path} = {shown(value)}: expected a table of keys")
        else:
            raise DeepSpeedError(f"unknown key {path!r}{_nearest(path)}")


def _nearest(path: str) -> str:
    """Returns the end of an error about the unknown key ``path``, such as ``; did you mean 'fp16.enabled'?``.

    The suggestion is the most similar known key.  If no known key is similar, the text says where all keys are listed.
    """
    known_paths = [*KEYS, *SECTIONS]
    short = {name.rpartition(".")[2]: name for name in known_paths}
    near = difflib.get_close_matches(path, known_paths, n=1, cutoff=0.7)
    near += [short[key] for key in difflib.get_close_matches(path.rpartition(".")[2], short, n=1)]
    return f"; did you mean {near[0]!r}?" if near else "; docs/guide/deepspeed.md lists all keys"
