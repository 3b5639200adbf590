"""Answers by the validation loss at the end of training, beside the suite's baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import pandas as pd

from harness.records.confidence_intervals import FEWEST
from harness.suites.question import LEAST_STEPS
from report.answer import effects, speed
from report.answer.parts import (
    MOST_NAMED,
    NO,
    OPEN,
    YES,
    Found,
    apart,
    g3,
    is_named,
    named_first,
    spelled,
)  # fmt: skip
from report.data import loss_verdicts
from report.data.metrics import Derived
from report.data.text import byte_unit, counted, listed, with_interval
from report.draw.contenders import titles_of

_BEATEN: Final = 3  # that are named with who beats them
Row = dict[str, Any]
_VERDICTS = {"not inferior": YES, "inferior": NO}
_WORDS = {
    "not inferior": "not inferior: ",
    "inferior": "inferior: ",
    "cannot tell": "it cannot be told of ",
    "no power": "it cannot be told, for the spread between seeds, of ",
    "too": "too few seeds for a verdict: ",
}


def rows_of(derived: Derived) -> list[Row]:
    """Rows of :func:`loss_verdicts.losses` of what the suite compares, those that it names first."""
    found: list[Row] = loss_verdicts.losses(derived).to_dict("records")  # type: ignore[assignment]
    names = named_first(derived, list(derived.compared.contrast))
    mine = [row for row in found if row["verdict"] and row["contender"] in names]
    return sorted(mine, key=lambda row: names.index(row["contender"]))


def loss(derived: Derived) -> Found:
    """By the validation loss at the end."""
    rows = rows_of(derived)
    if not rows:
        return speed.step(derived)
    if (lost := _lost(derived, rows[0])) is not None:
        return lost
    if all(row["verdict"].startswith("too") for row in rows):
        return _no_verdict(derived, rows)
    front = loss_verdicts.front(derived)
    among = derived.trials[derived.trials["contender"].isin(front["contender"])]
    if len(set(front["cell"])) == 1 and len(set(among["strategy"])) >= loss_verdicts.FEWEST_OF_FRONT:
        return _of_front(derived, rows, front)
    rows.sort(key=lambda row: row["verdict"].startswith("too"))
    several = sum(row["contender"] == rows[0]["contender"] for row in rows) > 1
    if len(rows) > 1 and (several or not is_named(derived, rows[0]["contender"])):
        return _of_all(derived, rows)
    return _of_one(derived, rows)


def _lost(derived: Derived, row: Row) -> Found | None:
    """Seeds of the main contender that ended without a loss: the others say nothing of it; None for none."""
    failed = derived.frames.failures
    failed = failed[(failed["contender"] == row["contender"]) & (failed["cell"] == row["cell"])]
    if not (gone := failed["seed"].nunique()):
        return None
    name = spelled(row["contender"])
    text = f"Cannot be told by loss: {gone} of {gone + row['seeds']} seeds of {name} ended without one"
    return Found(
        f"{text}; of the others it differs by {nats(row)} nats.", [OPEN], effects.effects(derived)[:1]
    )


def _of_one(derived: Derived, rows: Sequence[Row]) -> Found:
    """One contender beside the baseline, and the verdicts on others."""
    main = rows[0]
    name, base = spelled(main["contender"]), spelled(main["base"])
    within = loss_verdicts.allowed(derived)
    claims = {
        "not inferior": f"{name} trains as well as {base} to within {within}",
        "inferior": f"{name} trains worse than {base} by more than {within}",
    }
    claim = claims.get(main["verdict"], f"Cannot be told whether {name} trains as well as {base}")
    text = f"{claim}: its validation loss differs by {nats(main)} nats ({_test(derived, main)})."
    others = by_verdict(derived, rows[1:])
    more = [f"By validation loss minus {base}'s, in nats, {others}."] if others else []
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
    first = (
        f"By validation loss minus {base}'s in nats ({_test(derived, rows[0])}), {by_verdict(derived, rows)}."
    )
    kept = [least] if least is not None else found[:1]
    return Found(first, [_VERDICTS.get(row["verdict"], OPEN) for row in rows], kept, more)


def _of_front(derived: Derived, rows: Sequence[Row], front: pd.DataFrame) -> Found:
    """Of many contenders in one cell: whom none beats in bytes and loss, and of whom it cannot be told."""
    size, unit = byte_unit(float(front["sent"].max()))
    of: dict[str, list[Row]] = {
        kind: front[front["front"].eq(kind)].to_dict("records")  # type: ignore[misc]
        for kind in ("yes", loss_verdicts.OPEN, "no")
    }
    best = [
        f"{spelled(one['contender'])} ({g3(one['sent'] / size)} {unit}, loss {one['loss']:.3f})"
        for one in of["yes"]
    ]
    unsure = listed([spelled(one["contender"]) for one in of[loss_verdicts.OPEN]])
    of_all = f"Nobody who sends as few bytes between nodes has a lower loss than {listed(best)}"
    of_all = of_all if best else "Who has the lowest loss for its bytes between nodes cannot be told"
    of_all = f"{of_all}{f'; of {unsure} it cannot be told' if unsure and best else ''}."
    beaten = [
        f"{spelled(one['contender'])} (by {spelled(one['beaten'])})"
        for one in sorted(of["no"], key=lambda one: "(" in one["contender"])  # presets first
    ]
    rest = f", and {len(beaten) - _BEATEN} more" if len(beaten) > _BEATEN else ""
    shown = listed(beaten[:_BEATEN]) + rest
    more = [of_all, f"Beaten in loss by one that sends no more are {shown}."] if beaten else [of_all]
    sent = front.set_index("contender")["sent"]
    good = [row for row in rows if row["verdict"] == "not inferior"]
    saving = [row for row in good if sent[row["contender"]] < sent[str(row["base"])]]
    if least := min(saving, key=lambda row: sent[row["contender"]], default=None):
        base = str(least["base"])
        ours, theirs = (sent[name] / size for name in (least["contender"], base))
        text = (
            f"{spelled(least['contender'])} trains as well as {spelled(base)} and sends least of those: "
            f"{g3(ours)} of {g3(theirs)} {unit} between nodes in a step, at a loss that differs by "
            f"{nats(least)} nats ({_test(derived, least)})."
        )
        return Found(text, [], [], more, "frontier")
    return Found(more[0], [], [], more[1:], "frontier")


def _test(derived: Derived, row: Row) -> str:
    seeds, allowed = counted(row["difference"].n, "seed"), loss_verdicts.allowed(derived)
    of = "its loss"
    if derived.frames.margin:
        steps = derived.frames.margin * row["difference"].estimate / row["margin"]
        of = f"its training, and the difference {steps:.0f}"
    return f"margin {g3(row['margin'])} nats, {allowed} of {of}; {seeds}"


def nats(row: Row) -> str:
    """``+0.0113 (+0.0053 to +0.0174)``."""
    return with_interval(row["difference"], "{:+.4f}".format)


def _kind(row: Row) -> str:
    """The verdict, of which there is one for all that there is too little of."""
    return "too" if row["verdict"].startswith("too") else str(row["verdict"])


def by_verdict(derived: Derived, rows: Sequence[Row]) -> str:
    """``not inferior: A +0.01 and B -0.02; inferior: C +1.00``."""
    names = apart(derived, [row["contender"] for row in rows]) if rows else {}
    told = []
    cells = pd.DataFrame(rows, columns=["cell", "where"]).drop_duplicates()
    places = titles_of(cells) if len(cells) > 1 else {}
    for verdict, word in _WORDS.items():
        mine = [row for row in rows if _kind(row) == verdict]
        said = [
            f"{names[row['contender']]}{' on ' + places[row['cell']] if places else ''} "
            f"{row['difference'].estimate:+.4f}"
            for row in mine
        ]
        told += [f"{word}{listed(said)}"] if said else []
    return "; ".join(told)


def _no_verdict(derived: Derived, rows: Sequence[Row]) -> Found:
    """Losses of too few seeds or steps: how far they are apart."""
    main, base = rows[0], spelled(rows[0]["base"])
    why = f"{counted(main['difference'].n, 'seed')}, where a verdict takes {FEWEST}"
    if main["steps"] < LEAST_STEPS:
        why = f"{main['steps']} steps, where a verdict takes {LEAST_STEPS}"
    names = apart(derived, [row["contender"] for row in rows])
    ranked = sorted(rows, key=lambda row: row["difference"].estimate)
    told, most = [f"{names[row['contender']]} {nats(row)}" for row in ranked], ""
    if len(told) > MOST_NAMED:
        told, most = [*told[:2], *told[-2:]], f" (the least and the largest of {len(told)})"
    kept = [one for one in effects.effects(derived) if one.contender == main["contender"]]
    first = f"Cannot be told by loss ({why}): losses minus {base}'s, in nats, are {listed(told)}{most}."
    return Found(first, [OPEN], kept)


def in_short(derived: Derived, names: Sequence[str]) -> str:
    """A sentence on the loss beside an answer by another quantity; empty where none was validated."""
    row = next((row for row in rows_of(derived) if row["contender"] in names), None)
    if row is None:
        steps = derived.frames.validations["step"]
        few = f"a verdict takes {LEAST_STEPS} steps and {FEWEST} seeds"
        return "" if steps.empty else f"Validation losses after {steps.max()} steps are not compared: {few}."
    if row["verdict"].startswith("too"):
        seeds = counted(row["difference"].n, "seed")
        few = f"{row['steps']} steps and {seeds}, where a verdict takes {LEAST_STEPS} and {FEWEST}"
        return f"Validation losses are not compared: {few}."
    return (
        f"In loss {spelled(row['contender'])} differs from {spelled(row['base'])} by {nats(row)} nats: "
        f"{row['verdict']} ({_test(derived, row)})."
    )
