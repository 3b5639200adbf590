"""Metrics derived from raw records, one row per trial or part.  Formulas: docs/reference/metrics.md."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import pandas as pd

from harness.suites.answering_quantity import LEAST_STEPS
from harness.suites.model_sizes import PRESETS, step_flops
from harness.suites.trial import Trial
from impl.plan.step_time import Machine
from report.data import best_step, break_even, configuration, speedups
from report.data.configuration import Comparison, is_baseline, is_preset
from report.data.decoding import generations
from report.data.frames import Frames
from report.data.text import OTHERS_WITHIN as OTHERS_WITHIN  # noqa: PLC0414  # part of this vocabulary
from report.data.text import listed

TRAINING: Final = ("generate", "score", "forward", "backward", "step")  # phases of a step that trains
# Lower bounds over the step's time.
SHARES: Final = ("share", "schedule_share", "ideal_share", "processors_busy")
KEPT: Final = [
    "id", "strategy", "configuration", "place", "first", "setting", "where", "sweep", "occasion", "seed", "repeat",
    "disturbed", "nodes", "ranks_per_node", "tokens_per_rank", "rate_mbit", "achieved_mbit", "link_kind",
]  # fmt: skip
"""Columns of a figure's table that identify the trial of a row."""
OF_TRIAL: Final = ["id", "strategy", "configuration", "place", "first", "setting", "where", "seed", "repeat"]


def trials(frames: Frames) -> pd.DataFrame:
    """Return the metrics of every finished trial that trained, one row each; times in seconds, bytes per step.

    The columns are those of ``frames.finished``, those that ``report/quantities.csv`` defines, and these:

    * ``alone``: whether computation was measured by itself;
    * ``egress_bytes``: bytes that the busiest node sends to other nodes;
    * ``m_bytes``: M times the number of micro-batches;
    * ``tflops``: model TFLOP/s of a rank; NaN unless the model is a preset;
    * ``first_loss``: mean loss of the first step;
    * ``validation_step``: number of steps before the last validation.
    """
    table = frames.finished[frames.finished["workload"] != "generate"]
    for columns in (_times(frames), _traffic(frames), _losses(frames)):
        table = table.merge(columns, on="id", how="left")
    tokens = table["tokens_per_rank"] * table["world"] * table["accumulation"]
    table["tokens_per_second"] = tokens / table["step_seconds"]
    rate = table["achieved_mbit"] * best_step.BITS_PER_MBIT
    table["wire_seconds"] = np.where(table["egress_bytes"] == 0, 0.0, 8 * table["egress_bytes"] / rate)
    table["ideal_seconds"] = table[["compute_seconds", "wire_seconds"]].max(axis=1, skipna=False)
    table["schedule_seconds"] = table["id"].map(best_step.schedule_seconds(frames, timed_steps(frames)))
    # The schedule has only the units' messages, but the link also sends others.
    at_least = table[["schedule_seconds", "wire_seconds"]].max(axis=1)
    table["schedule_seconds"] = at_least.where(table["schedule_seconds"].notna())
    table["processor_seconds"] = table["id"].map(best_step.processor_seconds(frames))
    longer = table[["schedule_seconds", "processor_seconds"]].max(axis=1)
    table["best_seconds"] = longer.where(table["schedule_seconds"].notna())
    for name, bound in zip(SHARES, ("best", "schedule", "ideal", "processor"), strict=True):
        table[name] = table[f"{bound}_seconds"] / table["step_seconds"]
    model = ["nodes", "ranks_per_node", "shape", "accumulation"]  # peers have no units of their own
    table["numel"] = table.groupby(model)["numel"].transform("max")
    table["m_bytes"] = (2.0 * table["numel"] * (table["nodes"] - 1)).replace(0.0, np.nan)
    table["m_bytes"] *= table["accumulation"]
    # Both mean nothing for rlhf, which has several models, and whose loss lies around 0.
    table.loc[table["workload"] != "train", ["m_bytes", "first_loss"]] = np.nan
    rows = zip(table["id"], table["step_seconds"], table["processes"], strict=True)
    table["tflops"] = [_tflops(frames.trial_of[name], seconds, ranks) for name, seconds, ranks in rows]
    return table.copy()  # one block of memory a type: pandas warns of tables that grew by a hundred columns


