"""Answers by the validation loss at the end of training, beside the suite's baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import pandas as pd

from harness.records.confidence_intervals import FEWEST
from harness.suites.answering_quantity import LEAST_STEPS
from report.answer import by_seconds, effects
from report.answer.effects import NO, OPEN, YES, Draft, Effect, distinct_names, g3, spelled
from report.data import loss_verdicts
from report.data.loss_verdicts import Row
from report.data.metrics import Derived
from report.data.text import byte_unit, counted, listed, with_interval
from report.draw.names_of_rows import titles_of

_MOST_BEATEN: Final = 3  # configurations in a sentence
_VERDICTS: Final = {"not inferior": YES, "inferior": NO}
_CLAUSES: Final = {  # beginnings, by verdict
    "not inferior": "not inferior: ",
    "inferior": "inferior: ",
    "cannot tell": "it cannot be told of ",
    "no power": "it cannot be told, for the spread between seeds, of ",
    "too": "too few seeds for a verdict: ",
}


def rows_of(derived: Derived) -> list[Row]:
    """Rows of :func:`loss_verdicts.losses` with verdicts on the suite's contrast, named ones first."""
    names = effects.named_first(derived, derived.compared.contrast)
    rows = [row for row in loss_verdicts.losses(derived) if row["verdict"] and row["configuration"] in names]
    return sorted(rows, key=lambda row: names.index(row["configuration"]))


def loss(derived: Derived) -> Draft:
    """By the validation loss at the end."""
    rows, every = rows_of(derived), effects.effects(derived)
    if not rows:
        return by_seconds.step(derived)
    main, failed = rows[0], derived.frames.failures
    failed = failed[
        (failed["configuration"] == main["configuration"]) & (failed["setting"] == main["setting"])
    ]
    without = derived.trials["validation_loss"].isna() & derived.trials["validation_step"].notna()
    is_main = (derived.trials["configuration"] == main["configuration"]) & (
        derived.trials["setting"] == main["setting"]
    )
    if failed_seeds := len({*failed["seed"], *derived.trials[without & is_main]["seed"]}):
        name, seeds = spelled(main["configuration"]), failed_seeds + main["seeds"]
        text = f"Cannot be told by loss: {failed_seeds} of {seeds} seeds of {name} ended without one"
        return Draft(f"{text}; of the others it differs by {nats(main)} nats.", [OPEN], every[:1])
    rows.sort(key=lambda row: row["verdict"].startswith("too"))
    main, *others = rows
    of_main = [effect for effect in every if effect.configuration == main["configuration"]]
    if main["verdict"].startswith("too"):  # and so are all
        return Draft(_without_verdict(derived, rows), [OPEN], of_main)
    front = loss_verdicts.front(derived)
    trials = derived.trials[derived.trials["configuration"].isin(front["configuration"])]
    if len(set(front["setting"])) == 1 and len(set(trials["strategy"])) >= loss_verdicts.FEWEST_OF_FRONT:
        return _of_front(derived, rows, front)
    name, base = spelled(main["configuration"]), spelled(main["base"])
    several = any(row["configuration"] == main["configuration"] for row in others)
    if others and (several or not effects.is_named(derived, main["configuration"])):
        return _of_all(derived, rows, every)
    within, cannot = loss_verdicts.allowed(derived), f"Cannot be told whether {name} trains as well as {base}"
    claim = {
        "not inferior": f"{name} trains as well as {base} to within {within}",
        "inferior": f"{name} trains worse than {base} by more than {within}",
    }.get(main["verdict"], cannot)
    text = f"{claim}: its validation loss differs by {nats(main)} nats ({_test(derived, main)})."
    losses = f"By validation loss minus {base}'s, in nats, {by_verdict(derived, others)}."
    return Draft(text, [_VERDICTS.get(main["verdict"], OPEN)], of_main, [losses] if others else [])


def _of_all(derived: Derived, rows: Sequence[Row], every: Sequence[Effect]) -> Draft:
    """The verdicts on all configurations, and which of the good ones sends least."""
    good = {row["configuration"] for row in rows if row["verdict"] == "not inferior"}
    known = [
        effect for effect in every if effect.configuration in good and not math.isnan(effect.bytes_ratio)
    ]
    first = f"By validation loss minus {spelled(rows[0]['base'])}'s in nats ({_test(derived, rows[0])})"
    text = f"{first}, {by_verdict(derived, rows)}."
    verdicts = [_VERDICTS.get(row["verdict"], OPEN) for row in rows]
    if not known:
        return Draft(text, verdicts, every[:1])
    least = min(known, key=lambda effect: effect.bytes_ratio)
    details = [f"Of those not inferior, {spelled(least.configuration)} sends least."] if len(good) > 1 else []
    return Draft(text, verdicts, [least], details)


