"""Computes metrics from raw records, as tables with one row per trial, or per trial and part of a step.

Formulas: docs/reference/metrics.md.
"""

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
from report.data.text import listed

TRAINING: Final = ("generate", "score", "forward", "backward", "step")  # phases of a step that trains
# Columns with the ratio of a lower bound to the step's time.
SHARES: Final = ("share", "schedule_share", "ideal_share", "processors_busy")
KEPT: Final = [
    "id", "strategy", "configuration", "place", "first", "setting", "where", "sweep", "occasion", "seed", "repeat",
    "disturbed", "nodes", "ranks_per_node", "tokens_per_rank", "rate_mbit", "achieved_mbit", "link_kind",
]  # fmt: skip
"""Columns of a figure's table that identify the trial of a row."""
OF_TRIAL: Final = ["id", "strategy", "configuration", "place", "first", "setting", "where", "seed", "repeat"]


def trials(frames: Frames) -> pd.DataFrame:
    """Return the metrics of every finished trial that trained, one row per trial.

    Times are in seconds and sizes in bytes, both per step.  The table has the columns of ``frames.finished``, the
    columns that ``report/quantities.csv`` defines, and these:

    * ``alone``: whether computation was measured by itself, on the model without messages;
    * ``egress_bytes``: bytes that the busiest node sends to other nodes;
    * ``m_bytes``: M times the number of micro-batches of a step, where M are the bytes that one all-gather of the whole
      model in 16 bits sends between nodes;
    * ``tflops``: model TFLOP/s of a rank; NaN if the model's FLOPs are not known or the workload is not ``train``;
    * ``first_loss``: mean loss of the first step;
    * ``validation_step``: number of training steps before the last validation.

    ``m_bytes`` and ``first_loss`` are NaN if the workload is not ``train``; ``m_bytes`` is also NaN on a single node.
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
    model = ["nodes", "ranks_per_node", "shape", "accumulation"]  # libraries such as DDP have no units
    table["numel"] = table.groupby(model)["numel"].transform("max")
    table["m_bytes"] = (2.0 * table["numel"] * (table["nodes"] - 1)).replace(0.0, np.nan)
    table["m_bytes"] *= table["accumulation"]
    # Both mean nothing for rlhf, which has several models, and whose loss lies around 0.
    table.loc[table["workload"] != "train", ["m_bytes", "first_loss"]] = np.nan
    rows = zip(table["id"], table["step_seconds"], table["processes"], strict=True)
    table["tflops"] = [_tflops(frames.trial_of[name], seconds, ranks) for name, seconds, ranks in rows]
    return table.copy()  # in one piece: pandas warns of tables to which many columns were added


def _tflops(trial: Trial, seconds: float, ranks: int) -> float:
    """Return the model TFLOP/s of one rank, if a step on ``ranks`` ranks takes ``seconds``.

    Returns NaN if the workload is not ``train``, or if the FLOPs of the model are not known.  They are known for the
    models that the harness names (``PRESETS``), with the preset's own arguments or with others.
    """
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
    """Return the slowest rank's row of ``frames.steps`` for each timed step of each trial.

    The new column ``exposed`` holds the seconds in which this rank waited for messages in the whole step.
    """
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
    """Return the ``total`` and ``exposed`` seconds of a typical step of each trial, by id of the trial.

    ``exposed`` are the seconds in which the rank waited for messages.  Both numbers are medians over the timed steps in
    ``steps``.  If the trial has a schedule, its policy changes from phase to phase of training, and a median over all
    steps would describe only one phase.  In this case a median is computed for each phase, and the value is the mean of
    these medians, weighted by the phases' numbers of steps.
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
    """Return the number of timed training steps of each trial, by id; steps that decode are not counted."""
    return best_step.timed(frames.steps).groupby("id")["index"].nunique()