def _tflops(trial: Trial, seconds: float, ranks: int) -> float:
    """Return the model TFLOP/s of each rank; NaN unless the model is a preset and the workload is ``train``."""
    model = trial.model
    preset = PRESETS.get(model.name) if trial.workload == "train" else None
    if preset is None or not set(model.arguments) <= asdict(preset).keys():
        return math.nan
    arguments: dict[str, Any] = model.arguments
    shape = replace(preset, **arguments)
    sequences = trial.tokens_per_rank // trial.sequence * trial.accumulation * trial.topology().world
    flops = step_flops(shape, sequences=sequences, length=trial.sequence, recompute=False)
    return flops / seconds / ranks / 1e12


def slowest_steps(frames: Frames) -> pd.DataFrame:
    """Return the slowest rank's row for each timed step of each trial; ``exposed`` sums its exposed seconds."""
    timed = best_step.timed(frames.steps).dropna(subset=["total"])
    slowest = timed.loc[timed.groupby(["id", "index"])["total"].idxmax()]
    exposed = pd.to_numeric(slowest["exposed_forward"]) + pd.to_numeric(slowest["exposed_backward"])
    exposed += best_step.before_training(slowest, "exposed_generate", "exposed_score")
    return slowest.assign(exposed=exposed)


def _times(frames: Frames) -> pd.DataFrame:
    computed = best_step.computations(frames)
    whole = computed[["forward", "backward", "rest"]].astype(float).sum(axis=1, skipna=False)
    computing = whole.groupby([computed["id"], computed["index"]]).max().groupby("id").median()
    slowest = _typical(frames, slowest_steps(frames))
    seconds = slowest.rename(columns={"total": "step_seconds", "exposed": "exposed_seconds"})
    alone = computed.groupby("id")["alone"].any()
    return seconds.assign(compute_seconds=computing, alone=alone).reset_index()


def _typical(frames: Frames, steps: pd.DataFrame) -> pd.DataFrame:
    """Return each trial's ``total`` and ``exposed`` seconds of a step, by id.

    They are medians over timed steps.  With a schedule they are the means of the medians of its policies, each counted
    as often as the policy has steps: the median of all steps would be that of one policy.
    """
    names = ["total", "exposed"]
    medians = steps.groupby("id")[names].median()
    for identity in medians.index:
        policy = frames.trial_of[str(identity)].resolved_policy()
        if policy is not None and policy.schedule:
            own = steps[steps["id"].eq(identity)]
            by_phase = own.groupby(own["index"].map(policy.phase_at))[names]
            counts = by_phase.size()
            medians.loc[identity] = by_phase.median().mul(counts, axis=0).sum(skipna=False) / counts.sum()
    return medians


def timed_steps(frames: Frames) -> pd.Series[int]:
    """Return the number of timed steps of each trial, as its record counts them."""
    return best_step.timed(frames.steps).groupby("id")["index"].nunique()


