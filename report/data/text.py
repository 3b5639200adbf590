"""Formats numbers and untrusted text for the page, tables and figures."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from harness.records.confidence_intervals import FEWEST, WITHIN_START, Interval
from harness.suites.labels import counted as counted  # noqa: PLC0414  # imported from here by the other modules

NOTHING: Final = "–"  # noqa: RUF001 - an en dash stands for no value
FEWEST_IN_WORDS: Final = f"with a 95 % interval where {FEWEST} pairs or more were measured"
OTHERS_WITHIN: Final = 0.05  # share of the processors' time that others may have in a trial
_LABEL_CHARACTERS: Final = 48


def occasions_in_words(count: int) -> str:
    """Return caption text that says what intervals over ``count`` occasions include; empty if ``count`` is 0."""
    if count == 0:
        return ""
    if count == 1:
        return (
            f"Intervals of seconds and speed-ups hold {WITHIN_START} of the machine: all trials shown ran at one "
            "occasion, so the intervals say nothing about a run at another start."
        )
    return (
        f"Intervals of seconds and speed-ups are computed from the means of {count} occasions (starts of a machine), "
        "so they include the differences between occasions."
    )


def left_out_in_words(intervals: Iterable[Interval]) -> str:
    """Return sentences on the disturbed trials or pairs that these intervals leave out; empty if there are none."""
    counts = [(each.left_out, each.n + each.left_out) for each in intervals if each.left_out]
    if not counts:
        return ""
    left, whole = (sum(numbers) for numbers in zip(*counts, strict=True))
    return (
        f"A trial is disturbed if other programs and the machine's host took more than {OTHERS_WITHIN:.0%} of the "
        "processors' time. Times in seconds leave out disturbed trials, and speed-ups leave out pairs with a "
        f"disturbed trial. In {counted(len(counts), 'row')}, {left} of {whole} trials or pairs were left out."
    )


def none_in_words(intervals: Iterable[Interval]) -> str:
    """Return sentences that say why estimates have no interval; empty if none of them lacks one for a known reason."""
    few = [interval for interval in intervals if not interval.known and interval.why_none]
    return " ".join(f"{why}." for why in sorted({interval.why_none for interval in few}))


def with_arguments(name: str, arguments: Mapping[str, object]) -> str:
    """Return the name of a model or an optimizer with its arguments: ``gpt-small (layers=3)``."""
    pairs = ", ".join(f"{key}={value}" for key, value in arguments.items())
    return f"{name} ({pairs})" if pairs else name


def lowest_to_highest(values: Collection[float], form: Callable[[float], str]) -> str:
    """Return the lowest and the highest value, ``0.024 to 0.025``; a single number if both have the same text."""
    ends = dict.fromkeys((form(min(values)), form(max(values))))
    return " to ".join(ends)


def number(digits: int = 3) -> Callable[[Any], str]:
    """Return a formatter with ``digits`` significant digits, which uses plain notation from 0.0001 up to 1,000,000."""

    def formatted(value: Any) -> str:
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return NOTHING
        if value != 0 and not 1e-4 <= abs(value) < 1e6:
            return f"{value:.{digits - 1}e}"
        rounded = abs(float(f"{value:.{digits - 1}e}"))  # 9.996 has one digit more when rounded
        decimals = digits - 1 - math.floor(math.log10(rounded)) if value != 0 else 0
        return f"{value:.{max(decimals, 0)}f}"

    return formatted


def text(value: Any) -> str:
    """Format a value as one line of text."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    return " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())


def plain(text: object, limit: int = _LABEL_CHARACTERS) -> str:
    """Return one line of printable characters that the figures' font has, truncated at ``limit`` characters."""
    line = " ".join(str(text).split())
    line = "".join(c if ord(c) < 0x2000 and unicodedata.category(c)[0] != "C" else "?" for c in line)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def parts_of(text: str) -> list[str]:
    """Split a text at its commas, but not at those inside numbers: ``45,216 parameters, lr 0.01`` has two parts."""
    return [part.strip() for part in re.split(r"(?<!\d),|,(?!\d{3})", text)]


def span(counts: Collection[float], noun: str) -> str:
    """Return the range of counts with their noun: ``5 steps``, or ``5 to 40 steps``."""
    low, high = int(min(counts)), int(max(counts))
    return counted(high, noun) if low == high else f"{low} to {high} {noun}s"


def byte_unit(largest: float) -> tuple[float, str]:
    """Return the decimal unit for values up to ``largest`` bytes: its size in bytes, and its name (``"MB"``)."""
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next((unit for unit in units if largest >= unit[0]), (1.0, "bytes"))


def listed(parts: Sequence[str]) -> str:
    """Join parts of a sentence as ``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def sentence(clause: str) -> str:
    """Make a clause a sentence, with a capital letter and a full stop; ``vNMSE`` keeps its small letter."""
    first = clause if clause.startswith("vNMSE") else f"{clause[:1].upper()}{clause[1:]}"
    return f"{first}."


def with_interval(interval: Interval, format_number: Callable[[float], str]) -> str:
    """Format an estimate, followed by its interval in parentheses if the interval is known."""
    estimate = format_number(interval.estimate)
    ends = f" ({format_number(interval.low)} to {format_number(interval.high)})" if interval.known else ""
    return f"{estimate}{ends}"


def plus_or_minus(interval: Interval, format_number: Callable[[float], str]) -> str:
    """Format an estimate as ``2.36 ± 0.07`` or, if its printed interval is not symmetric, as ``2.36 (2.29 to 2.44)``.

    If the interval is not known, or both its ends are equal, the estimate alone is returned.
    """
    estimate = format_number(interval.estimate)
    if not interval.known or interval.low == interval.high:
        return estimate
    decimals = len(estimate.partition(".")[2])
    below, above = interval.estimate - interval.low, interval.high - interval.estimate
    if "e" not in estimate and f"{below:.{decimals}f}" == f"{above:.{decimals}f}":
        return f"{estimate} ± {above:.{decimals}f}"
    return with_interval(interval, format_number)
