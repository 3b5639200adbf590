"""Computes the numbers that templates of documents may use, from the committed records.

A template names a suite, and a configuration as report pages print it.  If the suite has several settings, the
template also names enough parts of one setting to identify it:
``speedup("bandwidth", "ZeRO++", at="25 Mbit/s, 256 tokens/rank")``.  If a name is unknown, a :class:`DocumentError`
lists the known ones.

Claims about direction are checked when a document is built: ``assert_better(speedup("quickstart", "ZeRO++"))``
prints nothing, and fails the build when the records no longer support the claim.
"""

from __future__ import annotations

import math
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import pandas as pd
from scipy import stats

from harness import plan_rows
from harness.errors import Refusal
from harness.measure import machine_file
from harness.records import archive
from harness.records.confidence_intervals import (
    WITHIN_START,
    Interval,
    Prediction,
    geometric_interval,
    mean_interval,
    of_another_run,
)
from harness.records.memory_parts import on_device
from harness.runs import feasibility
from harness.suites import suite_file
from harness.suites.peers import family_of
from report import page
from report.data import bytes_and_memory, decoding, speedups
from report.data.frames import load
from report.data.metrics import OTHERS_WITHIN, Derived, derive
from report.data.text import counted, number, parts_of
from report.effects import effects, loss_verdicts
from report.effects.net_speed import NetSpeed, net_speeds
from report.effects.net_speed import against as net_speed_against
from report.effects.step_seconds import read_source
from report.figures.all_figures import FIGURES
from report.tables import all_tables, peers, phases
from report.tables.table import markdown

ROOT: Final = Path(__file__).resolve().parents[1]
REFERENCE: Final = Path("results/reference")


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
        value = _alone(
            operation(self.interval.estimate, right), disturbed=any(each.disturbed for each in both)
        )
        return Estimate(value, number(3), f"{self.what} {word} {what}")


def _alone(value: float, *, disturbed: bool = False) -> Interval:
    """Return a number as an interval whose ends are unknown."""
    return Interval(value, math.nan, math.nan, 0, disturbed=disturbed)


def _form(specification: str) -> Callable[[float], str]:
    return lambda value: format(value, specification)


def _counted(value: float) -> Interval:
    """Return the interval of a number that is counted, and so has no spread: both ends equal the number."""
    return Interval(value, value, value, 0)


_DERIVED: Final[dict[str, Derived]] = {}  # by suite


def derived(suite: str) -> Derived:
    """Return the tables that are derived from the committed records of a suite, which are read only once.

    Raises:
        DocumentError: If there is no archive of that name.
        RecordError: If a record was edited, or the file is no archive.
    """
    if suite not in _DERIVED:
        if not (ROOT / REFERENCE / f"{suite}{archive.SUFFIX}").exists():
            raise DocumentError(f"no suite {suite!r} in {REFERENCE}: expected one of {', '.join(suites())}")
        _DERIVED[suite] = read(suite)
    return _DERIVED[suite]


def read(suite: str, folder: Path = REFERENCE) -> Derived:
    """Return the tables that are derived from a suite's archive in a folder below the root.

    Seconds of steps also come from the archive that the suite file names in its key ``seconds``.

    Raises:
        RecordError: If a record was edited, or the file is no archive.
    """
    with tempfile.TemporaryDirectory() as name:
        frames = load(archive.unpack(ROOT / folder / f"{suite}{archive.SUFFIX}", Path(name)))
    file = ROOT / "suites" / f"{suite}.toml"
    named = str(tomllib.loads(file.read_text(encoding="utf-8")).get("seconds", "")) if file.exists() else ""
    packed = ROOT / folder / f"{named}{archive.SUFFIX}"
    return derive(frames, (read_source(packed),) if named and packed.exists() else ())


def keep(suite: str, records: Derived) -> None:
    """Store what another process derived from a suite's records, for :func:`derived` to return."""
    _DERIVED[suite] = records


def suites(folder: Path = REFERENCE) -> list[str]:
    """Return the names of the suites that have committed records in a folder below the root, sorted."""
    return sorted(
        path.name.removesuffix(archive.SUFFIX) for path in (ROOT / folder).glob(f"*{archive.SUFFIX}")
    )


