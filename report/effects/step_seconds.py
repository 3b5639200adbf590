"""Computes speed-ups of steps from a suite's records, from another suite's records, or from a model of a machine.

Net speed-ups (:mod:`report.effects.net_speed`) are computed from these speed-ups.  A trial of another suite gives the
seconds of a configuration's step if both of these conditions hold:

* The trial does the same work (model, batch, ranks) with the same policy.
* The trial ran on one node, or the link between its nodes was a real network or had a limited rate.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pandas as pd

from harness.measure import machine_file
from harness.records import archive
from harness.records.confidence_intervals import Interval
from harness.runs.trial_step import predict, step_of_trial
from harness.suites.labels import flatten
from harness.suites.trial import Trial
from impl.plan.step_time import StepTime
from report import seconds_key
from report.data import speedups
from report.data.configuration import label_of
from report.data.frames import Frames, ReportError, groups, load, rate_text
from report.data.metrics import Derived, StepSource, derive

OWN: Final = "this suite's own records"
_ELSEWHERE: Final = "other trials of this suite"
_WORK: Final = (
    "workload", "model", "tokenizer", "sequence", "tokens_per_rank", "accumulation", "activation_checkpointing",
    "optimizer.name", "cluster.nodes", "cluster.ranks_per_node",
)  # fmt: skip
_REAL: Final = ("real", "shaped")  # kinds of links between hosts


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """The speed-up of a configuration's step over its baseline's step, from one source of step times in one setting.

    A source is a suite's records or a model of a machine; a setting is the cluster, model, batch and so on.
    """

    speedup: Interval
    seconds: float  # seconds of the configuration's step
    base_seconds: float  # seconds of the baseline's step
    source: str  # the source as text: ``this suite's own records``, or ``records of convergence``
    where: str  # description of the setting in which the seconds were measured or predicted

    @property
    def named(self) -> str:
        """The source as text: ``this suite's own records``, or another source followed by ``where`` in parentheses."""
        return self.source if self.source == OWN else f"{self.source} ({self.where})"


def step_speeds(derived: Derived, own: str, base: str) -> list[StepSpeed]:
    """Return how many times as fast as a step of trial ``base`` a step of trial ``own`` is, by each source of times.

    ``own`` and ``base`` are ids of trials.  The sources are ``derived.sources``, in this order, and then the suite's
    own records.  A source gives one speed-up for each setting (such as a link rate) in which it has the seconds of both
    steps, and none if there is no such setting.
    From the suite's own records, the speed-up is that of the setting of ``own`` and ``base``.  If this setting gives
    none, the suite's other settings with the same work (model, batch, ranks) are used.
    """
    trials = derived.frames.trial_of[own], derived.frames.trial_of[base]
    found = list[StepSpeed]()
    for source in derived.sources:
        if source.derived is not None:
            found += _of_records(source.derived, *trials, f"records of {source.name}")
        elif source.machine is not None:
            found += _of_model(derived, source, own, base)
    return found + (_of_setting(derived, own, base) or _of_records(derived, *trials, _ELSEWHERE))


def unmatched(derived: Derived, source: StepSource) -> str:
    """Return a clause that says why a source of step times has no seconds for any configuration of the suite.

    ``derived`` are the suite's records.  The clause is empty if the source has seconds for at least one configuration.
    """
    if source.missing or source.derived is None:
        return source.missing
    wanted = _known(derived)
    has = _known(source.derived)
    if wanted.empty:
        return "cannot be used: no trial of this suite trained"
    if has.empty:
        return "has no trial that trained"
    if wanted["work"].isin(has["work"]).any():
        shared = wanted.merge(has[has["shaped"]], on=["work", "label"])
        return "" if len(shared) else "has no configuration of this suite on a link with a rate"
    first, others = (
        _fields(each.frames.trial_of[frame["id"].iloc[0]])
        for each, frame in ((derived, wanted), (source.derived, has))
    )
    parts = [
        f"{name} {others.get(name, 'none')} instead of {first.get(name, 'none')}"
        for name in dict.fromkeys([*first, *others])
        if first.get(name) != others.get(name)
    ]
    return f"trains other work: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class StepsFrom:
    """The sources of seconds of steps that a user names with ``--seconds``, ``--machine`` and ``--rate``."""

    folders: tuple[Path, ...] = ()  # results folders, or archives of such folders
    machine: Path | None = None  # file of a machine whose model of steps predicts seconds
    rate: float | None = None  # Mbit/s of the link in predictions; None: the rate of each trial's link