def _traffic(frames: Frames) -> pd.DataFrame:
    """Return the bytes that each trial sends between nodes in a step, one row per trial.

    The ranks count the bytes of their messages while sending (their ledgers); network interfaces count, too.  The
    columns are:

    * ``sent_bytes``: bytes of all ranks, by the ledgers;
    * ``segment_bytes``: ``sent_bytes`` plus the headers that the packets of a real network would add;
    * ``predicted_bytes``: bytes that were predicted for all ranks;
    * ``interface_bytes``: bytes that the network interfaces of all nodes counted;
    * ``header_bytes``: bytes of headers in ``interface_bytes``;
    * ``egress_bytes``: bytes of the busiest node, by the ledgers or, without ledgers, by the interfaces.

    A value is NaN if the record lacks the ledgers, predictions or counters from which it is computed.
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
    """Return each trial's losses: ``first_loss``, ``validation_loss`` and ``validation_step``, one row per trial.

    ``first_loss`` is the mean over ranks in the first step.  ``validation_loss`` is the loss of the last validation,
    NaN if this loss is not finite, and ``validation_step`` the number of steps before the last validation.
    A trial with ``validate_every = 0`` validates only at its end.  If such a trial has fewer than :data:`LEAST_STEPS`
    steps, its ``validation_loss`` and ``validation_step`` are NaN.
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
    """Return the ids of the trials from which ``row``, a row of a table's data, was computed.

    If the row has a column ``records``, this column lists the ids.  Otherwise they are the ids of all finished trials
    of the row's configuration and setting.  The list is empty for rows that are not about trials, such as published
    numbers.
    """
    if isinstance(ids := row.get("records"), str):
        return ids.split()
    if not {"configuration", "where"} <= set(row.index):
        return []
    return derived.ids_by_place.get((row["configuration"], row["where"]), [])


