"""Turns plans and records into rows of plain values, which tables, JSON and CSV are made from.  No torch."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from harness.csv_cells import safe_cell
from harness.records.memory_parts import on_device, on_host
from harness.records.trial_record import Record, slowest_seconds
from harness.runs.feasibility import Forecast
from harness.runs.trial_step import predict
from harness.suites.labels import look_up, varying_paths
from harness.suites.repeat_order import BASELINE, setting_of
from harness.suites.suite import Suite
from impl.plan.step_time import Machine, StepTime

_MODELLED: Final = (
    "seconds", "low_seconds", "high_seconds", "compute_seconds", "wire_seconds", "exposed_seconds",
    "critical", "tokens_per_second", "tflops", "speed_up", "basis",
    "fits_low_seconds", "fits_high_seconds", "fits_low_speed_up", "fits_high_speed_up",
)  # fmt: skip


def rows(forecasts: Sequence[Forecast], machine: Machine | None = None) -> list[dict[str, Any]]:
    """Return a row for each trial: the trial's setting, the fields that vary in the suite, and the predictions.

    Some numbers depend on a user's own modules that the suite names.  If such a module was not imported, these numbers
    are None (:func:`not_imported`).  If a codec was not imported, the ids of all trials are None too.

    Bytes that are sent are counted for one optimizer step or one generation.  They are None where they cannot be
    predicted, such as for peers (other engines: DDP, FSDP2, DeepSpeed, or a single process):

    - ``inter_bytes`` and ``intra_bytes``: bytes that all ranks together send between nodes and inside nodes.
    - ``egress_bytes``: bytes that one node sends to the other nodes.
    - ``wire_seconds``: the time that ``egress_bytes`` take at the link's rate.
    - ``least_seconds``: ``wire_seconds`` times the number of all steps.

    Bytes that are held are counted for the rank that holds the most:

    - ``memory_bytes`` on the device and ``host_bytes`` in host memory, without activations.
    - ``secondary_frames`` and ``secondary_wide``: bytes of hpZ's copy of the weights.  ``secondary_frames`` are the
      bytes of a copy that is kept encoded, and ``secondary_wide`` those of a copy that is kept in 16 bits.

    With a ``machine``, each row also has predictions of a step on this machine.  Their keys are listed here without
    their common beginning ``modelled_``.  All of them are None for a trial whose step cannot be predicted, such as a
    trial of a peer, a trial that runs our policy inside FSDP2 or DDP, or a trial that generates
    (:func:`~harness.runs.trial_step.step_of_trial`).

    - ``seconds``: the duration of a step.
    - ``low_seconds`` and ``high_seconds``: ``seconds / exp(2 * spread)`` and ``seconds * exp(2 * spread)``.  ``spread``
      is the relative standard deviation of measured steps around the machine's predictions.  Both are None if the
      machine has no ``spread``.
    - ``compute_seconds``, ``wire_seconds`` and ``exposed_seconds``: how long a step computes, sends between nodes,
      and waits for messages.
    - ``critical``: the resource that is busy longest, ``link`` or ``processor``.
    - ``tokens_per_second``: tokens of all ranks together.
    - ``tflops``: TFLOP/s of one rank, at 6 operations for each parameter and token, or 8 with activation checkpointing.
    - ``speed_up``: the seconds of ZeRO-3's step, divided by ``seconds``.  ZeRO-3's step is that of the ZeRO-3 trial in
      the same setting; without such a trial, ``speed_up`` is None.
    - ``basis``: a word for the origin of the prediction, such as ``calibrated``
      (:meth:`impl.plan.step_time.Machine.basis`).
    - ``fits_low_seconds`` and ``fits_high_seconds``: the least and the largest ``seconds`` over all fits of the
      machine.  A fit is one set of costs (such as seconds per operation) in the model of a step.  All fits of a machine
      agree equally well with what was measured on it.  None for a machine with a single fit.
    - ``fits_low_speed_up`` and ``fits_high_speed_up``: the least and the largest ``speed_up`` over all fits.
    """
    varying = varying_paths([forecast.trial.canonical() for forecast in forecasts])
    # Units are padded to a multiple of the block sizes of all codecs of the suite.  This number is part of each id.
    ids_unknown = any(role.startswith("codec") for forecast in forecasts for role in forecast.unread)
    table = [_row(forecast, varying, ids_unknown=ids_unknown) for forecast in forecasts]
    if machine is None:
        return table
    by_fit = [_predicted(forecasts, fit) for fit in machine.fits]
    for row, forecast, predictions in zip(table, forecasts, zip(*by_fit, strict=True), strict=True):
        modelled = _modelled(forecast, machine, predictions)
        row |= {f"modelled_{name}": value for name, value in modelled.items()}
    return table


def undecided(row: Mapping[str, Any]) -> bool:
    """Return whether the machine's fits disagree on whether a row's trial is faster than ZeRO-3.

    A machine file may have several fits.  Each fit is a set of costs, such as seconds per operation, and all fits agree
    equally well with the machine's measurements.  Each fit predicts its own speed-up of the trial over ZeRO-3.  The
    fits disagree if the smallest of these speed-ups is below 1 and the largest above 1.

    ``row`` comes from :func:`rows`.
    """
    low, high = row.get("modelled_fits_low_speed_up"), row.get("modelled_fits_high_speed_up")
    return low is not None and high is not None and bool(low < 1 < high)


def _predicted(forecasts: Sequence[Forecast], machine: Machine) -> list[tuple[StepTime | None, float | None]]:
    """Predict each trial's step on a machine, and the trial's speed-up over ZeRO-3 in the same setting.

    The setting is everything but the configuration, such as model, batch and cluster.  The costs, such as seconds per
    operation, are read from the fields of ``machine``.  The machine may have other sets of costs in its field
    ``alternatives``; these are not used.

    Returns:
        For each trial, the pair (step, speed-up).  The step is None if it cannot be predicted.  The speed-up is None if
        the trial's step cannot be predicted, or if ``forecasts`` has no predictable step of ZeRO-3 in the same setting.
    """
    steps = [predict(f.trial, f.step, f.egress, machine) for f in forecasts]
    base = {
        setting_of(forecast.trial): step.seconds
        for forecast, step in sorted(
            zip(forecasts, steps, strict=True), key=lambda pair: -len(pair[0].trial.changes)
        )
        # If a setting has several baselines, the one with the fewest changes comes last in this order, and stays.
        if step is not None and forecast.trial.strategy == BASELINE
    }
    bases = [base.get(setting_of(forecast.trial)) for forecast in forecasts]
    return [
        (step, None if step is None or base is None else base / step.seconds)
        for step, base in zip(steps, bases, strict=True)
    ]


_MISSING: Final = {  # by role of a suite's own object, the numbers that are unknown until it is imported
    "model": "parameters, bytes, memory and time",
    "optimizer": "memory",
    "corpus": "whether the data fit",
    "tokenizer": "whether the data fit",
    "method": "bytes and time",
    "gather_method": "bytes and time",
    "strategy": "bytes and time",
    "codec": "padding, bytes, memory, time and trial ids",
}


def not_imported(forecasts: Sequence[Forecast]) -> str:
    """Return a line that says which numbers of a plan are missing because the user's own modules were not imported.

    Returns an empty text if no module is missing.
    """
    pairs = dict.fromkeys(pair for forecast in forecasts for pair in forecast.unread.items())
    names = ((role.partition(" ")[0], name) for role, name in pairs)
    parts = list(dict.fromkeys(f"{_MISSING[kind]} ({kind} {name})" for kind, name in names))
    if not parts:
        return ""
    return (
        f"Not known, because plan imports no module of a suite: {'; '.join(parts)}. To import and call these "
        "modules, add --import."
    )


def _modelled(
    forecast: Forecast, machine: Machine, predictions: Sequence[tuple[StepTime | None, float | None]]
) -> dict[str, Any]:
    """Return the predictions of one trial's step on a machine, as a dict with the keys of :data:`_MODELLED`.

    All values are None if the step could not be predicted.

    Args:
        forecast: The forecast of the trial.
        machine: The machine.
        predictions: One pair (predicted step, speed-up over ZeRO-3) for each of the machine's sets of costs, such as
            seconds per operation.  The pair for the machine's own costs comes first, before those for its field
            ``alternatives``.
    """
    trial, (step, speed_up) = forecast.trial, predictions[0]
    tokens = trial.tokens_per_rank * trial.accumulation
    operations = (8 if trial.activation_checkpointing else 6) * (forecast.parameters or 0) * tokens
    if step is None:
        return dict.fromkeys(_MODELLED)
    low, high = (step.seconds * math.exp(sigma * step.spread) if step.spread else None for sigma in (-2, 2))
    intervals: list[float | None] = [None] * 4
    if len(predictions) > 1:
        seconds = [other.seconds for other, _ in predictions if other is not None]
        speed_ups = [other for _, other in predictions if other is not None]
        intervals = [min(seconds), max(seconds), min(speed_ups, default=None), max(speed_ups, default=None)]
    values = (
        step.seconds, low, high, step.compute, step.wire,
        None if math.isnan(step.exposed) else step.exposed, step.critical,
        tokens * trial.topology().world / step.seconds, operations / step.seconds / 1e12,
        speed_up, machine.basis(known=step.calibrated), *intervals,
    )  # fmt: skip
    return dict(zip(_MODELLED, values, strict=True))


def _row(forecast: Forecast, varying: Sequence[str], *, ids_unknown: bool) -> dict[str, Any]:
    trial, memory, seconds = forecast.trial, forecast.memory, forecast.wire_seconds
    canonical = trial.canonical()
    unplanned = any(role.startswith(("model", "codec")) for role in forecast.unread)
    return {
        "id": None if ids_unknown else trial.id,
        "strategy": trial.strategy,
        "model": trial.model.name,
        "nodes": trial.cluster.nodes,
        "ranks_per_node": trial.cluster.ranks_per_node,
        "tokens_per_rank": trial.tokens_per_rank,
        "rate_mbit": trial.cluster.rate,
        "repeat": trial.repeat,
        **{path: look_up(canonical, path) for path in varying},
        "parameters": forecast.parameters,
        "padding": None if unplanned else forecast.padding,
        "inter_bytes": forecast.inter,
        "intra_bytes": forecast.intra,
        "egress_bytes": forecast.egress,
        "wire_seconds": seconds,
        "least_seconds": None if seconds is None else seconds * (trial.warmup + trial.steps),
        "memory_bytes": None if memory is None else sum(on_device(memory).values()),
        "host_bytes": None if memory is None else sum(on_host(memory).values()),
        "secondary_frames": forecast.secondary and forecast.secondary[0],
        "secondary_wide": forecast.secondary and forecast.secondary[1],
        "copied_bytes": None if unplanned else forecast.copied,
        "runs_here": not forecast.problems,
        "why": "; ".join(forecast.reasons),
    }


def plan_json(suite: Suite, forecasts: Sequence[Forecast], table: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a suite's plan as a dictionary, for JSON.

    - ``suite`` and ``question``: the suite's name and question.
    - ``stated_time``: the suite's text on how long it takes.
    - ``not_imported``: the line on missing numbers (:func:`not_imported`).
    - ``trials``: for each trial its row of ``table`` (:func:`rows`), with all fields of the trial under the key
      ``trial``.
    """
    trials = [row | {"trial": f.trial.canonical()} for row, f in zip(table, forecasts, strict=True)]
    for trial in [] if suite.ids_known else trials:
        if "align" in trial["trial"]["policy"]:
            trial["trial"]["policy"]["align"] = None
    return {
        "suite": suite.name,
        "question": suite.question,
        "stated_time": suite.time,
        "not_imported": not_imported(forecasts),
        "trials": trials,
    }