def _traffic(frames: Frames) -> pd.DataFrame:
    """Return the bytes that each trial sends between nodes in a step, by ledger, prediction and interfaces.

    A value is NaN if the record lacks its source.
    """
    between = (frames.bytes["link"] == "inter") & frames.bytes["phase"].isin(TRAINING)
    sizes = frames.bytes[["bytes", "headers"]].astype(float).where(between, 0)
    sent = frames.bytes[["id", "source", "node"]].assign(bytes=sizes["bytes"], packets=sizes.sum(axis=1))
    ledger, predicted = (sent[sent["source"] == source] for source in ("ledger", "predicted"))
    of_node = ledger.groupby(["id", "node"])["bytes"].sum()
    interfaces = frames.interfaces.set_index("id")
    headers = interfaces["tx_packets"] * interfaces["header_bytes"].astype(float)
    by_trial = interfaces["tx_bytes"].astype(float).groupby("id")
    sums = pd.DataFrame(
        {
            "sent_bytes": ledger.groupby("id")["bytes"].sum(),
            "predicted_bytes": predicted.groupby("id")["bytes"].sum(),
            "segment_bytes": ledger.groupby("id")["packets"].sum(),
            "interface_bytes": by_trial.sum(),
            "header_bytes": headers.groupby("id").sum(min_count=1),
            "egress_bytes": of_node.groupby("id").max().combine_first(by_trial.max()),
        }
    )
    return sums.div(timed_steps(frames), axis=0).reset_index(names="id")


def _losses(frames: Frames) -> pd.DataFrame:
    """Return each trial's mean loss of the first step, and its last validation.

    Of trials that validate only at their end (``validate_every = 0``), validations before step :data:`LEAST_STEPS` are
    left out.
    """
    steps = frames.steps
    first = steps[steps["index"] == steps.groupby("id")["index"].transform("min")]
    last = frames.validations.sort_values("step").groupby("id").tail(1)
    often = {identity for identity, trial in frames.trial_of.items() if trial.validate_every}
    last = last[last["id"].isin(often) | last["step"].ge(LEAST_STEPS)]
    names = {"loss": "validation_loss", "step": "validation_step"}
    last = last.assign(loss=last["loss"].where(np.isfinite(last["loss"].astype(float))))  # NaN if not finite
    losses = first.groupby("id")["loss"].mean().rename("first_loss").reset_index()
    return losses.merge(last[["id", *names]].rename(columns=names), on="id", how="left")


def records_of(derived: Derived, row: pd.Series) -> list[str]:
    """Return the ids of the trials behind a table's row, which are those of its configuration and setting.

    The list is empty for a row that no trial is behind, such as a row of numbers from the papers.
    """
    if isinstance(ids := row.get("records"), str):
        return ids.split()
    if not {"configuration", "where"} <= set(row.index):
        return []
    return derived.ids_by_place.get((row["configuration"], row["where"]), [])


def split(frames: Frames) -> pd.DataFrame:
    """Return the mean time of each part of a step, on the slowest rank of each timed step; one row per trial and part.

    Exposed communication that was not measured (peers) stays inside forward and backward.
    """
    slowest = slowest_steps(frames)
    parts = slowest[["id", "forward", "backward", "optimizer"]].copy()
    parts["other"] = slowest["total"] - slowest[["forward", "backward", "optimizer"]].sum(axis=1)
    parts["other"] -= best_step.before_training(slowest, "generate", "score")
    parts[["generate", "score"]] = slowest[["generate", "score"]].astype(float)
    for name in ("forward", "backward", "generate", "score"):
        parts[f"exposed in {name}"] = slowest[f"exposed_{name}"].astype(float)
        parts[name] -= parts[f"exposed in {name}"].fillna(0)
    means = parts.groupby("id").mean()
    means["other"] = means["other"].clip(lower=0)
    long = means.reset_index().melt(id_vars="id", var_name="part", value_name="seconds")
    return long.dropna(subset=["seconds"])


@dataclass(frozen=True, eq=False)
class StepSource:
    """Where seconds of steps come from besides a suite's own records: other records, or a model of a machine."""

    name: str  # of the other suite, or of the machine
    derived: Derived | None = None  # the other suite's records
    machine: Machine | None = None  # predicts steps (:mod:`impl.plan.step_time`)
    rate: float | None = None  # Mbit/s of the link that is modelled; None: the rate of each trial's link
    missing: str = ""  # why there are no records