def _trials(suite: str, name: str, at: str, table: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the rows of one configuration in one setting.

    They are rows of ``table``, by default the trials, with columns ``where``, ``configuration`` and ``setting``.
    """
    table = derived(suite).trials if table is None else table
    parts = {part for part in parts_of(at) if part}
    matches = {where: parts <= {*str(where).split(", ")} for where in table["where"].unique()}
    here = table[table["where"].map(matches).astype(bool)]
    if name not in set(here["configuration"]):
        present = "; ".join(map(str, table["configuration"].unique()))
        raise DocumentError(f"{suite}: no configuration {name!r} at {at!r}: expected one of {present}")
    rows = here[here["configuration"] == name]
    if len(set(rows["setting"])) > 1:
        settings = "; ".join(map(str, rows["where"].unique()))
        raise DocumentError(
            f"{suite}: {name!r} at {at!r} matches several settings: add to `at` what only one has of {settings}"
        )
    return rows


def _paired(suite: str, name: str, over: str, at: str) -> tuple[pd.DataFrame, str]:
    """Return the pairs of a configuration and ``over``, by default the suite's baseline, and the name of ``over``."""
    trials = derived(suite).trials
    setting = str(_trials(suite, name, at)["setting"].iloc[0])
    if over:
        both = trials[trials["setting"].eq(setting) & trials["configuration"].isin([name, over])]
        pairs = speedups.pairs(both, both["configuration"].eq(over))
    else:
        pairs = derived(suite).pairs
    pairs = pairs[pairs["setting"].eq(setting) & pairs["configuration"].eq(name)]
    if pairs.empty:
        raise DocumentError(
            f"{suite}: no trial of {name!r} has a pair of {over or 'the baseline'!r} at {at!r}: name another setting"
        )
    return pairs, str(pairs["baseline_configuration"].iloc[0])


def speedup(suite: str, name: str, over: str = "", at: str = "") -> Estimate:
    """Return how many times as fast a step of ``name`` is as a step of ``over``, by default the suite's baseline."""
    pairs, base = _paired(suite, name, over, at)
    what = f"the speed-up of {name} over {base} in {suite}"
    return Estimate(speedups.speedup(pairs), _form(".2f"), what, 1.0, expected=speedups.expected(pairs))


def seconds(suite: str, name: str, at: str = "") -> Estimate:
    """Return the seconds of a step, as geometric mean over trials."""
    rows = _trials(suite, name, at)
    return Estimate(speedups.step_interval(rows), number(3), f"the step of {name} in {suite}")


def sent(suite: str, name: str, over: str = "", at: str = "") -> Estimate:
    """Return the bytes between nodes, divided by the bytes of ``over``, by default the suite's baseline.

    The ledger counts both; if one has no ledger, the nodes' interfaces count both.
    """
    pairs, base = _paired(suite, name, over, at)
    ratio = float(pairs["bytes_ratio"].median())
    if math.isnan(ratio):
        ratio = float(pairs["interface_ratio"].median())
    what = f"the bytes of {name} over {base}'s in {suite}"
    return Estimate(_counted(ratio), _form(".3f"), what, equal=1.0, more_is_better=False)


def megabytes(suite: str, name: str, at: str = "") -> Estimate:
    """Return the MB that all ranks together send between nodes in a step."""
    size = float(_trials(suite, name, at)["sent_bytes"].median() / 1e6)
    return Estimate(_counted(size), number(3), f"the MB of {name} in {suite}")


def error(suite: str, name: str, at: str = "") -> Estimate:
    """Return the error of gradients end to end (vNMSE).

    It is the geometric mean over trials of each trial's median over steps.
    """
    rows = derived(suite).sent_errors
    rows = rows[rows["purpose"].eq("gradients") & rows["hop"].isna() & rows["repeated"].eq(1)]
    trials = _trials(suite, name, at)
    errors = trials["id"].map(rows.groupby("id")["vnmse"].median())
    if errors.isna().all():
        raise DocumentError(
            f"{suite}: the error of {name!r} at {at!r} was not measured: name a suite with measure_quantisation"
        )
    known = errors.notna()
    mean = geometric_interval(list(errors[known]))
    return Estimate(mean, number(3), f"the error (vNMSE) of {name} in {suite}")


def loss(suite: str, name: str, over: str = "", at: str = "") -> Estimate:
    """Return the final validation loss minus that of ``over``, by default the baseline, in nats, paired by seed."""
    setting = str(_trials(suite, name, at)["setting"].iloc[0])
    base = over or next(iter(effects.beside(derived(suite)).get((setting, name), ())), "")
    losses = [loss_verdicts.by_seed(_trials(suite, each, at)) for each in (name, base)]
    difference = mean_interval(list((losses[0] - losses[1]).dropna()))
    what = f"the loss of {name} minus {base}'s in {suite}"
    return Estimate(difference, _form("+.4f"), what, equal=0.0, more_is_better=False)


def final_loss(suite: str, name: str, at: str = "") -> Estimate:
    """Return the final validation loss, as mean over seeds without an interval."""
    mean = float(loss_verdicts.by_seed(_trials(suite, name, at)).mean())
    return Estimate(_alone(mean), _form(".3f"), f"the loss of {name} in {suite}")


def _loss_row(suite: str, name: str, at: str) -> loss_verdicts.Row:
    setting = _trials(suite, name, at)["setting"].iloc[0]
    rows = loss_verdicts.losses(derived(suite))
    return next(row for row in rows if row["configuration"] == name and row["setting"] == setting)


def loss_verdict(suite: str, name: str, at: str = "") -> str:
    """Return the verdict on a loss: ``within the margin``, ``beyond the margin``, ``inconclusive`` or ``no power``."""
    return str(_loss_row(suite, name, at)["verdict"])


def loss_margin(suite: str, name: str, at: str = "") -> Estimate:
    """Return the nats by which a loss may be higher than the baseline's and still be within the margin."""
    margin = float(_loss_row(suite, name, at)["margin"])
    return Estimate(_counted(margin), number(3), f"the margin of {name} in {suite}")


def loss_in_steps(suite: str, name: str, at: str = "") -> Estimate:
    """Return how many steps earlier than ``name`` the baseline reaches the higher of the two final losses."""
    equal = _net_speed(suite, name, at).equal
    return Estimate(_alone(equal.steps - equal.base_steps), _form(".0f"), f"{name}'s loss in steps, {suite}")


@dataclass(frozen=True)
class Net:
    """The net speed-up of a configuration over its baseline, with the factors of this speed-up."""

    found: NetSpeed
    suite: str

    @property
    def reached(self) -> bool:
        """Whether the configuration reaches the baseline's final loss, or does not differ significantly."""
        return self.found.equal.reached

    @property
    def step(self) -> Estimate:
        """The speed-up of a step."""
        assert self.found.step is not None  # noqa: S101  # :func:`net_speed` has looked
        return self._estimate(self.found.step.speedup, "the speed-up of a step")

    @property
    def steps_ratio(self) -> Estimate:
        """The baseline's steps over the configuration's, to the higher of the two final losses."""
        return self._estimate(self.found.equal.ratio, "the ratio of steps")

    @property
    def total(self) -> Estimate:
        """The net speed-up to the higher of the two final losses."""
        return self._estimate(self.found.at_both, "the net speed-up")

    @property
    def loss(self) -> Estimate:
        """The configuration's mean loss at the end."""
        return Estimate(_alone(self.found.equal.loss), _form(".3f"), "the final loss")

    @property
    def base_loss(self) -> Estimate:
        """The baseline's mean loss at the end."""
        return Estimate(_alone(self.found.equal.base), _form(".3f"), "the baseline's final loss")

    @property
    def target(self) -> Estimate:
        """The higher of the two final losses."""
        return Estimate(_alone(self.found.equal.target), _form(".3f"), "the loss that both reach")

    @property
    def seeds(self) -> int:
        """The number of seeds that both the configuration and the baseline have."""
        return self.found.equal.ratio.n

    @property
    def where(self) -> str:
        """The setting of the seconds: ``2x2 ranks, 200 Mbit/s, 512 tokens/rank``."""
        assert self.found.step is not None  # noqa: S101  # :func:`net_speed` has looked
        return self.found.step.where

    def _estimate(self, value: Interval, what: str) -> Estimate:
        return Estimate(
            value, _form(".2f"), f"{what} of {self.found.row['configuration']} in {self.suite}", 1.0
        )


def net_speed(suite: str, name: str, over: str = "", at: str = "") -> Net:
    """Return the net speed-up of a configuration, with seconds from the first source that has them for one setting.

    It is over the configuration ``over`` in the same setting, or else over the baseline.

    Raises:
        DocumentError: If the loss is not compared with a baseline's, if there are no seconds or no ratio of steps, or
            if ``over`` is of another setting.
    """
    found = _net_speed(suite, name, at)
    if over:
        base = _trials(suite, over, at)
        if base["setting"].iloc[0] != found.row["setting"]:
            raise DocumentError(
                f"{suite}: {over!r} at {at!r} is of another setting than {name!r}: name a setting that has both"
            )
        found = net_speed_against(derived(suite), found.row, list(base["id"]))[0]
    if found.step is None or found.equal.why:
        raise DocumentError(
            f"{suite}: no net speed-up of {name!r}: {found.equal.why or 'no seconds of a step on a link with a rate'}"
        )
    return Net(found, suite)


def _net_speed(suite: str, name: str, at: str) -> NetSpeed:
    setting = _trials(suite, name, at)["setting"].iloc[0]
    for each in net_speeds(derived(suite)):
        if (each.row["setting"], each.row["configuration"]) == (setting, name):
            return each
    raise DocumentError(
        f"{suite}: the loss of {name!r} is not compared with a baseline's: name a configuration of the contrast"
    )


def memory(suite: str, name: str, at: str = "") -> Estimate:
    """Return the MiB that the engine holds on the device of the fullest rank, as median over trials."""
    held = derived(suite).frames.memory
    ids = _trials(suite, name, at, derived(suite).finished)["id"]
    held = held[held["id"].isin(ids) & held["source"].eq("engine")]
    held = held[held["part"].isin(on_device(dict.fromkeys(held["part"], 0)))]
    size = float(held.groupby(["id", "rank"])["bytes"].sum().groupby("id").max().median() / 2**20)
    return Estimate(_counted(size), number(3), f"the memory of {name} in {suite}")


def decoding_speedup(suite: str, name: str, at: str = "") -> Estimate:
    """Return how many times the baseline's tokens per second a configuration decodes (workload ``generate``)."""
    rows = _trials(suite, name, at, derived(suite).generations)
    return Estimate(decoding.speedup(rows), _form(".2f"), f"{name}'s decoding in {suite}", equal=1.0)


def phase_speedup(suite: str, name: str, phase: str, at: str = "") -> Estimate:
    """Return how many times as fast as the baseline's a phase of workload ``rlhf`` is.

    The phases are ``generate``, ``score`` and ``train``.
    """
    rows = phases.by_phase(derived(suite))
    rows = _trials(suite, name, at, rows[rows["phase"] == phase]).dropna(subset=["baseline_seconds"])
    ratio = phases.over_baseline(rows)
    return Estimate(ratio, _form(".2f"), f"{name}'s speed-up in phase {phase} of {suite}", equal=1.0)


def phase_sent(suite: str, name: str, phase: str, at: str = "") -> Estimate:
    """Return the bytes between nodes in a phase of workload ``rlhf``, divided by the baseline's bytes."""
    rows = phases.by_phase(derived(suite))
    rows = _trials(suite, name, at, rows[rows["phase"] == phase])
    ratio = float((rows["inter_bytes"] / rows["baseline_bytes"]).median())
    what = f"{name}'s bytes in phase {phase} of {suite}"
    return Estimate(_counted(ratio), number(3), what, equal=1.0, more_is_better=False)


def tokens_per_second(suite: str, name: str, at: str = "") -> Estimate:
    """Return the tokens per second of all ranks in training, as geometric mean over trials."""
    rows = speedups.step_interval(_trials(suite, name, at), "tokens_per_second")
    return Estimate(rows, number(3), f"the tokens/s of {name} in {suite}")


def largest_model(suite: str, name: str, limit: str = "") -> Estimate:
    """Return the size, in million parameters, of the largest model that trained within the suite's limit of memory."""
    rows = bytes_and_memory.under_limits(derived(suite))
    rows = _trials(suite, name, limit, rows.assign(where=rows["where"], setting="all"))
    millions, _ = bytes_and_memory.largest(rows)
    return Estimate(_counted(millions), number(3), f"the largest model of {name} in {suite}")


def ratio_of_tokens(suite: str, name: str, at: str, over_at: str) -> Estimate:
    """Return the tokens per second of a configuration in one setting, divided by those in another setting.

    The ratio has no interval.
    """
    return tokens_per_second(suite, name, at) / tokens_per_second(suite, name, over_at)


def cell(suite: str, table: str, row: str, column: str) -> str:
    """Return a cell of a report table as printed.

    ``table`` is the table's name, ``row`` holds parts of the row's cells, and ``column`` is the column's title.
    """
    try:
        shown = all_tables.MAKERS[table](derived(suite))
        printed = shown.column(column)
        return markdown(printed.cell(shown.data.iloc[shown.row(row)][printed.key]))
    except KeyError as wrong:
        names = ", ".join(all_tables.MAKERS)
        raise DocumentError(f"no table {table!r}: expected one of {names}") from wrong
    except Refusal as refusal:
        raise DocumentError(f"{suite}: {refusal}") from refusal


def table(suite: str, name: str) -> str:
    """Return a table of a suite's page as Markdown, without its caption."""
    shown = all_tables.all_tables(derived(suite), (name,))
    if not shown:
        raise DocumentError(
            f"{suite}: table {name!r} has no rows, so the suite's page lacks it: name another table"
        )
    return shown[0].markdown_rows()


def question(suite: str) -> str:
    """Return the question that a suite asks."""
    return markdown(" ".join(derived(suite).frames.questions))


def fact(suite: str, name: str) -> str:
    """Return a fact of the page's head: ``trials``, ``ran``, ``processor``, ``commit``, ``link``, ..."""
    facts = dict(page.facts(derived(suite)))
    if name not in facts:
        raise DocumentError(f"{suite}: no fact {name!r}: expected one of {', '.join(facts)}")
    return markdown(facts[name])


def as_predicted(suite: str) -> str:
    """Return the number of trials in which the ledger's bytes equal the prediction: ``210 of 210``."""
    equal = derived(suite).trials["predicted_equal"].dropna().astype(bool)
    return f"{int(equal.sum())} of {len(equal)}"


def count(suite: str, what: str = "trials") -> int:
    """Return how many ``what`` the finished trials of a suite have.

    ``what`` is ``trials``, ``configurations``, ``sweeps``, ``occasions``, ``machines`` (pools) or ``seeds``.
    """
    ran = derived(suite).finished
    counts = {
        "trials": len(ran),
        "sweeps": int(ran["sweep"].nunique()),
        "occasions": int(ran["occasion"].nunique()),
        "machines": len(derived(suite).frames.pools),
        "seeds": int(ran["seed"].nunique()),
        "configurations": int(derived(suite).trials["configuration"].nunique()),
    }
    if what not in counts:
        raise DocumentError(f"count of {what!r}: expected one of {', '.join(counts)}")
    return counts[what]


def computing(suite: str) -> Estimate:
    """Return the seconds that the computation of a step takes by itself, as median over trials."""
    value = float(derived(suite).trials["compute_seconds"].median())
    return Estimate(_alone(value), _form(".2f"), f"computing alone in {suite}")


def title_of_figure(name: str) -> str:
    """Return the title of the figure with this name."""
    titles = {figure.name: figure.title for figure in FIGURES}
    if name not in titles:
        raise DocumentError(f"no figure {name!r}: expected one of {', '.join(titles)}")
    return titles[name]


def validated_at(suite: str) -> str:
    """Return the step after which final losses were measured: ``1,400``."""
    steps = {int(row["steps"]) for row in loss_verdicts.losses(derived(suite))}
    if len(steps) != 1:
        raise DocumentError(
            f"{suite}: losses were measured after {len(steps)} different numbers of steps: expected one, so write the "
            "number into the text"
        )
    return f"{steps.pop():,}"


def loss_share(suite: str, name: str, at: str = "") -> Estimate:
    """Return the difference of a final loss from the baseline's, as a share of the baseline's: ``+0.39 %``."""
    base = final_loss(suite, derived(suite).compared.baseline, at).interval.estimate
    difference = loss(suite, name, at=at).interval
    share = Interval(difference.estimate / base, difference.low / base, difference.high / base, difference.n)
    what = f"the loss of {name} as a share of the baseline's in {suite}"
    return Estimate(share, lambda value: f"{100 * value:+.2f} %", what, equal=0.0, more_is_better=False)


def _undisturbed_pairs(suite: str, name: str, over: str, at: str) -> pd.DataFrame:
    return speedups.undisturbed(_paired(suite, name, over, at)[0])


def pair_range(suite: str, name: str, over: str = "", at: str = "") -> str:
    """Return the lowest and the highest speed-up of an undisturbed pair; it replaces an interval if pairs are few."""
    pairs = _undisturbed_pairs(suite, name, over, at)
    disturbed = " (disturbed)" if pairs["disturbed"].any() else ""
    return f"{pairs['speedup'].min():.2f} to {pairs['speedup'].max():.2f}{disturbed}"


def pair_count(suite: str, name: str, over: str = "", at: str = "") -> int:
    """Return from how many undisturbed pairs of trials a speed-up is computed; all pairs if all are disturbed."""
    return len(_undisturbed_pairs(suite, name, over, at))


def pairs_agree(suite: str, name: str, over: str = "", at: str = "") -> bool:
    """Return whether all pairs, disturbed ones too, agree that the configuration is faster, or that it is slower.

    Templates use it if pairs are too few for an interval.
    """
    faster = _paired(suite, name, over, at)[0]["speedup"] > 1
    return bool(faster.all() or not faster.any())


@dataclass(frozen=True)
class Beside:
    """One of our configurations compared with the fastest setting of a library in the same types."""

    ours: str
    types: str  # types in which both compute and send, ``bf16``; where ours sends others: ``bf16; ours sends int4``
    library: str
    setting: str  # the library's fastest configuration, as pages print it
    speedup: Estimate  # how many times as fast a step of ours is
    pairs: str  # the lowest and the highest speed-up of a pair
    # Whether ours is significantly faster or, with too few pairs for an interval, faster in every pair.
    faster: bool
    slower: bool  # whether ours is significantly slower or, with too few pairs, slower in every pair

    @property
    def text(self) -> str:
        """The speed-up with its interval, or with the range of its pairs if they are too few for an interval."""
        known = self.speedup.interval.known
        return str(self.speedup) if known else f"{self.speedup.value} (pairs {self.pairs})"


def _types(suite: str, at: str) -> dict[str, tuple[str, str]]:
    """Return for each configuration its library (empty for ours), and the types in which it is compared."""
    trials, trial_of = derived(suite).trials, derived(suite).frames.trial_of
    parts = {part for part in parts_of(at) if part}
    here = trials[[parts <= {*str(where).split(", ")} for where in trials["where"]]]
    first = here.drop_duplicates("configuration")
    found = {}
    for name, identity in zip(first["configuration"], first["id"], strict=True):
        trial = trial_of[identity]
        library = peers.FAMILIES.get(family_of(trial.strategy) or "", "")
        found[str(name)] = library, peers.shared_types(trial)
    return found


def fastest_setting(suite: str, library: str, types: str, at: str = "") -> str:
    """Return the configuration with the shortest step among those of a library in ``types``, such as ``bf16``."""
    names = [name for name, of in _types(suite, at).items() if of == (library, types)]
    if not names:
        raise DocumentError(
            f"{suite}: no records of {library} in {types} at {at!r}: name another type or setting"
        )
    return min(names, key=lambda name: seconds(suite, name, at).interval.estimate)


def beside_libraries(suite: str, *ours: str, at: str = "") -> list[Beside]:
    """Compare each configuration of ours with the fastest setting of each library in the same types.

    The configuration and the setting compute in the same type and send the same type.  A configuration that quantises
    is compared with bf16, because libraries send at least 16 bits an element.  Configurations and libraries without
    records in a type are left out; :func:`not_beside` names them.
    """
    found, rows = _types(suite, at), []
    if not found.keys() & {*ours}:
        raise DocumentError(
            f"{suite}: no configuration {' or '.join(ours)} at {at!r}: expected one of {'; '.join(found)}"
        )
    for name in (name for name in ours if name in found):
        types = found[name][1]
        sent = peers.sent_types(derived(suite).frames.trial_of[_trials(suite, name, at)["id"].iloc[0]])
        words = types if sent in types else f"{types}; ours sends {sent}"
        for library in peers.FAMILIES.values():
            if (library, types) not in found.values():
                continue
            setting = fastest_setting(suite, library, types, at)
            pairs = name, setting, at
            gain, agree = speedup(suite, *pairs), pairs_agree(suite, *pairs)
            ratio, known = gain.interval.estimate, gain.interval.known
            faster, slower = (
                gain.verdict == verdict if known else agree and beyond
                for verdict, beyond in (("better", ratio > 1), ("worse", ratio < 1))
            )
            rows.append(
                Beside(name, words, library, setting, gain, pair_range(suite, *pairs), faster, slower)
            )
    return rows


def outcomes(rows: Sequence[Beside]) -> str:
    """Return as text in how many comparisons our configuration is faster than the library's, and in how many slower.

    For example, ``faster in 4 of 6 comparisons and slower in 2``.
    """
    faster, slower = sum(row.faster for row in rows), sum(row.slower for row in rows)
    text = f"faster in {'all' if faster == len(rows) else f'{faster} of'} {len(rows)} comparisons"
    text += f" and slower in {slower}" if slower else ""
    # With fewer than six pairs there is no interval, so that a difference cannot be significant.
    for known, why in ((True, "the difference is not significant"), (False, "the pairs disagree")):
        if rest := sum(
            not (row.faster or row.slower) and row.speedup.interval.known is known for row in rows
        ):
            text += f"; in {rest} {why}"
    return text


def not_beside(suite: str, at: str = "") -> str:
    """Return as text which libraries, or our configurations, have no records in fp32 or in bf16; empty if all have.

    For example, ``FSDP2 in bf16, ours in bf16``.
    """
    found = {*_types(suite, at).values()}
    wanted = [(library, types) for types in ("fp32", "bf16") for library in (*peers.FAMILIES.values(), "")]
    return ", ".join(f"{key[0] or 'ours'} in {key[1]}" for key in wanted if key not in found)


def settings_tried(suite: str, at: str = "") -> int:
    """Return the number of libraries' settings of which a suite has records."""
    return sum(bool(library) for library, _ in _types(suite, at).values())


def not_repeated(search: str, suite: str, at: str = "") -> str:
    """Name the fastest settings in the suite ``search`` of which the other suite has no records; empty if none.

    These are the fastest setting of each library in fp32, and in bf16.  Settings that compute in one type and send the
    other are left out.
    """
    found, repeated = {*_types(search, "").values()}, _types(suite, at)
    classes = [(library, types) for library in peers.FAMILIES.values() for types in ("fp32", "bf16")]
    fastest = [fastest_setting(search, *each) for each in classes if each in found]
    return ", ".join(name for name in fastest if name not in repeated)


def model_sizes() -> str:
    """Return the smallest and the largest model of all records, in million parameters: ``0.14 to 14.3``."""
    sizes = pd.concat([derived(suite).finished["parameters"] for suite in suites()]) / 1e6
    return f"{sizes.min():.2f} to {sizes.max():.1f}"


def disturbed(suite: str) -> str:
    """Return in how many trials other programs took so much processor time that seconds are marked: ``17 of 28``."""
    ran = derived(suite)
    return f"{len(ran.disturbed)} of {len(ran.finished)}"


def facts(suite: str) -> str:
    """Return a line on a suite's records: trials, sweeps, machine, date, commit, and how many were disturbed."""
    known = dict(page.facts(derived(suite)))
    sweeps, machines, occasions = (count(suite, what) for what in ("sweeps", "machines", "occasions"))
    trials = known["trials"]
    if sweeps > 1:
        trials += f", in {sweeps} sweeps at {counted(occasions, 'occasion')}"
        trials += f" on {machines} machines" if machines > 1 else ""
    changed = f" ({known['checkout']})" if "checkout" in known else ""
    parts = [
        f"Trials: {trials}",
        f"processor: {known['processor']}",
        f"ran: {known['ran']}",
        f"commit: {known['commit']}{changed}",
    ]
    if len(derived(suite).disturbed):
        share = f"{OTHERS_WITHIN:.0%}"
        parts.append(f"in {disturbed(suite)} trials others took more than {share} of the processors' time")
    return markdown("; ".join(parts) + ".")


def seconds_on_record(suite: str) -> str:
    """Return how long a suite says that it takes, from its key ``time``."""
    with (ROOT / "suites" / f"{suite}.toml").open("rb") as file:
        return str(tomllib.load(file)["time"])


def exposed(suite: str, name: str, at: str = "") -> Estimate:
    """Return the seconds of a step in which a rank waits for messages, as median over undisturbed trials.

    If all trials are disturbed, all count.
    """
    rows = speedups.undisturbed(_trials(suite, name, at))
    value = _alone(float(rows["exposed_seconds"].median()), disturbed=bool(rows["disturbed"].any()))
    return Estimate(value, number(3), f"{name}'s exposed communication in {suite}")


def parity_range(suite: str) -> str:
    """Return the tokens/s of ZeRO++ at a quarter of the rate, divided by those of ZeRO-3 at the full rate.

    The two numbers are the lowest and the highest of all settings: ``0.97 and 1.12``.
    """
    rows = speedups.parity(derived(suite).trials)
    ratios = [speedups.parity_interval(pairs) for _, pairs in rows.groupby(["setting", "full_rate"])]
    ends = min(each.estimate for each in ratios), max(each.estimate for each in ratios)
    disturbed = " (disturbed)" if any(each.disturbed for each in ratios) else ""
    return f"{ends[0]:.2f} and {ends[1]:.2f}{disturbed}"


def budgeted(suite: str, codec: str) -> Estimate:
    """Return the loss with codecs chosen unit by unit, minus the loss with the single ``codec``, such as ``int4``.

    The chosen codecs may send as many bytes as the single one.
    """
    names = [str(name) for name in derived(suite).trials["configuration"].unique()]
    chosen = [name for name in names if ", budget" in name and f"/{codec}:" in name.partition(", budget")[0]]
    if len(chosen) != 1:
        raise DocumentError(
            f"{suite}: {len(chosen)} configurations have a budget beside the codec {codec!r}: expected exactly one "
            f"among {'; '.join(names)}"
        )
    return loss(suite, chosen[0], over=f"{chosen[0].partition(', budget')[0]})")


def composition(suite: str, parts: Sequence[str], together: str, at: str = "") -> Estimate:
    """Return the speed-up of ``together``, divided by the product of its parts' speed-ups, pair by pair."""
    ratios, disturbed = {}, {}  # by configuration, for each pair
    for name in (together, *parts):
        pairs = _paired(suite, name, "", at)[0].set_index(["occasion", "seed", "repeat"])
        ratios[name] = pairs["speedup"].astype(float)
        disturbed[name] = pairs["disturbed"].astype(bool)
    whole = pd.DataFrame(ratios).dropna()
    rows = whole.assign(disturbed=pd.DataFrame(disturbed).loc[whole.index].any(axis="columns"))
    kept = speedups.undisturbed(rows)
    logs = kept[[together, *parts]].map(math.log)
    values = logs[together] - logs[[*parts]].sum(axis="columns")
    log = mean_interval(list(values), list(values.index.get_level_values("occasion")), len(rows) - len(kept))
    ratio = replace(log, estimate=math.exp(log.estimate), low=math.exp(log.low), high=math.exp(log.high))
    ratio = replace(ratio, disturbed=bool(kept["disturbed"].any()))
    return Estimate(ratio, _form(".2f"), f"{together} over the product of its parts in {suite}", equal=1.0)


def product(suite: str, parts: Sequence[str], at: str = "") -> Estimate:
    """Return the product of the speed-ups of several configurations, without an interval."""
    ratios = [speedup(suite, name, at=at).interval for name in parts]
    value = _alone(
        math.prod(each.estimate for each in ratios), disturbed=any(each.disturbed for each in ratios)
    )
    return Estimate(value, _form(".2f"), f"the product of {', '.join(parts)}")


@cache
def _plan(suite: str, machine: str) -> list[dict[str, Any]]:
    calibrated = machine_file.read(ROOT / "suites/machines" / f"{machine}.toml") if machine else None
    trials = suite_file.load(ROOT / "suites" / f"{suite}.toml").trials
    return plan_rows.rows(feasibility.forecast(trials, feasibility.any_host()), calibrated)


def planned(suite: str, column: str, machine: str = "", **row: object) -> float:
    """Return a number that ``zeropp plan`` predicts for the one trial whose columns have the values of ``row``."""
    rows = [each for each in _plan(suite, machine) if all(each.get(key) == row[key] for key in row)]
    if len(rows) != 1 or not isinstance(rows[0].get(column), int | float):
        raise DocumentError(
            f"{suite}: {len(rows)} planned trials with {row}, column {column!r}: expected one trial, with a number in "
            "this column"
        )
    return float(rows[0][column])


FUNCTIONS: Final = (
    speedup, seconds, sent, megabytes, error, loss, final_loss, loss_verdict, loss_margin, loss_in_steps, net_speed,
    memory, decoding_speedup, phase_speedup, phase_sent, tokens_per_second, ratio_of_tokens, largest_model,
    cell, table, question, fact, as_predicted, count, computing, suites,
    validated_at, loss_share, pair_range, pair_count, pairs_agree, model_sizes, disturbed,
    facts, seconds_on_record, fastest_setting, beside_libraries, outcomes, not_beside, settings_tried, not_repeated,
    exposed, parity_range, budgeted, composition, product, planned,
)  # fmt: skip
"""The functions that templates may call; :mod:`docs.build` adds figures, verdict tables and assertions."""
