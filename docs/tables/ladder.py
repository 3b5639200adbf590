"""Registers predictions of loss differences for models that have not trained yet, and writes docs/ladder.md.

Suite ``ladder`` trains models of several sizes, and suite ``ranks`` one model on several numbers of ranks.  A
prediction for a size is committed before that size runs::

    zeropp run FILE --results FOLDER                   # suites/ladder.toml without the sizes that are to be predicted
    python -m docs.tables.ladder register FOLDER...    # adds to docs/tables/ladder_predictions.toml: commit it
    zeropp run suites/ladder.toml --results FOLDER     # runs the rest
    zeropp archive ladder results/reference --results FOLDER
    python -m docs.tables.ladder                       # writes the page and its figures from results/reference

Every size of the suite file without a finished record is predicted.  The fit is that of :mod:`docs.tables.ladder_fit`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import textwrap
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from pydantic import AwareDatetime, BaseModel

from docs.numbers import REFERENCE, ROOT
from docs.tables import markdown
from docs.tables.ladder_fit import BASELINE, FEWEST, Fit, Point, Prediction, Rung, rungs, training_of
from harness.errors import Refusal, one_line
from harness.records import archive
from harness.records.chained_journal import LEFT_OUT_AT_FIRST, content_of
from harness.records.trial_record import Record, RecordError, read
from harness.runs.feasibility import any_host, forecast
from harness.suites.suite import SuiteError
from harness.suites.suite_file import load
from harness.suites.trial import Trial
from report.data.configuration import label_of
from report.data.text import counted, listed
from report.draw import axes, theme
from report.draw.theme import Style, fonts

DOCS: Final = ROOT / "docs"
PAGE: Final = DOCS / "ladder.md"
PREDICTIONS: Final = Path(__file__).parent / "ladder_predictions.toml"
_TITLE: Final = 22  # characters of a line above a panel
OPEN: Final = "not measured yet"
INSIDE: Final = "inside the interval"
OUTSIDE: Final = "**outside the interval**"
EARLY: Final = "does not count: it began before the registration"
_HEAD: Final = """\
# Predictions of loss differences, written by `python -m docs.tables.ladder register`.  Entries are added before the
# predicted sizes run, and never changed; docs/ladder.md compares them with what came out.
"""


@dataclass(frozen=True, slots=True)
class Axis:
    """What a suite varies besides configurations and seeds."""

    suite: str
    others: tuple[str, ...]  # suites whose records of the same training count too
    name: str
    unit: float  # of the labels of the figure
    label: str  # of the figure's horizontal axis
    of_rung: Callable[[Rung], int]
    of_record: Callable[[Record], int]
    beyond: tuple[int, ...]  # where the fit is evaluated, far from what was measured


AXES: Final = (
    Axis("ladder", ("convergence_long",), "parameters", 1e6, "million parameters", lambda rung: rung.parameters,
         lambda record: record.parameters, (350_000_000, 13_000_000_000)),
    Axis("ranks", (), "ranks", 1, "ranks", lambda rung: rung.topology.world,
         lambda record: Trial.from_canonical(record.trial).topology().world, (384,)),
)  # fmt: skip


class RegisteredPoint(BaseModel, extra="forbid", frozen=True):
    """One point of the fit behind a registered prediction."""

    configuration: str
    at: int
    seeds: int
    mean: float
    deviation: float


class RegisteredPrediction(BaseModel, extra="forbid", frozen=True):
    """A prediction of the mean difference over ``seeds`` seeds, in nats, with the ends of its 95 % interval."""

    configuration: str
    at: int
    seeds: int
    line: float
    constant: float
    low: float
    high: float


class Registered(BaseModel, extra="forbid", frozen=True):
    """Predictions that were registered at one moment, with the records and points from which they were computed."""

    suite: str
    moment: AwareDatetime
    commits: list[str]  # of the code that the records ran
    records: list[str]  # ids of the trials of all points
    content: str  # SHA-256 over these ids and the hashes of the records' contents
    points: list[RegisteredPoint]
    predictions: list[RegisteredPrediction]

    def fit(self, configuration: str) -> Fit:
        """Return the fit of one configuration."""
        own = (point for point in self.points if point.configuration == configuration)
        return Fit(tuple(Point(point.at, point.seeds, point.mean, point.deviation) for point in own))


@dataclass(frozen=True, slots=True)
class Kept:
    """A record without its ranks' steps, which take most of its memory, and the hash of its whole content."""

    record: Record
    content: str


