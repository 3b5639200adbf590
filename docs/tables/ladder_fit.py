"""Fits how a loss difference depends on the number of parameters or of ranks, and predicts it where nothing ran yet.

A *rung* is a configuration at one size of the model and one topology.  Its differences are those of the final
validation losses from ZeRO-3's, paired by seed.  Pure: records go in, numbers come out.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from harness.errors import Refusal
from harness.records.confidence_intervals import Interval, mean_interval, quantile
from harness.records.trial_record import Record
from harness.suites.labels import flatten
from harness.suites.model_sizes import PRESETS
from harness.suites.repeat_order import CONFIGURATION
from harness.suites.trial import Model, Trial
from impl.policy.topology import Topology
from report.data.configuration import NAMES, label_of

BASELINE: Final = NAMES["zero3"]
FEWEST: Final = 3  # rungs of a fit: a line through two would leave nothing that shows whether a line fits
# Fields in which trials that are compared may differ: the configuration, the seed, checks, and how ranks run.
_NOT_OF_TRAINING: Final = (
    *CONFIGURATION, "seed", "repeat", "timeout_seconds", "measure_quantisation", "validate_every", "memory_limit",
    "model", "cluster",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rung:
    """The differences of one configuration's final losses from ZeRO-3's, at one size and topology."""

    configuration: str
    parameters: int
    tokens: int  # of the whole training, all ranks together
    topology: Topology
    seeds: tuple[int, ...]  # those that both ZeRO-3 and the configuration have, ascending
    differences: tuple[float, ...]  # nats, by seed; more is worse
    base_loss: float  # ZeRO-3's mean loss over these seeds
    began: str  # when the first of these trials began, ZeRO-3's included
    records: tuple[str, ...]  # ids of these trials' records

    @property
    def interval(self) -> Interval:
        """The mean difference, with Student's interval if there are six seeds or more."""
        return mean_interval(self.differences)


@dataclass(frozen=True, slots=True)
class Point:
    """The place and the mean difference of a rung, to which a form is fitted."""

    at: int  # parameters or ranks
    seeds: int
    mean: float  # of the differences, in nats
    deviation: float  # standard deviation of the differences between seeds; 0 for one seed

    @classmethod
    def of(cls, at: int, differences: Sequence[float]) -> Point:
        """Return the point of a rung with these differences."""
        deviation = float(np.std(differences, ddof=1)) if len(differences) > 1 else 0.0
        return cls(at, len(differences), float(np.mean(differences)), deviation)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted mean difference, in nats."""

    line: float  # by the straight line over the logarithm
    constant: float  # if the difference does not depend on the size
    low: float  # the ends reach over the 95 % prediction intervals of both
    high: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A straight line over the decimal logarithm of parameters or ranks, and a constant, by least squares over seeds.

    Every seed of every point counts once, with the same variance.  The variance around each form is that of all seeds
    around it, so that it includes how badly the form fits.

    A power law ``c * x^a`` would bear no difference that changes its sign, and three points do not tell it from a line.
    A difference that changes in one direction and levels off, as a falling power law does, lies between the line and
    the constant beyond the last point.
    """

    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        if len({point.at for point in self.points}) < FEWEST:
            raise ValueError(
                f"a fit needs {FEWEST} different sizes, got {len(self.points)} points: add records of other sizes"
            )

    @property
    def seeds(self) -> int:
        """The number of differences of all points together."""
        return sum(point.seeds for point in self.points)

    @property
    def slope(self) -> Interval:
        """By how many nats the line rises while parameters or ranks grow tenfold."""
        slope, around = self._line()
        half = quantile(self.seeds - 2) * math.sqrt(around / self._spread())
        return Interval(slope, slope - half, slope + half, self.seeds)

    def predict(self, at: float, seeds: int | None = None) -> Prediction:
        """Predict the mean difference at a number of parameters or ranks.

        Args:
            at: The number of parameters or ranks.
            seeds: Number of seeds over which the mean will be taken; None for the mean over all seeds that there are.
        """
        weights, logs, means = self._columns()
        slope, around_line = self._line()
        off = math.log10(at) - float(np.average(logs, weights=weights))
        constant = float(np.average(means, weights=weights))
        line = constant + slope * off
        around_constant = self._around(means - constant) / (self.seeds - 1)
        own = 0.0 if seeds is None else 1 / seeds
        halves = (
            quantile(self.seeds - 2)
            * math.sqrt(around_line * (own + 1 / self.seeds + off**2 / self._spread())),
            quantile(self.seeds - 1) * math.sqrt(around_constant * (own + 1 / self.seeds)),
        )
        forms = tuple(zip((line, constant), halves, strict=True))
        low, high = min(form - half for form, half in forms), max(form + half for form, half in forms)
        return Prediction(line, constant, low, high)

    def _columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the weights, the decimal logarithms and the means of all points."""
        rows = [(point.seeds, math.log10(point.at), point.mean) for point in self.points]
        weights, logs, means = np.array(rows, dtype=float).T
        return weights, logs, means

    def _spread(self) -> float:
        """Return the sum over seeds of the squared distances of the logarithms from their mean."""
        weights, logs, _ = self._columns()
        return float(weights @ (logs - np.average(logs, weights=weights)) ** 2)

    def _line(self) -> tuple[float, float]:
        """Return the slope of the line, and the variance of a seed's difference around the line."""
        weights, logs, means = self._columns()
        centred = logs - np.average(logs, weights=weights)
        slope = float(weights @ (centred * means) / self._spread())
        residuals = means - np.average(means, weights=weights) - slope * centred
        return slope, self._around(residuals) / (self.seeds - 2)

    def _around(self, residuals: np.ndarray) -> float:
        """Return the sum over all seeds of the squared distance of a seed's difference from a form.

        ``residuals`` are the distances of the points' means from the form.
        """
        within = sum((point.seeds - 1) * point.deviation**2 for point in self.points)
        return float(
            within + sum(point.seeds * off**2 for point, off in zip(self.points, residuals, strict=True))
        )


