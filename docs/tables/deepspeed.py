"""Tables of ``docs/guide/deepspeed.md``: how each key of DeepSpeed's configuration is handled."""

from __future__ import annotations

import json
from typing import Final

from docs.tables.markdown import table
from impl.deepspeed.keys import KEYS, NO_LIMIT, Fate, Key

_ELSE: Final[tuple[tuple[Fate, str, str], ...]] = (
    ("without effect", "Without effect", "why nothing depends on it"),
    ("only the default", "Only the default", "why any other value is refused"),
    ("renamed", "Renamed", "read as"),
)


def render() -> str:
    """Return a table of the honoured keys, and for each other outcome a table of keys by reason, in Markdown."""
    honoured = table(
        ("key", "default", "what it means here"),
        ((f"`{key.path}`", _default(key), key.text) for key in KEYS.values() if key.fate == "honoured"),
    )
    others = (f"\n### {title}\n\n{_by_reason(fate, reason)}" for fate, title, reason in _ELSE)
    return f"### Honoured\n\n{honoured}{''.join(others)}"


def _by_reason(fate: Fate, head: str) -> str:
    """Return a table of the keys of one outcome, with a row for each reason.

    A key whose default is its only allowed value is shown with this default, unless the default means "off".
    """
    reasons: dict[str, list[str]] = {}
    for key in KEYS.values():
        if key.fate == fate:
            only = fate == "only the default" and key.default not in (None, False)
            cell = f"`{key.path}`: {_default(key)}" if only else f"`{key.path}`"
            reasons.setdefault(f"`{key.means}`: {key.text}" if key.means else key.text, []).append(cell)
    return table(("keys", head), ((", ".join(keys), reason) for reason, keys in reasons.items()))


def _default(key: Key) -> str:
    names = {None: "none", NO_LIMIT: "no limit"}
    return names[key.default] if key.default in names else f"`{json.dumps(key.default)}`"
