"""The lead of a page: at most five sentences that answer the suite's question, and the figure that shows it.

The first sentence answers by the quantity that the axes ask for (:mod:`harness.suites.answering_quantity`);
the next ones add what else was measured of the same contenders; the last says what limits the comparison.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from harness.suites.answering_quantity import Quantity, quantity
from report.answer import by_loss, by_seconds, by_size, effects
from report.answer.effects import NO, OPEN, YES, Draft, Effect, distinct_names, is_named, ratio, spelled
from report.data import metrics, speedups
from report.data.frames import load
from report.data.metrics import Derived, derive
from report.data.text import counted, sentence

PART: Final = "in part"
_MOST: Final = 5  # sentences
_POLAR: Final = frozenset(
    "are can could did do does has have is should was were will would".split()  # noqa: SIM905
)
_WORSE: Final = frozenset(
    "slower worse longer lose loses cost costs hurt hurts fail fails more".split()  # noqa: SIM905
)
_FASTER: Final = {YES: "it is faster", NO: "it is slower", OPEN: "it cannot be told who is faster"}
_WORDS: Final = ("A", "All", "Between", "By", "In", "No", "The")  # with which first sentences begin


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a suite's question."""

    sentences: tuple[str, ...]  # the first one answers; the others say what else was found
    verdict: str  # yes, no, in part, or cannot be told; empty where nothing is compared
    quantity: Quantity  # by which it is answered
    figure: str  # name of the figure that shows it


def of_folder(results: Path) -> Answer:
    """The answer by a results folder; arguments and errors are those of :func:`report.data.frames.load`."""
    return answer(derive(load(results)))


@lru_cache(maxsize=32)  # page, figures, tables and claims ask for it
def answer(derived: Derived) -> Answer:
    """The answer by the records of a folder."""
    frames = derived.frames
    asked = quantity([frames.trial_of[identity] for identity in sorted(frames.trial_of)], frames.answer)
    answered, figure = _BY_QUANTITY[asked]
    if derived.finished.empty:
        failed = counted(len(frames.failures), "trial")
        text = f"Cannot be told: no trial has finished, and {failed} failed."
        return Answer((text,), OPEN, asked, figure)
    found = answered(derived)
    caveat = _caveat(derived, found.effects)
    told = [found.first, *found.details, *_others(derived, asked, found.effects)]
    if any("in the memory" in question for question in frames.questions):
        told = [by_size.within_memory(derived), *told]
    first, *rest = filter(None, dict.fromkeys(told))
    kinds = set(found.verdicts)
    verdict = kinds.pop() if len(kinds) == 1 else PART if kinds else ""
    if verdict and _polar(derived) and not first.startswith("Cannot"):
        if first.split(maxsplit=1)[0] in _WORDS:  # a capital that is no name's
            first = first[0].lower() + first[1:]
        first = f"{verdict.capitalize()}{':' if verdict in (PART, OPEN) else ','} {first}"
    sentences = (first, *rest[: _MOST - 1 - len(caveat)], *caveat)
    return Answer(sentences, verdict, asked, found.figure or figure)


def _polar(derived: Derived) -> bool:
    """Whether yes or no answers the question, and yes means that the contrast is better."""
    # A longer prompt is no worse answer: the word counts where it ends a clause.
    told = (re.sub(r"\blonger (?!than\b)", "", one.lower()) for one in derived.frames.questions)
    words = [re.findall(r"[a-z]+", question) for question in told]
    if not words or not all(one and one[0] in _POLAR for one in words):
        return False
    compared = derived.compared
    first = effects.named_first(derived, [compared.baseline, *compared.contrast])[0]
    turned = first == compared.baseline and is_named(derived, first)
    return not turned and not any(_WORSE & {*one} for one in words)


def _others(derived: Derived, asked: Quantity, found: Sequence[Effect]) -> list[str]:
    """What else was measured of what the answer compares: bytes, seconds, loss, error."""
    if not found:
        return []
    names = list(dict.fromkeys(effect.contender for effect in found))
    told = [] if asked == "bytes" else [effects.sent(found)]
    if asked in ("loss", "memory", "trials") and not derived.mostly_disturbed:
        main = found[0]
        told.append(
            f"By seconds {_FASTER[main.verdict]}: a step of {spelled(main.contender)} is {ratio(main.ratio)} "
            f"times as fast as {spelled(main.base)}'s ({main.count})."
        )
    if asked != "loss":
        told.append(by_loss.in_short(derived, names))
    if asked == "step":
        told.append(by_size.within_memory(derived))
    if asked != "error":
        called = distinct_names(derived, names)
        errors = effects.errors(derived).groupby(level="contender").median()
        mine = [f"{effects.g2(float(errors[name]))} with {called[name]}" for name in names if name in errors]
        said = f"The error of the gradients end to end (vNMSE) is {effects.listed_most(mine)}."
        told += [said] if mine else []
    return told


def _caveat(derived: Derived, found: Sequence[Effect]) -> list[str]:
    """What limits the comparison: trials that others disturbed, and links of different rates."""
    taken, trials = len(derived.disturbed), counted(len(derived.finished), "trial")
    differing = {effect.cell for effect in found} & derived.differing.keys()
    disturbed = (
        f"others took more than {metrics.OTHERS_WITHIN:.0%} of the processors' time in {taken} of {trials}"
    )
    other = f"in {counted(len(differing), 'setting')} the links of what is compared achieved rates more than "
    other += f"{speedups.RATES_AGREE_WITHIN:.0%} apart"
    text = "; ".join(filter(None, (disturbed * bool(taken), other * bool(differing))))
    if derived.mostly_disturbed or differing:
        return [f"The seconds are not to be relied on: {text}."]
    return [sentence(text)] if text else []


_BY_QUANTITY: Final[dict[Quantity, tuple[Callable[[Derived], Draft], str]]] = {  # and its figure
    "loss": (by_loss.loss, "final_loss"), "step": (by_seconds.step, "speedup"),
    "bytes": (by_size.bytes_, "volume"), "error": (by_size.error, "sent_error"),
    "memory": (by_size.memory, "memory"), "trials": (by_size.trials, "speedup"),
    "rate": (by_seconds.rate, "speedup_over_rates"), "nodes": (by_seconds.nodes, "scaling"),
    "size": (by_size.size, "largest_model"), "tokens": (by_seconds.tokens, "generation"),
}  # fmt: skip
