"""A number from records, as documents print it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scipy import stats

from harness.records.confidence_intervals import WITHIN_START, Interval, Prediction, of_another_run
from report.data.text import number


class DocumentError(Exception):
    """A template asks for a number that the records do not hold, or makes a claim that they do not support."""


@dataclass(frozen=True)
class Estimate:
    """A number from records, with its 95 % interval if it has one, and with what limits it.

    It prints as ``2.36 (2.05 to 2.72)``, ``2.36 (2.29 to 2.42 within this start)`` if the interval is from one
    occasion, and ``0.73 (disturbed)`` if other programs disturbed all trials behind it.  All its other texts except
    :attr:`again` and :attr:`range` also say ``disturbed``.
    """

    interval: Interval
    form: Callable[[float], str]  # prints a number
    what: str  # what the number is, in words for messages
    equal: float = math.nan  # the value that means "no difference": 1 for ratios, 0 for differences; else NaN
    more_is_better: bool = True
    expected: Prediction | None = None  # of a further run; None if it follows from the interval alone

    def __str__(self) -> str:
        """Print the estimate with its interval, ``2.36 (2.05 to 2.72)``; without an interval, ``2.36``."""
        within = f" {WITHIN_START}" if self.interval.within_start else ""
        notes = [f"{self.range}{within}"] if self._spreads else []
        return self._with([*notes, *self._caveats], self.form(self.interval.estimate))

    @property
    def value(self) -> str:
        """The estimate alone: ``2.36``."""
        return self._with(self._caveats, self.form(self.interval.estimate))

    @property
    def cell(self) -> str:
        """The estimate with its interval, ``2.36 (2.29 to 2.42)``, for tables whose head says what intervals cover."""
        return (
            self._with([self.range, *self._caveats], self.form(self.interval.estimate))
            if self._spreads
            else self.value
        )

    @property
    def range(self) -> str:
        """The interval: ``2.29 to 2.42``."""
        return f"{self.form(self.interval.low)} to {self.form(self.interval.high)}"

    @property
    def ci(self) -> str:
        """The interval with its name: ``95 % CI 2.05 to 2.72``, or ``95 % CI within this start 2.29 to 2.42``."""
        within = f" {WITHIN_START}" if self.interval.within_start else ""
        return ", ".join([f"95 % CI{within} {self.range}", *self._caveats])

    @property
    def again(self) -> str:
        """The 95 % prediction interval of a further run of the suite: ``1.78 to 3.14``.

        If the prediction depends on the seconds of computation of a step, it says at how many it holds: ``1.9 to 2.8
        at 0.12 s of computation a step``.

        Raises:
            DocumentError: If there is no interval, or if all trials ran at one occasion, which says nothing about
                others.
        """
        if not self._spreads or self.interval.within_start:
            raise DocumentError(
                f"{self.what} has no interval over occasions, and so no prediction of a further run: leave out .again"
            )
        expected: Interval | Prediction = of_another_run(self.interval, ratio=self.equal == 1)
        if self.expected is not None:
            expected = self.expected
        ends = f"{self.form(expected.low)} to {self.form(expected.high)}"
        if isinstance(expected, Prediction) and not math.isnan(expected.at):
            ends += f" at {expected.at:.2g} s of computation a step"
        return ends

    @property
    def occasions(self) -> int:
        """The number of occasions (starts of a machine) at which the trials ran; 0 if occasions do not matter."""
        return self.interval.occasions

    @property
    def n(self) -> int:
        """The number of pairs, seeds or trials from which the estimate is computed."""
        return self.interval.n

    @property
    def magnitude(self) -> Estimate:
        """The same estimate without its sign, for sentences that name the direction in words."""
        low, high = sorted((abs(self.interval.low), abs(self.interval.high)))
        size = replace(self.interval, estimate=abs(self.interval.estimate), low=low, high=high)
        return replace(self, interval=size, form=lambda value: self.form(value).lstrip("+-"), equal=math.nan)

    def as_(self, form: str) -> Estimate:
        """Return the same estimate, printed with another format specification, such as ``.1f``."""
        return replace(self, form=lambda value: format(value, form))

    @property
    def percent(self) -> str:
        """The estimate as a share: ``28 %``."""
        return self._with(self._caveats, f"{100 * self.interval.estimate:.0f} %")

    @property
    def change(self) -> str:
        """By how much a ratio differs from 1, without its sign: ``14 %``."""
        return self._with(self._caveats, f"{100 * abs(self.interval.estimate - 1):.0f} %")

    @property
    def detectable(self) -> str:
        """The least change of a ratio that four of five runs like this would find significant: ``14 %``.

        With the standard error of the ratio's logarithm, from its interval, this is
        ``exp((t(0.975) + t(0.8)) * error) - 1``, by Student's t with n - 1 degrees of freedom.

        Raises:
            DocumentError: If there is no interval, or one over several occasions, which has other degrees of freedom.
        """
        if not self._spreads or self.occasions > 1:
            raise DocumentError(
                f"{self.what}: a detectable change needs an interval of pairs of one occasion: leave out .detectable"
            )
        students = [float(stats.t.ppf(share, self.n - 1)) for share in (0.975, 0.8)]
        error = math.log(self.interval.high / self.interval.low) / (2 * students[0])
        return self._with(self._caveats, f"{100 * math.expm1(sum(students) * error):.0f} %")

    @property
    def _caveats(self) -> list[str]:
        return ["disturbed"] if self.interval.disturbed else []

    @staticmethod
    def _with(notes: Sequence[str], number: str) -> str:
        return f"{number} ({', '.join(notes)})" if notes else number

    @property
    def _spreads(self) -> bool:
        return self.interval.known and self.interval.low < self.interval.high

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, or ``not significant``, which includes numbers without an interval."""
        if math.isnan(self.equal) or not self.interval.known or self.interval.contains(self.equal):
            return "not significant"
        return "better" if (self.interval.estimate > self.equal) is self.more_is_better else "worse"

    def __lt__(self, other: Estimate) -> bool:
        """Return whether this estimate is smaller than ``other``; templates use it in ``assert_that``."""
        return self.interval.estimate < other.interval.estimate

    def __truediv__(self, other: Estimate | float) -> Estimate:
        """Return the ratio to another estimate or a number, without an interval."""
        return self._combined(other, "over", lambda left, right: left / right)

    def __mul__(self, other: Estimate | float) -> Estimate:
        """Return the product with another estimate or a number, without an interval."""
        return self._combined(other, "times", lambda left, right: left * right)

    def _combined(
        self, other: Estimate | float, word: str, operation: Callable[[float, float], float]
    ) -> Estimate:
        if isinstance(other, Estimate):
            right, what, both = other.interval.estimate, other.what, (self.interval, other.interval)
        else:
            right, what, both = other, str(other), (self.interval, self.interval)
        value = alone(
            operation(self.interval.estimate, right), disturbed=any(each.disturbed for each in both)
        )
        return Estimate(value, number(3), f"{self.what} {word} {what}")


def alone(value: float, *, disturbed: bool = False) -> Interval:
    """Return a number as an interval whose ends are unknown."""
    return Interval(value, math.nan, math.nan, 0, disturbed=disturbed)


def form_of(specification: str) -> Callable[[float], str]:
    """Return a function that prints a number by a format specification, such as ``.2f``."""
    return lambda value: format(value, specification)


def exact(value: float) -> Interval:
    """Return the interval of a number that is counted, and so has no spread: both ends equal the number."""
    return Interval(value, value, value, 0)