def derive_folder(results: Path, steps: StepsFrom | None = None) -> Derived:
    """Return the tables of a results folder, with the sources from which net speed-ups take the seconds of steps.

    Args:
        results: The suite's results folder.
        steps: The sources besides the suite's own records.  If it names no folders, and the suite file has the key
            ``seconds``, the suite that this key names is a source.  The results folder or the archive of that suite is
            looked for in the parent folder of ``results``.

    Raises:
        ReportError: If the records cannot be reported together (:func:`report.data.frames.load`), or if a folder of
            ``steps`` has no seconds of any configuration of the suite.
        Refusal: If the machine's file cannot be read.
    """
    frames, steps = load(results), steps or StepsFrom()
    sources = [read_source(path) for path in steps.folders] or list(_of_suite(frames, results))
    if steps.machine is not None:
        model = machine_file.read(steps.machine)
        sources.append(StepSource(model.name, machine=model, rate=steps.rate))
    derived = derive(frames, tuple(sources))
    for source in sources if steps.folders else ():
        if why := unmatched(derived, source):
            other = "name a suite that trains the same model with the same batch, ranks and policies"
            way_out = "remove --seconds" if _known(derived).empty else other
            raise ReportError(f"--seconds {source.name}: {why}; {way_out}")
    return derived


def _of_suite(frames: Frames, results: Path) -> Iterator[StepSource]:
    """Yield the source of step times that the suite file names with its key ``seconds``; nothing without this key.

    The source is another suite's records.  The key is read from the suite file of the latest run in the folder
    ``results``.  If the records of the other suite are not found, the source says so (``missing``).
    """
    if frames.run is not None and (name := seconds_key.named(results, frames.run)):
        path = seconds_key.beside(results, name)
        missing = (
            f"there are no records of it beside this suite's; run {name}, or name a folder with --seconds"
        )
        yield StepSource(name, missing=missing) if path is None else read_source(path)


def read_source(path: Path) -> StepSource:
    """Return the records of a results folder, or of the archive of a results folder, as a source of step times."""
    name = path.name.removesuffix(archive.SUFFIX)
    if path.is_dir():
        return StepSource(name, derive(load(path)))
    with tempfile.TemporaryDirectory() as folder:
        return StepSource(name, derive(load(archive.unpack(path, Path(folder)))))


@lru_cache(maxsize=64)
def _known(derived: Derived) -> pd.DataFrame:
    """Return the trials that trained, with the new columns ``work``, ``label`` and ``shaped``.

    ``work`` is a text that is equal for trials whose steps compute the same.  ``label`` is the name of the
    configuration with all of its changes.  ``shaped`` says whether the trial's seconds may be used.  They may be used
    if the trial ran on one node, or if the link between its nodes was a real network or had a limited rate.
    """
    table, trial_of = derived.trials, derived.frames.trial_of
    shaped = table["rate_mbit"].notna() | table["nodes"].eq(1) | table["link_kind"].isin(_REAL)
    return table.assign(
        work=[str(_fields(trial_of[identity])) for identity in table["id"]],
        label=[label_of(trial_of[identity], {}) for identity in table["id"]],
        shaped=shaped,
    )


def _fields(trial: Trial) -> dict[str, Any]:
    """Return the fields of a trial that say what a step computes, such as model and batch, but not policy and link."""
    return {
        path: value
        for path, value in flatten(trial.canonical())
        if any(f"{path}.".startswith(f"{name}.") for name in _WORK)
    }


def _of_setting(derived: Derived, own: str, base: str) -> list[StepSpeed]:
    """Return the speed-up of a step over the baseline's step in one setting, from the suite's own records.

    ``own`` and ``base`` are ids of trials of the configuration and the baseline in this setting (cluster, model, batch
    and so on).  The result is a list of one.  It is empty if the seconds of this setting must not be used (``shaped``
    in :func:`_known`), or if no pairs of trials can be formed.
    """
    known = _known(derived).set_index("id")
    first = known.loc[own]
    if not first["shaped"]:
        return []
    pairs = derived.pairs
    pairs = pairs[pairs["setting"].eq(first["setting"]) & pairs["configuration"].eq(first["configuration"])]
    pairs = pairs[pairs["baseline_configuration"].eq(known.loc[base]["configuration"])]
    return [] if pairs.empty else [_speed(pairs, OWN)]


