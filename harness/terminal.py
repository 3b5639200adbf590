"""What the command line prints: forecasts, records and findings as tables.  Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness import fitted_table
from harness.doctor import Compared, Finding
from harness.errors import one_line
from harness.expected_time import Expected
from harness.fitted_table import Column, numbers, sizes, text
from harness.plan_rows import of_records, rows
from harness.records.confidence_intervals import FEWEST
from harness.records.record import Record
from harness.records.summary import Summary, summarise
from harness.runs.feasibility import Forecast, gib
from harness.runs.progress import outcome
from harness.suites.expanded_suite import Suite
from harness.suites.labels import (
    INTERFACES,
    INTERFACES_IN_WORDS,
    NONE,
    at,
    counted,
    in_words,
    padded,
    padded_in_words,
    varying_paths,
)
from harness.suites.peers import PEERS
from harness.suites.question import LEAST_STEPS
from harness.suites.suite_file import flatten
from impl.plan.step_time import Machine

_MOST_CELLS: Final = 6  # that are named one by one
_PLANNED: Final = (
    "between, inside nodes: what all ranks send in an optimizer step (or one generation); out of a node: "
    "what one node sends to others; on the wire: the time that this takes at the link's rate; memory/rank: "
    "without activations."
)
_MODELLED: Final = (
    "a modelled step is calibrated where model and batch lie inside what the machine was measured with, else "
    "transferred; speed-up: over ZeRO-3 in the same setting."
)
_WHOLE: Final = "--json and --csv have all"


def forecasts(suite: Suite, found: Sequence[Forecast], out: Console, machine: Machine | None = None) -> None:
    """Print a suite's plan: one row for all seeds and repeats of a trial, then why some cannot run.

    On a ``machine`` also what its steps are predicted to take.
    """
    cells = {one.trial.model_copy(update={"repeat": 0, "seed": 0}).id: one for one in reversed(found)}
    varying = [
        path for path in varying_paths([one.trial.canonical() for one in cells.values()]) if path != "seed"
    ]
    come = {path: list(dict.fromkeys(at(one.trial.canonical(), path) for one in found)) for path in varying}

    def place(one: Forecast) -> list[int]:
        """By what varies, in the order in which the values first came."""
        return [values.index(at(one.trial.canonical(), path)) for path, values in reversed(come.items())]

    shown = sorted(cells.values(), key=place)
    fitted_table.say(f"{suite.name}: {suite.question}", out)
    count = f"{counted(len(found), 'trial')}: {_cells(suite, len(shown))} x {suite.repeats}"
    fitted_table.say(f"{count}. Stated time: {suite.time}.", out)
    if suite.merged:
        more = len(suite.merged) - _MOST_CELLS
        same = "; ".join(suite.merged[:_MOST_CELLS]) + (f"; and {more} more" if more > 0 else "")
        fitted_table.say(f"Run once, being the same run as another cell, {len(suite.merged)}: {same}.", out)
    peers = dict.fromkeys(one.trial.strategy for one in shown if one.trial.strategy in PEERS)
    said = (f"{name}: {PEERS[name].says.replace('`', '')}" for name in peers)
    other = (str(finding) for one in shown for finding in one.findings if finding.kind != "honoured")
    for line in (*suite.kept, *said, *dict.fromkeys(other)):
        fitted_table.say(line, out)
    notes = list(dict.fromkeys(why for one in shown for why in one.reasons))
    fitted_table.show(_planned(shown, varying, notes, machine), out, whole=_WHOLE)
    fitted_table.say(_PLANNED, out)
    if machine is not None:
        fitted_table.say(f"On {machine.name} ({machine.source}): {_MODELLED}", out)
    fitted_table.say(padded_in_words(one.padding for one in shown), out)
    for number, why in enumerate(notes, 1):
        of_it = [one for one in shown if why in one.reasons]
        what = "cannot run here" if of_it[0].problems else _outcome(of_it[0])
        fitted_table.say(f"{number}: {what} ({len(of_it)} of {len(shown)} cells): {one_line(why)}", out)
    fitted_table.say(_too_short(found), out)


def expected_time(found: Expected | str, out: Console) -> None:
    """Print how long a suite is expected to take here, or why that is not known."""
    fitted_table.say(f"No expected time: {found}." if isinstance(found, str) else str(found), out)


def _cells(suite: Suite, rows: int) -> str:
    """How many cells there are, and how many seeds each has."""
    seeds = len({trial.seed for trial in suite.cells})
    if len(suite.cells) == rows:
        return counted(rows, "cell")
    if len(suite.cells) == rows * seeds:
        return f"{counted(rows, 'cell')} x {counted(seeds, 'seed')}"
    return f"{counted(rows, 'cell')}, {len(suite.cells)} with all their seeds,"


def _planned(
    shown: Sequence[Forecast], varying: Sequence[str], notes: Sequence[str], machine: Machine | None
) -> list[Column]:
    """The columns of a plan, the least important of the highest rank."""
    table, trials = rows(shown, machine), [one.trial.canonical() for one in shown]

    def column(heading: str, key: str, form: str, unit: str = "", rank: int = 0) -> Column:
        return numbers(heading, [row[key] for row in table], form, unit, rank=rank)

    def bytes_of(heading: str, key: str, per: str = "", rank: int = 0) -> Column:
        return sizes(heading, [row[key] for row in table], per=per, rank=rank)

    millions = [one.parameters and one.parameters / 1e6 for one in shown]
    columns = [text(path, [at(one, path) for one in trials], always=True) for path in varying or ["strategy"]]
    if machine is not None:
        columns += [
            column("step, modelled", "modelled_seconds", ".3g", "s"),
            column("speed-up", "modelled_speed_up", ".2f", rank=1),
            column("tokens", "modelled_tokens_per_second", ",.0f", "/s", 3),
            column("speed", "modelled_tflops", ".3g", "TFLOPS/rank", 4),
            column("basis", "modelled_basis", "", rank=2),
        ]
    columns += [
        numbers("parameters", millions, ",.2f", "M", rank=3, marks=[padded(one.padding) for one in shown]),
        bytes_of("between nodes", "inter_bytes", "/step"),
        bytes_of("inside nodes", "intra_bytes", "/step", 4),
        bytes_of("out of a node", "egress_bytes", "/step", 5),
        column("on the wire", "wire_seconds", ".3f", "s/step", 1),
        bytes_of("memory/rank", "memory_bytes", rank=2),
    ]
    if any(one.secondary for one in shown):
        frames, wide = ([one.secondary and one.secondary[way] for one in shown] for way in (0, 1))
        columns += [sizes("hpZ copy as frames", frames, rank=6), sizes("hpZ copy in 16 bits", wide, rank=7)]
    if any(row["host_bytes"] for row in table):
        columns += [
            bytes_of("on the host", "host_bytes", rank=2),
            sizes("to and from the host", [one.copied for one in shown], per="/step", rank=3),
        ]
    numbered = (", ".join(str(notes.index(why) + 1) for why in one.reasons) for one in shown)
    runs = [
        f"{_outcome(one)}: {why}" if why else _outcome(one) for one, why in zip(shown, numbered, strict=True)
    ]
    return [*columns, Column("runs here", runs, always=bool(notes))]


def _too_short(found: Sequence[Forecast]) -> str:
    """Why a suite that validates will give no verdict on losses; empty if it may."""
    validated = [one.trial for one in found if one.trial.validate_every is not None]
    if not validated:
        return ""
    seeds = len({trial.seed for trial in validated})
    steps = min(trial.warmup + trial.steps for trial in validated)
    short = [f"{steps} steps where {LEAST_STEPS} are needed"] if steps < LEAST_STEPS else []
    short += [f"{counted(seeds, 'seed')} where {FEWEST} are needed"] if seeds < FEWEST else []
    return f"Too short for a verdict on losses: {', and '.join(short)}." if short else ""


def _marks(one: Record, found: Summary) -> str:
    """What stands behind a record's bytes between nodes."""
    if found.sent is None:
        return ""
    return padded(one.padding) + (f" {INTERFACES}" if found.by_interfaces else "")