def split(frames: Frames) -> pd.DataFrame:
    """Return the mean seconds of each part of a step (forward, backward and so on), one row per trial and part.

    For each timed step, the seconds are those of its slowest rank; the mean is over these steps.  The parts add up to
    the step.  For libraries such as DDP, the time in which ranks wait for messages is not measured, so the parts
    ``forward`` and ``backward`` contain this time.
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
    """A source of step times other than a suite's own records, from which net speed-ups can be computed.

    The source is either another suite's records (``derived``), or a machine file, which predicts steps (``machine``).
    """

    name: str  # name of the other suite, or of the machine
    derived: Derived | None = None  # the other suite's records
    machine: Machine | None = None  # the machine whose steps are predicted (:mod:`impl.plan.step_time`)
    rate: float | None = None  # Mbit/s of the link in predictions; None: the rate of each trial's link
    missing: str = ""  # clause that says why the other suite's records were not found; empty if they were


@dataclass(frozen=True, eq=False)  # hashed by identity, so that functions of it can be cached
class Derived:
    """Holds the raw values of a suite's records as tables, and the tables that figures and tables of a page need.

    The latter are computed from the raw values; each is computed once, when it is first used.
    """

    frames: Frames
    # Where net speed-ups take the seconds of a step from, the preferred source first.  The suite's own records are the
    # last source, and are not listed here.
    sources: tuple[StepSource, ...] = ()

    @cached_property
    def trials(self) -> pd.DataFrame:
        """The metrics of :func:`trials`, one row per trial that trained, and a column ``rates_differ``.

        ``rates_differ`` says whether the link was faster for some configurations of the trial's setting (cluster,
        model, batch and so on) than for others (:attr:`differing`).
        """
        table = trials(self.frames)
        return table.assign(rates_differ=table["setting"].isin(list(self.differing)))

    @cached_property
    def differing(self) -> dict[str, float]:
        """The spread of the link's rate in each setting whose link was faster for some configurations than for others.

        Keys are hashes of settings (cluster, model, batch and so on).  A spread of 0.2 means that the highest of the
        configurations' median rates is 20 % above the lowest.  Settings whose rates agree are left out
        (:func:`report.data.speedups.rates_differ`).
        """
        return speedups.rates_differ(self.finished[self.finished["workload"] != "generate"])

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """Pairs of a trial and the baseline's trial under equal conditions (:func:`report.data.speedups.pairs`)."""
        return speedups.pairs(self.trials, is_baseline(self.trials))

    @cached_property
    def break_evens(self) -> pd.DataFrame:
        """The link rates at which configurations are as fast as the baseline (:mod:`report.data.break_even`)."""
        return break_even.break_even(self.pairs)

    @cached_property
    def over_papers(self) -> pd.DataFrame:
        """Pairs of a trial and a trial of ``zero3-flat``, the ZeRO++ paper's baseline, under equal conditions."""
        return speedups.pairs(self.trials, is_preset(self.trials, configuration.PAPERS_BASELINE))

    @cached_property
    def generations(self) -> pd.DataFrame:
        """One row for each timed generation of workload ``generate`` (:func:`report.data.decoding.generations`)."""
        return generations(self.frames)

    @cached_property
    def sent_errors(self) -> pd.DataFrame:
        """Errors of sent gradients and weights, over all units: one row per trial, step, purpose, hop and ``repeated``.

        Units are the sets of parameters that are sent together.

        * ``purpose``: ``gradients``, ``weights`` or, for weights that are gathered from hpZ's copy, ``secondary``;
        * ``hop``: the number of the hop (exchange of a reduction) that causes the error; NaN in the row with the error
          from end to end, over all hops together;
        * ``repeated``: usually 1; 8 if the mean of 8 repeated reductions was compared with the exact mean;
        * ``vnmse``: the sum of squared errors, divided by the sum of squared values.
        """
        errors = self.frames.communication_errors
        floats = dict.fromkeys(("hop", "squared_error", "squared_value", "cosine"), float)
        errors = errors[errors["unit"] == ""].astype(floats)
        errors = errors.assign(vnmse=errors["squared_error"] / errors["squared_value"])
        return self.trials[OF_TRIAL].merge(errors, on="id")

    @cached_property
    def compared(self) -> Comparison:
        """The printed names of the suite's baseline and of the configurations that are compared with the baseline."""
        trials, named_in_suite = self.finished, bool(self.finished["role"].isin(configuration.ROLES).any())
        names = [str(name) for name in trials[is_baseline(trials)]["configuration"].unique()]
        contrast = trials["role"].eq("contrast") if named_in_suite else ~trials["configuration"].isin(names)
        configurations = tuple(map(str, trials[contrast]["configuration"].unique()))
        return Comparison(listed(names), configurations, named_in_suite)

    @cached_property
    def ids_by_place(self) -> dict[tuple[str, str], list[str]]:
        """The sorted ids of the finished trials of each configuration in each setting.

        Keys are (configuration, description of the setting), where a setting is the cluster, model, batch and so on.
        """
        ids: dict[tuple[str, str], list[str]] = defaultdict(list)
        columns = (self.finished[name] for name in ("configuration", "where", "id"))
        for name, where, identity in sorted(zip(*columns, strict=True)):
            ids[name, where].append(identity)
        return dict(ids)

    @property
    def finished(self) -> pd.DataFrame:
        """One row per finished trial, both of trials that trained and of trials that decoded (``Frames.finished``)."""
        return self.frames.finished

    @property
    def disturbed(self) -> frozenset[str]:
        """Ids of the disturbed trials.

        A trial is disturbed if other programs and the hypervisor together took more than 5 % of the processors' time
        (:attr:`harness.records.trial_record.Record.disturbed`).
        """
        return frozenset(map(str, self.finished[self.finished["disturbed"].astype(bool)]["id"]))

    @property
    def mostly_disturbed(self) -> bool:
        """Whether more than half of the finished trials are disturbed, so that seconds are unreliable."""
        return 2 * len(self.disturbed) > len(self.finished)


derive = Derived  # of frames
