"""Makes the tables of an audit: the calls, the comparison with a scheme, and the bytes that interfaces counted.

The module also writes the calls of all steps as CSV.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from harness.audit import wire
from harness.audit.calls import CSV, Calls, Line, Rank, alike, lines, spans
from harness.audit.schemes import NONE, Model, Scheme, recognise
from harness.audit.witness import FIRST_STEPS
from harness.csv_cells import safe_cell
from harness.terminal_table import BYTES, Column

COLUMNS: Final = (
    Column("phase", always=True),
    Column("operation", always=True),
    Column("done_as", "done as", rank=3),
    Column("dtype", "type", always=True),
    Column("group", "groups", rank=2),
    Column("members", "ranks of the groups", rank=4),
    Column("place", rank=1),
    Column("ranks", rank=2),
    Column("calls", form="d", always=True),
    Column("bytes", "message", BYTES, always=True),
    Column("parameters", "of parameters", ".3f", rank=1),
    Column("sent", "sent by a rank", BYTES, rank=1, always=True),
    Column("site", "call site", rank=1),
    Column("caller", rank=4),
)
SCHEME_COLUMNS: Final = (
    Column("phase", always=True),
    Column("operation", always=True),
    Column("dtype", "type", always=True),
    Column("group_size", "ranks of the group", "d"),
    Column("holds", "what they hold"),
    Column("measured", "measured", ",d", "bytes", always=True),
    Column("expected", "closed form", ",.0f", "bytes", always=True),
    Column("difference", "", "+.2%", always=True),
)
COUNTER_COLUMNS: Final = (
    Column("node", always=True),
    Column("interface", always=True),
    Column("counted", "counted", BYTES, always=True),
    Column("uncertain", "known to within", BYTES),
    Column("expected", "by the calls", BYTES),
    Column("difference", "", "+.2%"),
)
_WHERE: Final = {"inside": "inside a node", "between": "between nodes", "across": "inside and between nodes"}


@dataclass(frozen=True)
class Report:
    """The result of an audit for the reported steps."""

    calls: Calls
    steps: list[int]  # the reported steps
    classes: list[list[int]]  # the same steps, in classes with equal calls; the largest first
    model: Model | None
    scheme: Scheme | None  # of the first step of the largest class; None without a model
    by: str  # what ends a step
    broken: list[str]  # a line for each expectation that does not hold or could not be checked
    kept: int  # number of all expectations that were given, broken ones included

    @property
    def shown(self) -> int:
        """The step whose calls the tables show: the first step of the largest class of steps with equal calls."""
        return self.classes[0][0]


def report_on(
    calls: Calls,
    steps: Sequence[int],
    model: Model | None,
    *,
    by: str,
    broken: Sequence[str] = (),
    kept: int = 0,
) -> Report:
    """Compare the calls of the steps with the schemes of data parallelism, and return the report of these steps.

    Args:
        calls: The calls of all ranks.
        steps: Numbers of the steps to report, at least one.
        model: The model's size; None if it is not known.  No scheme is then found.
        by: What ends a step, in words, such as ``optimizer steps``.
        broken: A line for each expectation that does not hold or could not be checked.
        kept: Number of all expectations that were given, broken ones included.
    """
    classes = alike(calls, steps)
    scheme = None if model is None else recognise(calls, calls.ranks[0], classes[0][0], model)
    return Report(calls, list(steps), classes, model, scheme, by, list(broken), kept)


def call_rows(report: Report, step: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of the table of the calls in one step, each as a dictionary.

    A row stands for equal calls of one or several ranks (:class:`Line`).  It has the keys of :data:`COLUMNS` and a few
    more.  If ``step`` is None, the step is :attr:`Report.shown`, the first step of the largest class of steps with
    equal calls.
    """
    return [_row(report, line) for line in lines(report.calls, report.shown if step is None else step)]