def record_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a row for each record: the fields that vary between the records, its main measurements and its outcome."""
    varying = [path for path in varying_paths([record.trial for record in records]) if path != "strategy"]
    return [
        {
            "id": record.id,
            "strategy": record.trial.get("strategy"),
            **{path: look_up(record.trial, path) for path in varying},
            "repeat": record.trial.get("repeat"),
            "sweep": record.sweep,
            "padding": record.padding,
            **_summary(record),
            "outcome": "ok" if record.failure is None else record.failure.kind,
            "why": "" if record.failure is None else record.failure.message,
        }
        for record in records
    ]


_TRAINING: Final = ("forward", "backward", "step")  # phases that a training step has in the ledger


def _summary(record: Record) -> dict[str, Any]:
    """Return the main numbers of a record by name; a number that was not measured is None.

    - ``step_seconds``: the duration of a step on its slowest rank, as the median over the timed steps.  For a trial
      that generates, the duration of a generation on the first rank, as the median over the timed generations.
    - ``exposed_seconds``: seconds of a step or generation in which the first rank waits for messages, as the median
      over the steps or generations.
    - ``inter_bytes``: bytes that all ranks sent between nodes in a step or generation, from the ledger.  Without a
      ledger, the bytes that the nodes' interfaces counted; ``counted_by_interfaces`` is then true.
    - ``rate_mbit``: the rate of the link between nodes in Mbit/s.  It is the median of the rates that probes measured
      after the trial.  Without probes, it is the median of the rates that the link's calibration measured.
    - ``loss``: the loss of the last step, as the mean over ranks.  None for a trial that generates.
    """
    timed = [[step for step in rank.steps if not step.warmup] for rank in record.ranks]
    tokens = [[token for token in rank.tokens if not token.warmup] for rank in record.ranks]
    seconds, waited, sent = list[float](), list[float](), list[int]()
    by_interfaces, loss, count = False, None, len(timed[0]) if timed else 0
    if record.ranks and tokens[0]:
        generations = [list(group) for _, group in itertools.groupby(tokens[0], lambda token: token.step)]
        count, seconds = len(generations), [sum(token.seconds for token in each) for each in generations]
        if tokens[0][0].exposed is not None:
            waited = [sum(token.exposed or 0.0 for token in generation) for generation in generations]
        sent = [token.inter_bytes for token in itertools.chain(*tokens) if token.inter_bytes is not None]
    elif record.ranks and timed[0]:
        seconds = slowest_seconds(record)
        if timed[0][0].exposed is not None:
            waited = [step.exposed or 0.0 for step in timed[0]]
        ledgers = [rank.ledger for rank in record.ranks if rank.ledger is not None]
        # In workload rlhf, steps also decode.  In other workloads, messages of other phases belong to evaluations.
        decodes = record.trial.get("workload") == "rlhf"
        sent = [
            sum(row.bytes for row in ledger if row.link == "inter" and (decodes or row.phase in _TRAINING))
            for ledger in ledgers
        ]
        if not ledgers and record.interfaces:
            sent, by_interfaces = [counters.tx_bytes for counters in record.interfaces], True
        loss = statistics.fmean(rank.steps[-1].loss for rank in record.ranks)
    rates = [] if record.link is None else record.link.probed_mbit or record.link.calibrated_mbit
    return {
        "step_seconds": statistics.median(seconds) if seconds else None,
        "exposed_seconds": statistics.median(waited) if waited else None,
        "inter_bytes": sum(sent) / count if sent else None,
        "counted_by_interfaces": by_interfaces,
        "rate_mbit": statistics.median(rates) if seconds and rates else None,
        "loss": loss,
    }


def as_csv(table: Sequence[dict[str, Any]]) -> str:
    """Return rows as CSV with a header line.

    None becomes an empty cell.  Lists and dictionaries become JSON.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    for row in table:
        cells = {name: json.dumps(v) if isinstance(v, dict | list) else v for name, v in row.items()}
        writer.writerow({name: safe_cell(cell) for name, cell in cells.items()})
    return text.getvalue()
