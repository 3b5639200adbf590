"""Defines :class:`Span`, a part of a run for which the values of some fields of a policy are changed.

A policy with ``schedule=(Span(until="50 %", gradients=...), Span())`` changes while it trains.  The number of a step
determines the policy of the step, which :meth:`impl.policy.policy.Policy.policy_at` returns.

A schedule may change the fields that decide what is sent (:data:`VARYING`).  It must not change the fields
:data:`FIXED`, for example those that decide on which rank or in which layout states are kept.

Pure: no torch.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

VARYING: Final = (
    "weights", "gradients", "gather", "reduce", "chunks", "secondary", "secondary_format", "inside", "differences",
    "refresh", "feedback", "sums",
)  # fmt: skip
"""The fields of a policy that a span may change."""

FIXED: Final = {
    "stage": "it decides which states are sharded",
    "group": "it moves shards to other ranks",
    "blocks": "it changes the layout of units",
    "planes": "it decides which units stay gathered for backward",
    "reduce_every": "it decides where gradients of micro-batches are added up",
    "compute": "it is the type of gathered weights and local gradients",
    "loss_scale": "its scale is a state of the whole run",
    "frozen": "frozen weights are kept in this codec",
    "memory": "its limits decide which memory is kept",
    "offload": "it moves states between host and device",
    "budget": "it chooses codecs by itself",
    "order_every": "it counts the passes of the whole run",
    "local_steps": "groups count their steps from the beginning of the run",
    "local_fragments": "units are divided into fragments once",
    "outer_rate": "the outer step belongs to the whole run",
    "outer_momentum": "the outer step keeps it for the whole run",
    "owned": "the buffers for these messages are made once for the whole run",
    "align": "it changes the layout of units",
    "schedule": "a span has no spans of its own",
}
"""The fields of a policy that a span must not change, each with the reason as error messages give it."""


class SpanError(ValueError):
    """Raised if the spans of a schedule cannot be carried out; the message gives the reason."""


def refusal(name: str) -> str | None:
    """Returns the error message that says why a span must not set the field ``name``; None if a span may set it."""
    if name in VARYING:
        return None
    why = FIXED.get(name, "it holds for the whole run")
    return f"a schedule cannot change {name}, because {why}: set {name} outside of the schedule"


@dataclass(frozen=True, slots=True, init=False)
class Span:
    """A part of a run, from the end of the span before it to ``until``, in which fields of the policy are changed.

    Args:
        until: the number of optimizer steps at which the span ends, counted from the beginning of the run, or a share
            of the run such as ``"50 %"``.  The last span may have None, which stands for the end of the run.
        every: with 1, the changes hold in all steps of the span.  With 2, the changes hold in the first, third, fifth
            step of the span and so on; with 3, in the first, fourth and so on.  All other steps of the span have the
            policy's own fields.
        changes: values of fields of the policy.  ``secondary=0`` also removes the fields that need hpZ.

    Raises:
        SpanError: for a field that must not change, or an impossible ``until`` or ``every``.
    """

    until: int | str | None
    every: int
    changes: tuple[tuple[str, Any], ...]
    # Number of optimizer steps after which the span ends.  None if ``until`` is a share of a run whose number of steps
    # is not known, or if the span ends with the run.
    end: int | None

    def __init__(self, *, until: int | str | None = None, every: int = 1, **changes: Any) -> None:
        for name in changes:
            if (why := refusal(name)) is not None:
                raise SpanError(why)
        whole = isinstance(until, int) and not isinstance(until, bool)
        if until is not None and not (whole and int(until) > 0):
            _share(until)
        number: object = every
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise SpanError(f"every = {every!r}: expected a whole number of steps, 1 or more")
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
        for name, value in given.items():
            try:
                hash(value)
            except TypeError:
                raise SpanError(
                    f"{name} = {value!r}: a span cannot hold such a value; use a value that policy.{name} allows"
                ) from None
        values = {
            "until": until,
            "every": every,
            "changes": tuple(given.items()),
            "end": until if whole else None,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def ending(self, end: int | None) -> Span:
        """Returns a copy of this span that ends after ``end`` optimizer steps of the run, or with the run if None."""
        span = Span(until=self.until, every=self.every, **dict(self.changes))
        object.__setattr__(span, "end", end)
        return span

    @property
    def text(self) -> str:
        """The changes as text, such as ``gradients int8:256 in every 2nd step``; empty without changes."""
        return changes_in_words(dict(self.changes), self.every)


def _share(until: Any) -> Fraction:
    """Returns the share of a run that a text such as ``"50 %"`` gives, as a number above 0 and at most 1.

    Raises SpanError: for any other value of ``until``, and for a share outside this range.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", until) if isinstance(until, str) else None
    if match is None:
        raise SpanError(f"until = {until!r}: expected a step of 1 or more, or a share such as '50 %'")
    share = Fraction(match[1]) / 100
    if not 0 < share <= 1:
        raise SpanError(f"until = {until!r}: expected a share above 0 and at most 100 %")
    return share