def _of_front(derived: Derived, rows: Sequence[Row], front: pd.DataFrame) -> Draft:
    """Of many configurations in one setting, those that none beats in bytes and loss, those beaten, and the rest."""
    size, unit = byte_unit(float(front["sent"].max()))
    front = front.assign(sent=front["sent"] / size, name=front["configuration"].map(spelled))
    kinds = ("yes", "no", loss_verdicts.OPEN)
    ahead, worse, unsure = (front[front["front"] == kind].to_dict("records") for kind in kinds)
    sentences = ["Who has the lowest loss for its bytes between nodes cannot be told."]
    if ahead:
        names = [f"{row['name']} ({g3(row['sent'])} {unit}, loss {row['loss']:.3f})" for row in ahead]
        text = f"Nobody who sends as few bytes between nodes has a lower loss than {listed(names)}"
        text += f"; of {listed([row['name'] for row in unsure])} it cannot be told" if unsure else ""
        sentences = [f"{text}."]
    if worse:
        worse.sort(key=lambda row: "(" in row["configuration"])  # presets first
        beaten = [f"{row['name']} (by {spelled(row['beaten'])})" for row in worse]
        rest = f", and {len(beaten) - _MOST_BEATEN} more" if len(beaten) > _MOST_BEATEN else ""
        beaten = beaten[:_MOST_BEATEN]
        sentences.append(f"Beaten in loss by one that sends no more are {listed(beaten)}{rest}.")
    sent = front.set_index("configuration")["sent"]
    good = [row for row in rows if row["verdict"] == "not inferior"]
    saving = [row for row in good if sent[row["configuration"]] < sent[row["base"]]]
    if least := min(saving, key=lambda row: sent[row["configuration"]], default=None):
        name, base = least["configuration"], least["base"]
        text = (
            f"{spelled(name)} trains as well as {spelled(base)} and sends least of those: {g3(sent[name])} "
            f"of {g3(sent[base])} {unit} between nodes in a step, at a loss that differs by {nats(least)} "
            f"nats ({_test(derived, least)})."
        )
        sentences = [text, *sentences]
    return Draft(sentences[0], details=sentences[1:], figure="frontier")


def _test(derived: Derived, row: Row) -> str:
    """``margin 0.02 nats, 1% of its loss; 8 seeds``."""
    seeds, base = counted(row["difference"].n, "seed"), "its loss"
    if derived.frames.margin:
        steps = derived.frames.margin * row["difference"].estimate / row["margin"]
        base = f"its training, and the difference {steps:.0f}"
    return f"margin {g3(row['margin'])} nats, {loss_verdicts.allowed(derived)} of {base}; {seeds}"


def nats(row: Row) -> str:
    """``+0.0113 (+0.0053 to +0.0174)``."""
    return with_interval(row["difference"], "{:+.4f}".format)


def by_verdict(derived: Derived, rows: Sequence[Row]) -> str:
    """``not inferior: A +0.01 and B -0.02; inferior: C +1.00``."""
    losses = {verdict: list[str]() for verdict in _CLAUSES}
    for name, row in zip(_names(derived, rows), rows, strict=True):
        verdict = "too" if row["verdict"].startswith("too") else row["verdict"]
        losses[verdict].append(f"{name} {row['difference'].estimate:+.4f}")
    return "; ".join(f"{_CLAUSES[verdict]}{listed(texts)}" for verdict, texts in losses.items() if texts)


def _names(derived: Derived, rows: Sequence[Row]) -> list[str]:
    """The configuration of each row, with its setting where there are several."""
    names = distinct_names(derived, [row["configuration"] for row in rows])
    settings = pd.DataFrame(rows, columns=["setting", "where"]).drop_duplicates()
    places = titles_of(settings) if len(settings) > 1 else {}
    return [names[row["configuration"]] + (f" on {places[row['setting']]}" if places else "") for row in rows]


def _without_verdict(derived: Derived, rows: Sequence[Row]) -> str:
    """A sentence on differences of losses with too few seeds or steps for verdicts."""
    why = f"{counted(rows[0]['difference'].n, 'seed')}, where a verdict takes {FEWEST}"
    if rows[0]["steps"] < LEAST_STEPS:
        why = f"{rows[0]['steps']} steps, where a verdict takes {LEAST_STEPS}"
    ranked = sorted(rows, key=lambda row: row["difference"].estimate)
    texts = [f"{name} {nats(row)}" for name, row in zip(_names(derived, ranked), ranked, strict=True)]
    base, losses = spelled(rows[0]["base"]), effects.listed_most(texts)
    return f"Cannot be told by loss ({why}): losses minus {base}'s, in nats, are {losses}."


def in_short(derived: Derived, names: Sequence[str]) -> str:
    """A sentence on the loss beside an answer by another quantity; empty where none was validated."""
    steps = derived.frames.validations["step"]
    rows = [row for row in rows_of(derived) if row["configuration"] in names]
    if rows and not rows[0]["verdict"].startswith("too"):
        return f"By validation loss minus {spelled(rows[0]['base'])}'s, in nats, {by_verdict(derived, rows)}."
    few = f"a verdict takes {LEAST_STEPS} steps and {FEWEST} seeds"
    return "" if steps.empty else f"Validation losses after {steps.max()} steps are not compared: {few}."