Records = Mapping[str, Kept]  # by id


@dataclass(frozen=True, slots=True)
class Ladder:
    """The records, rungs and registered predictions of one axis."""

    axis: Axis
    records: Records
    rungs: Sequence[Rung]
    registered: Sequence[Registered]

    @classmethod
    def of(cls, axis: Axis, records: Records, registered: Iterable[Registered]) -> Ladder:
        """Return the rungs of the records, and the registrations of this axis.

        Raises:
            Refusal: If a configuration has several rungs at one place, since a fit and an outcome are of one training.
        """
        found = rungs([kept.record for kept in records.values()], axis.suite)
        places = Counter((rung.configuration, axis.of_rung(rung)) for rung in found)
        for (name, at), count in places.items():
            if count > 1:
                raise Refusal(
                    f"suite {axis.suite}: {name} with {at:,} {axis.name} has records of {count} trainings, which "
                    "differ in more than the configuration and the seed: keep the records of one of them"
                )
        return cls(axis, records, found, [each for each in registered if each.suite == axis.suite])

    def at(self, rung: Rung) -> int:
        """Return where a rung is on the axis."""
        return self.axis.of_rung(rung)

    def points(self, configuration: str) -> tuple[Point, ...]:
        """Return the points of a configuration's fit."""
        own = (rung for rung in self.rungs if rung.configuration == configuration)
        return tuple(Point.of(self.at(rung), rung.differences) for rung in own)

    def fits(self) -> dict[str, Fit]:
        """Return the fit of each configuration that has enough sizes."""
        names = sorted({rung.configuration for rung in self.rungs})
        by_name = {name: self.points(name) for name in names}
        return {
            name: Fit(points)
            for name, points in by_name.items()
            if len({point.at for point in points}) >= FEWEST
        }

    def outcome(self, prediction: RegisteredPrediction) -> Rung | None:
        """Return what was measured where a prediction was made; None if nothing was."""
        own = (rung for rung in self.rungs if rung.configuration == prediction.configuration)
        return next((rung for rung in own if self.at(rung) == prediction.at), None)


