"""Table of ``docs/guide/deepspeed.md``: how each key of DeepSpeed's configuration is handled."""

from __future__ import annotations

import json

from docs.tables.markdown import table
from impl.deepspeed.keys import KEYS, NO_LIMIT, Key


def render() -> str:
    """The table, in Markdown."""
    head = ("key", "takes", "default", "", "what that means here")
    return table(head, (_row(key) for key in KEYS.values()))


def _row(key: Key) -> tuple[str, ...]:
    if key.means:
        return f"`{key.path}`", key.takes, "-", key.fate, f"`{key.means}`: {key.text}"
    words = {None: "none", NO_LIMIT: "no limit"}
    default = words[key.default] if key.default in words else f"`{json.dumps(key.default)}`"
    return f"`{key.path}`", key.takes, default, key.fate, key.text