def _outcome(one: Forecast) -> str:
    """What comes of a cell in a word: "yes" if it can run."""
    if one.problems:
        return "no"
    if one.failure is None:
        return "yes"
    return "over its limit" if one.failure.kind == "memory" else one.failure.kind


def records(found: Sequence[Record], out: Console, folder: Path) -> None:
    """Print the records of a results folder, one row each, then why trials failed."""
    trials = [record.trial for record in found]
    varying = [path for path in varying_paths(trials) if path != "strategy"]
    table, measured = of_records(found), [summarise(record) for record in found]
    marks = [_marks(*both) for both in zip(found, measured, strict=True)]

    def column(heading: str, key: str, form: str, unit: str = "", rank: int = 0) -> Column:
        return numbers(heading, [row[key] for row in table], form, unit, rank=rank)

    columns = [
        Column("id", [record.id for record in found], number=False, always=True, whole=True),
        text("strategy", [in_words(trial.get("strategy")) for trial in trials]),
        *(text(path, [at(trial, path) for trial in trials]) for path in varying),
        text("repeat", [in_words(trial.get("repeat")) for trial in trials], rank=1),
        *([column("sweep", "sweep", "d", rank=2)] if any(record.sweep for record in found) else []),
        column("step", "step_seconds", ".4f", "s"),
        column("exposed", "exposed_seconds", ".4f", "s", 4),
        sizes("between nodes", [row["inter_bytes"] for row in table], per="/step", rank=3, marks=marks),
        column("rate", "rate_mbit", ".4g", "Mbit/s", 5),
        column("loss", "loss", ".4f"),
        text("outcome", [row["outcome"] for row in table]),
    ]
    fitted_table.show(columns, out, whole=_WHOLE)
    fitted_table.say(padded_in_words(record.padding for record in found), out)
    fitted_table.say(INTERFACES_IN_WORDS if any(one.by_interfaces for one in measured) else "", out)
    for record in found:
        if record.failure is not None:
            out.print(escape(f"{record.id} {outcome(record, folder)}"), soft_wrap=True)