def read_folder(folder: Path) -> dict[str, Kept]:
    """Read the records of a suite's folder one by one, without keeping their steps.

    Raises:
        RecordError: If a file is no record, or was edited.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        record = read(path)
        content = content_of(record, LEFT_OUT_AT_FIRST)  # as in the predictions that are registered
        found[record.id] = Kept(record.model_copy(update={"ranks": []}), content)
    return found


def committed(suite: str) -> dict[str, Kept]:
    """Return the committed records of a suite; empty if there are none.

    Raises:
        RecordError: If the archive cannot be read, or a record was edited.
    """
    packed = ROOT / REFERENCE / f"{suite}{archive.SUFFIX}"
    if not packed.exists():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        return read_folder(archive.unpack(packed, Path(folder)))


def committed_records(axis: Axis) -> dict[str, Kept]:
    """Return the committed records of an axis; empty unless those of its suite are there."""
    own = committed(axis.suite)
    return own | {key: kept for other in axis.others for key, kept in committed(other).items()} if own else {}


def in_folders(folders: Sequence[Path]) -> dict[str, dict[str, Kept]]:
    """Return the records in results folders, by suite.

    Args:
        folders: Folders that ``zeropp run --results`` wrote, or folders of single suites in them.

    Raises:
        Refusal: If a folder has no records of any suite of :data:`AXES`, or two folders have different records of a
            trial.
        RecordError: If a file is no record, or was edited.
    """
    known = {suite for axis in AXES for suite in (axis.suite, *axis.others)}
    found: dict[str, dict[str, Kept]] = defaultdict(dict)
    for folder in folders:
        here = [
            kept
            for place in (folder, *(folder / suite for suite in known))
            for kept in read_folder(place).values()
        ]
        here = [kept for kept in here if kept.record.suite in known]
        if not here:
            raise Refusal(
                f"{folder}: no records of suite {' or '.join(sorted(known))}: name a folder that "
                "zeropp run --results wrote"
            )
        for kept in here:
            before = found[kept.record.suite].setdefault(kept.record.id, kept)
            if before.content != kept.content:
                raise Refusal(
                    f"{folder}: another folder has another record {kept.record.id}: name only one of the two folders"
                )
    return found


def digest(records: Records, ids: Iterable[str]) -> str:
    """Return the SHA-256 over ids of records and the hashes of their contents; empty if one of them is missing."""
    wanted = sorted(ids)
    if any(identity not in records for identity in wanted):
        return ""
    text = "".join(f"{identity} {records[identity].content}\n" for identity in wanted)
    return hashlib.sha256(text.encode()).hexdigest()


def planned(axis: Axis) -> dict[tuple[str, int], int]:
    """Return the number of seeds that the suite file plans, by configuration and size."""
    trials = load(ROOT / "suites" / f"{axis.suite}.toml").combinations
    first = {training_of(trial): trial for trial in trials}
    if axis.name == "ranks":
        sizes = {key: trial.topology().world for key, trial in first.items()}
    else:
        forecasts = forecast(first.values(), any_host())
        sizes = {key: each.parameters or 0 for key, each in zip(first, forecasts, strict=True)}
    seeds: dict[tuple[str, int], set[int]] = defaultdict(set)
    for trial in trials:
        if (name := label_of(trial, {})) != BASELINE:
            seeds[name, sizes[training_of(trial)]].add(trial.seed)
    return {key: len(found) for key, found in seeds.items()}


def register(
    ladder: Ladder, plan: Mapping[tuple[str, int], int], moment: datetime, measured: Iterable[int]
) -> Registered:
    """Predict every planned configuration and size of which there is no finished record.

    Args:
        ladder: The records so far, and earlier registrations.
        plan: The number of planned seeds by configuration and size.
        moment: The time of the registration.
        measured: Sizes of which there are finished records, of whatever configuration.

    Raises:
        Refusal: If there are records of every planned size, if a prediction of a size is registered already, or if a
            configuration has records of too few sizes.
    """
    suite, what, known = f"suites/{ladder.axis.suite}.toml", ladder.axis.name, {*measured}
    unmeasured = {key: seeds for key, seeds in sorted(plan.items()) if key[1] not in known}
    if not unmeasured:
        raise Refusal(
            f"{suite}: there are records of every size ({listed([f'{at:,}' for at in sorted(known)])} {what}), and a "
            "size with records cannot be predicted: add a size that has not run"
        )
    for each in ladder.registered:
        for prediction in each.predictions:
            if (prediction.configuration, prediction.at) in unmeasured:
                raise Refusal(
                    f"{suite}: {prediction.configuration} with {prediction.at:,} {what} was predicted on "
                    f"{each.moment:%Y-%m-%d}: a registered prediction is not changed, so run that size"
                )
    points, predictions = list[RegisteredPoint](), list[RegisteredPrediction]()
    for name in sorted({name for name, _ in unmeasured}):
        own = ladder.points(name)
        if len({point.at for point in own}) < FEWEST:
            raise Refusal(
                f"{suite}: {name} has records of {counted(len(own), 'size')}, and a fit needs {FEWEST}: run more of "
                "the suite first"
            )
        points += [
            RegisteredPoint(
                configuration=name, at=point.at, seeds=point.seeds, mean=_rounded(point.mean),
                deviation=_rounded(point.deviation),
            )
            for point in own
        ]  # fmt: skip
    registered = Registered(
        suite=ladder.axis.suite,
        moment=moment.replace(microsecond=0),
        commits=_commits(ladder, ids := _ids(ladder)),
        records=ids,
        content=digest(ladder.records, ids),
        points=points,
        predictions=[],
    )
    for (name, at), seeds in unmeasured.items():
        found = registered.fit(name).predict(at, seeds)
        values = {key: _rounded(getattr(found, key)) for key in ("line", "constant", "low", "high")}
        predictions.append(RegisteredPrediction(configuration=name, at=at, seeds=seeds, **values))
    return registered.model_copy(update={"predictions": predictions})


def _rounded(nats: float) -> float:
    """Round a difference to the digits in which it is registered."""
    return round(nats, 6)


def _ids(ladder: Ladder) -> list[str]:
    """Return the ids of all records behind the rungs."""
    return sorted({identity for rung in ladder.rungs for identity in rung.records})


def _commits(ladder: Ladder, ids: Iterable[str]) -> list[str]:
    """Return the commits of the code that the records ran; a plus sign follows if the checkout was changed."""
    codes = (ladder.records[identity].record.code for identity in ids)
    return sorted({f"{code.get('commit')}{'+' if code.get('dirty') else ''}" for code in codes})


def as_toml(each: Registered) -> str:
    """Return an entry of the file of predictions."""
    # Numbers and text have the same form in TOML as in JSON.
    records = textwrap.fill(", ".join(map(json.dumps, each.records)), 116, break_on_hyphens=False)
    lines = [
        "[[registered]]",
        f"suite = {json.dumps(each.suite)}",
        f"moment = {each.moment.isoformat()}",
        f"commits = {json.dumps(each.commits)}",
        f"records = [\n{textwrap.indent(records, '    ')},\n]",
        f"content = {json.dumps(each.content)}",
    ]
    for name, rows in (("points", each.points), ("predictions", each.predictions)):
        for row in rows:
            lines += ["", f"[[registered.{name}]]"]
            lines += [
                f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in row.model_dump().items()
            ]
    return "\n".join(lines) + "\n"


def registered_in(path: Path) -> list[Registered]:
    """Read the registered predictions; there are none if the file does not exist.

    Raises:
        Refusal: If the file is no TOML, or has other tables than :func:`as_toml` writes.
    """
    if not path.exists():
        return []
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        return [Registered.model_validate(each) for each in tables.get("registered", [])]
    except ValueError as error:  # of tomllib, of pydantic, or of a wrong encoding
        raise Refusal(f"{path}: {error}: take the file from git, since entries are never changed") from error


def verdict(prediction: RegisteredPrediction, outcome: Rung | None, moment: datetime) -> str:
    """Return in words whether the measured difference lies inside the interval of a prediction, or why this is open.

    A prediction is judged once as many seeds have run as it was made for, since the mean of fewer seeds varies more.
    """
    if outcome is None:
        return OPEN
    if datetime.fromisoformat(outcome.began) < moment:
        return EARLY
    if len(outcome.seeds) < prediction.seeds:
        return f"not judged yet: {len(outcome.seeds)} of {counted(prediction.seeds, 'seed')}"
    return INSIDE if prediction.low <= outcome.interval.estimate <= prediction.high else OUTSIDE


def page(ladders: Sequence[Ladder]) -> str:
    """Return the page as Markdown."""
    parts = [
        "# Loss differences by size of the model and number of ranks",
        _filled(
            "`python -m docs.tables.ladder` writes this page from the committed records. A *difference* is the final "
            f"validation loss of a configuration minus {BASELINE}'s, in nats, as mean over the seeds that both have; "
            "more is worse. Its 95 % interval is that of Student's t, and needs six seeds. The figures also show each "
            "seed."
        ),
    ]
    for ladder in ladders:
        parts += [f"## Differences by number of {ladder.axis.name}", *_measured(ladder)]
    parts += ["## The fit", *_fitted(ladders), "## Registered predictions", *_registered(ladders)]
    parts += ["## The paper's sizes", *_beyond(ladders[0]), *_beyond_ranks(ladders[1])]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _measured(ladder: Ladder) -> list[str]:
    """Return the table and the figure of what was measured."""
    if not ladder.rungs:
        return [f"No records of [{ladder.axis.suite}](../suites/README.md) are committed yet."]
    rows = [
        (rung.configuration, f"{rung.parameters:,}", f"{rung.tokens / 1e6:.2f}", rung.topology,
         len(rung.seeds), f"{rung.base_loss:.3f}", _difference(rung), _between_seeds(rung))
        for rung in sorted(ladder.rungs, key=lambda rung: (rung.configuration, ladder.at(rung)))
    ]  # fmt: skip
    head = (
        "configuration",
        "parameters",
        "million tokens",
        "ranks",
        "seeds",
        f"{BASELINE}'s loss",
        "difference",
        "deviation between seeds",
    )
    names = listed([f"`{suite}`" for suite in (ladder.axis.suite, *ladder.axis.others)])
    shown = f"![Loss difference over {ladder.axis.name}](figures/{_figure(ladder.axis).name})"
    caption = _filled(
        "Dots are seeds, and points are means with their intervals. The line and the band, which is for the mean over "
        "many seeds, are those of the registered fit or, without one, of the fit of all records. Red bars are the "
        "intervals of [registered predictions](#registered-predictions)."
    )
    failed = sum(kept.record.failure is not None for kept in ladder.records.values())
    left_out = (
        f" {counted(failed, 'failed trial')} {'is' if failed == 1 else 'are'} left out." if failed else ""
    )
    return [f"Records: {names}.{left_out}", markdown.table(head, rows), shown, caption]


def _between_seeds(rung: Rung) -> str:
    """Return the standard deviation of a rung's differences; ``-`` for one seed."""
    return f"{np.std(rung.differences, ddof=1):.4f}" if len(rung.seeds) > 1 else "-"