def _row(report: Report, line: Line) -> dict[str, Any]:
    key, topology, group = line.key, report.calls.topology, line.groups[0]
    sent = max(
        wire.sent(rank, key, line.count, group, topology).all
        for group in line.groups
        for rank in group.ranks
        if rank in line.ranks
    ) if any(rank in line.ranks for group in line.groups for rank in group.ranks) else 0.0  # fmt: skip
    members = "; ".join(spans(group.ranks) for group in line.groups)
    return {
        "phase": key.phase,
        "operation": key.operation,
        "done_as": "" if key.done_as == key.operation else key.done_as,
        "dtype": key.dtype,
        "group": f"{len(line.groups)} x {group.size}" if len(line.groups) > 1 else f"{group.size}",
        "members": members,
        "place": _WHERE[topology.place(group.ranks)],
        "ranks": spans(line.ranks),
        "calls": line.count.calls,
        "bytes": line.count.bytes,
        "elements": line.count.elements,
        "parameters": None if report.model is None else line.count.elements / report.model.elements,
        "sent": sent,
        "site": short(key.site),
        "caller": key.caller,
        "source": key.source,
    }


def short(site: str) -> str:
    """Return a call site, with its path relative to the working folder if the file lies in the working folder."""
    base = f"{Path.cwd()}/"
    return site.removeprefix(base)


def scheme_rows(scheme: Scheme) -> list[dict[str, Any]]:
    """Return the rows of the table that compares measured bytes with a scheme; their keys are :data:`SCHEME_COLUMNS`.

    First there is a row for each kind of messages that the scheme has.  Then there is a row for each other kind of
    messages, such as norms and losses.  The last row has the sum over the scheme's messages.
    """
    rows = [
        {
            "phase": term.phase, "operation": term.operation, "dtype": term.dtype, "group_size": term.group_size,
            "measured": term.measured, "expected": term.expected, "difference": term.difference,
            "holds": term.holds,
        }
        for term in (*scheme.terms, *scheme.rest)
    ]  # fmt: skip
    if scheme.terms:
        difference = scheme.measured / scheme.expected - 1 if scheme.expected else None
        rows.append({
            "phase": "all", "operation": "closed form", "dtype": "", "group_size": None,
            "measured": scheme.measured, "expected": scheme.expected, "difference": difference, "holds": "",
        })  # fmt: skip
    return rows


def counter_rows(report: Report) -> list[dict[str, Any]]:
    """Return a row for each node and interface, with the bytes that the interface counted in the reported steps.

    A row compares two numbers: ``counted``, the bytes that the interface has sent, and ``expected``, the bytes that the
    calls of the same steps send to other nodes.  A few of the first and last reported steps may be left out of both
    numbers (:func:`_between_reads`).

    The ranks of a node do not read the counters at the same moment: each rank reads them when its own step ends.  The
    earliest reading after a step lacks what other ranks have yet to send in this step.  The latest reading includes
    what other ranks have already sent in the next step.  The node's true count at the end of the step lies between
    these two readings.  The bytes that were sent between the ends of two steps are therefore known only as a range.
    ``counted`` is the middle of the range, and ``uncertain`` is half of the range's width.

    A rank that records until its process ends reads the counters one more time, at this end.  If all ranks of the node
    do so, the latest of these readings is exact.
    """
    calls, rows = report.calls, list[dict[str, Any]]()
    # A node on another host may have left no files here, and then nothing is known of its counters.
    for node in sorted({calls.topology.nodes[rank.number] for rank in calls.ranks}):
        ranks = [rank for rank in calls.ranks if calls.topology.nodes[rank.number] == node]
        between = _between_reads(ranks, report.steps)
        if between is None:
            continue
        first, last = between
        # The reading after the program's last step also counts what was sent after this step.
        through = last + 1 if _ended(ranks, last) else last
        expected = sum(
            wire.between_by_node(calls, step).get(node, 0.0) for step in range(first + 1, through + 1)
        )
        # Calls of the optimizer after a step, such as gathers of new weights, belong to the step but are counted later.
        expected += wire.between_by_node(calls, first, late=True).get(node, 0.0)
        if through == last:
            expected -= wire.between_by_node(calls, last, late=True).get(node, 0.0)
        began, ended = _readings(ranks, first), _readings(ranks, last)
        for name, (low, high) in sorted(ended.items()):
            before = began.get(name, (low, high))
            least, most = max(0, low - before[1]), high - before[0]
            outside = name != "lo" and not name.startswith("nvlink")
            if most:
                counted = (least + most) / 2
                rows.append({
                    "node": str(node), "interface": name, "counted": counted, "uncertain": (most - least) / 2,
                    "expected": expected if outside and calls.topology.count > 1 else None,
                    "difference": counted / expected - 1 if outside and expected else None,
                })  # fmt: skip
    return rows


