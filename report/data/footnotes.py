"""Footnote marks beside numbers, and the texts of the footnotes."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from harness.suites import labels
from report.data.metrics import OTHERS_WITHIN, Derived
from report.data.speedups import RATES_AGREE_WITHIN
from report.data.text import NOTHING, counted

RATES = "†"
TAKEN = "‡"
ABOVE = "§"

RATES_IN_WORDS = (
    f"{RATES}: the links of one setting's contenders achieved rates that differ by more than "
    f"{RATES_AGREE_WITHIN:.0%}."
)
TAKEN_IN_WORDS = (
    f"{TAKEN}: trials during which other programs and the machine's host took more than {OTHERS_WITHIN:.0%} "
    "of the processors' time."
)
ABOVE_IN_WORDS = (
    f"{ABOVE}: above 1, so what is said to be allowed is too long: steps sent bytes at a higher rate than "
    "the probe after the trial found, their units share the computation otherwise than by their elements, "
    "all ranks computed at once when it was measured, or ranks do not begin a step together."
)


def share(value: float) -> str:
    """Format a ratio to a bound, to hundredths; one above 1 is marked."""
    if pd.isna(value):
        return NOTHING
    return f"{value:.2f}" + (f" {ABOVE}" if round(value, 2) > 1 else "")


def rates(mine: pd.DataFrame) -> str:
    """The mark of trials in cells whose links had different rates; empty for others."""
    return f" {RATES}" if mine["rates_differ"].any() else ""


def in_words(cells: Iterable[str]) -> str:
    """Caption text for the marks that occur in these cells, after a space."""
    found = "".join(cells)
    words = {
        RATES: RATES_IN_WORDS,
        TAKEN: TAKEN_IN_WORDS,
        ABOVE: ABOVE_IN_WORDS,
        labels.INTERFACES: labels.INTERFACES_IN_WORDS,
    }
    return "".join(f" {told}" for mark, told in words.items() if mark in found)


def alone_in_words(derived: Derived) -> str:
    """Caption text, after a space, on trials whose computation was not measured by itself; empty for none."""
    ran = derived.trials
    older = int((~ran["alone"].eq(other=True)).sum())
    more = any(trial.workload == "rlhf" for trial in derived.frames.ran.values())
    why = "whose steps do more than train" if more else "whose records are older"
    said = (
        f" Of {older} of {counted(len(ran), 'trial')}, {why}, computation is what ranks "
        "did while they did not wait, and the engine's own stalls count as such."
    )
    return said if older else ""


def modelled_in_words(derived: Derived) -> str:
    """Caption text where the link of any trial was modelled, after a space; empty for none."""
    ran = derived.finished
    paced = int(ran["modelled"].sum())
    which = "all trials" if paced == len(ran) else f"{paced} of {counted(len(ran), 'trial')}"
    said = (
        f" Modelled: of {which} the link between nodes was a pacer in the process, which holds back what our "
        "wire sends by its bytes; no network was slow."
    )
    return said if paced else ""


def taken_fact(derived: Derived) -> str | None:
    """Largest part of the CPU time that others took in any trial, as text; None without trials."""
    taken = derived.finished["taken_share"]
    unknown = int(taken.isna().sum())
    if unknown == len(taken):
        return "not on record" if unknown else None
    return f"at most {taken.max():.1%} in a trial" + (f"; not on record in {unknown}" if unknown else "")