def _difference(rung: Rung) -> str:
    interval = rung.interval
    mean = f"{interval.estimate:+.4f}"
    return f"{mean} ({interval.low:+.4f} to {interval.high:+.4f})" if interval.known else mean


def _fitted(ladders: Sequence[Ladder]) -> list[str]:
    """Return what the fit is, and its table."""
    about = _filled(
        "Two forms are fitted to the seeds' differences by least squares: a straight line over the logarithm of "
        "parameters or ranks, and a constant. These few sizes allow no richer form: a power law cannot change its "
        "sign, and so few points do not tell it from a line. A difference that changes in one direction and levels off "
        "lies between the two forms beyond the last size. A predicted interval therefore reaches over both forms' 95 % "
        "prediction intervals. It assumes that beyond the fitted sizes the difference changes no faster than within "
        "them, and that seeds vary by the same amount at all sizes. The tables above show how far the latter holds: "
        "where deviations between seeds fall with the size, an interval for a larger size is too wide."
    )
    formulas = """\
    line:      a + b x +- t(n - 2) s sqrt(1 / k + 1 / n + (x - mean of x)^2 / sum of (x_i - mean of x)^2)
    constant:  m       +- t(n - 1) s sqrt(1 / k + 1 / n)"""
    words = _filled(
        "Here x is the decimal logarithm of parameters or ranks, n the number of differences of all sizes and seeds, s "
        "their standard deviation around the form, t Student's quantile, and k the number of seeds whose mean is "
        "predicted. The table has the lines through all committed records; a registered prediction rests on the "
        "records of its time."
    )
    rows = [
        (
            name,
            ladder.axis.name,
            len(fit.points),
            fit.seeds,
            _with_ends(fit.slope.estimate, fit.slope.low, fit.slope.high),
        )
        for ladder in ladders
        for name, fit in ladder.fits().items()
    ]
    if not rows:
        return [about, formulas, words, f"No configuration has records of {FEWEST} sizes yet."]
    head = ("configuration", "over", "sizes", "seeds in all", "nats for ten times as many (95 % interval)")
    slopes = [fit.slope for ladder in ladders for fit in ladder.fits().values()]
    flat = (
        "All intervals contain 0: these records do not show that a difference changes with the size of the model or "
        "the number of ranks."
        if all(slope.low <= 0 <= slope.high for slope in slopes)
        else ""
    )
    return [part for part in (about, formulas, words, markdown.table(head, rows), _filled(flat)) if part]


