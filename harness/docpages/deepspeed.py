"""Table of ``docs/guide/deepspeed.md``: how each key of DeepSpeed's configuration is handled."""

from __future__ import annotations

import json
from typing import Final

from impl.deepspeed.keys import KEYS, NO_LIMIT, Key

_HEAD: Final = """\
| key | takes | default | | what that means here |
| --- | --- | --- | --- | --- |
"""


def render() -> str:
    """The table, in Markdown."""
    return _HEAD + "".join(_row(key) for key in KEYS.values())


def _row(key: Key) -> str:
    default = "none" if key.default is None else f"`{json.dumps(key.default)}`"
    if key.default == NO_LIMIT:
        default = "no limit"
    if key.means:
        default = "-"
    text = f"`{key.means}`: {key.text}" if key.means else key.text
    return f"| `{key.path}` | {key.takes} | {default} | {key.fate} | {text} |\n"
