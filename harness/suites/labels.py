"""Finds the fields in which trials differ, and formats values of these fields for tables and messages.

A *canonical* trial is the JSON-ready data of a trial (:meth:`harness.suites.trial.Trial.canonical`).  This module does
not import torch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from harness.errors import one_line
from harness.suites.trial import Trial
from impl.policy import spans
from impl.policy.shard_layout import MUCH_PADDING

NONE: Final = "-"
PADDED: Final = "¶"  # marks bytes and sizes of a model in which padding is more than the share MUCH_PADDING
# Marks bytes that the nodes' network interfaces counted, because peers have no ledger.
INTERFACES: Final = "*"
INTERFACES_IN_WORDS: Final = (
    f"{INTERFACES}: counted by the interfaces of the nodes, packet headers included, because peers do not count what "
    "they send."
)
_RATES: Final = ("cluster.rate", "cluster.inner_rate")
# Fields whose values follow from the suite as a whole, so that no suite asks about them.
_FOLLOWS: Final = ("policy.align", "policy.max_padding")


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 seed``, ``3 seeds``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) for each leaf of a nested table, that is, each value that is not itself a table.

    ``{"cluster": {"nodes": 2}}`` gives ``("cluster.nodes", 2)``.  Every path begins with ``prefix``.
    """
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differing(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the dotted paths of the fields in which trials differ, in field order; ``repeat`` is left out.

    ``trials`` are canonical: each is the JSON-ready data of a trial (:meth:`harness.suites.trial.Trial.canonical`).
    """
    flat = [dict(flatten(trial)) for trial in trials]
    paths = dict.fromkeys(path for trial in flat for path in trial if path != "repeat")
    return [path for path in paths if len({json.dumps(trial.get(path)) for trial in flat}) > 1]


def look_up(trial: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, such as ``cluster.nodes``, in the JSON-ready data of a trial.

    Returns the field's default if the data leave the field out.  ``trial`` may be nested, or flat with dotted paths as
    keys.
    """
    value: Any = trial
    for key in [path] if path in trial else path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return _defaults().get(path)
        value = value[key]
    return _defaults().get(path) if isinstance(value, dict) else value


@functools.cache
def _defaults() -> dict[str, Any]:
    """Return the defaults of a trial's fields by dotted path."""
    return dict(flatten(Trial().model_dump(mode="json")))


def varying_paths(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the dotted paths of the fields in which trials differ, in field order.

    ``trials`` are canonical: each is the JSON-ready data of a trial (:meth:`harness.suites.trial.Trial.canonical`).
    ``repeat`` is left out.  ``policy.align`` and ``policy.max_padding`` are left out too, since their values follow
    from the suite as a whole.
    """
    return [path for path in differing(trials) if path not in _FOLLOWS]


def pad_mark(share: float) -> str:
    """Return the text `` ¶``, which marks a model with much padding in tables.  Returns the empty text for others.

    ``share`` is the number of the model's padding elements divided by the number of its other elements.  A model has
    much padding if its share is above ``MUCH_PADDING``.
    """
    return f" {PADDED}" if share > MUCH_PADDING else ""


def pad_note(shares: Iterable[float]) -> str:
    """Return the footnote that explains the mark ``¶`` and names the largest share of padding.

    ``shares`` are the shares of padding of all models in a table.  Returns the empty text if no model has the mark.
    """
    most = max(shares, default=0.0)
    added = f"padding adds more than {MUCH_PADDING:.0%} to the model's elements, at most {most:.1%}"
    return f"{PADDED}: {added}; padding is sent and held like elements." if most > MUCH_PADDING else ""


def at(trial: Mapping[str, Any], path: str) -> str:
    """Look up a field of a trial, and format its value as a user writes it in a suite file, without quotes.

    ``trial`` is the trial's JSON-ready data, and ``path`` the dotted path of the field, such as ``cluster.rate``.
    """
    return as_written(path, look_up(trial, path))


def as_written(path: str, value: Any) -> str:
    """Format a value as a user writes it in a suite file, without quotes: ``200 Mbit/s``, ``unshaped``, ``48 MiB``.

    ``path`` is the dotted path of the field, such as ``cluster.rate``, and ``value`` is the field's value in the
    JSON-ready data of a trial.
    """
    if path == "memory_limit" and value is not None:
        return f"{value / 2**30:.12g} GiB" if value >= 2**30 else f"{value / 2**20:.12g} MiB"
    if path == "policy.schedule":
        return schedule_in_words(value)
    if path in _RATES and value is None:
        return "unshaped"
    if path in _RATES:
        return f"{value / 1000:g} Gbit/s" if value >= 1000 else f"{value:g} Mbit/s"
    return in_words(value)


def schedule_in_words(schedule: Sequence[Mapping[str, Any]] | None) -> str:
    """Format the spans of ``policy.schedule`` on one line: ``gradients int4:256 until 50 %, then gradients bf16``.

    A span is a run of consecutive steps with the same changes of the policy.  ``-`` stands for a policy without
    schedule.
    """
    rows = []
    for span in schedule or ():
        changes = {name: value for name, value in span.items() if name not in ("until", "every")}
        rows.append((spans.changes_in_words(changes, span.get("every", 1)), span.get("until")))
    return spans.in_words(rows) if rows else NONE


def in_words(value: Any) -> str:
    """Format any value in a trial's JSON-ready data on one line, without units.

    ``-`` stands for None and for empty values.
    """
    if value is None or value == "":
        return NONE
    if isinstance(value, list):
        return ", ".join(in_words(item) for item in value) or NONE
    if isinstance(value, dict):
        return ", ".join(f"{key} {in_words(item)}" for key, item in value.items() if item is not None) or NONE
    return f"{value:g}" if isinstance(value, float) else one_line(value)


def value_text(value: Any) -> str:
    """Format a value as JSON, for error messages.  A text of more than 80 characters is cut to 80, with ``...``."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