def _registered(ladders: Sequence[Ladder]) -> list[str]:
    """Return the table of registered predictions with their outcomes, and what each registration rests on."""
    rows, notes, verdicts = [], list[str](), list[str]()
    for ladder in ladders:
        for each in ladder.registered:
            for prediction in each.predictions:
                outcome = ladder.outcome(prediction)
                verdicts.append(verdict(prediction, outcome, each.moment))
                what = f"{prediction.at:,} {ladder.axis.name}"
                rows.append((
                    prediction.configuration, what, prediction.seeds, f"{prediction.line:+.4f}",
                    f"{prediction.constant:+.4f}", f"{prediction.low:+.4f} to {prediction.high:+.4f}",
                    OPEN if outcome is None else _difference(outcome), verdicts[-1],
                ))  # fmt: skip
            notes.append(f"- {_basis(ladder, each)}")
    if not rows:
        return ["No prediction is registered yet."]
    head = (
        "configuration", "predicted for", "seeds", "by the line", "by the constant", "95 % interval", "measured",
        "outcome",
    )  # fmt: skip
    about = _filled(
        "A prediction is committed in [ladder_predictions.toml](tables/ladder_predictions.toml) before its size runs, "
        "and its entry is never changed; `git log` shows when each entry came. The interval is for the mean over as "
        f"many seeds as the table names. {_tally(verdicts)}"
    )
    return [about, markdown.table(head, rows), "\n".join(notes)]


