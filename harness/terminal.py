"""Prints plans, records and the findings of ``zeropp doctor`` as tables in a terminal.

This module only chooses columns and words.  The values come from :mod:`harness.plan_rows`, and from the forecasts
(:class:`harness.runs.feasibility.Forecast`), which predict what trials send and hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness import terminal_table
from harness.cluster.link import PACED
from harness.errors import one_line
from harness.plan_rows import record_rows, rows, undecided
from harness.records.confidence_intervals import FEWEST
from harness.records.trial_record import Record
from harness.runs.feasibility import Forecast, gib
from harness.runs.progress import outcome
from harness.suites import labels
from harness.suites.answering_quantity import LEAST_STEPS
from harness.suites.labels import at, counted, flatten, varying_paths
from harness.suites.peers import PEERS
from harness.suites.suite import Suite
from harness.terminal_table import BYTES, Column, filled
from impl.plan.step_time import Machine

_NOTES: Final = (
    "between nodes, inside nodes: bytes that all ranks together send in an optimizer step (or a generation); "
    "out of a node: bytes that one node sends to the others; on the wire: the seconds that these bytes take at the "
    "link's rate; memory/rank: without activations."
)
_BASES: Final = {  # what a modelled step rests on, by the nature of the machine
    "calibration": "the basis of a modelled step is 'calibrated' if model and batch lie inside the range that was "
    "measured on the machine, else 'transferred'",
    "published steps": "the basis of a modelled step is 'fitted' if the batch lies inside the range of the "
    "published steps, else 'transferred'",
    "data sheet": "modelled steps rest on data sheets and assumptions, and nothing was measured",
}
_UNCALIBRATED: Final = "modelled steps rest on a machine that was not calibrated"
_SPEED_UP: Final = "speed-up is over ZeRO-3 in the same setting."
_ONE_FIT: Final = "The file states one fit; speed-ups are without an interval."
_FITS: Final = (
    "In parentheses: the interval over {count} fits of the machine file, which agree equally well with its "
    "measurements or sources."
)
_UNDECIDED: Final = "?: the interval includes 1, so that the machine file does not tell which is faster."
_WHOLE: Final = "--json and --csv print all of them"


def _interval(row: Mapping[str, Any], quantity: str, form: str) -> str:
    """Return the uncertainty of a predicted quantity as text, such as `` (0.12 to 0.15)``.

    A machine file may hold several fits: sets of costs that agree equally well with the machine's measurements.  The
    text has the smallest and the largest value that the fits predict.  The text is empty if there is only one fit, or
    if both values are equal.

    Args:
        row: A row of a plan.
        quantity: The predicted quantity, ``seconds`` or ``speed_up``.
        form: A format specification, such as ``.2f``.
    """
    low, high = (row.get(f"modelled_fits_{end}_{quantity}") for end in ("low", "high"))
    return terminal_table.interval(low, high, form)


_PLANNED: Final = (
    Column("modelled_seconds", "step, modelled", ".3g", "s", mark=lambda row: _interval(row, "seconds", ".3g")),
    Column(
        "modelled_speed_up", "speed-up", ".2f", rank=1,
        mark=lambda row: _interval(row, "speed_up", ".2f") + (" ?" if undecided(row) else ""),
    ),
    Column("modelled_tokens_per_second", "tokens", ",.0f", "/s", rank=3),
    Column("modelled_tflops", "speed", ".3g", "TFLOPS/rank", rank=4),
    Column("modelled_basis", "basis", rank=2),
    Column("parameters", form=",d", rank=3, mark=lambda row: labels.pad_mark(row["padding"] or 0.0)),
    Column("inter_bytes", "between nodes", BYTES, "/step"),
    Column("intra_bytes", "inside nodes", BYTES, "/step", rank=4),
    Column("egress_bytes", "out of a node", BYTES, "/step", rank=5),
    Column("wire_seconds", "on the wire", ".3f", "s/step", rank=1),
    Column("memory_bytes", "memory/rank", BYTES, rank=2),
    Column("secondary_frames", "hpZ copy as frames", BYTES, rank=6),
    Column("secondary_wide", "hpZ copy in 16 bits", BYTES, rank=7),
    Column("host_bytes", "on the host", BYTES, rank=2),
    Column("copied_bytes", "to and from the host", BYTES, "/step", rank=3),
)  # fmt: skip


def _mark(row: Mapping[str, Any]) -> str:
    return labels.pad_mark(row["padding"]) + (f" {labels.INTERFACES}" if row["counted_by_interfaces"] else "")


_MEASURED: Final = (
    Column("repeat", rank=1),
    Column("sweep", form="d", rank=2),
    Column("step_seconds", "step", ".4f", "s"),
    Column("exposed_seconds", "exposed", ".4f", "s", rank=4),
    Column("inter_bytes", "between nodes", BYTES, "/step", rank=3, mark=_mark),
    Column("rate_mbit", "rate", ".4g", "Mbit/s", rank=5),
    Column("loss", "loss", ".4f"),
    Column("outcome"),
)


def plan(suite: Suite, forecasts: Sequence[Forecast], out: Console, machine: Machine | None = None) -> None:
    """Print a suite's plan: a table, notes on its columns, and the reasons why trials cannot run here.

    The table has a row for each combination of the suite's settings; trials that differ only in repeat or seed share
    the row.  ``forecasts`` has a forecast for each trial: what the trial is predicted to send and hold, and why it
    cannot run.  With a ``machine``, the table also shows the seconds of a step that are predicted for this machine.
    """
    merged = [(f.trial.model_copy(update={"repeat": 0, "seed": 0}), f) for f in reversed(forecasts)]
    varying = varying_paths([trial.canonical() for trial, _ in merged])
    orders = {path: list(dict.fromkeys(at(f.trial.canonical(), path) for f in forecasts)) for path in varying}
    shown = sorted(  # by the fields that vary; values are ordered as they first appear in the suite
        {trial.id: forecast for trial, forecast in merged}.values(),
        key=lambda forecast: [
            order.index(at(forecast.trial.canonical(), path)) for path, order in reversed(orders.items())
        ],
    )
    say = partial(terminal_table.say, out=out)
    say(f"{suite.name}: {suite.question}")
    count = f"{counted(len(forecasts), 'trial')}: {_combinations(suite, len(shown))} x {suite.repeats}"
    say(f"{count}. Stated time: {suite.time}.")
    if suite.merged:
        say(
            f"Merged, because they equal another combination, {len(suite.merged)}: {'; '.join(suite.merged)}."
        )
    peers = (forecast.trial.strategy for forecast in shown if forecast.trial.strategy in PEERS)
    about_peers = (f"{name}: {PEERS[name].says.replace('`', '')}" for name in peers)
    findings = (
        str(finding) for forecast in shown for finding in forecast.findings if finding.kind != "honoured"
    )
    for line in dict.fromkeys([*suite.left_out, *about_peers, *findings]):
        say(line)
    reasons = list(dict.fromkeys(reason for forecast in shown for reason in forecast.reasons))
    settings = [Column(path, always=True) for path in varying or ["strategy"]]
    columns = [*settings, *_PLANNED, Column("runs here", always=bool(reasons))]
    table = [
        row | {"runs here": _outcome(forecast, reasons)}
        for row, forecast in zip(rows(shown, machine), shown, strict=True)
    ]
    terminal_table.show(table, columns, out, whole=_WHOLE)
    say(_NOTES)
    if machine is not None:
        nature = machine.nature or ("calibration" if machine.host else "")
        basis = _BASES.get(nature, _UNCALIBRATED)
        say(f"On {machine.name} ({machine.source}): {basis}; {_SPEED_UP}")
        say(_FITS.format(count=len(machine.fits)) if machine.alternatives else _ONE_FIT)
        say(_UNDECIDED if any(map(undecided, table)) else "")
    say(labels.pad_note(forecast.padding for forecast in shown))
    for number, reason in enumerate(reasons, 1):
        stopped = [forecast for forecast in shown if reason in forecast.reasons]
        kind = "cannot run here" if stopped[0].problems else _outcome(stopped[0])
        say(f"{number}: {kind} ({len(stopped)} of {len(shown)} combinations): {one_line(reason)}")
    for why in dict.fromkeys(
        forecast.paced for forecast in shown if forecast.paced and not forecast.problems
    ):
        say(PACED.format(f"no namespaces ({one_line(why)})"))
    say(_too_short(forecasts))


def _combinations(suite: Suite, rows: int) -> str:
    """Return, as text, how many combinations of settings a suite has, and with how many seeds.

    For a suite of 4 combinations, the text is

    - ``4 combinations`` if each runs with one seed;
    - ``4 combinations x 6 seeds`` if each runs with the same 6 seeds;
    - ``4 combinations, 20 with all their seeds,`` if their numbers of seeds differ, for example 6 + 6 + 6 + 2 = 20.

    Args:
        suite: The suite.
        rows: Number of its combinations, without regard to the seed.
    """
    count, seeds = counted(rows, "combination"), len({trial.seed for trial in suite.combinations})
    if len(suite.combinations) == rows:
        return count
    if len(suite.combinations) != rows * seeds:
        return f"{count}, {len(suite.combinations)} with all their seeds,"
    return f"{count} x {counted(seeds, 'seed')}"


def _too_short(forecasts: Sequence[Forecast]) -> str:
    """Return a sentence if a suite's validation losses cannot be compared, for lack of steps or of seeds.

    Returns an empty text if there are enough steps and enough seeds, or if no trial measures a validation loss.
    """
    validated = [f.trial for f in forecasts if f.trial.validate_every is not None]
    if not validated:
        return ""
    seeds = len({trial.seed for trial in validated})
    steps = min(trial.warmup + trial.steps for trial in validated)
    short = [f"{steps} steps ({LEAST_STEPS} are needed)"] if steps < LEAST_STEPS else []
    short += [f"{counted(seeds, 'seed')} ({FEWEST} are needed)"] if seeds < FEWEST else []
    return f"Too short for a verdict on losses: {' and '.join(short)}." if short else ""


def _outcome(forecast: Forecast, reasons: Sequence[str] = ()) -> str:
    """Return the text of a plan's column "runs here" for one trial, for example ``yes`` or ``no: 1, 3``.

    The text is ``yes`` if the trial can run, and ``no`` if it cannot run here.  If a failure is recorded instead of a
    run, the text names the kind of the failure, for example ``over its limit`` for memory.  The numbers say which texts
    of ``reasons``, counted from 1, are reasons of this trial.
    """
    kind = "yes" if forecast.failure is None else forecast.failure.kind
    word = "no" if forecast.problems else "over its limit" if kind == "memory" else kind
    numbers = ", ".join(str(reasons.index(reason) + 1) for reason in forecast.reasons if reason in reasons)
    return f"{word}: {numbers}" if numbers else word


def records(measured: Sequence[Record], out: Console, folder: Path) -> None:
    """Print the records of a results folder, a row for each, then the failures of trials."""
    varying = [path for path in varying_paths([record.trial for record in measured]) if path != "strategy"]
    table, settings = record_rows(measured), [Column(path, always=True) for path in varying]
    columns = [Column("id", always=True, whole=True), Column("strategy"), *settings, *_MEASURED]
    terminal_table.show(table, columns, out, whole=_WHOLE)
    terminal_table.say(labels.pad_note(record.padding for record in measured), out)
    by_interfaces = any(row["counted_by_interfaces"] for row in table)
    terminal_table.say(labels.INTERFACES_IN_WORDS if by_interfaces else "", out)
    for record in measured:
        if record.failure is not None:
            out.print(escape(f"{record.id} {outcome(record, folder)}"), soft_wrap=True)


_ENDS: Final = 6  # losses of a curve that are printed from its beginning, and as many from its end
# Fields of a record that are too long to print, or printed in another form.  --json has them.
_NOT_PRINTED: Final = {
    "trial", "ran", "units", "findings", "ranks", "interfaces", "validations", "quantisation", "predicted",
    "communication_errors", "first_gradients", "decoded_sha256", "machine_use", "earlier",
}  # fmt: skip


def losses_text(losses: Sequence[float]) -> str:
    """Return the losses of a trial's steps as one line; of more than twelve losses, only the first and last six."""
    texts = [f"{loss:.4f}" for loss in losses]
    return ", ".join(texts if len(texts) <= 2 * _ENDS else [*texts[:_ENDS], "...", *texts[-_ENDS:]])


