"""Formats numbers and untrusted text for the page, tables and figures."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from harness.records.confidence_intervals import FEWEST, WITHIN_START, Interval
from harness.records.trial_record import OTHERS_WITHIN
from harness.suites.labels import counted as counted  # noqa: PLC0414  # imported from here by the other modules

NOTHING: Final = "–"  # noqa: RUF001 - an en dash stands for no value
FEWEST_IN_WORDS: Final = f"with a 95 % interval where {FEWEST} pairs or more were measured"
_LABEL_CHARACTERS: Final = 48
_MOST_NAMES: Final = 4  # most configurations that a footnote names


def occasions_in_words(count: int) -> str:
    """Return caption text on whether the intervals of times include differences between occasions.

    An occasion is a start of a machine, or a run more than an hour apart from others.  ``count`` is the number of
    occasions at which the trials ran.  Intervals include the differences between occasions if there are several.  The
    text is empty if ``count`` is 0.
    """
    if count == 0:
        return ""
    if count == 1:
        return (
            f"Confidence intervals of times and speed-ups hold {WITHIN_START} of the machine: all trials shown ran "
            "on one occasion, so the intervals say nothing about a run after another start."
        )
    return (
        f"Confidence intervals of times and speed-ups are computed from the means of {count} occasions (starts of a "
        "machine, or runs more than an hour apart), so they include the differences between occasions."
    )


def left_out_in_words(intervals: Iterable[Interval], noun: str = "pair") -> str:
    """Return sentences that say what a disturbed trial is, and how many disturbed trials or pairs were left out.

    ``noun`` says what the ``intervals`` are computed from: ``trial`` or ``pair``.  The text is empty if none of the
    intervals leaves out a trial or pair.
    """
    counts = [(each.left_out, each.n + each.left_out) for each in intervals if each.left_out]
    if not counts:
        return ""
    left, whole = (sum(numbers) for numbers in zip(*counts, strict=True))
    return (
        f"A trial is disturbed if other programs and the hypervisor together took more than {OTHERS_WITHIN:.0%} of the "
        "processors' time. Columns of times leave out disturbed trials, and columns of speed-ups leave out pairs with "
        f"a disturbed trial. In this table, {left} of the {counted(whole, noun)} of {counted(len(counts), 'row')} "
        f"{'is' if left == 1 else 'are'} left out."
    )


def none_in_words(intervals: Iterable[tuple[str, Interval]]) -> str:
    """Return sentences that say why estimates have no interval, with the names of their rows.

    For example, ``n = 3: no interval; six are needed (qwZ, hpZ).``  Each reason is given once.  More than four names
    are replaced by their number.  The text is empty if all estimates have an interval, or if no reason is known.

    Args:
        intervals: Pairs of a row's name and an estimate of this row, with or without an interval.  Rows may share a
            name, and an empty name is not printed.
    """
    names: dict[str, dict[str, None]] = {}
    for name, interval in intervals:
        if not interval.known and interval.why_none:
            names.setdefault(interval.why_none, {})[name] = None
    return " ".join(f"{why}{_in_parentheses([*filter(None, names[why])])}." for why in sorted(names))


def _in_parentheses(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f" ({', '.join(names) if len(names) <= _MOST_NAMES else counted(len(names), 'configuration')})"


def with_arguments(name: str, arguments: Mapping[str, object]) -> str:
    """Return the name of a model or an optimizer with its arguments: ``gpt-small (layers=3)``."""
    pairs = ", ".join(f"{key}={value}" for key, value in arguments.items())
    return f"{name} ({pairs})" if pairs else name


def lowest_to_highest(values: Collection[float], form: Callable[[float], str]) -> str:
    """Return the lowest and the highest value as text, ``0.024 to 0.025``; one number if both are printed alike."""
    ends = dict.fromkeys((form(min(values)), form(max(values))))
    return " to ".join(ends)


def number(digits: int = 3) -> Callable[[Any], str]:
    """Return a function that formats a number with ``digits`` significant digits: ``0.0123``, or ``1.23e+07``.

    Numbers from 0.0001 up to 1,000,000 have no exponent, and keep all digits before the decimal point: ``12346``.
    None and NaN give an en dash.
    """

    def formatted(value: Any) -> str:
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return NOTHING
        if value != 0 and not 1e-4 <= abs(value) < 1e6:
            return f"{value:.{digits - 1}e}"
        rounded = abs(float(f"{value:.{digits - 1}e}"))  # 9.996 has one digit more when rounded
        decimals = digits - 1 - math.floor(math.log10(rounded)) if value != 0 else 0
        return f"{value:.{max(decimals, 0)}f}"

    return formatted


def short_integer(text: str) -> str:
    """Shorten the text of a large round integer: ``1000000000`` gives ``1e9``, and ``2500000`` gives ``2.5e6``.

    An integer is large from 1,000,000 on, and round if only zeros follow its first two digits.  Any other text is
    returned unchanged, so that different texts stay different.
    """
    digits = text.rstrip("0")
    if re.fullmatch(r"[1-9][0-9]{6,}", text) is None or len(digits) > 2:
        return text
    return f"{'.'.join(digits)}e{len(text) - 1}"


def text(value: Any) -> str:
    """Return a value as one line of text: runs of white space and unprintable characters become one space.

    None and NaN give an en dash.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    return " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())