def _tally(verdicts: Sequence[str]) -> str:
    """Return a sentence on how many predictions came true."""
    inside, outside = verdicts.count(INSIDE), verdicts.count(OUTSIDE)
    if not inside + outside:
        return "None of them is judged yet."
    count = counted(inside + outside, "judged prediction")
    return (
        f"Of {count}, {inside} came out inside the interval and {outside} outside; if the forms hold, at most one in "
        "twenty is expected outside."
    )


def _basis(ladder: Ladder, each: Registered) -> str:
    """Return a sentence on when predictions were registered, and whether their records are the committed ones."""
    commits = listed([commit[:8] + "+" * commit.endswith("+") for commit in each.commits])
    if not ladder.records:
        held = "the records are not committed yet"
    elif digest(ladder.records, each.records) == each.content:
        held = "the committed archives hold these records unchanged"
    else:
        held = (
            "**the committed archives hold other records of some of these trials, as after a new measurement**; git's "
            "history has the archives of that time"
        )
    count = counted(len(each.records), "record")
    moment = f"{each.moment:%Y-%m-%d %H:%M} UTC"
    text = f"Suite {each.suite}, registered at {moment}, from {count} of code at {commits}: {held}."
    return textwrap.fill(text, 118, subsequent_indent="  ")


def _beyond(ladder: Ladder) -> list[str]:
    """Return what the fit gives at the paper's sizes, and how little that is worth."""
    fits = ladder.fits()
    if not fits:
        return ["The fit has no records yet."]
    sizes = sorted({point.at for fit in fits.values() for point in fit.points})
    small, large = ladder.axis.beyond
    rows = [(name, *(_in_nats(fit.predict(at)) for at in ladder.axis.beyond)) for name, fit in fits.items()]
    about = (
        "The paper claims that ZeRO++ reaches the baseline's loss with GPT models of 350 M and 13 B parameters. The "
        "table has our fit at these sizes: the value of the line, and an interval for the mean over many seeds that "
        "reaches over both forms."
    )
    worth = (
        f"These numbers are worth very little. The sizes here span a factor of {sizes[-1] / sizes[0]:.0f}, while 350 M "
        f"is {small / sizes[-1]:,.0f} times and 13 B {large / sizes[-1]:,.0f} times the largest of them. The intervals "
        "hold only if one of the two forms continues that far, and if other data, batches, widths and optimizers "
        "change nothing; no record here tests either. An interval that contains 0 does not support the claim of "
        "parity, and one that excludes 0 does not refute it."
    )
    head = ("configuration", "350 M, nats", "13 B, nats")
    return [_filled(about), markdown.table(head, rows), _filled(worth)]


def _beyond_ranks(ladder: Ladder) -> list[str]:
    """Return what the fit gives at the paper's number of ranks."""
    fits, (ranks,) = ladder.fits(), ladder.axis.beyond
    if not fits:
        return []
    most = max(point.at for fit in fits.values() for point in fit.points)
    about = _filled(
        f"The paper's cluster has {ranks} GPUs, {ranks / most:.0f} times as many as the most ranks here. The same "
        "caution holds for the fit over ranks, whose records are of one small model and of few steps."
    )
    rows = [(name, _in_nats(fit.predict(ranks))) for name, fit in fits.items()]
    return [about, markdown.table(("configuration", f"{ranks} ranks, nats"), rows)]


def _in_nats(found: Prediction) -> str:
    return _with_ends(found.line, found.low, found.high, 3)


def _with_ends(middle: float, low: float, high: float, digits: int = 4) -> str:
    return f"{middle:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False)


def _figure(axis: Axis) -> Path:
    return DOCS / "figures" / f"ladder_{axis.name}.svg"


