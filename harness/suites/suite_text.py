"""What a run keeps of its suite's file: the text, without names of machines and accounts.

Names that the cluster block has for hosts and for Slurm are no part of what is asked; they stand in the kept
text as ``name-1``, ``name-2`` and so on.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from harness.suites.expansion import Suite, SuiteError, expanded, flatten

MOST_LETTERS: Final = 256 << 10
# Of launcher "slurm": what names machines or people.
_NAMING: Final = ("account", "exclude", "mail_user", "nodelist", "wckey")


class SuiteText(BaseModel, extra="forbid", frozen=True):
    """The file of a suite.

    Attributes:
        sha256: of the whole file as it was.
        text: of the file; None if it is not kept, and ``without`` says why.
        replaced: names that stand in it for those of machines and accounts.
        configurations: DeepSpeed configurations in files, as JSON text, by the path that the suite has.
    """

    name: str
    sha256: str
    text: str | None = None
    without: str = ""
    replaced: list[str] = []
    configurations: dict[str, str] = {}


def kept(path: Path, suite: Suite) -> SuiteText:
    """What to keep of ``suite``, whose file is at ``path``; its trials are those of the kept text."""
    text = suite.text
    found = SuiteText(
        name=suite.name,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        configurations=dict(suite.configurations),
    )
    if len(text) > MOST_LETTERS:
        why = f"it has {len(text)} letters, and at most {MOST_LETTERS} are kept"
        return found.model_copy(update={"without": why})
    names = sorted(set(_names(tomllib.loads(text))), key=lambda name: (-len(name), name))
    other = {name: f"name-{number}" for number, name in enumerate(names, 1)}
    for name, word in other.items():
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", word, text)
    try:
        same = not names or [one.id for one in expanded(path, text).trials] == [
            one.id for one in suite.trials
        ]
    except SuiteError:
        same = False
    if not same:
        why = "names of machines or accounts in it cannot be told from its other words"
        return found.model_copy(update={"without": why})
    return found.model_copy(update={"text": text, "replaced": list(other.values())})


def _names(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Names of machines and accounts that a suite's tables have, hosts also by their parts."""
    for path, value in flatten(table, prefix):
        _, _, key = f".{path}".rpartition(".cluster.")
        if key == "hosts":
            for host in _words(value):
                name = host.rpartition("@")[2]
                short = name.partition(".")[0]
                yield from (host, name, *([] if short.isdecimal() else [short]))
        elif key.startswith("slurm.") and key.removeprefix("slurm.") in _NAMING:
            yield from _words(value)
        elif isinstance(value, list):
            for one in value:
                if isinstance(one, dict):
                    yield from _names(one, f"{path}.")


def _words(value: Any) -> Iterator[str]:
    """All texts in lists of lists."""
    if isinstance(value, list):
        for one in value:
            yield from _words(one)
    elif isinstance(value, str) and value:
        yield value