# Of a record, rows and long lists: --json has them.
_ROWS: Final = {
    "trial", "ran", "units", "findings", "ranks", "interfaces", "validations", "quantisation", "predicted",
    "communication_errors", "first_gradients", "decoded_sha256", "machine_use", "earlier",
}  # fmt: skip


def record(one: Record, out: Console, folder: Path) -> None:
    """Print one record of a results folder: what defines it, where it ran, what came out.

    Names are keys of the record (``results/README.md``), or of the suite.
    """
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    found = summarise(one)
    parts = sorted({part for rank in one.ranks for part in rank.memory.engine})
    held = {part: max(rank.memory.engine.get(part, 0) for rank in one.ranks) for part in parts}
    validations = [v for v in one.validations if v.step >= LEAST_STEPS]
    lines: dict[str, Any] = {
        **dict(flatten(one.model_dump(mode="json", exclude=_ROWS))),
        **{path: at(one.trial, path) for path, value in flatten(one.trial) if value is not None},
        **{f"ran {name}": value for name, value in one.ran.items()},
        "padding of its units": f"{one.padding:.1%} of them" if one.units else NONE,
        "median step, s": found.seconds,
        "exposed communication, s": found.exposed,
        "between nodes, a step": _size(found.sent) + _marks(one, found),
        "achieved rate, Mbit/s": found.rate,
        "last loss": found.loss,
        **{f"memory, {part.replace('_', ' ')}": gib(size) for part, size in held.items() if size},
        "validations": ", ".join(f"{v.loss:.4f} after {v.step} steps" for v in validations),
        "ledger equals prediction": None if one.predicted is None else one.predicted.equal,
        "outcome": outcome(one),
    }
    for name, value in lines.items():
        table.add_row(name, escape(in_words(value)))
    out.print(table)
    fitted_table.say(INTERFACES_IN_WORDS if found.by_interfaces else "", out)
    if one.failure is not None and one.failure.log:
        out.print(escape(f"log: {folder / one.failure.log}"), soft_wrap=True)


def findings(found: Iterable[Finding], out: Console) -> None:
    """Print what the doctor found."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("", "what", "found", "what it adds, and what to do"):
        table.add_column(name, overflow="fold")
    for one in found:
        table.add_row("ok" if one.there else "--", one.what, escape(one.found), escape(one.adds))
    out.print(table)


def compared(found: Sequence[Compared], out: Console) -> None:
    """Print the nodes of a run side by side, what differs first marked."""
    count = len(found[0].values)
    columns = [
        text("", ["differs" if row.differs else "" for row in found], always=True),
        text("what", [row.what for row in found], always=True),
        *(text(f"node {n}", [row.values[n] for row in found], rank=n, always=True) for n in range(count)),
    ]
    fitted_table.show(columns, out, whole=_WHOLE)
    differing = [row.what for row in found if row.differs]
    out.print(f"What differs: {', '.join(differing)}." if differing else "Nothing differs that should agree.")
    hosts = len(set(found[0].values))
    many = f"{count} nodes on {hosts} host{'s' if hosts > 1 else ''}"
    out.print(f"{many}: no network is between those of one host." if hosts < count else f"{many}.")


def _size(size: float | None) -> str:
    """Bytes with a decimal unit, four digits."""
    column = sizes("", [size])
    return NONE if size is None else f"{column.cells[0]} {column.unit}"