@dataclass(frozen=True, eq=False)  # hashed by identity, so that functions of it can be cached
class Derived:
    """The tables of raw values, and the tables derived from them that figures share; each is computed once."""

    frames: Frames
    sources: tuple[StepSource, ...] = ()  # of seconds, before the suite's own

    @cached_property
    def trials(self) -> pd.DataFrame:
        """The metrics of :func:`trials`, and ``rates_differ``: whether the setting is one of :attr:`differing`."""
        table = trials(self.frames)
        return table.assign(rates_differ=table["setting"].isin(list(self.differing)))

    @cached_property
    def differing(self) -> dict[str, float]:
        """Settings whose links achieved different rates, each with the rates' relative spread.

        See :func:`report.data.speedups.rates_differ`.
        """
        return speedups.rates_differ(self.finished[self.finished["workload"] != "generate"])

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """Each trial with the baseline's trial of the same setting and seed (:func:`report.data.speedups.pairs`)."""
        return speedups.pairs(self.trials, is_baseline(self.trials))

    @cached_property
    def break_evens(self) -> pd.DataFrame:
        """The rates at which configurations break even (:func:`report.data.break_even.break_even`)."""
        return break_even.break_even(self.pairs)

    @cached_property
    def over_papers(self) -> pd.DataFrame:
        """Each trial with the trial of the paper's baseline, ``zero3-flat`` (:func:`report.data.speedups.pairs`)."""
        return speedups.pairs(self.trials, is_preset(self.trials, configuration.PAPERS_BASELINE))

    @cached_property
    def generations(self) -> pd.DataFrame:
        """One row for each timed generation of workload ``generate`` (:func:`report.data.decoding.generations`)."""
        return generations(self.frames)

    @cached_property
    def sent_errors(self) -> pd.DataFrame:
        """Errors of sent values, over all units: one row per trial, step, purpose and hop.

        ``hop`` is NaN for the error from end to end.  ``vnmse`` is the sum of squared errors over the sum of squared
        values.
        """
        errors = self.frames.communication_errors
        floats = dict.fromkeys(("hop", "squared_error", "squared_value", "cosine"), float)
        errors = errors[errors["unit"] == ""].astype(floats)
        errors = errors.assign(vnmse=errors["squared_error"] / errors["squared_value"])
        return self.trials[OF_TRIAL].merge(errors, on="id")

    @cached_property
    def compared(self) -> Comparison:
        """The suite's baseline, and the configurations that are compared with it."""
        trials, named_in_suite = self.finished, bool(self.finished["role"].isin(configuration.ROLES).any())
        names = [str(name) for name in trials[is_baseline(trials)]["configuration"].unique()]
        contrast = trials["role"].eq("contrast") if named_in_suite else ~trials["configuration"].isin(names)
        configurations = tuple(map(str, trials[contrast]["configuration"].unique()))
        return Comparison(listed(names), configurations, named_in_suite)

    @cached_property
    def ids_by_place(self) -> dict[tuple[str, str], list[str]]:
        """Sorted ids of the finished trials; keys are (configuration, description of the setting)."""
        ids: dict[tuple[str, str], list[str]] = defaultdict(list)
        columns = (self.finished[name] for name in ("configuration", "where", "id"))
        for name, where, identity in sorted(zip(*columns, strict=True)):
            ids[name, where].append(identity)
        return dict(ids)

    @property
    def finished(self) -> pd.DataFrame:
        """One row per finished trial, whether it trained or generated tokens (``Frames.finished``)."""
        return self.frames.finished

    @property
    def disturbed(self) -> frozenset[str]:
        """Ids of finished trials in which others took more than :data:`OTHERS_WITHIN` of the processors."""
        return frozenset(map(str, self.finished[self.finished["disturbed"].astype(bool)]["id"]))

    @property
    def mostly_disturbed(self) -> bool:
        """Whether more than half of the finished trials are disturbed, so that seconds are unreliable."""
        return 2 * len(self.disturbed) > len(self.finished)


derive = Derived  # of frames