def _ended(ranks: Sequence[Rank], step: int) -> bool:
    """Return whether ``step`` was the last step of all ranks, and all ranks recorded until they ended by themselves.

    If the result is True, each rank has read the counters of its node's interfaces once more when the rank ended.  Two
    kinds of ranks make no such reading: ranks that were killed, and ranks that stopped recording after the last step
    that the audit was asked for.
    """
    return all(rank.ended in ("exit", "os._exit") and rank.steps == step for rank in ranks)


def _readings(ranks: Sequence[Rank], step: int) -> dict[str, tuple[int, int]]:
    """Return, for each interface, the (smallest, largest) value that the ranks of one node read after ``step``.

    The ranks read the counter at different moments, so their values differ.  If the program ended with this step, the
    largest value is exact, and is returned twice, as the smallest and as the largest value.
    """
    read: dict[str, list[int]] = {}
    for rank in ranks:
        for name, value in rank.counters[step].items():
            read.setdefault(name, []).append(value)
    exact = _ended(ranks, step)
    return {name: (max(values) if exact else min(values), max(values)) for name, values in read.items()}


def _between_reads(ranks: Sequence[Rank], steps: Sequence[int]) -> tuple[int, int] | None:
    """Choose the steps (first, last) between whose ends the bytes that a node sent are known most exactly.

    The ranks of a node read its interface counters at different moments after a step.  The uncertainty of the step is
    the largest of these readings minus the smallest, summed over all interfaces except ``lo``; it is 0 if the program
    ended with the step.  For each pair of steps, the two uncertainties are added, and the sum is divided by
    ``last - first``.  The pair with the smallest quotient is chosen.

    Candidates are the reported steps and the one step before them.  A step after which some rank of the node did not
    read the counters is no candidate.  ``first`` is one of the first ten candidates, and ``last`` is one of the last
    ten.  Returns None if there are fewer than two candidates.
    """
    common = set.intersection(*(set(rank.counters) for rank in ranks))
    read = sorted(step for step in common if steps[0] - 1 <= step <= steps[-1])
    spread = {
        step: sum(high - low for name, (low, high) in _readings(ranks, step).items() if name != "lo")
        for step in {*read[:10], *read[-10:]}
    }
    pairs = [(first, last) for first in read[:10] for last in read[-10:] if first < last]
    if not pairs:
        return None
    return min(
        pairs, key=lambda pair: ((spread[pair[0]] + spread[pair[1]]) / (pair[1] - pair[0]), pair[0] - pair[1])
    )


def as_csv(report: Report) -> str:
    """Return the calls of all reported steps as CSV text: a line for each row of :func:`call_rows` of each step."""
    out = io.StringIO()
    rows = [{"step": step, **row} for step in report.steps for row in call_rows(report, step)]
    names = list(rows[0]) if rows else ["step"]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: safe_cell(value) for name, value in row.items()})
    return out.getvalue()


def sentences(report: Report) -> list[str]:
    """Return sentences on the ranks, steps and model that a report is about."""
    calls = report.calls
    nodes = calls.topology.count
    where = f"{len(calls.ranks)} of {calls.world} ranks on {nodes} node{'s' * (nodes != 1)}"
    made = [f"{where}; steps {spans(report.steps)} (by {report.by}); numbers are of one step"]
    reading = max(rank.reading for rank in calls.ranks)
    if reading and calls.whole > FIRST_STEPS:  # in fewer steps the share would say little
        made.append(
            f"Reading the recorder took {reading:.1%} of a rank's processor time from its first step on."
        )
    if report.steps[0] == 1:
        made.append("Step 1 also holds what the program sends to set itself up.")
    others = report.classes[1:]
    if others:
        rest = spans(step for members in others for step in members)
        made.append(f"Steps {spans(report.classes[0])} are alike and shown; steps {rest} differ: see {CSV}.")
    if report.model is None:
        made.append("The number of parameters is not known: give --model module:function.")
    else:
        made.append(f"{report.model.elements:,} parameters (from {report.model.source}).")
    return made


def scheme_sentence(scheme: Scheme) -> str:
    """Return a sentence that names the scheme, and says how well the scheme fits the measured bytes.

    The sentence has the relative difference of the measured bytes from those of the scheme's closed form, a formula for
    what the scheme sends.
    """
    if scheme.name == NONE:
        return "No known scheme of data parallelism sends these messages:"
    difference = scheme.measured / scheme.expected - 1 if scheme.expected else 0.0
    return f"These are the messages of {scheme.name}: {difference:+.2%} from the closed form."