def _as_predicted(record: Record) -> bool | str | None:
    """Return whether the ranks of a trial sent exactly the bytes that were predicted.

    If some messages could not be predicted, the result is instead a text that names the kinds of these messages.  The
    result is None if the record has no prediction, for example because a peer such as DDP trained the model.
    """
    if record.predicted is not None and record.predicted.unpredicted:
        return f"{', '.join(record.predicted.unpredicted)}: measured, not predicted"
    return None if record.predicted is None else record.predicted.equal


def single_record(record: Record, out: Console, folder: Path) -> None:
    """Print one record of a results folder, a line for each value.

    The names of the lines are keys of the record, which ``results/README.md`` explains, or keys of the suite.
    """
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    (row,) = record_rows([record])
    parts = sorted({part for rank in record.ranks for part in rank.memory.engine})
    sizes = {part: max(rank.memory.engine.get(part, 0) for rank in record.ranks) for part in parts}
    validations = [v for v in record.validations if v.step >= LEAST_STEPS]
    lines: dict[str, Any] = {
        **dict(flatten(record.model_dump(mode="json", exclude=_NOT_PRINTED))),
        **{path: at(record.trial, path) for path, value in flatten(record.trial) if value is not None},
        **{f"ran {name}": value for name, value in record.ran.items()},
        "padding": f"{record.padding:.1%} of the model's elements" if record.units else None,
        **{column.heading: column.cells[0] for column in filled([row], _MEASURED)},
        **{f"memory, {part.replace('_', ' ')}": gib(size) for part, size in sizes.items() if size},
        "failure.losses": losses_text([] if record.failure is None else record.failure.losses),
        "validations": ", ".join(f"{v.loss:.4f} after {v.step} steps" for v in validations),
        "ledger equals prediction": _as_predicted(record),
        "outcome": outcome(record),
    }
    for name, value in lines.items():
        table.add_row(escape(name), escape(labels.in_words(value)))
    out.print(table)
    terminal_table.say(labels.INTERFACES_IN_WORDS if row["counted_by_interfaces"] else "", out)
    if record.failure is not None and record.failure.log:
        out.print(escape(f"log: {folder / record.failure.log}"), soft_wrap=True)