def draw(ladder: Ladder, path: Path) -> None:
    """Write the figure of an axis as SVG: a panel for each configuration, with a dot for each seed.

    The band is that of the registered fit or, without one, of the fit of all records.  A registered interval is a bar
    without a point; what was measured there is drawn as all other sizes are.
    """
    names = sorted({rung.configuration for rung in ladder.rungs})
    ticks = {ladder.at(rung) for rung in ladder.rungs}
    ticks |= {prediction.at for each in ladder.registered for prediction in each.predictions}
    with fonts():
        figure, (row,) = axes.grid(Style(), 1, len(names), [2.9], share_y=True)
        for ax, name in zip(row, names, strict=True):
            _panel(ax, ladder, name)
            labels = [
                f"{at / ladder.axis.unit:.2g}" if ladder.axis.unit > 1 else str(at) for at in sorted(ticks)
            ]
            ax.set_xticks(sorted(ticks), labels)
            ax.minorticks_off()
            ax.set(xlabel=ladder.axis.label, title=textwrap.fill(name, _TITLE))
        row[0].set_ylabel(f"loss minus {BASELINE}'s, nats")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _panel(ax: Axes, ladder: Ladder, name: str) -> None:
    """Draw one configuration."""
    ax.set_xscale("log")
    axes.line_at(ax, 0.0, across=True)
    own = [rung for rung in ladder.rungs if rung.configuration == name]
    predictions = [
        (each, prediction)
        for each in ladder.registered
        for prediction in each.predictions
        if prediction.configuration == name
    ]
    fit = predictions[-1][0].fit(name) if predictions else ladder.fits().get(name)
    if fit is not None:
        ends = [point.at for point in fit.points] + [prediction.at for _, prediction in predictions]
        places = np.geomspace(min(ends), max(ends), 41)
        found = [fit.predict(float(at)) for at in places]
        ax.plot(places, [each.line for each in found], color=theme.INK, lw=1)
        ax.fill_between(
            places,
            [each.low for each in found],
            [each.high for each in found],
            color=theme.FAINT,
            alpha=0.25,
            lw=0,
        )
    for _, prediction in predictions:
        ax.plot(
            [prediction.at] * 2, [prediction.low, prediction.high], color=theme.PUBLISHED, lw=2.5, alpha=0.6
        )
    for rung in own:
        interval, at = rung.interval, ladder.at(rung)
        ax.plot([at] * len(rung.differences), rung.differences, ".", color=theme.FAINT, ms=3)
        reach = (
            None
            if not interval.known
            else [[interval.estimate - interval.low], [interval.high - interval.estimate]]
        )
        ax.errorbar([at], [interval.estimate], yerr=reach, fmt="o", color=theme.INK, ms=4, lw=1.2, capsize=2)


def register_all(folders: Sequence[Path], predictions: Path, moment: datetime) -> str:
    """Register predictions from results folders, and return the text to add to the file of predictions.

    Raises:
        Refusal: As :func:`register` does, or if a folder has no records of a suite of :data:`AXES`.
        RecordError: If a file is no record, or was edited.
    """
    found, before, added = in_folders(folders), registered_in(predictions), list[str]()
    for axis in AXES:
        if axis.suite not in found:
            continue
        records: dict[str, Kept] = {}
        for suite in (axis.suite, *axis.others):
            records |= found.get(suite) or committed(suite)
        # A size whose records are committed is measured, even if they are not in the folders.
        known = [*records.values(), *committed(axis.suite).values()]
        finished = [kept.record for kept in known if kept.record.failure is None]
        ladder = Ladder.of(axis, records, before)
        new = register(ladder, planned(axis), moment, {axis.of_record(record) for record in finished})
        added.append(as_toml(new))
    if not added:
        raise Refusal(
            f"{', '.join(map(str, folders))}: no records of suite {' or '.join(axis.suite for axis in AXES)}: name a "
            "folder that has records of one of these suites"
        )
    return "\n".join(added)


def main(arguments: list[str]) -> int:
    """Run one of the commands in the module's docstring; return 2 for what is refused."""
    try:
        match arguments:
            case ["register", *folders] if folders:
                added = register_all([*map(Path, folders)], PREDICTIONS, datetime.now(UTC))
                text = PREDICTIONS.read_text(encoding="utf-8") if PREDICTIONS.exists() else _HEAD
                PREDICTIONS.write_text(f"{text}\n{added}", encoding="utf-8")
                sys.stdout.write(f"{PREDICTIONS}: commit it before the predicted sizes run\n")
            case []:
                write()
            case _:
                sys.stderr.write(f"{__doc__}\n")
                return 2
    except (Refusal, RecordError, SuiteError) as error:
        sys.stderr.write(f"docs.tables.ladder: {one_line(error)}\n")
        return 2
    return 0


def ladders() -> list[Ladder]:
    """Return what the committed records and registered predictions hold, for each axis."""
    registered = registered_in(PREDICTIONS)
    return [Ladder.of(axis, committed_records(axis), registered) for axis in AXES]


def write() -> None:
    """Write docs/ladder.md and its figures."""
    known = ladders()
    for ladder in known:
        if ladder.rungs:
            draw(ladder, _figure(ladder.axis))
    PAGE.write_text(page(known), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
