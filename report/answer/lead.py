"""The lead of a page: at most five sentences that answer the suite's question, and the figure that shows it.

The first sentence answers by the quantity that the axes ask for (:mod:`harness.suites.answering_quantity`);
the next ones add other quantities of the same configurations; the last names limits of the comparison.
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
from report.data.text import counted, listed, sentence

PART: Final = "in part"
_MOST: Final = 5  # sentences
_POLAR: Final = frozenset(
    "are can could did do does has have is should was were will would".split()  # noqa: SIM905
)
_WORSE: Final = frozenset(
    "slower worse longer lose loses cost costs hurt hurts fail fails more".split()  # noqa: SIM905
)
_FASTER: Final = {YES: "it is faster", NO: "it is slower", OPEN: "it cannot be told who is faster"}
_FIRST_WORDS: Final = ("A", "All", "Between", "By", "In", "No", "The")  # of first sentences, no names


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a suite's question."""

    sentences: tuple[str, ...]  # the first one answers; others are on further quantities and on limits
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
    by = quantity([frames.trial_of[identity] for identity in sorted(frames.trial_of)], frames.answer)
    draft_of, figure = _BY_QUANTITY[by]
    if derived.finished.empty:
        ended = [f"{counted(len(frames.failures), 'trial')} failed"] * (len(frames.failures) > 0)
        ended += [f"{counted(frames.interrupted, 'trial')} stopped"] * (frames.interrupted > 0)
        text = f"Cannot be told: no trial has finished, and {listed(ended) or 'none was run'}."
        return Answer((text,), OPEN, by, figure)
    draft = draft_of(derived)
    caveat = _caveat(derived, draft.effects)
    sentences = [draft.first, *draft.details, *_others(derived, by, draft.effects)]
    if any("in the memory" in question for question in frames.questions):
        sentences = [by_size.within_memory(derived), *sentences]
    first, *rest = filter(None, dict.fromkeys(sentences))
    kinds = set(draft.verdicts)
    verdict = kinds.pop() if len(kinds) == 1 else PART if kinds else ""
    if verdict and _polar(derived) and not first.startswith("Cannot"):
        if first.split(maxsplit=1)[0] in _FIRST_WORDS:
            first = first[0].lower() + first[1:]
        first = f"{verdict.capitalize()}{':' if verdict in (PART, OPEN) else ','} {first}"
    lead = (first, *rest[: _MOST - 1 - len(caveat)], *caveat)
    return Answer(lead, verdict, by, draft.figure or figure)


def _polar(derived: Derived) -> bool:
    """Whether yes or no answers the question, and yes means that the contrast is better."""
    # A longer prompt is no worse answer: the word counts where it ends a clause.
    texts = (re.sub(r"\blonger (?!than\b)", "", question.lower()) for question in derived.frames.questions)
    questions = [re.findall(r"[a-z]+", text) for text in texts]
    if not questions or not all(question and question[0] in _POLAR for question in questions):
        return False
    compared = derived.compared
    first = effects.named_first(derived, [compared.baseline, *compared.contrast])[0]
    turned = first == compared.baseline and is_named(derived, first)
    return not turned and not any(_WORSE & {*question} for question in questions)


def _others(derived: Derived, by: Quantity, compared: Sequence[Effect]) -> list[str]:
    """Sentences on other quantities of the compared configurations: bytes, seconds, loss, error."""
    if not compared:
        return []
    names = list(dict.fromkeys(effect.configuration for effect in compared))
    sentences = [] if by == "bytes" else [effects.sent(compared)]
    if by in ("loss", "memory", "trials") and not derived.mostly_disturbed:
        main = compared[0]
        sentences.append(
            f"By seconds {_FASTER[main.verdict]}: a step of {spelled(main.configuration)} is {ratio(main.ratio)} "
            f"times as fast as {spelled(main.base)}'s ({main.count})."
        )
    if by != "loss":
        sentences.append(by_loss.in_short(derived, names))
    if by == "step":
        sentences.append(by_size.within_memory(derived))
    if by != "error":
        called = distinct_names(derived, names)
        vnmse = effects.errors(derived).groupby(level="configuration").median()
        if errors := [f"{effects.g2(vnmse[name])} with {called[name]}" for name in names if name in vnmse]:
            text = f"The median error of the gradients end to end (vNMSE) is {effects.listed_most(errors)}."
            sentences.append(text)
    return sentences


def _caveat(derived: Derived, compared: Sequence[Effect]) -> list[str]:
    """A sentence on trials that others disturbed and on links of different rates; none without them."""
    clauses: list[str] = []
    if disturbed := len(derived.disturbed):
        trials, within = counted(len(derived.finished), "trial"), f"{metrics.OTHERS_WITHIN:.0%}"
        clauses.append(f"others took more than {within} of the processors' time in {disturbed} of {trials}")
    if differing := {effect.setting for effect in compared} & derived.differing.keys():
        settings, within = counted(len(differing), "setting"), f"{speedups.RATES_AGREE_WITHIN:.0%}"
        clauses.append(f"in {settings} the links of what is compared achieved rates more than {within} apart")
    text = "; ".join(clauses)
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
