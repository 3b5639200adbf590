"""Events as a witness writes them, for tests without a program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.audit.calls import Calls, Rank, combine
from harness.audit.command import Options, options

SITE = "train.py:7 (main)"
CALLER = "torch/distributed/fsdp/x.py:1 (gather)"


def row(
    operation: str,
    elements: int,
    *,
    phase: str = "forward",
    dtype: str = "float32",
    item: int = 4,
    group: str = "0",
    calls: int = 1,
    done_as: str = "",
    peer: int = -1,
    site: str = SITE,
) -> list[Any]:
    """One row of an event ``rows``."""
    key = [phase, operation, done_as or operation, dtype, group, peer, site, CALLER, "recorder"]
    return [*key, calls, elements, item * elements]


def events(
    rank: int,
    world: int,
    rows: Sequence[list[Any]],
    *,
    steps: int = 3,
    groups: Sequence[tuple[str, Sequence[int]]] = (),
    elements: int = 0,
    fsdp: Sequence[dict[str, Any]] = (),
    own: Sequence[dict[str, Any]] = (),
    ended: str = "exit",
    environment: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """All events of a rank that made the same calls in each step."""
    made: list[dict[str, Any]] = [
        {"event": "process", "pid": rank, "host": "here", "started": rank, "environment": environment or {}},
        {"event": "torch", "version": "2.13.0", "recorders": ["generic"]},
    ]
    made += [
        {"event": "group", "name": name, "ranks": list(ranks), "backend": "gloo", "seen": True}
        for name, ranks in (("0", range(world)), *groups)
    ]
    made.append({"event": "rank", "rank": rank, "world": world})
    if elements:
        made.append({
            "event": "model", "elements": elements, "types": {}, "by": "optimizer AdamW", "fsdp": list(fsdp),
            "own": list(own),
        })  # fmt: skip
    made.append({"event": "rows", "first": 1, "last": steps, "rows": list(rows)})
    if ended:
        made.append({"event": "end", "how": ended, "steps": steps})
    return made


def calls_of(ranks: Sequence[Sequence[dict[str, Any]]], ranks_per_node: int | None = None) -> Calls:
    """The calls of ranks with these events."""
    made = []
    for number, given in enumerate(ranks):
        made.append(Rank(number))
        for event in given:
            made[-1].take(event)
    return combine(made, [], processes=len(made), ranks_per_node=ranks_per_node)


def write(folder: Path, ranks: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Write the witnesses' files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, given in enumerate(ranks):
        text = "".join(json.dumps(event) + "\n" for event in given)
        (folder / f"here-{number}.jsonl").write_text(text)


def given(folder: Path, *expect: str, **changes: object) -> Options:
    """The options of an audit in ``folder``."""
    usual: dict[str, object] = {
        "steps": "2:", "expect": expect, "file": None, "marker": "", "model": "", "ranks_per_node": 2, "folder": folder,
    }  # fmt: skip
    return options(["python", "train.py"], **(usual | changes))  # type: ignore[arg-type]


def zero_3(folder: Path) -> Path:
    """Write an audit of ZeRO-3 on 2x2 ranks, with counters of an interface; returns its folder."""
    rows = [
        row("all_gather", 1000),
        row("all_gather", 1000, phase="backward"),
        row("reduce_scatter", 1000, phase="backward", done_as="all_reduce", site="=<b>train</b>.py:9 (main)"),
    ]
    ranks = [events(rank, 4, rows, elements=1000) for rank in range(4)]
    for rank in ranks:
        rank += [
            {"event": "counters", "step": n, "sent": {"eth0": 12_100 * n, "lo": 9 * n}} for n in range(1, 4)
        ]
    write(folder / "ranks", ranks)
    return folder
