"""Answers by the validation loss at the end of training, beside the suite's baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from harness.records.confidence_intervals import FEWEST
from harness.suites.question import LEAST_STEPS
from report.answer import speed
from report.answer.parts import (
    MOST_NAMED,
    NO,
    OPEN,
    YES,
    Found,
    apart,
    ends,
    g3,
    is_named,
    named_first,
    spelled,
)
from report.answer.sizes import errors_of_variants
from report.data import effects, learning
from report.data.metrics import Derived
from report.data.text import counted, listed

Row = dict[str, Any]
_VERDICTS = {"not inferior": YES, "inferior": NO}
_WORDS = {
    "not inferior": "not inferior",
    "inferior": "inferior",
    "cannot tell": "it cannot be told of",
    "no power": "it cannot be told, for the spread between seeds, of",
}


def rows_of(derived: Derived) -> list[Row]:
    """Rows of :func:`report.data.learning.losses` of what the suite compares, those that it names first."""
    found: list[Row] = learning.losses(derived).to_dict("records")  # type: ignore[assignment]
    names = named_first(derived, list(derived.compared.contrast))
    mine = [row for row in found if row["verdict"] and row["contender"] in names]
    return sorted(mine, key=lambda row: names.index(row["contender"]))


def loss(derived: Derived) -> Found:
    """By the validation loss at the end."""
    rows = rows_of(derived)
    if not rows:
        return speed.step(derived)
    if rows[0]["verdict"].startswith("too"):
        return _no_verdict(derived, rows)
    if len(rows) > 1 and not is_named(derived, rows[0]["contender"]):
        return _of_all(derived, rows)
    return _of_one(derived, rows)


def _of_one(derived: Derived, rows: Sequence[Row]) -> Found:
    """One contender beside the baseline, and the verdicts on others."""
    main = rows[0]
    name, base = spelled(main["contender"]), spelled(main["base"])
    claim = {"not inferior": "trains as well as", "inferior": "trains worse than"}.get(main["verdict"])
    if claim is None:
        text = f"Cannot be told whether {name} trains as well as {base}: its validation loss"
    else:
        text = f"{name} {claim} {base}: its validation loss"
    text += f" differs by {nats(main)} nats ({_test(main)})."
    others = by_verdict(derived, rows[1:])
    more = [f"In loss, by differences in nats, {others}."] if others else []
    kept = [one for one in effects.effects(derived) if one.contender == main["contender"]]
    return Found(text, [_VERDICTS.get(main["verdict"], OPEN)], kept, more)


def _of_all(derived: Derived, rows: Sequence[Row]) -> Found:
    """The verdicts on all contenders, and which of the good ones sends least."""
    found = effects.effects(derived)
    good = {row["contender"] for row in rows if row["verdict"] == "not inferior"}
    known = [one for one in found if one.contender in good and not math.isnan(one.bytes_ratio)]
    least = min(known, key=lambda one: one.bytes_ratio, default=None)
    more = []
    if least is not None and len(good) > 1:
        more = [f"Of those not inferior, {spelled(least.contender)} sends least."]
    base = spelled(rows[0]["base"])
    first = f"In loss beside {base} ({_test(rows[0])}; differences in nats), {by_verdict(derived, rows)}."
    kept = [least] if least is not None else found[:1]
    return Found(first, [_VERDICTS.get(row["verdict"], OPEN) for row in rows], kept, more)


def _test(row: Row) -> str:
    return (
        f"margin {learning.MARGIN:.0%} of its loss, {g3(row['margin'])} nats; {counted(row['seeds'], 'seed')}"
    )


def nats(row: Row) -> str:
    """``+0.0113 (+0.0053 to +0.0174)``."""
    return f"{row['difference'].estimate:+.4f}{ends(row['difference'], '+.4f')}"


def by_verdict(derived: Derived, rows: Sequence[Row]) -> str:
    """``not inferior: A +0.01 and B -0.02; inferior: C +1.00``."""
    names = apart(derived, [row["contender"] for row in rows]) if rows else {}
    told = []
    for verdict, word in _WORDS.items():
        mine = [row for row in rows if row["verdict"] == verdict]
        said = [f"{names[row['contender']]} {row['difference'].estimate:+.4f}" for row in mine]
        if said:
            told.append(f"{word}: {listed(said)}" if verdict in _VERDICTS else f"{word} {listed(said)}")
    return "; ".join(told)


def _no_verdict(derived: Derived, rows: Sequence[Row]) -> Found:
    """Losses of too few seeds or steps: how far they are apart, and by error where that is measured."""
    main, base = rows[0], spelled(rows[0]["base"])
    why = f"{counted(main['seeds'], 'seed')}, where a verdict takes {FEWEST}"
    if main["steps"] < LEAST_STEPS:
        why = f"{main['steps']} steps, where a verdict takes {LEAST_STEPS}"
    names = apart(derived, [row["contender"] for row in rows])
    told = [
        f"{names[row['contender']]} {nats(row)}"
        for row in sorted(rows, key=lambda row: row["difference"].estimate)
    ]
    if len(told) > MOST_NAMED:
        told = [*told[:2], *told[-2:]]
    kept = [one for one in effects.effects(derived) if one.contender == main["contender"]]
    first = f"Cannot be told by loss ({why}): less {base}'s, in nats, losses are {listed(told)}."
    return Found(first, [OPEN], kept, errors_of_variants(derived))


def in_short(derived: Derived, names: Sequence[str]) -> str:
    """A sentence on the loss beside an answer by another quantity; empty where none was validated."""
    row = next((row for row in rows_of(derived) if row["contender"] in names), None)
    if row is None:
        return ""
    if row["verdict"].startswith("too"):
        return (
            f"Validation losses are not compared: {row['steps']} steps and {counted(row['seeds'], 'seed')}, "
            f"where a verdict takes {LEAST_STEPS} and {FEWEST}."
        )
    return (
        f"In loss {spelled(row['contender'])} differs from {spelled(row['base'])} by {nats(row)} nats: "
        f"{row['verdict']} ({_test(row)})."
    )