def findings(features: Sequence[Mapping[str, Any]], out: Console) -> None:
    """Print, as a table, what a machine has and lacks.

    ``features`` are the rows that :func:`harness.doctor.examine` returned.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("", "what", "found", "use, and what to do without it"):
        table.add_column(name, overflow="fold")
    for row in features:
        table.add_row("ok" if row["there"] else "--", row["what"], escape(row["found"]), escape(row["adds"]))
    out.print(table)


def nodes(facts: Sequence[Mapping[str, Any]], out: Console) -> None:
    """Print a table that compares the nodes of a cluster: a row for each fact, and a column for each node.

    ``facts`` are the rows that :func:`harness.doctor.compare` returned.  Rows in which the nodes differ are marked, and
    a sentence below the table names these rows.
    """
    count = len(facts[0]["values"])
    table = [
        {"differs": "differs" if row["differs"] else "", "what": row["what"]}
        | {f"node {number}": value for number, value in enumerate(row["values"])}
        for row in facts
    ]
    columns = [Column(f"node {n}", rank=n, always=True) for n in range(count)]
    columns = [Column("differs", " ", always=True), Column("what", always=True), *columns]
    terminal_table.show(table, columns, out, whole=_WHOLE)
    differing = [row["what"] for row in facts if row["differs"]]
    out.print(f"The nodes differ in: {', '.join(differing)}." if differing else "The nodes agree.")
    hosts = len(set(facts[0]["values"]))
    counts = f"{count} nodes on {counted(hosts, 'host')}"
    out.print(f"{counts}: nodes on one host have no network between them." if hosts < count else f"{counts}.")
