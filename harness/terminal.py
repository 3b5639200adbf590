"""What the command line prints: forecasts, records and findings as tables.  Decides nothing."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.doctor import Compared, Finding
from harness.errors import one_line
from harness.records.confidence_intervals import LEAST_STEPS
from harness.records.memory_parts import on_device, on_host
from harness.records.record import Record, slowest_seconds
from harness.runs.forecast import Forecast, gib
from harness.suites.labels import (
    INTERFACES,
    INTERFACES_IN_WORDS,
    NONE,
    at,
    counted,
    in_words,
    padded,
    padded_in_words,
    told,
)
from harness.suites.peers import PEERS
from harness.suites.suite import Suite
from harness.suites.suite_file import flatten

if TYPE_CHECKING:
    from report.compare import Comparison

_TRAINING: Final = ("forward", "backward", "step")  # phases
PIPE_WIDTH: Final = 200  # columns where the output is no terminal
_MOST_CELLS: Final = 6  # that are named one by one
_PLANNED: Final = (
    "between, inside nodes/step: bytes that all ranks send in an optimizer step (or one generation); out of "
    "a node/step: those of one node to others; on the wire: the time that these take at the link's rate; "
    "memory/rank: without activations."
)


def console(*, stderr: bool = False) -> Console:
    """A console that does not cut tables when it is piped."""
    plain = Console(stderr=stderr, highlight=False)
    return plain if plain.is_terminal else Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)


def forecasts(suite: Suite, found: Sequence[Forecast], out: Console) -> None:
    """Print a suite's plan: one row for all repeats of a trial, then why some cannot run."""
    once = {one.trial.model_copy(update={"repeat": 0}).id: one for one in found}
    trials = [one.trial.canonical() for one in once.values()]
    varying = told(trials)
    come = {path: list(dict.fromkeys(at(trial, path) for trial in trials)) for path in varying}

    def place(trial: dict[str, Any]) -> list[int]:
        """By what varies, in the order in which the values first came."""
        return [values.index(at(trial, path)) for path, values in reversed(come.items())]

    rows = sorted(once.values(), key=lambda one: place(one.trial.canonical()))
    out.print(f"[bold]{escape(suite.name)}[/]: {escape(suite.question)}")
    out.print(
        f"{counted(len(found), 'trial')}: {counted(len(rows), 'cell')} x {suite.repeats}. "
        f"Stated time: {suite.time}.",
        markup=False,
    )
    if suite.merged:
        more = len(suite.merged) - _MOST_CELLS
        cells = "; ".join(suite.merged[:_MOST_CELLS]) + (f"; and {more} more" if more > 0 else "")
        out.print(
            f"Run once, being the same run as another cell, {len(suite.merged)}: {cells}.",
            markup=False,
            soft_wrap=True,
        )
    other = (str(finding) for one in rows for finding in one.findings if finding.kind != "honoured")
    peers = dict.fromkeys(one.trial.strategy for one in rows if one.trial.strategy in PEERS)
    said = (f"{name}: {PEERS[name].says.replace('`', '')}" for name in peers)
    for line in (*suite.kept, *said, *dict.fromkeys(other)):
        out.print(escape(line), soft_wrap=True)
    notes = list(dict.fromkeys(why for one in rows for why in _reasons(one)))
    table = Table(box=box.SIMPLE_HEAD, title_justify="left")
    copies = ("hpZ copy, GiB: frames/16 bits",) if any(one.secondary for one in rows) else ()
    offloading = ("on the host", "to and from it/step") if any(_host_bytes(one) for one in rows) else ()
    for name in varying or ["strategy"]:
        table.add_column(name, overflow="fold")
    for name in (
        "parameters", "between nodes/step", "inside nodes/step", "out of a node/step",
        "on the wire s/step", "memory/rank", *copies, *offloading, "runs here",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for one in rows:
        trial = one.trial.canonical()
        table.add_row(
            *(at(trial, path) for path in varying or ["strategy"]),
            NONE if one.parameters is None else f"{one.parameters / 1e6:,.2f} M{padded(one.padding)}",
            _size(one.inter),
            _size(one.intra),
            _size(one.egress),
            NONE if one.wire_seconds is None else f"{one.wire_seconds:.3f}",
            NONE if one.memory is None else gib(sum(on_device(one.memory).values())),
            *((_either_way(one.secondary),) if copies else ()),
            *((gib(_host_bytes(one)), _size(one.copied)) if offloading else ()),
            _runs(one, notes),
        )
    out.print(table)
    out.print(_PLANNED, soft_wrap=True)
    _say_padding((one.padding for one in rows), out)
    for number, why in enumerate(notes, 1):
        count = sum(why in _reasons(one) for one in rows)
        what = next((_outcome(one) for one in rows if why in _reasons(one)), "")
        what = "cannot run here" if what == "no" else what
        out.print(f"{number}: {what} ({count} of {len(rows)} cells): {escape(one_line(why))}", soft_wrap=True)


def _say_padding(shares: Iterable[float], out: Console) -> None:
    """What the mark in the table above means, if it stands there."""
    if said := padded_in_words(shares):
        out.print(said, soft_wrap=True)


def _say_interfaces(sent: Iterable[str], out: Console) -> None:
    """What the mark of bytes without a ledger means, if it stands there."""
    if any(text.endswith(INTERFACES) for text in sent):
        out.print(INTERFACES_IN_WORDS, soft_wrap=True, markup=False)


def _reasons(one: Forecast) -> tuple[str, ...]:
    """Why a cell cannot run here or, where it can, why it will be a failure on record."""
    return one.problems or tuple(why for why in (one.beyond_limit, one.refusal) if why)


def _outcome(one: Forecast) -> str:
    """What comes of a cell in a word: "yes" if it can run."""
    if one.problems:
        return "no"
    return "over its limit" if one.beyond_limit else "refused" if one.refusal else "yes"


def _runs(one: Forecast, notes: Sequence[str]) -> str:
    """The last column: "yes", or why not, by number."""
    numbers = ", ".join(str(notes.index(why) + 1) for why in _reasons(one))
    return f"{_outcome(one)}: {numbers}" if numbers else _outcome(one)


def _either_way(secondary: tuple[int, int] | None) -> str:
    """GiB of hpZ's copy kept as frames and in 16 bits."""
    return "/".join(f"{size / 2**30:.3g}" for size in secondary) if secondary else NONE


def _host_bytes(one: Forecast) -> int:
    """Bytes of one rank that are offloaded."""
    return sum(on_host(one.memory or {}).values())


def records(found: Sequence[Record], out: Console, folder: Path) -> None:
    """Print the records of a results folder, one row each, then why trials failed."""
    trials = [record.trial for record in found]
    varying = [path for path in told(trials) if path != "strategy"]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    # Whole in every terminal, since it is there to be copied; the others give way, and none is cut.
    table.add_column("id", no_wrap=True, min_width=max(len(record.id) for record in found))
    several = ["sweep"] if any(record.sweep for record in found) else []
    for name in ("strategy", *varying, "repeat", *several):
        table.add_column(name, overflow="fold")
    for name in ("s/step", "exposed s", "between nodes/step", "Mbit/s", "loss", "outcome"):
        table.add_column(name, justify="right", overflow="fold")
    measured = [_measured(record) for record in found]
    for record, values in zip(found, measured, strict=True):
        table.add_row(
            record.id,
            in_words(record.trial.get("strategy")),
            *(at(record.trial, path) for path in varying),
            in_words(record.trial.get("repeat")),
            *([str(record.sweep)] if several else []),
            *values,
            "ok" if record.failure is None else record.failure.kind,
        )
    out.print(table)
    _say_padding((record.padding for record in found), out)
    _say_interfaces((sent for _, _, sent, _, _ in measured), out)
    for record in found:
        if record.failure is not None:
            log = f"; log {folder / record.failure.log}" if record.failure.log else ""
            line = f"{record.id} {record.failure.kind}: {record.failure.message}{log}"
            out.print(escape(one_line(line)), soft_wrap=True)


def _held(one: Record) -> list[tuple[str, Any]]:
    """What the fullest rank's engine held and, for what is offloaded, copied in a step."""
    parts = {part for rank in one.ranks for part in rank.memory.engine}
    largest = {part: max(rank.memory.engine.get(part, 0) for rank in one.ranks) for part in sorted(parts)}
    lines = [(f"memory, {part.replace('_', ' ')}", gib(size)) for part, size in largest.items() if size]
    steps = sum(not step.warmup for step in one.ranks[0].steps) if one.ranks else 0
    for name in sorted({name for rank in one.ranks for name in rank.memory.copied}):
        most = max(rank.memory.copied.get(name, 0) for rank in one.ranks)
        lines.append((f"copied {name.replace('_', ' ')}, a step", _size(most // steps) if steps else NONE))
    return lines


def record(one: Record, out: Console, folder: Path) -> None:
    """Print one record of a results folder: what defines it, where it ran, what came out."""
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    seconds, exposed, sent, rate, loss = _measured(one)
    lines: list[tuple[str, Any]] = [
        ("id", one.id),
        ("suite", one.suite),
        ("sweep", one.sweep),
        ("started", one.started),
        ("finished", one.finished),
        *((path, at(one.trial, path)) for path, value in flatten(one.trial) if value is not None),
        *((f"machine {name}", value) for name, value in one.machine.items()),
        *((f"code {name}", value) for name, value in one.code.items()),
        ("hash of machine and code", one.pool),
        *((f"ran {name}", value) for name, value in one.ran.items()),
        ("parameters", one.parameters),
        ("padding of its units", f"{one.padding:.1%} of them" if one.units else NONE),
        *((f"link {name}", value) for name, value in (one.link or ())),
        ("median step, s", seconds),
        ("exposed communication, s", exposed),
        ("between nodes, a step", sent),
        ("achieved rate, Mbit/s", rate),
        ("last loss", loss),
        ("reference loss of step 1", one.reference_loss),
        *_held(one),
        (
            "validations",
            ", ".join(f"{v.loss:.4f} after {v.step} steps" for v in one.validations if v.step >= LEAST_STEPS),
        ),
        ("ledger equals prediction", None if one.predicted is None else one.predicted.equal),
        ("outcome", "ok" if one.failure is None else f"{one.failure.kind}: {one.failure.message}"),
    ]
    for name, value in lines:
        table.add_row(name, escape(in_words(value)))
    out.print(table)
    _say_interfaces([sent], out)
    if one.failure is not None and one.failure.log:
        out.print(escape(f"log: {folder / one.failure.log}"), soft_wrap=True)


def findings(found: Iterable[Finding], out: Console) -> None:
    """Print what the doctor found."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", "what", "found", "what it adds, and what to do"):
        table.add_column(name, overflow="fold")
    for one in found:
        table.add_row("ok" if one.there else "--", one.what, escape(one.found), escape(one.adds))
    out.print(table)


def comparison(found: Comparison, out: Console) -> None:
    """Print two result folders side by side."""
    from report.compare import HEADS, cells, notes

    table = Table(box=box.SIMPLE_HEAD)
    for name in HEADS:
        table.add_column(name, overflow="fold")
    for row in found.rows:
        table.add_row(*(escape(cell) for cell in cells(row)))
    out.print(table)
    for note in notes(found):
        out.print(note, markup=False, highlight=False, soft_wrap=True)


def compared(found: Sequence[Compared], out: Console) -> None:
    """Print the nodes of a run side by side, what differs first marked."""
    table = Table(box=box.SIMPLE_HEAD)
    count = len(found[0].values)
    for name in ("", "what", *(f"node {number}" for number in range(count))):
        table.add_column(name, overflow="fold")
    for row in found:
        table.add_row("differs" if row.differs else "", row.what, *(escape(value) for value in row.values))
    out.print(table)
    differing = [row.what for row in found if row.differs]
    out.print(f"What differs: {', '.join(differing)}." if differing else "Nothing differs that should agree.")
    hosts = len(set(found[0].values))
    many = f"{count} nodes on {hosts} host{'s' if hosts > 1 else ''}"
    out.print(f"{many}: no network is between those of one host." if hosts < count else f"{many}.")


def _measured(one: Record) -> tuple[str, str, str, str, str]:
    """Median step of the slowest rank, exposed communication of the first, bytes between nodes per step,
    rate, and the last loss, its mean over ranks.  A generation is a step without loss.
    """
    timed = [[step for step in rank.steps if not step.warmup] for rank in one.ranks]
    tokens = [[token for token in rank.tokens if not token.warmup] for rank in one.ranks]
    waited: list[float] | None = None
    mark = ""
    if one.ranks and tokens[0]:
        of_steps = [list(group) for _, group in itertools.groupby(tokens[0], lambda token: token.step)]
        seconds = [sum(token.seconds for token in group) for group in of_steps]
        if tokens[0][0].exposed is not None:
            waited = [sum(token.exposed or 0.0 for token in group) for group in of_steps]
        sent = [token.inter_bytes for token in itertools.chain(*tokens) if token.inter_bytes is not None]
        loss = NONE
    elif one.ranks and timed[0]:
        seconds = slowest_seconds(one)
        if timed[0][0].exposed_forward is not None:
            waited = [(step.exposed_forward or 0.0) + (step.exposed_backward or 0.0) for step in timed[0]]
        ledgers = [rank.ledger for rank in one.ranks if rank.ledger is not None]
        sent = [
            sum(row.bytes for row in ledger if row.link == "inter" and row.phase in _TRAINING)
            for ledger in ledgers
        ]
        if not ledgers and one.interfaces:
            sent, mark = [counters.tx_bytes for counters in one.interfaces], f" {INTERFACES}"
        loss = f"{statistics.fmean(rank.steps[-1].loss for rank in one.ranks):.4f}"
    else:
        return NONE, NONE, NONE, NONE, NONE
    rates = [] if one.link is None else one.link.probed_mbit or one.link.calibrated_mbit
    return (
        f"{statistics.median(seconds):.4f}",
        NONE if waited is None else f"{statistics.median(waited):.4f}",
        _size(sum(sent) / len(seconds)) + padded(one.padding) + mark if sent else NONE,
        f"{statistics.median(rates):.4g}" if rates else NONE,
        loss,
    )


def _size(size: float | None) -> str:
    """Bytes with a decimal unit, four digits."""
    if size is None:
        return NONE
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:,.4g} TB"
