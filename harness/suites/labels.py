"""The fields in which trials differ, and their values as text for tables.  No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from harness.errors import one_line
from harness.suites.trial import Trial
from impl.plan.shard_layout import MUCH_PADDING

NONE: Final = "-"
PADDED: Final = "¶"  # beside bytes, or a size, of a model whose units are padded by more than MUCH_PADDING
INTERFACES: Final = "*"  # beside bytes that the nodes' interfaces counted, for want of a ledger
INTERFACES_IN_WORDS: Final = (
    f"{INTERFACES}: counted by the interfaces of the nodes, headers included: peers have no ledger."
)
_RATES: Final = ("cluster.rate", "cluster.inner_rate")
_FOLLOWS: Final = ("policy.align", "policy.max_padding")  # from the suite; they change no trial's question


def counted(count: int, noun: str) -> str:
    """A count with its noun: ``1 seed``, ``3 seeds``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every value that is not a table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differing(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """Dotted paths of the fields in which canonical trials differ, ``repeat`` left out, in field order."""
    flat = [dict(flatten(trial)) for trial in trials]
    paths = dict.fromkeys(path for trial in flat for path in trial if path != "repeat")
    return [path for path in paths if len({json.dumps(trial.get(path)) for trial in flat}) > 1]


def look_up(trial: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path of a canonical trial; the default where it is left out."""
    values = dict(flatten(trial))
    return values[path] if path in values else dict(flatten(Trial().model_dump(mode="json"))).get(path)


def varying_paths(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """Paths in which trials differ, without the layout's, which are no question of a suite."""
    return [path for path in differing(trials) if path not in _FOLLOWS]


def pad_mark(share: float) -> str:
    """The mark of a model whose units are padded by this share of its elements; nothing for little."""
    return f" {PADDED}" if share > MUCH_PADDING else ""


def pad_note(shares: Iterable[float]) -> str:
    """The footnote of tables that have the mark; empty for others."""
    most = max(shares, default=0.0)
    added = f"more than {MUCH_PADDING:.0%} of the model's elements, at most {most:.1%}, is added to them"
    return f"{PADDED}: {added} as padding, which is sent and held too." if most > MUCH_PADDING else ""


def at(trial: Mapping[str, Any], path: str) -> str:
    """The value at a dotted path of a canonical trial, formatted as in a suite file."""
    return as_written(path, look_up(trial, path))


def as_written(path: str, value: Any) -> str:
    """A value that stands at a dotted path of a canonical trial, formatted as in a suite file."""
    if path == "memory_limit" and value is not None:
        return f"{value / 2**30:.12g} GiB" if value >= 2**30 else f"{value / 2**20:.12g} MiB"
    if path in _RATES and value is None:
        return "unshaped"
    if path in _RATES:
        return f"{value / 1000:g} Gbit/s" if value >= 1000 else f"{value:g} Mbit/s"
    return in_words(value)


def in_words(value: Any) -> str:
    """Format any value of a trial on one line."""
    if value is None or value == "":
        return NONE
    if isinstance(value, list):
        return ", ".join(in_words(item) for item in value) or NONE
    if isinstance(value, dict):
        return ", ".join(f"{key} {in_words(item)}" for key, item in value.items() if item is not None) or NONE
    return f"{value:g}" if isinstance(value, float) else one_line(value)


def value_text(value: Any) -> str:
    """A value as it stands in a suite, shortened to one readable line."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