def rungs(records: Sequence[Record], suite: str) -> list[Rung]:
    """Return the rungs of the configurations that a suite has records of, in the order of sizes and topologies.

    Trials are compared if they train the same model on the same data with the same optimizer and the same topology.
    How their ranks run, as threads or processes, and on which link, changes no loss.  Records of other suites count
    too: their ZeRO-3, and those of their configurations that the suite has as well.

    Args:
        records: Records of the suite and, if wanted, of others; failed ones are left out.
        suite: The suite's name.

    Raises:
        Refusal: If a final loss is not finite, since leaving it out would flatter its configuration; or if the last
            validation was before the end.
    """
    finished = [record for record in records if record.failure is None]
    trials = {record.id: Trial.from_canonical(record.trial) for record in finished}
    names = {identity: label_of(trial, {}) for identity, trial in trials.items()}
    wanted = {names[record.id] for record in finished if record.suite == suite} - {BASELINE}
    runs: dict[str, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in finished:
        runs[training_of(trials[record.id])][names[record.id]].append(record)
    found = []
    for by_name in runs.values():
        base = _by_seed(by_name.get(BASELINE, []), trials)
        for name in sorted(wanted & by_name.keys()):
            own = _by_seed(by_name[name], trials)
            if not (seeds := sorted(own.keys() & base.keys())):
                continue
            used = [record for side in (own, base) for seed in seeds for record in side[seed]]
            losses = [(_mean_loss(own[seed], trials), _mean_loss(base[seed], trials)) for seed in seeds]
            trial = trials[used[0].id]
            found.append(
                Rung(
                    configuration=name,
                    parameters=used[0].parameters,
                    tokens=tokens_of(trial),
                    topology=trial.topology(),
                    seeds=tuple(seeds),
                    differences=tuple(loss - base_loss for loss, base_loss in losses),
                    base_loss=float(np.mean([base_loss for _, base_loss in losses])),
                    began=min(record.started for record in used),
                    records=tuple(sorted(record.id for record in used)),
                )
            )
    return sorted(found, key=lambda rung: (rung.parameters, rung.topology.world, rung.configuration))


def training_of(trial: Trial) -> str:
    """Return a text that is equal for trials whose losses may be compared."""
    fields = {key: value for key, value in trial.canonical().items() if key not in _NOT_OF_TRAINING}
    model = asdict(shape) if (shape := _shape(trial.model)) is not None else trial.model.model_dump()
    return json.dumps([dict(flatten(fields)), model, str(trial.topology())], sort_keys=True, default=str)


def tokens_of(trial: Trial) -> int:
    """Return the number of tokens on which a trial trains, all ranks together."""
    steps = trial.warmup + trial.steps
    return trial.tokens_per_rank * trial.accumulation * trial.topology().world * steps


def _shape(model: Model) -> Any:
    """Return the shape of a preset with its arguments; None if the model is no preset or its arguments are not its."""
    preset = PRESETS.get(model.name)
    if preset is None or not model.arguments.keys() <= asdict(preset).keys():
        return None
    arguments: dict[str, Any] = model.arguments
    return replace(preset, **arguments)


def _by_seed(records: Sequence[Record], trials: Mapping[str, Trial]) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        found[trials[record.id].seed].append(record)
    return found


def _mean_loss(records: Sequence[Record], trials: Mapping[str, Trial]) -> float:
    """Return the mean final validation loss of the repeats of one seed."""
    for record in records:
        end = trials[record.id].warmup + trials[record.id].steps
        losses = [each.loss for each in record.validations if each.step == end]
        if not losses or not math.isfinite(losses[-1]):
            raise Refusal(
                f"record {record.id} of suite {record.suite}: expected a finite loss of a validation at its end, and "
                "the record has none: let validate_every divide the steps, or leave out the record's configuration"
            )
    return float(np.mean([record.validations[-1].loss for record in records]))