def _of_records(source: Derived, trial: Trial, base: Trial, name: str) -> list[StepSpeed]:
    """Return the speed-ups of a configuration's step over its baseline's step, from the records ``source``.

    There is one speed-up for each setting (such as a link rate) of these records that meets two conditions: the
    configuration and its baseline both ran in this setting, and their work (model, batch, ranks) was that of ``trial``.

    Args:
        source: The records.
        trial: A trial of the configuration, which may be from other records.
        base: A trial of the baseline, which may be from other records.
        name: Text that names the source.
    """
    labels, known = [label_of(each, {}) for each in (trial, base)], _known(source)
    if labels[0] == labels[1]:  # the two trials differ in something that labels do not show
        return []
    rows = known[known["work"].eq(str(_fields(trial))) & known["shaped"] & known["label"].isin(labels)]
    speeds = list[StepSpeed]()
    for _, of_setting in groups(rows, ["setting"]):
        pairs = speedups.pairs(of_setting, of_setting["label"].eq(labels[1]))
        pairs = pairs[pairs["label"].eq(labels[0])]
        speeds += [] if pairs.empty else [_speed(pairs, name)]
    return speeds


def _speed(pairs: pd.DataFrame, source: str) -> StepSpeed:
    """Return the speed-up over pairs of trials, and the geometric means of the two step times that it compares.

    ``pairs`` are rows of :func:`report.data.speedups.pairs`, and ``source`` is text that names their source.
    """
    kept = speedups.undisturbed(pairs)
    seconds, base = (speedups.geometric(kept[name]) for name in ("step_seconds", "baseline_seconds"))
    return StepSpeed(speedups.speedup(pairs), seconds, base, source, str(pairs["where"].iloc[0]))


def _of_model(derived: Derived, source: StepSource, own: str, base: str) -> list[StepSpeed]:
    """Return the speed-up of trial ``own`` over trial ``base`` that a machine's model of steps predicts, in a list.

    The list is empty if the model cannot predict the step of one of the trials.
    The model is fitted to steps that a calibration measured on the machine.  ``source.machine`` may have several fits.
    The estimate is from the first fit, and the interval covers the speed-ups from all fits.
    The machine's file may also give the spread of the fitted model's errors.  Then the interval is widened by two
    standard deviations of the ratio's error; the errors of the two steps are taken as independent.  If there is one
    fit, and the file gives no spread, both ends of the interval equal the estimate.
    """
    machine = source.machine
    assert machine is not None  # noqa: S101  # the caller has looked
    pairs = list[tuple[StepTime, StepTime]]()
    for fit in machine.fits:
        alone = replace(source, machine=fit)
        step, base_step = _predicted(derived, alone, own), _predicted(derived, alone, base)
        if step is None or base_step is None:
            return []
        pairs.append((step, base_step))
    (best, best_base), *_ = pairs
    ratios = [base_step.seconds / step.seconds for step, base_step in pairs]
    wide = math.exp(2 * math.hypot(best.spread, best_base.spread))
    basis = machine.basis(known=best.calibrated and best_base.calibrated)
    cluster = derived.frames.trial_of[own].cluster
    where = f"{cluster.nodes}x{cluster.ranks_per_node} ranks"
    where += f", {rate_text(source.rate or cluster.rate)}" if cluster.nodes > 1 else ""
    speedup = Interval(ratios[0], min(ratios) / wide, max(ratios) * wide, 0)
    name = f"model {machine.name}, {basis}"
    return [StepSpeed(speedup, best.seconds, best_base.seconds, name, where)]


def _predicted(derived: Derived, source: StepSource, identity: str) -> StepTime | None:
    """Return the predicted time of a trial's step on the machine ``source.machine``.

    The prediction is computed from the units (parameters that are sent together) and the bytes in the trial's record.
    ``identity`` is the trial's id.  Returns None in each of these cases:

    * DDP, FSDP2 or DeepSpeed trains the model.  This includes trials in which our collectives send the library's
      messages.
    * A single process trains the model.
    * The work of the step, or the bytes that a node sends in the step, are not known.
    """
    machine, trial = source.machine, derived.frames.trial_of[identity]
    if machine is None or trial.resolved_policy() is None or trial.host is not None:
        return None
    if source.rate is not None:
        cluster = trial.cluster.model_copy(update={"rate": source.rate})
        trial = trial.model_copy(update={"cluster": cluster})
    row = derived.trials[derived.trials["id"].eq(identity)].iloc[0]
    step = step_of_trial(trial, derived.frames.geometries(identity), int(row["parameters"]))
    egress = float(row["egress_bytes"])
    return predict(trial, step, None if math.isnan(egress) else egress, machine)