def plain(text: object, limit: int = _LABEL_CHARACTERS) -> str:
    """Return a text as one line that figures can print, of at most ``limit`` characters.

    Characters that the figures' font may lack, and control characters, become ``?``.  A longer text ends with ``…``.
    """
    line = " ".join(str(text).split())
    line = "".join(c if ord(c) < 0x2000 and unicodedata.category(c)[0] != "C" else "?" for c in line)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def parts_of(text: str) -> list[str]:
    """Split a text at its commas, but not at those inside numbers: ``45,216 parameters, lr 0.01`` has two parts."""
    return [part.strip() for part in re.split(r"(?<!\d),|,(?!\d{3})", text)]


def span(counts: Collection[float], noun: str) -> str:
    """Return the lowest and the highest count with their noun, ``5 to 40 steps``; ``5 steps`` if both are equal."""
    low, high = int(min(counts)), int(max(counts))
    return counted(high, noun) if low == high else f"{low} to {high} {noun}s"


def byte_unit(largest: float) -> tuple[float, str]:
    """Return the decimal unit in which values up to ``largest`` bytes are printed, as (bytes of the unit, its name).

    For example, 5e7 gives ``(1e6, "MB")``, and 12 gives ``(1.0, "bytes")``.
    """
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next((unit for unit in units if largest >= unit[0]), (1.0, "bytes"))


def listed(parts: Sequence[str]) -> str:
    """Return the parts of a sentence joined as ``a, b and c``; empty without parts."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def sentence(clause: str) -> str:
    """Return a clause as a sentence, with a capital letter and a full stop.

    A clause that begins with ``vNMSE`` keeps its small letter.
    """
    first = clause if clause.startswith("vNMSE") else f"{clause[:1].upper()}{clause[1:]}"
    return f"{first}."


def with_interval(interval: Interval, format_number: Callable[[float], str]) -> str:
    """Return an estimate with its interval as text, ``2.3 (2.2 to 2.4)``; without parentheses if it has no interval."""
    estimate = format_number(interval.estimate)
    ends = f" ({format_number(interval.low)} to {format_number(interval.high)})" if interval.known else ""
    return f"{estimate}{ends}"


def plus_or_minus(interval: Interval, format_number: Callable[[float], str]) -> str:
    """Return an estimate with its interval as text: ``2.36 ± 0.07``.

    If the interval is not symmetric in the printed digits, its ends are printed: ``2.36 (2.29 to 2.44)``.
    If the interval is not known, or if its two ends are equal, the estimate alone is returned.
    """
    estimate = format_number(interval.estimate)
    if not interval.known or interval.low == interval.high:
        return estimate
    decimals = len(estimate.partition(".")[2])
    below, above = interval.estimate - interval.low, interval.high - interval.estimate
    if "e" not in estimate and f"{below:.{decimals}f}" == f"{above:.{decimals}f}":
        return f"{estimate} ± {above:.{decimals}f}"
    return with_interval(interval, format_number)