def check_order(spans: Sequence[Span]) -> Iterator[str]:
    """Yield a message for each error in the order of ``spans`` that does not depend on the run's number of steps.

    There are three such errors:

    - a span does not end after the span before it;
    - a span that is not the last has no ``until``;
    - the last span ends before 100 % of the run.

    :func:`over` finds the errors that depend on the run's number of steps.  For example, ``until=100`` after
    ``until="50 %"`` is possible in a run of 150 steps, and impossible in a run of 300.
    """
    for number, (span, after) in enumerate(itertools.pairwise(spans), 1):
        if span.until is None:
            yield f"span {number} of schedule has no 'until', so that span {number + 1} never begins: set its 'until'"
        elif type(span.until) is type(after.until) and _place(after) <= _place(span):
            yield _overlap(number + 1, f"until {after.until}", f"until {span.until}")
    last = spans[-1].until if spans else None
    if isinstance(last, str) and _share(last) < 1:
        yield (
            f"the last span of schedule ends at {last} of the run, and the steps after it have no span: remove "
            "'until' from the last span"
        )


def _place(span: Span) -> Fraction:
    return Fraction(span.until) if isinstance(span.until, int) else _share(span.until)


def _overlap(number: int, end: str, before: str) -> str:
    return (
        f"span {number} of schedule ({end}) is empty or overlaps the span before it ({before}): let each span end "
        "after the one before"
    )


def over(spans: Sequence[Span], steps: int) -> tuple[Span, ...]:
    """Returns copies of ``spans`` whose ends are numbers of steps, for a run of ``steps`` optimizer steps.

    The attribute ``end`` of a copy is the number of the run's steps after which the span ends, or None if the span ends
    with the run.  An end that was given as a share of the run, such as ``"50 %"``, is rounded to the nearest step.

    Raises SpanError: if a span has no step, if the spans do not end with the run, or if ``steps`` is not a whole number
    of 1 or more.
    """
    number_of_steps: object = steps
    if isinstance(steps, bool) or not isinstance(number_of_steps, int) or steps < 1:
        raise SpanError(f"a schedule cannot be fitted to {steps!r} steps: expected a whole number, 1 or more")
    ends, before = list[int](), 0
    for number, span in enumerate(spans, 1):
        share = Fraction(1) if span.until is None else None
        if isinstance(span.until, str):
            share = _share(span.until)
        end = int(span.until or 0) if share is None else math.floor(share * steps + Fraction(1, 2))
        if end > steps:
            raise SpanError(
                f"span {number} of schedule (until {end}) ends beyond the run of {steps} steps: lower its 'until'"
            )
        if end <= before:
            raise SpanError(_overlap(number, f"until step {end} of {steps}", f"until step {before}"))
        ends.append(end)
        before = end
    if before != steps:
        raise SpanError(
            f"the last span of schedule ends at step {before} of {steps}, and the steps after it have no span: remove "
            "'until' from the last span"
        )
    return tuple(span.ending(end if end < steps else None) for span, end in zip(spans, ends, strict=True))


def changes_in_words(changes: Mapping[str, Any], every: int) -> str:
    """Returns a span's ``changes`` as text, such as ``gradients bf16 in every 2nd step``; empty without changes."""
    parts = [f"{name} {_text(value)}" for name, value in changes.items()]
    often = "" if every == 1 else f" in every {ordinal(every)} step"
    return ", ".join(parts) + often if parts else ""


def in_words(spans: Iterable[tuple[str, int | str | None]]) -> str:
    """Returns a schedule on one line, such as ``gradients int4:256 until 50 %, then gradients bf16``.

    ``spans`` has (text, until) for each span: the span's changes (:attr:`Span.text`), and where it ends.  Returns
    ``unchanged`` if no span changes anything.
    """
    texts, before = list[str](), None
    for text, until in spans:
        begin = f" from {_when(before)}" if before is not None and not texts else ""
        if text:
            end = "" if until is None else f" until {_when(until)}"
            texts.append(f"{text}{begin}{end}")
        elif texts and until is not None:
            texts.append(f"unchanged until {_when(until)}")
        before = until
    return ", then ".join(texts) or "unchanged"


def _when(until: int | str) -> str:
    return until if isinstance(until, str) else f"step {until}"


def _text(value: Any) -> str:
    """Returns the value of a policy's field as text; a pair of equal codecs, one for each hop, becomes one name."""
    if isinstance(value, tuple | list):
        return "/".join(dict.fromkeys(map(str, value)))
    return "none" if value is None else str(value)


def ordinal(number: int) -> str:
    """Returns ``number`` as an English ordinal: ``2nd`` for 2, ``11th`` for 11."""
    last = number % 10 if number % 100 not in (11, 12, 13) else 0
    return f"{number}{({1: 'st', 2: 'nd', 3: 'rd'}).get(last, 'th')}"
